"""Random interleavings of everything that can happen to the server, against the oracle.

The real handlers, object store and copies run here; only the order in which copies run and end, and
which deadlines have passed, is the machine's choice. The arena holds a quarter of the working set,
half of it, or all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.server_pools import CHUNK_TOKENS, DIGEST, HYBRID, NULL, TestPool, first, prompt
from support.store_model import Oracle

from hma_triton import messages as m
from hma_triton.config import ServerConfig
from hma_triton.engine import TransferEngine
from hma_triton.keys import EngineFacts
from hma_triton.objects.arena import Arena
from hma_triton.objects.chunk_index import ABSENT, NONE
from hma_triton.process_identity import this_process
from hma_triton.server import registration
from hma_triton.server.handlers import Handlers
from hma_triton.server.jobs import Job, RetrieveJob, StoreJob
from hma_triton.tensor_ipc import export_kv_caches

WORLD = 2
FAR_NS = 10**18
SCHEDULER = b"scheduler"
SELDOM = st.sampled_from([False, False, False, True])


@functools.cache
def prompts() -> tuple[bytes, ...]:
    """Prompts that share prefixes of 0, 1 and 3 chunks."""
    long = prompt(1, 5)
    branch = first(long, 1) + prompt(2, 5)[DIGEST * 1 :]
    late = first(long, 3) + prompt(3, 5)[DIGEST * 3 :]
    return long, branch, late, prompt(4, 5)


@dataclass
class ManualPool:
    """A copy pool whose threads are the test."""

    queue: list[Job] = field(default_factory=list)
    queued: int = 0
    running: int = 0

    def submit(self, lane: object, job: Job) -> bool:
        self.queue.append(job)
        return True

    def cancel(self, lane: object, job: Job) -> bool:
        if job in self.queue:
            self.queue.remove(job)
            return True
        return False

    def forget(self, lane: object) -> None:
        pass

    def stop(self, timeout_s: float) -> bool:
        return True


class InlineExecutor:
    """Builds and unmaps pools at once, on the test's own thread."""

    def submit(self, work: Callable[..., object], *arguments: object) -> Future:
        done: Future = Future()
        try:
            done.set_result(work(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done

    def stop(self) -> None:
        pass


@functools.cache
def shared_engine(rank: int) -> TransferEngine:
    """Building an engine takes longer than a whole run of the machine; one per rank serves all."""
    pool = shared_pools()[0][rank]
    engine = TransferEngine(
        pool.kv,
        pool.infos,
        layout_hints={"kv_layout": "HND"},
        chunk_tokens=CHUNK_TOKENS,
        threads=1,
    )
    engine.close = lambda: None  # type: ignore[method-assign]
    return engine


@functools.cache
def shared_pools() -> tuple[list[TestPool], list[tuple]]:
    pools = [TestPool(rank=rank, blocks=21) for rank in range(WORLD)]
    return pools, [export_kv_caches(pool.kv) for pool in pools]


class ServerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.replies: dict[tuple[bytes, int], m.Reply] = {}
        self.callbacks: list[Callable[[], None]] = []
        self.ran: list[Job] = []
        self.seq = 0
        self.oracle = Oracle(HYBRID, WORLD)
        self.pools, self.handles = shared_pools()
        # request -> hit chunks and digests, while the promise must hold
        self.promises: dict[str, tuple[int, bytes, set[int]]] = {}
        self.where: dict[int, tuple[str, bytes, list[np.ndarray]]] = {}

    # how the machine talks to the server

    def ask(self, identity: bytes, kind: type, **fields: object) -> m.Reply | None:
        self.seq += 1
        request = kind(seq=self.seq, **fields)
        reply = self.handlers.handle(identity, m.RequestDecoder().decode(m.encode(request)))
        if reply is not None:
            self.replies[identity, request.seq] = reply
        return reply

    def run_callbacks(self) -> None:
        while self.callbacks:
            self.callbacks.pop(0)()

    def greet(self, identity: bytes) -> None:
        reply = self.ask(identity, m.Hello, version=m.PROTOCOL_VERSION, process=this_process())
        assert isinstance(reply, m.HelloReply)

    @staticmethod
    def worker(rank: int) -> bytes:
        return b"worker%d" % rank

    def registered(self, rank: int) -> bool:
        return self.handlers.registrations.get("i", rank) is not None

    @initialize(units=st.sampled_from([12, 24, 24, 80]))
    def start(self, units: int) -> None:
        arena_bytes = units * 4096
        self.config = ServerConfig(
            url="ipc:///unused",
            host_bytes=arena_bytes,
            copy_threads=1,
            copier_threads=1,
            verify="all",
            pin_share=0.7,
        )
        self.handlers = Handlers(
            self.config,
            "server",
            Arena(arena_bytes),
            lambda identity, reply: self.replies.__setitem__((identity, reply.seq), reply),
            lambda callback, asker: self.callbacks.append(callback),
            dict,
        )
        self.handlers.desk.pool.stop(1)
        self.handlers.registrar._control = InlineExecutor()  # type: ignore[assignment]
        self.pool = ManualPool()
        self.handlers.desk.pool = self.pool  # type: ignore[assignment]
        self.greet(SCHEDULER)
        for rank in range(WORLD):
            self.register(rank)

    def register(self, rank: int) -> None:
        registration.TransferEngine = lambda *_, **__: shared_engine(rank)  # type: ignore[misc]
        self.greet(self.worker(rank))
        storages, layers = self.handles[rank]
        pool = self.pools[rank]
        self.ask(
            self.worker(rank),
            m.RegisterKVCache,
            instance_id="i",
            storages=storages,
            kv_caches=layers,
            model_name="m",
            world_size=WORLD,
            engine_type="vllm",
            layout_hints={"kv_layout": "HND"},
            engine_group_infos=tuple(pool.infos),
            rank=rank,
            chunk_tokens=CHUNK_TOKENS,
            facts=EngineFacts().to_wire(),
        )
        self.run_callbacks()
        reply = self.replies[self.worker(rank), self.seq]
        assert isinstance(reply, m.RegisterReply), reply

    # stores

    @rule(
        rank=st.integers(0, WORLD - 1),
        which=st.integers(0, 3),
        start=st.integers(0, 4),
        length=st.integers(1, 5),
        null=st.sampled_from([None, None, None, 1, 2]),
    )
    def store(self, rank: int, which: int, start: int, length: int, null: int | None) -> None:
        if not self.registered(rank):
            return
        whole = prompts()[which]
        end = min(5, start + length)
        digests = whole[start * DIGEST : end * DIGEST]
        pool = self.pools[rank]
        ids = pool.all_ids(end - start, first=self.seq)
        if null is not None:
            # the window or the state of the first chunk is gone
            ids[null][0 : HYBRID[null].blocks_per_chunk] = NULL
        if any(isinstance(job, (StoreJob, RetrieveJob)) for job in self.jobs_of(rank)):
            return  # an engine does not write under its own copies
        pool.write(digests, ids)
        reply = self.ask_or_full(
            self.worker(rank),
            m.Store,
            instance_id="i",
            rank=rank,
            key=m.ChunkRange(
                start_chunk=start,
                digests=digests,
                parent=whole[(start - 1) * DIGEST : start * DIGEST] if start else b"",
            ),
            block_ids=tuple(m.pack_block_ids(i) for i in ids),
            deadline_ns=FAR_NS,
        )
        assert reply is None
        self.where[self.seq] = ("store", digests, ids)
        self.run_callbacks()

    @rule(which=st.integers(0, 3), chunks=st.integers(1, 5))
    def prefill(self, which: int, chunks: int) -> None:
        """All ranks store a prompt from its start, in one go."""
        for rank in range(WORLD):
            if self.registered(rank) and not self.jobs_of(rank):
                self.store(rank, which, 0, chunks, None)
                if self.pool.queue and self.pool.queue[-1].seq == self.seq:
                    self.pool.queue[-1].run()
                    self.ran.append(self.pool.queue.pop())
                    self.end_one(len(self.ran) - 1, False)

    def ask_or_full(self, identity: bytes, kind: type, **fields: object) -> m.Reply | None:
        from hma_triton.errors import CapacityError

        try:
            return self.ask(identity, kind, **fields)
        except CapacityError:
            return None

    def jobs_of(self, rank: int) -> list[Job]:
        return [job for job in (*self.pool.queue, *self.ran) if job.registration.rank == rank]

    # copies

    @precondition(lambda self: self.pool.queue)
    @rule(pick=st.integers(0, 10), late=st.sampled_from([False, False, False, True]))
    def run_one(self, pick: int, late: bool) -> None:
        job = self.pool.queue.pop(pick % len(self.pool.queue))
        if late:
            job.deadline_ns = 0
        job.run()
        self.ran.append(job)

    @precondition(lambda self: self.ran)
    @rule(pick=st.integers(0, 10), late=st.sampled_from([False, False, False, True]))
    def end_one(self, pick: int, late: bool) -> None:
        job = self.ran.pop(pick % len(self.ran))
        if late:
            job.deadline_ns = 0
        places = []
        if isinstance(job, StoreJob):
            digests = self.where[job.seq][1]
            places = [
                (group, digests[chunk * DIGEST : (chunk + 1) * DIGEST])
                for group, chunk in job.reservation.places
            ]
        closed = job.registration.closing or (
            isinstance(job, StoreJob) and job.reservation.namespace.closed
        )
        self.handlers.desk._copied(job)
        self.run_callbacks()
        reply = self.replies[job.owner, job.seq]
        if isinstance(reply, m.StoreReply):
            if late or closed or job.aborted:
                assert reply.stored == 0, "a late completion changes nothing"
            if reply.stored:
                assert reply.stored == len(places), "a store is all or nothing"
                self.oracle.commit(job.registration.rank, places)
        else:
            self.judge_retrieve(job, reply)

    def judge_retrieve(self, job: Job, reply: m.Reply) -> None:
        assert isinstance(job, RetrieveJob) and isinstance(reply, m.RetrieveReply)
        _, digests, ids = self.where[job.seq]
        pool = self.pools[job.registration.rank]
        assert pool.null_blocks_untouched()
        promise = self.promises.get(job.request_id)
        if reply.ok:
            assert pool.wrong(digests, ids) == [], "a wrong byte is never a success"
            if promise is not None:
                promise[2].discard(job.registration.rank)
                if not promise[2]:
                    del self.promises[job.request_id]
        else:
            may_fail = promise is None or job.aborted or job.deadline_ns == 0
            assert may_fail or reply.code == "aborted", (reply, "a promise was broken")
            self.promises.pop(job.request_id, None)

    @precondition(lambda self: self.pool.queue or self.ran)
    @rule(pick=st.integers(0, 10))
    def abort(self, pick: int) -> None:
        jobs = [*self.pool.queue, *self.ran]
        job = jobs[pick % len(jobs)]
        queued = job in self.pool.queue
        if self.handlers.peers.get(job.owner) is None:
            return
        reply = self.ask(job.owner, m.Abort, target_seq=job.seq)
        if isinstance(job, RetrieveJob):
            self.promises.pop(job.request_id, None)
        if queued:
            assert isinstance(reply, m.AbortReply) and reply.state == "cancelled"
            assert self.replies[job.owner, job.seq].code == "aborted"  # type: ignore[union-attr]
        elif reply is not None:
            assert isinstance(reply, m.AbortReply) and reply.state == "unknown"

    # hits

    @rule(
        which=st.integers(0, 3),
        request=st.sampled_from("abc"),
        cap=st.sampled_from([10**6, 10**6, 159, 97, 64]),
        likely=st.booleans(),
    )
    def lookup(self, which: int, request: str, cap: int, likely: bool) -> None:
        self.promises.pop(request, None)
        if not (self.registered(0) or self.registered(1)):
            return
        digests = prompts()[which]
        if likely:
            digests = max(prompts(), key=lambda each: self.oracle.longest_hit(each, cap))
        reply = self.ask(
            SCHEDULER,
            m.Lookup,
            instance_id="i",
            request_id=request,
            digests=digests,
            max_tokens=cap,
        )
        assert isinstance(reply, m.LookupReply)
        assert reply.tokens == reply.chunks * CHUNK_TOKENS <= cap
        may = self.oracle.longest_hit(digests, cap)
        assert reply.chunks <= may, "nothing is served that was not committed"
        exact = self.handlers.store.counters.evicted_objects == 0
        if exact and reply.reason != "pin limit" and not reply.reason.startswith("ranks"):
            assert reply.chunks == may, "nothing that may be served is missed"
        if reply.chunks:
            self.promises[request] = (reply.chunks, digests, set(range(WORLD)))

    @precondition(lambda self: self.promises)
    @rule(pick=st.integers(0, 3), skip=st.integers(0, 2))
    def load_what_was_promised(self, pick: int, skip: int) -> None:
        """Every rank that is free loads the hit, in one go."""
        request = sorted(self.promises)[pick % len(self.promises)]
        for rank in range(WORLD):
            before = self.seq
            self.retrieve(rank, request, 0, 1, skip)
            if self.seq != before:
                job = self.pool.queue.pop()
                job.run()
                self.ran.append(job)
                self.end_one(len(self.ran) - 1, False)
                assert self.replies[job.owner, job.seq].ok  # type: ignore[union-attr]

    @rule(request=st.sampled_from("abc"))
    def release(self, request: str) -> None:
        self.promises.pop(request, None)
        self.ask(SCHEDULER, m.Release, instance_id="i", request_id=request)

    @rule(
        rank=st.integers(0, WORLD - 1),
        request=st.sampled_from("abcd"),
        which=st.integers(0, 3),
        chunks=st.integers(1, 5),
        skip=st.integers(0, 2),
    )
    def retrieve(self, rank: int, request: str, which: int, chunks: int, skip: int) -> None:
        if not self.registered(rank) or self.jobs_of(rank):
            return
        digests = first(prompts()[which], chunks)
        if request not in self.promises and request != "d":
            return
        if request in self.promises:
            chunks, whole, _ = self.promises[request]
            digests = first(whole, chunks)
        pool = self.pools[rank]
        skip_tokens = min(skip, chunks - 1) * CHUNK_TOKENS
        ids = pool.load_ids(chunks * CHUNK_TOKENS, first=self.seq)
        pool.wipe()
        reply = self.ask(
            self.worker(rank),
            m.Retrieve,
            instance_id="i",
            rank=rank,
            request_id=request,
            digests=digests,
            skip_tokens=skip_tokens,
            block_ids=tuple(m.pack_block_ids(i) for i in ids),
            deadline_ns=FAR_NS,
        )
        assert reply is None
        expected = [i.copy() for i in ids]
        for kind, of_group in zip(HYBRID, expected, strict=True):
            of_group[: skip_tokens // kind.tokens_per_block] = NULL
        self.where[self.seq] = ("retrieve", digests, expected)

    # the world

    @rule(really=SELDOM)
    def leases_expire(self, really: bool) -> None:
        if not really:
            return
        self.handlers.leases.expire(FAR_NS)
        self.promises.clear()

    @rule(really=SELDOM)
    def clear(self, really: bool) -> None:
        if really and (self.registered(0) or self.registered(1)):
            self.ask(SCHEDULER, m.Clear, instance_id="i")
            self.oracle.clear()
            self.promises.clear()

    @rule(records=st.integers(1, 4))
    def drain(self, records: int) -> None:
        self.handlers.store.drain(records)

    @rule(rank=st.integers(0, WORLD - 1), really=SELDOM)
    def worker_dies_or_comes_back(self, rank: int, really: bool) -> None:
        if not self.registered(rank):
            self.register(rank)
            return
        if not really:
            return
        peer = self.handlers.peers.get(self.worker(rank))
        assert peer is not None
        self.handlers.drop_peer(peer, "died")
        for job in self.ran:
            assert job.registration.rank != rank or job.registration.closing

    @rule(really=SELDOM)
    def scheduler_dies(self, really: bool) -> None:
        if not really:
            return
        peer = self.handlers.peers.get(SCHEDULER)
        assert peer is not None
        self.handlers.drop_peer(peer, "died")
        assert len(self.handlers.leases) == 0
        self.promises.clear()
        self.greet(SCHEDULER)

    # what always holds

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "handlers"):
            return
        store = self.handlers.store
        used = pinned = 0
        for namespace in store._space.namespaces.values():
            index = namespace.index
            for record in range(index.top):
                if not index.is_live(record):
                    continue
                held = int((index.state[record] != ABSENT) @ namespace.column_bytes)
                used += held
                assert index.pins[record] >= 0 and index.writing[record] >= 0
                pinned += held if index.pins[record] else 0
                parent = int(index.parent[record])
                assert parent == NONE or index.is_live(parent), "a prefix outlives what hangs on it"
                assert parent != NONE or index.digest[record].tobytes() in {
                    p[:DIGEST] for p in prompts()
                }, "no orphan is kept where hits need the whole prefix"
        assert store.arena.used_bytes == used
        assert store.pinned_bytes == pinned

    def teardown(self) -> None:
        while self.pool.queue:
            self.run_one(0, False)
        while self.ran:
            self.end_one(0, False)
        for peer in self.handlers.peers.all():
            self.handlers.drop_peer(peer, "end")
        self.run_callbacks()
        store = self.handlers.store
        assert store.pinned_bytes == 0 and len(self.handlers.leases) == 0
        assert self.handlers.desk.open_jobs == 0 and len(self.handlers.registrations) == 0
        for namespace in store._space.namespaces.values():
            top = namespace.index.top
            assert not namespace.index.pins[:top].any() and not namespace.index.writing[:top].any()
        self.handlers.close()


def test_random_interleavings(monkeypatch) -> None:
    monkeypatch.setattr(registration, "TransferEngine", registration.TransferEngine)
    run_state_machine_as_test(
        ServerMachine,
        settings=settings(max_examples=2000, stateful_step_count=25),
    )
