"""Pools come and go: built and unmapped on threads of their own, so that the loop never waits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from hma_triton import messages as m
from hma_triton.config import ServerConfig
from hma_triton.errors import CapacityError, ConfigError, HmaError, RemoteError
from hma_triton.objects.store import ObjectStore
from hma_triton.server.control_threads import ControlThreads
from hma_triton.server.copy_desk import CopyDesk
from hma_triton.server.peers import Peer, PeerTable
from hma_triton.server.pinned_arena import PinnedArena
from hma_triton.server.registration import Registration, RegistrationTable, build_registration

log = logging.getLogger("hma_triton.server")

_CONTROL_TURNS = 2
# longer than this, a registration or release no longer holds up the next one
_CONTROL_LIMIT_S = 10.0

# (callback, who gets the error when it raises: identity and seq)
Later = Callable[[Callable[[], None], tuple[bytes, int] | None], None]


class Registrar:
    """Registers, closes and releases pools."""

    def __init__(
        self,
        config: ServerConfig,
        store: ObjectStore,
        peers: PeerTable,
        registrations: RegistrationTable,
        desk: CopyDesk,
        send: Callable[[bytes, m.Reply], None],
        later: Later,
    ) -> None:
        self._config = config
        self._store = store
        self._peers = peers
        self._registrations = registrations
        self._desk = desk
        self._send = send
        self._later = later
        self.pinned_arena = PinnedArena(store.arena, config.pin, config.numa_node)
        self._control = ControlThreads(_CONTROL_TURNS, _CONTROL_LIMIT_S)

    def register(self, peer: Peer, request: m.RegisterKVCache) -> None:
        """Start building the registration; the reply follows when it is built.

        Raises:
            RemoteError: no room. ConfigError: a request that contradicts itself.
        """
        self._registrations.check_room(request)
        for handle in request.storages:
            if handle.owner != peer.process:
                raise ConfigError(
                    f"a storage of process {handle.owner.pid} was registered by process "
                    f"{peer.process.pid}; every process registers its own"
                )
        future = self._control.submit(
            build_registration, request, peer.identity, self._config, self.pinned_arena
        )
        future.add_done_callback(
            lambda done: self._later(
                lambda: self._registered(peer, request, done), (peer.identity, request.seq)
            )
        )

    def _registered(
        self, peer: Peer, request: m.RegisterKVCache, built: Future[Registration]
    ) -> None:
        try:
            registration = built.result()
            replaced = self._enter(peer, request, registration)
        except RemoteError as refused:
            self._refuse(peer, request.seq, refused.code, str(refused))
        except CapacityError as refused:
            self._refuse(peer, request.seq, m.ErrorCode.CAPACITY.value, str(refused))
        except (HmaError, RuntimeError, OSError) as refused:
            self._refuse(peer, request.seq, m.ErrorCode.BAD_REGISTRATION.value, str(refused))
        else:
            if replaced is not None:
                self.close(replaced)
            log.info(
                "registered instance=%s rank=%d pid=%d fingerprint=%s",
                registration.instance_id,
                registration.rank,
                peer.process.pid,
                registration.fingerprint.hex()[:16],
            )
            self._send(peer.identity, self._register_reply(request.seq, registration))

    def _enter(
        self, peer: Peer, request: m.RegisterKVCache, registration: Registration
    ) -> Registration | None:
        """Take the pool into service; gives the one it replaces. Releases it when it may not."""
        entered = False
        try:
            if self._peers.get(peer.identity) is not peer:
                raise ConfigError(f"process {peer.process.pid} left while it registered")
            self._registrations.check_room(request)
            self._store.namespace(registration.fingerprint, registration.shape)
            replaced = self._registrations.add(registration)
            entered = True
            return replaced
        finally:
            if not entered:
                self._release_pool(registration)

    def _refuse(self, peer: Peer, seq: int, code: str, why: str) -> None:
        log.warning("registration refused pid=%d code=%s: %s", peer.process.pid, code, why)
        self._send(peer.identity, m.ErrorReply(seq=seq, code=code, message=why[:8000]))

    def _register_reply(self, seq: int, registration: Registration) -> m.RegisterReply:
        return m.RegisterReply(
            seq=seq,
            object_nbytes=registration.shape.object_nbytes,
            chunk_tokens=registration.shape.chunk_tokens,
            fingerprint=registration.fingerprint.hex(),
            ranks=len(self._registrations.ranks(registration.instance_id)),
            backend=registration.engine.backend,
        )

    def unregister(self, peer: Peer, request: m.Unregister) -> None:
        """Close the registration; the reply follows when no copy touches the pool any more."""
        registration = self.find(request.instance_id, request.rank, peer)
        reply = m.Done(seq=request.seq, count=1)
        self.close(registration, lambda: self._send(peer.identity, reply))

    def find(self, instance_id: str, rank: int, peer: Peer) -> Registration:
        """The registration that this connection made.

        Raises:
            RemoteError: it made none, or it is gone.
        """
        found = self._registrations.get(instance_id, rank)
        if found is None or found.owner != peer.identity:
            raise RemoteError(
                f"instance {instance_id!r} rank {rank} is not registered by this connection",
                m.ErrorCode.UNKNOWN_INSTANCE.value,
            )
        return found

    def close(
        self, registration: Registration, when_closed: Callable[[], None] | None = None
    ) -> None:
        """Take a pool out of service; it is unmapped when the last copy has ended."""
        self._registrations.remove(registration)
        if when_closed is not None:
            registration.when_closed.append(when_closed)
        registration.when_closed.append(lambda: self._release_pool(registration))
        self._desk.close(registration)

    def _release_pool(self, registration: Registration) -> None:
        # unmapping may take long, and never on the loop's thread
        self._control.submit(_release, registration)

    @property
    def overdue(self) -> tuple[int, int]:
        """Control calls that take too long: now, and ever."""
        return self._control.overdue, self._control.overdue_total

    def stop(self) -> None:
        """Start nothing more; pools still mapped go with the process."""
        self._control.stop()


def _release(registration: Registration) -> None:
    """Give back what the registration holds; what one part refuses does not keep the other."""
    for close in (registration.engine.close, registration.caches.close):
        try:
            close()
        except (HmaError, RuntimeError, OSError) as error:
            log.warning(
                "releasing the pool of instance=%s rank=%d: %s",
                registration.instance_id,
                registration.rank,
                error,
            )
