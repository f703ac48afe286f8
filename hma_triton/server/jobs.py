"""One store or retrieve on its way: waiting for an event, queued, running, done.

`run` is called on a copy thread. It touches the pool and the arena only, never the store or the
tables; the loop reads the outcome afterwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from hma_triton.cpu_event import ImportedCpuEvent
from hma_triton.errors import HmaError, IncompleteRetrieveError, PlanError
from hma_triton.messages import ErrorCode
from hma_triton.objects.arena import Arena
from hma_triton.objects.reservation import Reading, Reservation
from hma_triton.server.registration import IdArrays, Registration
from hma_triton.stop_points import reach
from hma_triton.tensor_ipc_cuda import ImportedEvent

log = logging.getLogger("hma_triton.server")


@dataclass(slots=True, eq=False)
class Job:
    """What stores and retrieves have in common. `code` is empty when the copy was carried out."""

    owner: bytes
    seq: int
    registration: Registration
    block_ids: IdArrays
    deadline_ns: int
    event: ImportedCpuEvent | ImportedEvent | None
    arena: Arena
    submitted_ns: int
    started: bool = False
    aborted: bool = False
    abort_waiters: list[tuple[bytes, int]] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0
    # how the bytes went, for the metrics; empty when none did
    path: str = ""
    ended_ns: int = 0
    code: str = ""
    message: str = ""

    def fail(self, code: ErrorCode, message: str) -> None:
        """Note why nothing came of it; the first reason stays."""
        if not self.code:
            self.code, self.message = code.value, message

    def run(self) -> None:
        """Copy, unless it is too late; on a copy thread."""
        if time.monotonic_ns() > self.deadline_ns:
            self.fail(ErrorCode.DEADLINE, "the deadline passed before the copy could start")
            return
        try:
            self.registration.caches.check()
            self._copy()
        except IncompleteRetrieveError as error:
            self.fail(ErrorCode.MISSING, str(error))
        except PlanError as error:
            self.fail(ErrorCode.BAD_REQUEST, str(error))
        except (HmaError, RuntimeError, OSError) as error:
            self.fail(ErrorCode.TRANSFER, f"{type(error).__name__}: {error}")
        except Exception as error:
            # the request loop's other half: whatever it is, the request is answered
            log.exception("copy seq=%d failed", self.seq)
            self.fail(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        self.ended_ns = time.monotonic_ns()

    def _copy(self) -> None:
        raise NotImplementedError

    def region_sums(self, group: int, offset: int) -> tuple[int, ...]:
        """Checksums of the regions of an object in the arena."""
        return tuple(
            xxhash.xxh3_64_intdigest(self.arena.view(offset + start, nbytes))
            for start, nbytes in self.registration.shape.regions[group]
        )


@dataclass(slots=True, eq=False)
class StoreJob(Job):
    """Pool to objects."""

    reservation: Reservation = field(kw_only=True)
    wants_checksums: bool = False
    checksums: list[tuple[int, ...]] = field(default_factory=list)

    def _copy(self) -> None:
        reach("server.store.copying")
        result = self.registration.engine.store_addresses(
            self.block_ids, self.reservation.addresses
        )
        self.nbytes, self.seconds, self.path = result.nbytes, result.seconds, result.backend
        if result.skipped:
            self.fail(ErrorCode.TRANSFER, f"objects {result.skipped[:4]} were left out")
        if self.wants_checksums:
            self.checksums = [
                self.region_sums(group, offset)
                for (group, _), offset in zip(
                    self.reservation.places, self.reservation.offsets.tolist(), strict=True
                )
            ]
        # what counts is when the pool was last read, and that is now
        reach("server.store.copied")


@dataclass(slots=True, eq=False)
class RetrieveJob(Job):
    """Objects to pool. `expected` lists objects to check first: group, chunk, checksums."""

    request_id: str = field(kw_only=True)
    skip_tokens: int = field(kw_only=True)
    reading: Reading = field(kw_only=True)
    group_objects: list[int] = field(default_factory=list)
    expected: Sequence[tuple[int, int, tuple[int, ...]]] = ()
    corrupt: list[tuple[int, int]] = field(default_factory=list)

    def _copy(self) -> None:
        for group, chunk, sums in self.expected:
            offset = int(self.reading.addresses[group][chunk]) - self.arena.address
            if self.region_sums(group, offset) != sums:
                self.corrupt.append((group, chunk))
        if self.corrupt:
            self.fail(
                ErrorCode.CHECKSUM,
                f"objects (group, chunk) {self.corrupt[:4]} are not what was stored",
            )
            return
        reach("server.retrieve.copying")
        result = self.registration.engine.retrieve_addresses(
            self.block_ids, self.reading.addresses, skip_tokens=self.skip_tokens
        )
        self.nbytes, self.seconds, self.path = result.nbytes, result.seconds, result.backend
        reach("server.retrieve.copied")
