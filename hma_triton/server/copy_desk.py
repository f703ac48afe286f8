"""Stores and retrieves between request and reply: events, queues, deadlines, aborts, commits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hma_triton import messages as m
from hma_triton.config import ServerConfig
from hma_triton.errors import HmaError
from hma_triton.metrics import Metrics
from hma_triton.objects.leases import LeaseTable
from hma_triton.objects.store import ObjectStore
from hma_triton.server.copy_pool import CopyPool
from hma_triton.server.jobs import Job, RetrieveJob, StoreJob
from hma_triton.server.registration import Registration
from hma_triton.stop_points import reach

log = logging.getLogger("hma_triton.server")


class CopyDesk:
    """All jobs that have not been answered. Runs on the loop's thread."""

    def __init__(
        self,
        config: ServerConfig,
        store: ObjectStore,
        leases: LeaseTable,
        metrics: Metrics,
        send: Callable[[bytes, m.Reply], None],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        self._store = store
        self._leases = leases
        self._metrics = metrics
        self._send = send
        self._later = later
        self._waiting_limit = config.queue_limit
        self._jobs: dict[tuple[bytes, int], Job] = {}
        self._waiting: list[Job] = []
        self.pool = CopyPool(config.copy_threads, config.queue_limit, self._copied)

    @property
    def has_waiting(self) -> bool:
        """Whether some job waits for its producer's event."""
        return bool(self._waiting)

    @property
    def open_jobs(self) -> int:
        """Jobs that have not been answered."""
        return len(self._jobs)

    def submit(self, job: Job) -> None:
        """Queue the job, or let it wait for its event; refuse it when there is too much."""
        key = (job.owner, job.seq)
        if key in self._jobs:
            job.fail(m.ErrorCode.BAD_REQUEST, f"seq {job.seq} is already in use")
            self._finish(job)
            return
        self._jobs[key] = job
        job.registration.running += 1
        if isinstance(job, StoreJob) and not job.reservation.places:
            self._finish(job)
        elif _has_fired(job):
            self._enqueue(job)
        elif job.code:
            self._finish(job)
        elif len(self._waiting) >= self._waiting_limit:
            job.fail(m.ErrorCode.BUSY, f"{len(self._waiting)} copies already wait for events")
            self._finish(job)
        else:
            self._waiting.append(job)

    def _enqueue(self, job: Job) -> None:
        job.started = True
        if not self.pool.submit(job.registration.lane, job):
            job.fail(m.ErrorCode.BUSY, "the queue of this registration is full")
            self._finish(job)

    def poll_waiting(self, now_ns: int) -> None:
        """Queue jobs whose event has fired; give up those whose deadline has passed."""
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            if _has_fired(job):
                self._enqueue(job)
            elif job.code:
                self._finish(job)
            elif now_ns > job.deadline_ns:
                job.fail(m.ErrorCode.DEADLINE, "the producer's work did not end in time")
                self._finish(job)
            else:
                self._waiting.append(job)

    def abort(self, identity: bytes, request: m.Abort) -> m.Reply | None:
        """Answer when the operation no longer touches the pool."""
        job = self._jobs.get((identity, request.target_seq))
        if job is None:
            return m.AbortReply(seq=request.seq, target_seq=request.target_seq, state="unknown")
        job.aborted = True
        if self._withdraw(job, m.ErrorCode.ABORTED, "aborted before it started"):
            return m.AbortReply(seq=request.seq, target_seq=request.target_seq, state="cancelled")
        job.abort_waiters.append((identity, request.seq))
        return None

    def close(self, registration: Registration) -> None:
        """Withdraw what has not started; tell the registration when nothing runs any more."""
        registration.closing = True
        for job in list(self._jobs.values()):
            if job.registration is registration:
                job.aborted = True
                self._withdraw(job, m.ErrorCode.ABORTED, "the registration was closed")
        self._maybe_closed(registration)

    def shut_down(self, timeout_s: float) -> bool:
        """Refuse what has not started, let the rest end; whether it did in time."""
        for job in list(self._jobs.values()):
            self._withdraw(job, m.ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        return self.pool.stop(timeout_s)

    def _withdraw(self, job: Job, code: m.ErrorCode, why: str) -> bool:
        if job in self._waiting:
            self._waiting.remove(job)
        elif not self.pool.cancel(job.registration.lane, job):
            return False
        job.fail(code, why)
        self._finish(job)
        return True

    def _copied(self, job: object) -> None:
        # on a copy thread
        assert isinstance(job, Job)
        self._later(lambda: self._finish(job))

    def _finish(self, job: Job) -> None:
        """Commit or drop, answer, and let waiting aborts and closings go on."""
        known = self._jobs.get((job.owner, job.seq)) is job
        if job.aborted and not job.code:
            job.fail(m.ErrorCode.ABORTED, "aborted while it ran")
        if isinstance(job, StoreJob):
            reply: m.Reply = self._finish_store(job)
        else:
            assert isinstance(job, RetrieveJob)
            reply = self._finish_retrieve(job)
        if job.code:
            self._metrics.errors.labels(job.code).inc()
            log.info("copy seq=%d code=%s: %s", job.seq, job.code, job.message)
        self._send(job.owner, reply)
        for identity, seq in job.abort_waiters:
            self._send(identity, m.AbortReply(seq=seq, target_seq=job.seq, state="ended"))
        if known:
            del self._jobs[job.owner, job.seq]
            job.registration.running -= 1
            self._maybe_closed(job.registration)

    def _finish_store(self, job: StoreJob) -> m.StoreReply:
        if not job.code and max(job.ended_ns, time.monotonic_ns()) > job.deadline_ns:
            job.fail(m.ErrorCode.DEADLINE, "the copy ended after the deadline")
        stored = 0
        total = len(job.reservation.places)
        if job.code:
            self._store.abort(job.reservation)
        else:
            stored = self._store.commit(job.reservation, job.checksums)
            reach("server.store.committed")
            self._count_copy(job, "store", self._objects_per_group(job))
        groups = job.registration.shape.num_groups
        chunks = job.reservation.addresses[0].shape[0]
        self._metrics.objects.labels("stored").inc(stored)
        self._metrics.objects.labels("there").inc(job.reservation.there)
        self._metrics.objects.labels("dropped").inc(total - stored)
        return m.StoreReply(
            seq=job.seq,
            stored=stored,
            skipped=groups * chunks - total,
            nbytes=job.nbytes,
            seconds=job.seconds,
            code=job.code,
            message=job.message[:8000],
        )

    def _objects_per_group(self, job: StoreJob) -> list[int]:
        return [int((addresses != 0).sum()) for addresses in job.reservation.addresses]

    def _finish_retrieve(self, job: RetrieveJob) -> m.RetrieveReply:
        for group, chunk in job.corrupt:
            log.error(
                "checksum mismatch instance=%s group=%d chunk=%d: dropped",
                job.registration.instance_id,
                group,
                chunk,
            )
            self._store.discard(job.reading, group, chunk)
        self._store.close_read(job.reading)
        key = (job.registration.instance_id, job.request_id)
        if job.code:
            self._leases.release(key)
        else:
            self._leases.retrieved(key, job.registration.rank)
            self._count_copy(job, "retrieve", job.group_objects)
        reach("server.retrieve.ended")
        return m.RetrieveReply(
            seq=job.seq,
            request_id=job.request_id,
            ok=not job.code,
            nbytes=job.nbytes,
            seconds=job.seconds,
            code=job.code,
            message=job.message[:8000],
        )

    def _count_copy(self, job: Job, direction: str, group_objects: list[int]) -> None:
        if not job.ended_ns:
            return
        path = job.path or job.registration.engine.backend
        sizes = job.registration.shape.object_nbytes
        moved = [objects * size for objects, size in zip(group_objects, sizes, strict=True)]
        for group, nbytes in enumerate(moved):
            if nbytes:
                labels = (direction, str(group), path)
                self._metrics.bytes.labels(*labels).inc(nbytes)
                self._metrics.group_seconds.labels(*labels).inc(job.seconds * nbytes / sum(moved))
        self._metrics.copy_seconds.labels(direction, path).observe(job.seconds)
        waited = (time.monotonic_ns() - job.submitted_ns) / 1e9
        self._metrics.wait_seconds.labels(direction).observe(waited)

    def _maybe_closed(self, registration: Registration) -> None:
        if registration.closing and not registration.running:
            self.pool.forget(registration.lane)
            callbacks, registration.when_closed = registration.when_closed, []
            for callback in callbacks:
                callback()


def _has_fired(job: Job) -> bool:
    """Whether the producer's work has ended; fails the job when its event cannot be asked."""
    try:
        return job.event is None or job.event.query()
    except HmaError as error:
        # a driver's refusal, as when the process that made the event has crashed
        job.fail(m.ErrorCode.TRANSFER, f"the producer's event: {error}")
        return False
