"""One piece of host memory, cut into slots of as many sizes as there are object groups.

The arena is divided into equal units. A span is a run of units that holds slots of one size; a span
whose slots are all free gives its units back, so that no size holds on to memory that another
needs. Slots are named by their byte offset; nothing is allocated per object.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hma_triton.errors import CapacityError
from hma_triton.host_memory import HostMemory
from hma_triton.units import align_up, cdiv

SLOT_ALIGN_BYTES = 64
_MIN_UNIT_BYTES = 4096
_MAX_UNIT_BYTES = 64 << 20
_UNITS_WANTED = 512
_MAX_WASTE = 1 / 16
FREE = 0


class Span:
    """Units `[first_unit, first_unit + num_units)` holding `num_slots` slots of one size.

    `owners[i]` is the tag of slot i's owner, `FREE` when it has none.
    """

    __slots__ = ("first_unit", "free", "num_slots", "num_units", "offset", "owners", "slot_bytes")

    def __init__(self, first_unit: int, num_units: int, unit_bytes: int, slot_bytes: int) -> None:
        self.first_unit = first_unit
        self.num_units = num_units
        self.offset = first_unit * unit_bytes
        self.slot_bytes = slot_bytes
        self.num_slots = num_units * unit_bytes // slot_bytes
        self.owners = array("Q", bytes(8 * self.num_slots))
        # a stack, lowest slot on top, so that memory is touched from the front
        self.free = array("I", range(self.num_slots - 1, -1, -1))

    def owner_tags(self) -> npt.NDArray[np.uint64]:
        """Tags of the slots in use."""
        tags: npt.NDArray[np.uint64] = np.frombuffer(self.owners, dtype=np.uint64)
        return tags[np.flatnonzero(tags)]


@dataclass(slots=True)
class SizeClass:
    """All spans of one slot size. `open_spans` have at least one free slot."""

    slot_bytes: int
    span_units: int
    open_spans: dict[int, Span]
    used_slots: int = 0
    total_slots: int = 0


class Arena:
    """`nbytes` of anonymous shared memory (mode 0600), rounded down to whole units.

    Args:
        hugepages, numa_node: as `HostMemory` takes them.
        touch: take all memory at once (`start`), beside serving (`background`), or as objects come
            (`off`). Pinning takes all of it anyway.

    Raises:
        CapacityError: the machine or control group has less memory free.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        hugepages: str = "off",
        numa_node: int | None = None,
        touch: str = "off",
    ) -> None:
        wanted = 1 << max(0, (nbytes // _UNITS_WANTED).bit_length() - 1)
        self.unit_bytes = min(max(_MIN_UNIT_BYTES, wanted), _MAX_UNIT_BYTES)
        self.num_units = nbytes // self.unit_bytes
        self.nbytes = self.num_units * self.unit_bytes
        if self.num_units < 1:
            raise CapacityError(f"an arena of {nbytes} bytes is below {_MIN_UNIT_BYTES} bytes")
        self.memory = HostMemory(
            self.nbytes,
            hugepages=hugepages,
            numa_node=numa_node,
            touch_threads=None if touch == "start" else 0,
        )
        if touch == "background":
            self.memory.touch_in_background(numa_node)
        self._bytes = np.frombuffer(self.memory.buffer, dtype=np.uint8)
        self.address = self.memory.address
        self._unit_span: list[Span | None] = [None] * self.num_units
        self._classes: dict[int, SizeClass] = {}
        self.used_bytes = 0

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes of a slot."""
        return self._bytes.data[offset : offset + nbytes]

    def size_class(self, nbytes: int) -> SizeClass:
        """The class for objects of `nbytes`.

        Raises:
            CapacityError: an object larger than the arena, or without bytes.
        """
        slot_bytes = align_up(nbytes, SLOT_ALIGN_BYTES)
        if not 0 < slot_bytes <= self.nbytes:
            raise CapacityError(
                f"an object of {nbytes} bytes does not fit into an arena of {self.nbytes} bytes; "
                "raise --host-gb or lower the chunk's tokens"
            )
        if slot_bytes not in self._classes:
            units = _span_units(slot_bytes, self.unit_bytes, self.num_units)
            self._classes[slot_bytes] = SizeClass(slot_bytes, units, {})
        return self._classes[slot_bytes]

    def take(self, size: SizeClass, owner: int) -> int | None:
        """A free slot's offset for the owner's tag (not 0), or None when the class has none."""
        if not size.open_spans:
            return None
        key, span = next(iter(size.open_spans.items()))
        slot = span.free.pop()
        if not span.free:
            del size.open_spans[key]
        span.owners[slot] = owner
        size.used_slots += 1
        self.used_bytes += size.slot_bytes
        return span.offset + slot * span.slot_bytes

    def give_back(self, offset: int) -> None:
        """Free the slot at `offset`."""
        span = self._unit_span[offset // self.unit_bytes]
        assert span is not None, "a slot lies in a span"
        slot = (offset - span.offset) // span.slot_bytes
        assert span.owners[slot] != FREE, "a slot is freed once"
        span.owners[slot] = FREE
        span.free.append(slot)
        size = self._classes[span.slot_bytes]
        size.used_slots -= 1
        self.used_bytes -= span.slot_bytes
        size.open_spans[span.first_unit] = span
        if len(span.free) == span.num_slots:
            self._close_span(size, span)

    def open_span(self, size: SizeClass) -> bool:
        """Give the class another span, if a run of free units is there."""
        first = self._free_run(size.span_units)
        units = size.span_units
        if first is None:
            # a shorter span wastes more of itself, but less than not being there
            units = cdiv(size.slot_bytes, self.unit_bytes)
            first = self._free_run(units)
            if first is None:
                return False
        span = Span(first, units, self.unit_bytes, size.slot_bytes)
        self._unit_span[first : first + units] = [span] * units
        size.open_spans[first] = span
        size.total_slots += span.num_slots
        return True

    def spans(self) -> list[Span]:
        """All spans, by offset."""
        found: list[Span] = []
        for span in self._unit_span:
            if span is not None and (not found or found[-1] is not span):
                found.append(span)
        return found

    def windows(self, size: SizeClass) -> Iterator[tuple[Span, ...]]:
        """The spans under every run of units that one object of the class needs."""
        units = cdiv(size.slot_bytes, self.unit_bytes)
        seen: set[tuple[int, ...]] = set()
        for first in range(self.num_units - units + 1):
            under = {
                span.first_unit: span
                for span in self._unit_span[first : first + units]
                if span is not None
            }
            key = tuple(under)
            if key not in seen:
                seen.add(key)
                yield tuple(under.values())

    def usage(self) -> list[dict[str, int]]:
        """Slots in use and in all, per size."""
        return [
            {
                "slot_bytes": size.slot_bytes,
                "used_slots": size.used_slots,
                "total_slots": size.total_slots,
            }
            for size in list(self._classes.values())
            if size.total_slots
        ]

    def _free_run(self, units: int) -> int | None:
        run = 0
        for unit, span in enumerate(self._unit_span):
            run = 0 if span is not None else run + 1
            if run == units:
                return unit - units + 1
        return None

    def _close_span(self, size: SizeClass, span: Span) -> None:
        del size.open_spans[span.first_unit]
        size.total_slots -= span.num_slots
        self._unit_span[span.first_unit : span.first_unit + span.num_units] = [
            None
        ] * span.num_units


def _span_units(slot_bytes: int, unit_bytes: int, num_units: int) -> int:
    """Units of a span: the fewest that waste at most a sixteenth, else the least wasteful."""
    least = cdiv(slot_bytes, unit_bytes)
    best, best_waste = least, 1.0
    for units in range(least, min(8 * least, num_units) + 1):
        waste = (units * unit_bytes % slot_bytes) / (units * unit_bytes)
        if waste <= _MAX_WASTE:
            return units
        if waste < best_waste:
            best, best_waste = units, waste
    return best
