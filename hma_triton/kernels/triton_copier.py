"""The executor of plans on a device: tables uploaded once, one launch for each copy spec."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from hma_triton.errors import ConfigError
from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array
from hma_triton.kernels.block_copy import is_interpreted, launch_block_copy
from hma_triton.kernels.launch_environment import environment
from hma_triton.kernels.specialize import (
    KernelSpecialization,
    alignment_bytes,
    arena_alignment_bytes,
    specialize,
    tune_key,
)
from hma_triton.tuning import SIZE_BUCKETS_BYTES, KernelConfig, TuneTable

# pools register on several threads, and Triton says nothing about compiling on several
_COMPILING = threading.Lock()
_INTERPRETING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch, as it was made."""

    spec: CopySpec
    kernel: KernelSpecialization
    programs: int
    nbytes: int

    @property
    def direction(self) -> Direction:
        """Which way the bytes went."""
        return self.kernel.direction

    @property
    def word_bytes(self) -> int:
        """Width of an access; 16 needs every address and step of the copy to allow it."""
        return self.kernel.word_bytes


class TritonCopier:
    """Runs `copy_blocks` as one kernel launch on the pool's device.

    The kernel reads and writes host objects itself, so object addresses must be ones that the
    device can reach (mapped pinned memory; on ROCm the mapped device address). On CPU pools it
    runs in Triton's interpreter, for tests.

    Args:
        device: where the pools are.
        config: one launch for everything, instead of the tuned or written ones.
        object_alignments: powers of two up to 16 that object addresses may be aligned to; where
            empty, what an arena's objects have, and 1 for every other. A launch takes the widest
            of these variants that its addresses allow, and none compiles after `prepare`.
        program_cap: most programs of a launch, instead of the config's.

    Raises:
        ConfigError: CPU pools without `TRITON_INTERPRET=1`, or a device while it is set.
    """

    name = "triton"

    def __init__(
        self,
        device: torch.device | str = "cpu",
        config: KernelConfig | None = None,
        object_alignments: Sequence[int] = (),
        program_cap: int | None = None,
    ) -> None:
        self.device = torch.device(device)
        if (self.device.type == "cpu") != is_interpreted():
            switch = "needs" if self.device.type == "cpu" else "cannot run with"
            raise ConfigError(
                f"backend 'triton' on {self.device} {switch} TRITON_INTERPRET=1 in the "
                "environment before the process starts; CPU pools take backend 'cpu'"
            )
        self.last_launch: Launch | None = None
        self.launch_count = 0
        self._config = config
        self._object_alignments = tuple(object_alignments)
        self._program_cap = program_cap
        self._table = TuneTable(environment(self.device))
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}
        self._alignments: dict[CopySpec, tuple[int, ...]] = {}
        # the interpreter patches triton.language while it runs; on a device a launch is short
        self._lock = _INTERPRETING if is_interpreted() else threading.Lock()

    def prepare(self, specs: Sequence[CopySpec]) -> None:
        """Upload the tables of `specs` and compile every variant that a launch may take.

        Raises:
            GeometryError: a page too large for the kernel.
        """
        nothing = np.empty(0, dtype=np.int64)
        with _COMPILING, self._lock, self._on_device(None):
            for spec in specs:
                wanted = self._object_alignments or (arena_alignment_bytes(spec),)
                self._alignments[spec] = tuple(sorted({*wanted, 1}, reverse=True))
                if spec.row_addresses not in self._rows:
                    self._rows[spec.row_addresses] = self._upload(
                        np.asarray(spec.row_addresses, dtype=np.int64)
                    )
                if not is_interpreted():
                    for _, config, direction, alignment in self._variants(spec):
                        self._launch(spec, direction, alignment, config, nothing, nothing)
        self.synchronize()

    def copy_blocks(
        self,
        spec: CopySpec,
        direction: Direction,
        block_ids: Int64Array,
        object_addresses: Int64Array,
    ) -> None:
        """Move `block_ids` [n] of `spec` to or from `object_addresses` [n]; done on return."""
        self.enqueue(spec, direction, block_ids, object_addresses)
        self.synchronize()

    def enqueue(
        self,
        spec: CopySpec,
        direction: Direction,
        block_ids: Int64Array,
        object_addresses: Int64Array,
        stream: int | None = None,
    ) -> None:
        """`copy_blocks` on `stream` (a handle; the current one where None), without waiting."""
        if block_ids.shape[0] == 0:
            return
        if spec not in self._alignments:
            self.prepare((spec,))
        found = alignment_bytes(object_addresses)
        alignment = next(a for a in self._alignments[spec] if a <= found)
        with self._lock, self._on_device(stream):
            config = self._config_of(spec, direction, alignment, block_ids.shape[0])
            self.last_launch = self._launch(
                spec, direction, alignment, config, block_ids, object_addresses
            )
            self.launch_count += 1

    def synchronize(self) -> None:
        """Wait for everything enqueued on the device's current stream."""
        if self.device.type != "cpu":
            torch.cuda.current_stream(self.device).synchronize()

    def tuned_path(self, spec: CopySpec, direction: Direction, num_blocks: int) -> str | None:
        """Path measured on this device for such a copy, None without a measurement."""
        key = tune_key(spec, direction, arena_alignment_bytes(spec), num_blocks)
        measured = self._table.measured(key)
        return measured.path if measured else None

    def specializations(self, spec: CopySpec) -> frozenset[KernelSpecialization]:
        """Every kernel that launches of a prepared `spec` take."""
        return frozenset(variant[0] for variant in self._variants(spec))

    def close(self) -> None:
        """Forget the tables; nothing enqueued may be pending."""
        self._rows.clear()
        self._alignments.clear()

    def _variants(
        self, spec: CopySpec
    ) -> list[tuple[KernelSpecialization, KernelConfig, Direction, int]]:
        """One entry for each distinct kernel of `spec`."""
        table = {}
        edges = (1, *(edge + 1 for edge in SIZE_BUCKETS_BYTES))
        for direction in Direction:
            for alignment in self._alignments[spec]:
                for edge in edges:
                    blocks = max(1, -(-edge // spec.block_bytes))
                    config = self._config_of(spec, direction, alignment, blocks)
                    special, _ = specialize(spec, direction, alignment, config)
                    table[special] = (special, config, direction, alignment)
        return list(table.values())

    def _config_of(
        self, spec: CopySpec, direction: Direction, alignment: int, num_blocks: int
    ) -> KernelConfig:
        return self._config or self._table.lookup(tune_key(spec, direction, alignment, num_blocks))

    def _launch(
        self,
        spec: CopySpec,
        direction: Direction,
        alignment: int,
        config: KernelConfig,
        block_ids: Int64Array,
        object_addresses: Int64Array,
    ) -> Launch:
        special, steps = specialize(spec, direction, alignment, config)
        ids, addresses = self._upload(np.stack((block_ids, object_addresses)))
        programs = launch_block_copy(
            special,
            steps,
            self._rows[spec.row_addresses],
            ids,
            addresses,
            self._program_cap or config.program_cap,
        )
        return Launch(
            spec=spec,
            kernel=special,
            programs=programs,
            nbytes=block_ids.shape[0] * spec.block_bytes,
        )

    def _upload(self, table: Int64Array) -> torch.Tensor:
        host = torch.from_numpy(table)
        if self.device.type == "cpu":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)

    def _on_device(self, stream: int | None) -> AbstractContextManager[object]:
        if self.device.type == "cpu":
            return nullcontext()
        if stream is None:
            return torch.cuda.device(self.device)
        external = torch.cuda.ExternalStream(stream, self.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(external)
