"""What each request does. A handler gives the reply, or None when the reply comes later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from hma_triton import messages as m
from hma_triton.config import SAMPLE_EVERY, ServerConfig
from hma_triton.cpu_event import ImportedCpuEvent
from hma_triton.errors import ConfigError, RemoteError
from hma_triton.handles import CpuEventHandle, CudaEventHandle, EventHandle, ShmHandle
from hma_triton.metrics import Metrics, reason_label
from hma_triton.objects.arena import Arena
from hma_triton.objects.leases import LeaseTable
from hma_triton.objects.store import ObjectStore
from hma_triton.plan import storable_chunks
from hma_triton.process_identity import check_same_kernel, this_process
from hma_triton.server.copy_desk import CopyDesk
from hma_triton.server.jobs import RetrieveJob, StoreJob
from hma_triton.server.peers import Peer, PeerTable
from hma_triton.server.registrar import Later, Registrar
from hma_triton.server.registration import IdArrays, Registration, RegistrationTable
from hma_triton.stop_points import reach
from hma_triton.tensor_ipc_cuda import ImportedEvent

log = logging.getLogger("hma_triton.server")
Send = Callable[[bytes, m.Reply], None]


def _error(seq: int, code: m.ErrorCode, message: str) -> m.ErrorReply:
    return m.ErrorReply(seq=seq, code=code.value, message=message[:8000])


class Handlers:
    """All requests but status. Runs on the loop's thread; `later` hands results back to it."""

    def __init__(
        self,
        config: ServerConfig,
        server_id: str,
        arena: Arena,
        send: Send,
        later: Later,
        snapshot: Callable[[], dict[str, object]],
    ) -> None:
        self.config = config
        self._server_id = server_id
        self._arena = arena
        self._send = send
        self._snapshot = snapshot
        self.metrics = Metrics(snapshot)
        self.store = ObjectStore(
            arena, pin_share=config.pin_share, checksums=config.verify != "off"
        )
        self.leases = LeaseTable(self.store, int(config.lease_s * 1e9))
        self.peers = PeerTable(config.max_peers)
        self.registrations = RegistrationTable(config.max_registrations)
        self.desk = CopyDesk(
            config, self.store, self.leases, self.metrics, send, lambda work: later(work, None)
        )
        self.registrar = Registrar(
            config, self.store, self.peers, self.registrations, self.desk, send, later
        )
        self._retrieves = 0

    def handle(self, identity: bytes, request: m.Request) -> m.Reply | None:
        """Carry out a request.

        Raises:
            HmaError: it cannot be done; the loop answers with it.
        """
        peer = self.peers.get(identity)
        self.metrics.requests.labels(str(request.__struct_config__.tag)).inc()
        if isinstance(request, m.Hello):
            return self._hello(identity, request)
        if isinstance(request, m.Ping):
            return m.Pong(
                seq=request.seq, server_id=self._server_id, monotonic_ns=time.monotonic_ns()
            )
        if peer is None:
            return _error(request.seq, m.ErrorCode.NOT_GREETED, "say hello first")
        peer.requests += 1
        match request:
            case m.Lookup():
                return self._lookup(peer, request)
            case m.Store():
                return self._store(peer, request)
            case m.Retrieve():
                return self._retrieve(peer, request)
            case m.Release():
                ended = self.leases.release((request.instance_id, request.request_id))
                return m.Done(seq=request.seq, count=int(ended))
            case m.Abort():
                return self.desk.abort(identity, request)
            case m.RegisterKVCache():
                self.registrar.register(peer, request)
                return None
            case m.Unregister():
                self.registrar.unregister(peer, request)
                return None
            case m.Clear():
                return self._clear(request)
            case m.Status():
                return m.StatusReply(seq=request.seq, json=msgspec.json.encode(self._snapshot()))
            case m.Goodbye():
                self.drop_peer(peer, "said goodbye")
                return m.Done(seq=request.seq)

    def _hello(self, identity: bytes, request: m.Hello) -> m.Reply:
        try:
            check_same_kernel(request.process)
        except ConfigError as error:
            return _error(request.seq, m.ErrorCode.NO_DATA_PATH, str(error))
        _, earlier = self.peers.greet(identity, request)
        if earlier is not None:
            self._end_peer(earlier)
        return m.HelloReply(
            seq=request.seq,
            version=m.PROTOCOL_VERSION,
            process=this_process(),
            server_id=self._server_id,
            lease_s=self.config.lease_s,
        )

    def drop_peer(self, peer: Peer, why: str) -> None:
        """A connection is over: its leases, copies and pools go."""
        log.info("peer pid=%d role=%s %s", peer.process.pid, peer.role, why)
        self.peers.drop(peer)
        self._end_peer(peer)

    def _end_peer(self, peer: Peer) -> None:
        self.leases.release_owner(peer.identity)
        for registration in self.registrations.all():
            if registration.owner == peer.identity:
                self.registrar.close(registration)

    # hits

    def _lookup(self, peer: Peer, request: m.Lookup) -> m.Reply:
        reach("server.lookup.received")
        _check_digests(request.digests)
        ranks = self.registrations.ranks(request.instance_id)
        if not ranks:
            raise RemoteError(
                f"instance {request.instance_id!r} is not registered",
                m.ErrorCode.UNKNOWN_INSTANCE.value,
            )
        first = next(iter(ranks.values()))
        if len(ranks) < first.world_size:
            reason = f"ranks: {len(ranks)} of {first.world_size} are registered"
            self._count_lookup(request, first, 0, reason)
            return m.LookupReply(
                seq=request.seq, request_id=request.request_id, tokens=0, chunks=0, reason=reason
            )
        namespace = self.store.namespace(first.fingerprint, first.shape)
        key = (request.instance_id, request.request_id)
        hit, records = self.store.lookup(namespace, request.digests, request.max_tokens)
        self.leases.grant(key, namespace, records, peer.identity, time.monotonic_ns())
        reach("server.lookup.pinned")
        self._count_lookup(request, first, hit.tokens, hit.reason)
        return m.LookupReply(
            seq=request.seq,
            request_id=request.request_id,
            tokens=hit.tokens,
            chunks=hit.chunks,
            reason=hit.reason,
        )

    def _count_lookup(
        self, request: m.Lookup, registration: Registration, tokens: int, reason: str
    ) -> None:
        asked = len(request.digests) // m.DIGEST_BYTES * registration.shape.chunk_tokens
        outcome = "miss" if not tokens else "hit" if tokens == asked else "partial"
        self.metrics.lookups.labels(outcome, reason_label(reason)).inc()
        self.metrics.lookup_tokens.labels("asked").inc(asked)
        self.metrics.lookup_tokens.labels("hit").inc(tokens)

    def _clear(self, request: m.Clear) -> m.Reply:
        ranks = self.registrations.ranks(request.instance_id)
        if not ranks:
            raise RemoteError(
                f"instance {request.instance_id!r} is not registered",
                m.ErrorCode.UNKNOWN_INSTANCE.value,
            )
        registration = next(iter(ranks.values()))
        namespace = self.store.namespace(registration.fingerprint, registration.shape)
        return m.Done(seq=request.seq, count=self.store.clear(namespace))

    # copies

    def _store(self, peer: Peer, request: m.Store) -> m.Reply | None:
        reach("server.store.received")
        _check_digests(request.key.digests)
        if len(request.key.parent) not in (0, m.DIGEST_BYTES) or (
            bool(request.key.parent) != bool(request.key.start_chunk)
        ):
            raise ConfigError(
                f"chunk {request.key.start_chunk} with a parent of {len(request.key.parent)} bytes"
            )
        registration = self.registrar.find(request.instance_id, request.rank, peer)
        chunks = len(request.key.digests) // m.DIGEST_BYTES
        block_ids = _unpack(request.block_ids)
        registration.check_lengths(block_ids, chunks)
        storable = storable_chunks(registration.engine.layout, block_ids, chunks)
        event = self._event(peer, request.event)
        namespace = self.store.namespace(registration.fingerprint, registration.shape)
        reservation = self.store.reserve(
            namespace, request.rank, request.key.digests, request.key.parent, storable
        )
        reach("server.store.reserved")
        job = StoreJob(
            owner=peer.identity,
            seq=request.seq,
            registration=registration,
            block_ids=block_ids,
            deadline_ns=request.deadline_ns,
            event=event,
            arena=self._arena,
            submitted_ns=time.monotonic_ns(),
            reservation=reservation,
            wants_checksums=self.config.verify != "off",
        )
        self.desk.submit(job)
        return None

    def _retrieve(self, peer: Peer, request: m.Retrieve) -> m.Reply | None:
        reach("server.retrieve.received")
        _check_digests(request.digests)
        registration = self.registrar.find(request.instance_id, request.rank, peer)
        chunks = len(request.digests) // m.DIGEST_BYTES
        block_ids = _unpack(request.block_ids)
        registration.check_lengths(block_ids, chunks)
        event = self._event(peer, request.event)
        namespace = self.store.namespace(registration.fingerprint, registration.shape)
        reading = self.store.open_read(namespace, request.rank, request.digests)
        reach("server.retrieve.held")
        needed = registration.needed_chunks(block_ids, chunks, request.skip_tokens)
        places = [
            (group, chunk)
            for group, chunk in zip(*(axis.tolist() for axis in needed.nonzero()), strict=True)
            if reading.addresses[group][chunk]
        ]
        if self.config.verify == "sample":
            self._retrieves += 1
            places = places[self._retrieves % SAMPLE_EVERY :: SAMPLE_EVERY]
        job = RetrieveJob(
            owner=peer.identity,
            seq=request.seq,
            registration=registration,
            block_ids=block_ids,
            deadline_ns=request.deadline_ns,
            event=event,
            arena=self._arena,
            submitted_ns=time.monotonic_ns(),
            request_id=request.request_id,
            skip_tokens=request.skip_tokens,
            reading=reading,
            group_objects=needed.sum(axis=1).tolist(),
            expected=(
                []
                if self.config.verify == "off"
                else [(*place, self.store.checksums_of(reading, *place)) for place in places]
            ),
        )
        self.desk.submit(job)
        return None

    def _event(
        self, peer: Peer, handle: EventHandle | None
    ) -> ImportedCpuEvent | ImportedEvent | None:
        if handle is None:
            return None
        if isinstance(handle, CpuEventHandle):
            _check_owner(handle.segment, peer)
            return ImportedCpuEvent(handle)
        _check_owner(handle, peer)
        return ImportedEvent(handle, this_process())

    def close(self) -> None:
        """End the control threads; pools still mapped go with the process."""
        self.registrar.stop()
        self.peers.close()


def _check_owner(named: ShmHandle | CudaEventHandle, peer: Peer) -> None:
    if named.owner != peer.process:
        raise ConfigError(
            f"memory or event of process {named.owner.pid} named by process {peer.process.pid}"
        )


def _check_digests(digests: bytes) -> None:
    if len(digests) % m.DIGEST_BYTES or not digests:
        raise ConfigError(
            f"{len(digests)} bytes of digests; whole digests of {m.DIGEST_BYTES} bytes are needed"
        )


def _unpack(block_ids: tuple[bytes, ...]) -> IdArrays:
    return [m.unpack_block_ids(packed) for packed in block_ids]
