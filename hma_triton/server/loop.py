"""The loop: one thread, one ROUTER socket, everything that happens to the server in turn."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from hma_triton import messages as m
from hma_triton.config import ServerConfig, prepare_socket_directory
from hma_triton.errors import (
    CapacityError,
    ConfigError,
    HmaError,
    RemoteError,
    ServerUnavailableError,
)
from hma_triton.handles import ProcessRef
from hma_triton.objects.arena import Arena
from hma_triton.process_identity import ProcessWatch, start_ticks, this_process
from hma_triton.server.curve import CurveGate
from hma_triton.server.handlers import Handlers
from hma_triton.server.pinned_arena import context_bytes, device_node
from hma_triton.server.socket_guard import SocketGuard
from hma_triton.server.status import snapshot

log = logging.getLogger("hma_triton.server")

Asker = tuple[bytes, int]

_FRAMES_PER_TURN = 64
_RECEIVE_LIMIT = 16
_SEND_LIMIT = 4096
_EVENT_POLL_MS = 1
_DRAIN_PER_TURN = 512
_IDLE_MS = 1000
_REBIND_S = 10.0
_BIND_AGAIN_S = 0.005


class CacheServer:
    """A cache server on `config.url`. The socket is bound when this returns.

    Raises:
        ConfigError: the URL cannot be served, or another server serves it.
        CapacityError: the arena does not fit, or cannot be pinned where it must be.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.server_id = uuid.uuid4().hex
        self._started_ns = time.monotonic_ns()
        self._callbacks: queue.SimpleQueue[tuple[Callable[[], None], Asker | None]] = (
            queue.SimpleQueue()
        )
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # re-entrant: a signal may ask to stop while the same thread rings
        self._wake_lock = threading.RLock()
        self._decoder = m.RequestDecoder()
        self._stopping = False
        self._parent = _watch_parent(config.parent_pid)
        arena = Arena(
            config.host_bytes,
            hugepages=config.hugepages,
            numa_node=device_node(config.pin) if config.numa_node is None else config.numa_node,
            touch=config.touch,
        )
        self.handlers = Handlers(
            config, self.server_id, arena, self._send, self.call_later, self.snapshot
        )
        self._context = zmq.Context()
        self._gate = CurveGate(self._context, config.curve_key_file)
        self._guard = SocketGuard(config.socket_limit_bytes + context_bytes())
        prepare_socket_directory(config.url)
        _refuse_second_server(config.url)
        self._socket = self._bind(patience_s=0.0)
        self._stop_metrics = (
            self.handlers.metrics.serve(config.metrics_port)
            if config.metrics_port is not None
            else None
        )
        try:
            # last, so that a setting that cannot be served is found before memory is pinned for it
            self.handlers.registrar.pinned_arena.start()
        except HmaError:
            self._close()
            raise

    def _bind(self, patience_s: float) -> zmq.Socket[bytes]:
        """A listening socket; `patience_s` is for an address that an earlier one still has."""
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RCVHWM, _RECEIVE_LIMIT)
        socket.setsockopt(zmq.SNDHWM, _SEND_LIMIT)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # a client that reconnects keeps its name, and with it what it holds
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        self._gate.protect(socket)
        old_mask = os.umask(0o077)
        until = time.monotonic() + patience_s
        try:
            while True:
                try:
                    socket.bind(self.config.url)
                except zmq.ZMQError as error:
                    if error.errno == zmq.EADDRINUSE and time.monotonic() < until:
                        time.sleep(_BIND_AGAIN_S)
                        continue
                    socket.close(0)
                    raise ConfigError(f"cannot listen on {self.config.url}: {error}") from error
                return socket
        finally:
            os.umask(old_mask)

    def call_later(self, callback: Callable[[], None], asker: Asker | None = None) -> None:
        """Run `callback` on the loop's thread; from any thread.

        When it raises, `asker` (identity, seq) gets the error for an answer.
        """
        self._callbacks.put((callback, asker))
        self._ring()

    def _ring(self) -> None:
        # a copy that outlived the shutdown must not write to a descriptor that is gone
        with self._wake_lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Ask the loop to end; from any thread and from a signal handler."""
        self._stopping = True
        self._ring()

    def run(self) -> bool:
        """Serve until `stop`, or until the parent ends; whether all copies ended in time."""
        log.info(
            "serving url=%s server_id=%s arena_bytes=%d",
            self.config.url,
            self.server_id,
            self.handlers.store.arena.nbytes,
        )
        try:
            while not self._stopping:
                self._turn()
            return self._shut_down()
        finally:
            self._close()

    def _turn(self) -> None:
        readable = self._poll()
        self._run_callbacks()
        if self._parent is not None and not self._parent.alive:
            log.warning("parent pid=%d ended; stopping", self._parent.process.pid)
            self._stopping = True
        for descriptor, process in self.handlers.peers.watched().items():
            if descriptor in readable:
                self._process_ended(process)
        if self._socket in readable:
            self._receive()
        now = time.monotonic_ns()
        self.handlers.desk.poll_waiting(now)
        self.handlers.leases.expire(now)
        if self._guard.exceeded(now, self.handlers.store.bookkeeping_nbytes):
            self._renew_socket()
        if self.handlers.store.needs_drain:
            self.handlers.store.drain(_DRAIN_PER_TURN)

    def _poll(self) -> set[Any]:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        if self._parent is not None:
            poller.register(self._parent.fileno(), zmq.POLLIN)
        for descriptor in self.handlers.peers.watched():
            poller.register(descriptor, zmq.POLLIN)
        return {key for key, _ in poller.poll(self._patience_ms())}

    def _patience_ms(self) -> int:
        if self.handlers.desk.has_waiting or self.handlers.store.needs_drain:
            return _EVENT_POLL_MS
        expiry = self.handlers.leases.next_expiry_ns()
        if expiry is None:
            return _IDLE_MS
        left_ms = (expiry - time.monotonic_ns()) // 1_000_000 + 1
        return int(min(_IDLE_MS, max(0, left_ms)))

    def _run_callbacks(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        for _ in range(self._callbacks.qsize()):
            callback, asker = self._callbacks.get_nowait()
            seq = 0 if asker is None else asker[1]
            error = self._guarded(seq, callback)
            if error is not None and asker is not None:
                self._answer(asker[0], error)

    def _process_ended(self, process: ProcessRef) -> None:
        for peer in self.handlers.peers.of_process(process):
            self.handlers.drop_peer(peer, "ended")

    def _receive(self) -> None:
        for _ in range(_FRAMES_PER_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            identity, payload = frames[0], frames[1:]
            if len(payload) != 1:
                request: m.Request | m.ErrorReply = m.ErrorReply(
                    seq=0,
                    code=m.ErrorCode.MALFORMED.value,
                    message=f"{len(payload)} frames where one is a message",
                )
            else:
                request = self._decoder.decode(payload[0])
            reply = (
                request if isinstance(request, m.ErrorReply) else self._carry_out(identity, request)
            )
            if reply is not None:
                self._answer(identity, reply)

    def _renew_socket(self) -> None:
        """Drop all connections and what they have half sent; clients come back by themselves."""
        log.error(
            "memory outside the arena grew by more than %d bytes, which only a peer that sends "
            "endless messages does; dropping all connections",
            self.config.socket_limit_bytes,
        )
        self.handlers.metrics.errors.labels("flooded").inc()
        # its address is free again some time later, when its threads have let go
        self._socket.close(0)
        self._socket = self._bind(_REBIND_S)

    def _carry_out(self, identity: bytes, request: m.Request) -> m.Reply | None:
        return self._guarded(request.seq, lambda: self.handlers.handle(identity, request))

    def _guarded(self, seq: int, work: Callable[[], m.Reply | None]) -> m.Reply | None:
        """What `work` gives, or the error that answers the request it was done for."""
        try:
            return work()
        except RemoteError as error:
            return _error_reply(seq, error.code, str(error))
        except HmaError as error:
            return _error_reply(seq, _code_of(error).value, str(error))
        except Exception as error:
            # whatever it is, it costs the sender an error and the others nothing
            log.exception("request seq=%d failed", seq)
            message = f"{type(error).__name__}: {error}"
            return _error_reply(seq, m.ErrorCode.INTERNAL.value, message)

    def _answer(self, identity: bytes, reply: m.Reply) -> None:
        if isinstance(reply, m.ErrorReply):
            self.handlers.metrics.errors.labels(reply.code).inc()
            peer = self.handlers.peers.get(identity)
            if peer is not None:
                peer.errors += 1
            log.debug("error seq=%d code=%s: %s", reply.seq, reply.code, reply.message)
        self._send(identity, reply)

    def _send(self, identity: bytes, reply: m.Reply) -> None:
        try:
            self._socket.send_multipart([identity, m.encode(reply)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # gone, or not reading; either way nobody waits for it here
            log.debug("a reply to %s was dropped: %s", identity.hex(), error)

    def snapshot(self) -> dict[str, Any]:
        """The state, as `STATUS` gives it."""
        return snapshot(self.handlers, self.server_id, self._started_ns)

    def _shut_down(self) -> bool:
        log.info("stopping; open copies=%d", self.handlers.desk.open_jobs)
        ended = self.handlers.desk.shut_down(self.config.shutdown_s)
        self._run_callbacks()
        log.info("stopped; all copies ended=%s", ended)
        return ended

    def _close(self) -> None:
        if self._stop_metrics is not None:
            self._stop_metrics()
        self.handlers.close()
        self._socket.close(200)
        self._gate.close()
        self._context.term()
        if self.config.url.startswith("ipc://"):
            Path(self.config.url.removeprefix("ipc://")).unlink(missing_ok=True)
        if self._parent is not None:
            self._parent.close()
        with self._wake_lock:
            os.close(self._wake)
            self._wake = -1


def _watch_parent(pid: int | None) -> ProcessWatch | None:
    if pid is None:
        return None
    return ProcessWatch(
        ProcessRef(
            pid=pid,
            start_ticks=start_ticks(pid),
            pid_namespace=this_process().pid_namespace,
            boot_id=this_process().boot_id,
        )
    )


def _refuse_second_server(url: str) -> None:
    """A second server on one ipc path would silently take over the first one's clients."""
    if not url.startswith("ipc://") or not os.path.exists(url.removeprefix("ipc://")):
        return
    with zmq.Context() as context, context.socket(zmq.DEALER) as probe:
        probe.setsockopt(zmq.LINGER, 0)
        probe.connect(url)
        probe.send(m.encode(m.Ping(seq=0)))
        if probe.poll(300):
            raise ConfigError(f"a server already listens on {url}")


def _code_of(error: HmaError) -> m.ErrorCode:
    if isinstance(error, CapacityError):
        return m.ErrorCode.CAPACITY
    if isinstance(error, ServerUnavailableError):
        return m.ErrorCode.NO_DATA_PATH
    return m.ErrorCode.BAD_REQUEST


def _error_reply(seq: int, code: str, message: str) -> m.ErrorReply:
    return m.ErrorReply(seq=seq, code=code, message=message[:8000])
