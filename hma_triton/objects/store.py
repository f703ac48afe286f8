"""Objects and their states: reserve, write, commit, read, evict.

An object is absent, being written, or present; only present ones are found. One store's objects
become present together, on its rank. A record that is pinned (a lease or a running read) or being
written is never evicted. All methods run on one thread; copies run elsewhere on the addresses given
out here, which stay valid until `commit`, `abort` or `close_read`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hma_triton.errors import CapacityError, ConfigError
from hma_triton.objects.arena import Arena
from hma_triton.objects.chunk_index import (
    ABSENT,
    CORRUPT,
    NONE,
    PRESENT,
    WRITING,
    ChunkIndex,
    Keys,
    Records,
    are_distinct,
    unpack_keys,
)
from hma_triton.objects.eviction import LAST_NAMESPACE
from hma_triton.objects.namespace import BoolArray, Namespace, NamespaceShape
from hma_triton.objects.reservation import Reading, Reservation
from hma_triton.objects.space import Space, StoreCounters
from hma_triton.plan import Hit, longest_hit

_MANY_NAMESPACES = 64
_NO_RECORDS: Records = np.empty(0, dtype=np.int32)


class ObjectStore:
    """All namespaces over one arena. `pin_share` of the arena is the most that leases may hold."""

    def __init__(self, arena: Arena, *, pin_share: float = 0.5, checksums: bool = False) -> None:
        if not 0.0 < pin_share <= 1.0:
            raise ConfigError(f"pin share {pin_share} is not in (0, 1]")
        self.arena = arena
        self._space = Space(arena)
        self.pinned_bytes = 0
        self._pin_limit_bytes = int(arena.nbytes * pin_share)
        self._checksums = checksums
        self._numbers = 0
        self._by_fingerprint: dict[bytes, Namespace] = {}

    @property
    def counters(self) -> StoreCounters:
        """What happened since the start."""
        return self._space.counters

    @property
    def chunks(self) -> int:
        """Records in all namespaces."""
        return sum(each.index.count for each in list(self._space.namespaces.values()))

    @property
    def bookkeeping_nbytes(self) -> int:
        """Bytes of the indexes."""
        namespaces = list(self._space.namespaces.values())
        return sum(each.index.bookkeeping_nbytes() for each in namespaces)

    def describe_namespaces(self) -> list[dict[str, object]]:
        """For the status view."""
        return [
            {
                "fingerprint": each.fingerprint.hex(),
                "chunks": each.index.count,
                "closed": each.closed,
                "world_size": each.shape.world_size,
            }
            for each in list(self._space.namespaces.values())
        ]

    @property
    def needs_drain(self) -> bool:
        """Whether `drain` may have something to do."""
        return self._space.needs_drain

    def drain(self, max_records: int) -> int:
        """Free records of cleared namespaces and of discarded objects; gives how many went."""
        return self._space.drain(max_records)

    # namespaces

    def namespace(self, fingerprint: bytes, shape: NamespaceShape) -> Namespace:
        """The open namespace of that fingerprint, made when there is none.

        Ask again for every operation: an empty one may be forgotten when others are made.

        Raises:
            CapacityError: an object of the shape is larger than the arena.
        """
        found = self._by_fingerprint.get(fingerprint)
        if found is not None:
            if found.shape != shape:
                raise ConfigError(
                    f"namespace {fingerprint.hex()[:16]} has objects of {found.shape.object_nbytes}"
                    f" bytes, not {shape.object_nbytes}"
                )
            return found
        self._drop_empty_namespaces()
        sizes = tuple(self.arena.size_class(nbytes) for nbytes in shape.object_nbytes)
        width = int(shape.columns().max()) + 1
        checksum_width = int(shape.checksum_starts()[-1]) if self._checksums else 0
        index = ChunkIndex(width, checksum_width=checksum_width)
        made = Namespace(self._next_number(), fingerprint, shape, index, sizes)
        self._by_fingerprint[fingerprint] = made
        self._space.namespaces[made.number] = made
        return made

    def _next_number(self) -> int:
        """Numbers come round again, without those in use."""
        while True:
            self._numbers = self._numbers % LAST_NAMESPACE + 1
            if self._numbers not in self._space.namespaces:
                return self._numbers

    def _drop_empty_namespaces(self) -> None:
        """Forget namespaces without a record; the next use makes them again."""
        if len(self._by_fingerprint) < _MANY_NAMESPACES:
            return
        for fingerprint, namespace in list(self._by_fingerprint.items()):
            if namespace.index.count == 0:
                del self._by_fingerprint[fingerprint]
                del self._space.namespaces[namespace.number]

    def clear(self, namespace: Namespace) -> int:
        """Forget all keys at once; memory in use by copies and leases follows when they end."""
        count = namespace.index.count
        if not namespace.closed:
            self._space.close(namespace)
            del self._by_fingerprint[namespace.fingerprint]
        return count

    # hits

    def lookup(self, namespace: Namespace, digests: bytes, max_tokens: int) -> tuple[Hit, Records]:
        """The longest servable prefix, and the records it stands on; touches them."""
        if namespace.closed:
            return Hit(0, 0, "cleared"), _NO_RECORDS
        records = namespace.index.find(unpack_keys(digests))
        shape = namespace.shape
        present = namespace.present_on_all_ranks(records)
        hit = longest_hit(shape.rules, present, shape.chunk_tokens, max_tokens)
        allowed = self._chunks_within_pin_limit(namespace, records[: hit.chunks])
        if allowed < hit.chunks:
            limit_tokens = allowed * shape.chunk_tokens
            shorter = longest_hit(shape.rules, present, shape.chunk_tokens, limit_tokens)
            hit = Hit(shorter.tokens, shorter.chunks, "pin limit")
        held = records[: hit.chunks]
        if not shape.needs_prefix:
            held = held[held != NONE]
        self._touch(namespace, held)
        return hit, held

    def _chunks_within_pin_limit(self, namespace: Namespace, records: Records) -> int:
        room = self._pin_limit_bytes - self.pinned_bytes
        if namespace.total_bytes(records[records != NONE]) <= room:
            return int(records.shape[0])
        fresh = (records != NONE) & (namespace.index.pins[records] == 0)
        needed = np.cumsum(namespace.record_bytes(records) * fresh)
        return int(np.searchsorted(needed, room, side="right"))

    def _touch(self, namespace: Namespace, records: Records) -> None:
        """Earlier records get later stamps, so that leaves are older than their prefixes."""
        count = records.shape[0]
        namespace.index.stamp[records] = np.arange(self._space.clock + count, self._space.clock, -1)
        self._space.clock += count + 1

    # pins

    def pin(self, namespace: Namespace, records: Records) -> Records:
        """Keep the records until `unpin` is given the result."""
        index = namespace.index
        if not (index.parent[records[1:]] == records[:-1]).all():
            # no chain, so one of them may be named twice
            records = np.unique(records)
        pins = index.pins
        self.pinned_bytes += namespace.total_bytes(records[pins[records] == 0])
        pins[records] += 1
        return records

    def unpin(self, namespace: Namespace, records: Records) -> None:
        """Undo one `pin`."""
        pins = namespace.index.pins
        pins[records] -= 1
        left = pins[records]
        assert not records.size or int(left.min()) >= 0, "a pin is undone once"
        loose = records[left == 0]
        self.pinned_bytes -= namespace.total_bytes(loose)
        self._space.offer(namespace, loose)

    # stores

    def reserve(
        self, namespace: Namespace, rank: int, digests: bytes, parent: bytes, storable: BoolArray
    ) -> Reservation:
        """Take slots for the storable objects [num_groups, n] of `n` chunks that are not there.

        Chunks whose prefix is gone are left out when no hit could reach them.

        Raises:
            CapacityError: no room, and nothing may be evicted; nothing is taken then.
            ConfigError: a digest is there twice.
        """
        wanted = storable.copy()
        if rank:
            wanted[np.array(namespace.shape.replicated)] = False
        keys = unpack_keys(digests)
        if not are_distinct(keys):
            raise ConfigError(f"{keys.shape[0]} digests of a store name a chunk more than once")
        records = self._records_for(namespace, keys, parent, wanted)
        columns = namespace.columns[:, rank]
        known = records != NONE
        state = namespace.index.state.take(records, axis=0, mode="clip")[:, columns].T
        there = int((wanted & known & (state == PRESENT)).sum())
        wanted &= known & (state == ABSENT)
        places = [(int(group), int(chunk)) for group, chunk in np.argwhere(wanted)]
        taken = Reservation(
            namespace=namespace,
            addresses=[np.zeros(keys.shape[0], dtype=np.int64) for _ in columns],
            records=np.array([records[chunk] for _, chunk in places], dtype=np.int32),
            columns=np.array([columns[group] for group, _ in places], dtype=np.int64),
            offsets=np.full(len(places), NONE, dtype=np.int64),
            places=places,
            there=there,
        )
        self._take_slots(taken, records[known])
        return taken

    def _records_for(
        self, namespace: Namespace, keys: Keys, parent: bytes, wanted: BoolArray
    ) -> Records:
        """Records up to the last wanted chunk, made where they are missing; `NONE` for the rest."""
        index = namespace.index
        records = index.find(keys)
        end = int(np.flatnonzero(wanted.any(axis=0))[-1]) + 1 if wanted.any() else 0
        before = int(index.find(unpack_keys(parent))[0]) if parent else NONE
        if parent and before == NONE and namespace.shape.needs_prefix:
            end = 0
        chunk = 0
        while chunk < end:
            run_end = chunk
            while run_end < end and records[run_end] == NONE:
                run_end += 1
            if run_end > chunk:
                made = index.insert_chain(keys[chunk:run_end], before, self._space.clock + 1)
                self._space.clock += made.shape[0] + 1
                records[chunk:run_end] = made
                chunk = run_end
            else:
                chunk += 1
            before = int(records[chunk - 1])
        return records

    def _take_slots(self, taken: Reservation, chain: Records) -> None:
        namespace = taken.namespace
        # the chain must survive the evictions that make room for it
        held = self.pin(namespace, chain)
        try:
            needed = int(namespace.column_bytes[taken.columns].sum())
            if needed > self.arena.nbytes:
                raise CapacityError(
                    f"a store of {needed} bytes does not fit into an arena of "
                    f"{self.arena.nbytes} bytes; raise --host-gb or store fewer chunks at once"
                )
            offsets: list[int] = []
            try:
                for column, record in zip(
                    taken.columns.tolist(), taken.records.tolist(), strict=True
                ):
                    offsets.append(self._space.take_slot(namespace, column, record))
            finally:
                self._enter(taken, offsets)
        except CapacityError:
            self._undo(taken)
            raise
        finally:
            self.unpin(namespace, held)
            self._space.drop_empty(namespace, held)

    def _enter(self, taken: Reservation, offsets: list[int]) -> None:
        """Note the slots of the first objects of `taken`, whose records are pinned until then."""
        namespace, index = taken.namespace, taken.namespace.index
        count = len(offsets)
        records, columns = taken.records[:count], taken.columns[:count]
        taken.offsets[:count] = offsets
        places = np.array(taken.places[:count], dtype=np.int64).reshape(count, 2)
        for group, addresses in enumerate(taken.addresses):
            here = places[:, 0] == group
            addresses[places[here, 1]] = self.arena.address + taken.offsets[:count][here]
        index.state[records, columns] = WRITING
        index.offset[records, columns] = taken.offsets[:count]
        np.add.at(index.writing, records, 1)
        self.pinned_bytes += int(namespace.column_bytes[columns].sum())

    def commit(self, reservation: Reservation, checksums: Sequence[Sequence[int]] = ()) -> int:
        """Make all objects of the reservation present; gives how many. Once only.

        `checksums[i]` has one value per region of object i, in the order of `places`.
        """
        namespace, index = reservation.namespace, reservation.namespace.index
        if namespace.closed:
            self.abort(reservation)
        if not reservation.open:
            return 0
        reservation.open = False
        np.subtract.at(index.writing, reservation.records, 1)
        index.state[reservation.records, reservation.columns] = PRESENT
        if self._checksums:
            starts = namespace.checksum_starts[reservation.columns]
            for record, start, of_object in zip(
                reservation.records.tolist(), starts.tolist(), checksums, strict=True
            ):
                index.checksum[record, start : start + len(of_object)] = of_object
        self._space.offer(namespace, np.unique(reservation.records))
        count = int(reservation.records.shape[0])
        self._space.counters.committed_objects += count
        return count

    def abort(self, reservation: Reservation) -> None:
        """Give the slots back; nothing was ever visible. Later calls do nothing."""
        if not reservation.open:
            return
        self._space.counters.aborted_objects += int(reservation.records.shape[0])
        self._undo(reservation)
        records = np.unique(reservation.records)
        self._space.offer(reservation.namespace, records)
        self._space.drop_empty(reservation.namespace, records)
        self._space.drop_barren(reservation.namespace, records)

    def _undo(self, reservation: Reservation) -> None:
        reservation.open = False
        namespace, index = reservation.namespace, reservation.namespace.index
        for record, column, offset in zip(
            reservation.records.tolist(),
            reservation.columns.tolist(),
            reservation.offsets.tolist(),
            strict=True,
        ):
            if offset == NONE:
                continue
            self._space.free_object(namespace, record, column)
            index.writing[record] -= 1
            if index.pins[record]:
                self.pinned_bytes -= int(namespace.column_bytes[column])

    # reads

    def open_read(self, namespace: Namespace, rank: int, digests: bytes) -> Reading:
        """Hold what is there of these chunks for one rank until `close_read`."""
        index = namespace.index
        keys = unpack_keys(digests)
        records = (
            np.full(keys.shape[0], NONE, dtype=np.int32) if namespace.closed else index.find(keys)
        )
        known = (records != NONE)[:, None]
        columns = namespace.columns[:, rank]
        there = known & (index.state.take(records, axis=0, mode="clip")[:, columns] == PRESENT)
        offsets = index.offset.take(records, axis=0, mode="clip")[:, columns]
        addresses = np.where(there, offsets + self.arena.address, 0).T
        self._touch(namespace, records[records != NONE])
        return Reading(
            namespace=namespace,
            addresses=list(np.ascontiguousarray(addresses)),
            records=records,
            columns=columns,
            held=self.pin(namespace, records[records != NONE]),
        )

    def checksums_of(self, reading: Reading, group: int, chunk: int) -> tuple[int, ...]:
        """The checksums kept for an object's regions."""
        namespace, column = reading.namespace, int(reading.columns[group])
        start, end = namespace.checksum_starts[column : column + 2].tolist()
        kept: list[int] = namespace.index.checksum[int(reading.records[chunk]), start:end].tolist()
        return tuple(kept)

    def close_read(self, reading: Reading) -> None:
        """The retrieve has ended. Later calls do nothing."""
        if reading.open:
            reading.open = False
            self.unpin(reading.namespace, reading.held)

    def discard(self, reading: Reading, group: int, chunk: int) -> None:
        """An object's bytes are not what was stored: nobody finds it from now on."""
        namespace, record = reading.namespace, int(reading.records[chunk])
        index = namespace.index
        index.state[record, int(reading.columns[group])] = CORRUPT
        self._space.counters.corrupt_objects += 1
        self._space.corrupt.append((namespace, record))
