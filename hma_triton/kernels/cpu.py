"""The copy of CPU pools: one pass from page to object and back, on all threads of the process.

Two implementations give the same bytes: compiled movers (numba) and, where numba is not installed,
numpy. Both release the interpreter lock while they copy and may be called from several threads at
once. No temporary grows with the request.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from hma_triton.errors import ConfigError, PlanError, TransferError
from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array

logger = logging.getLogger(__name__)

IMPLEMENTATIONS = ("auto", "compiled", "numpy")

# Each further thread is worth its start (some 30 us) from this many bytes on.
BYTES_PER_THREAD = 1 << 20


class Shares(Protocol):
    """One copy, divided among threads."""

    def run(self) -> None:
        """Move whatever no other thread has taken; returns when nothing is left to take."""


class Implementation(Protocol):
    """How bytes are moved; see `cpu_compiled` and `cpu_numpy`."""

    name: str

    def prepare(self, specs: Sequence[CopySpec]) -> None:
        """Everything that can be computed once per spec."""

    def way_of(self, spec: CopySpec, direction: Direction) -> str:
        """Which of its loops moves `spec`."""

    def shares(
        self,
        spec: CopySpec,
        direction: Direction,
        block_ids: Int64Array,
        object_addresses: Int64Array,
    ) -> Shares:
        """The copy of at least one block."""


class _Team:
    """The helpers of one copy: when `finish` returns, none of them moves a byte any more."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._changed = threading.Condition()
        self._working = 0
        self._over = False
        self._error: BaseException | None = None

    def help(self) -> None:
        """Take part, on a helper thread; who comes too late does nothing."""
        with self._changed:
            if self._over:
                return
            self._working += 1
        try:
            self._shares.run()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def finish(self) -> None:
        """Wait for those that have begun; raises what one of them did."""
        with self._changed:
            self._over = True
            while self._working:
                self._changed.wait()
        if self._error is not None:
            raise self._error


class CpuCopier:
    """Executor for pools and objects in memory that this process has mapped.

    Args:
        threads: most threads of one copy, the caller's among them; None for
            `torch.get_num_threads()`. Callers at the same time share the other threads.
        implementation: `compiled`, `numpy`, or `auto`: compiled if numba is installed.

    Raises:
        ConfigError: fewer than one thread, an unknown implementation, or `compiled` without numba.
    """

    def __init__(self, threads: int | None = None, implementation: str = "auto") -> None:
        self.threads = torch.get_num_threads() if threads is None else threads
        if self.threads < 1:
            raise ConfigError(f"a copy needs at least one thread, not {threads}")
        self._implementation = _load(implementation)
        self._pool: ThreadPoolExecutor | None = None
        self._pool_lock = threading.Lock()
        self._closed = False

    @property
    def name(self) -> str:
        """`cpu-compiled` or `cpu-numpy`."""
        return f"cpu-{self._implementation.name}"

    def prepare(self, specs: Sequence[CopySpec]) -> None:
        """Compile what `specs` need, so that no request waits for it."""
        self._implementation.prepare(specs)

    def way_of(self, spec: CopySpec, direction: Direction) -> str:
        """How `spec` is moved, for reports: `compiled, runs`, `compiled, pages by line256`, ...

        Objects are taken to lie on multiples of 64 bytes, as an arena's do.
        """
        return self._implementation.way_of(spec, direction)

    def copy_blocks(
        self,
        spec: CopySpec,
        direction: Direction,
        block_ids: Int64Array,
        object_addresses: Int64Array,
    ) -> None:
        """Move blocks between the pool and objects; done when it returns.

        Args:
            block_ids: int64 [n], validated by the plan; may repeat on store only.
            object_addresses: int64 [n], absolute, with region offset and kept block's place.

        Raises:
            PlanError: the two lengths differ.
            TransferError: the copier is closed.
        """
        if block_ids.shape != object_addresses.shape or block_ids.ndim != 1:
            raise PlanError(
                f"kernel group {spec.kernel_group_index}: block ids of shape {block_ids.shape} "
                f"for object addresses of shape {object_addresses.shape}; both are [n]"
            )
        if self._closed:
            raise TransferError("this copier is closed")
        count = block_ids.shape[0]
        if not count or not spec.num_rows:
            return
        shares = self._implementation.shares(
            spec,
            direction,
            np.ascontiguousarray(block_ids, dtype=np.int64),
            np.ascontiguousarray(object_addresses, dtype=np.int64),
        )
        helpers = min(self.threads, count * spec.block_bytes // BYTES_PER_THREAD) - 1
        if helpers <= 0:
            shares.run()
            return
        team = _Team(shares)
        try:
            self._call_helpers(team, helpers)
            shares.run()
        finally:
            team.finish()

    def close(self) -> None:
        """End the helper threads, after the copies under way."""
        with self._pool_lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _call_helpers(self, team: _Team, count: int) -> None:
        pool = self._helpers()
        try:
            for _ in range(count):
                pool.submit(team.help)
        except RuntimeError as error:
            # no thread to be had, or just closed: the copy takes longer, and is as right
            logger.debug("a copy goes on with fewer threads: %s", error)

    def _helpers(self) -> ThreadPoolExecutor:
        with self._pool_lock:
            if self._closed:
                raise TransferError("this copier is closed")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    self.threads - 1, "hma-copy", initializer=_run_on_all_cores
                )
            return self._pool


def _run_on_all_cores() -> None:
    """Give this thread every core that some thread of the process may use.

    OpenMP settings of serving engines pin the main thread to one core, and its children with it.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            cores |= os.sched_getaffinity(int(task))
        except ProcessLookupError:
            continue
    os.sched_setaffinity(0, cores)


def _load(implementation: str) -> Implementation:
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(
            f"implementation {implementation!r} is unknown; use one of {', '.join(IMPLEMENTATIONS)}"
        )
    has_numba = importlib.util.find_spec("numba") is not None
    if implementation == "compiled" and not has_numba:
        raise ConfigError("the compiled copy needs numba: pip install 'hma-triton[cpu]'")
    if implementation == "numpy" or not has_numba:
        from hma_triton.kernels.cpu_numpy import NumpyCopy

        if implementation == "auto":
            logger.warning("numba is not installed: CPU pools are copied with numpy, more slowly")
        return NumpyCopy()
    from hma_triton.kernels.cpu_compiled import CompiledCopy

    return CompiledCopy()
