"""The thread that owns the client's socket: hello, requests, replies, deadlines, the server's end.

It connects by itself and again after the server's end; it re-registers the pools it has been given.
While no server is there, requests fail at once, except those that are meant to wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from hma_triton import messages as m
from hma_triton.client.dealer import dealer, send
from hma_triton.client.inbox import Inbox
from hma_triton.client.link_state import LinkState
from hma_triton.client.ticket import TIMEOUT, UNAVAILABLE, Ticket
from hma_triton.curve_keys import read_key_file
from hma_triton.errors import ConfigError, ProtocolError, ServerUnavailableError
from hma_triton.process_identity import ProcessWatch, this_process
from hma_triton.stop_points import reach

log = logging.getLogger("hma_triton.client")

_HELLO_RETRY_NS = 1_000_000_000
_IDLE_MS = 500
_GOODBYE_WAIT_S = 0.5
_LOOSE_LIMIT = 4096
_ABORT_AGAIN_NS = 5_000_000_000
_CLOSED = "the client was closed"
PoolKey = tuple[str, int]


class Link:
    """One connection to one server URL. All methods but the loop's own may be called anywhere."""

    def __init__(
        self, url: str, role: str, connect_timeout_s: float, curve_key: Path | None
    ) -> None:
        self.url = url
        self._role = role
        self._keys = None if curve_key is None else read_key_file(curve_key)
        # queued rather than refused until then, so that a client may be made before its server
        self._patient_until_ns = time.monotonic_ns() + int(connect_timeout_s * 1e9)
        self._identity = b"hma" + uuid.uuid4().bytes
        self._inbox = Inbox(f"the client of {url}")
        self._changed = threading.Condition()
        self.state = LinkState.AWAY
        self.hello: m.HelloReply | None = None
        self.refusal: m.ErrorReply | None = None
        self._seq = 0
        self._outbox: deque[Ticket[Any]] = deque()
        self._loose: deque[Callable[[int], m.Request]] = deque(maxlen=_LOOSE_LIMIT)
        self._pending: dict[int, Ticket[Any]] = {}
        self._aborts: dict[int, Ticket[Any]] = {}
        self._late: dict[int, Ticket[Any]] = {}
        self._pools: dict[PoolKey, Callable[[int], m.Request]] = {}
        self._registering: dict[int, PoolKey] = {}
        self._watch: ProcessWatch | None = None
        self._hello_seq = -1
        self._hello_sent_ns = 0
        self._closing = False
        self._decoder = m.ReplyDecoder()
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        try:
            self._connect()
        except zmq.ZMQError as error:
            self._inbox.close()
            self._context.destroy(linger=0)
            raise ConfigError(f"{url!r} is no address of a server: {error}") from error
        self._thread = threading.Thread(target=self._run, name="hma-client", daemon=True)
        self._thread.start()

    # from any thread

    def submit(self, ticket: Ticket[Any]) -> None:
        """Send the request as soon as the state allows."""
        self._inbox.put(lambda: self._accept(ticket))

    def tell(self, make_request: Callable[[int], m.Request]) -> None:
        """Send a request whose reply nobody waits for; a server that is lost needs it no more."""
        self._inbox.put(lambda: self._send_loose(make_request))

    def remember(self, key: PoolKey, make_request: Callable[[int], m.Request]) -> None:
        """Register this pool again whenever the server has lost it."""
        self._inbox.put(lambda: self._pools.__setitem__(key, make_request))

    def forget(self, key: PoolKey) -> None:
        """Undo `remember`."""
        self._inbox.put(lambda: self._pools.pop(key, None))

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait for a server that has answered hello and has all pools, or has refused the hello."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.state is LinkState.READY or self.refusal is not None, timeout_s
            )

    def close(self) -> None:
        """Say goodbye and end the thread; open tickets fail. Idempotent, also at the same time.

        In a forked child, whose parent's thread this is, it does nothing.
        """
        if self._inbox.is_foreign:
            return
        with contextlib.suppress(ServerUnavailableError):
            self._inbox.put(self._say_goodbye)
        self._thread.join(_GOODBYE_WAIT_S + 5.0)

    # on the link's thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            # whatever ended the loop, nobody waits for an answer that cannot come
            self._closing = True
            self._inbox.close()
            self._lose_server(_CLOSED)
            self._fail_outbox(_CLOSED)
            self._context.destroy(linger=0)

    def _turn(self) -> None:
        poller = zmq.Poller()
        assert self._socket is not None
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._inbox.fileno(), zmq.POLLIN)
        if self._watch is not None:
            poller.register(self._watch.fileno(), zmq.POLLIN)
        readable = {key for key, _ in poller.poll(self._patience_ms())}
        if self._socket in readable:
            self._receive()
        if self._watch is not None and self._watch.fileno() in readable:
            self._lose_server(f"the server, process {self._watch.process.pid}, has ended")
            self._connect()
        if self._inbox.fileno() in readable:
            self._inbox.run()
        self._check_deadlines()
        if self.state is LinkState.AWAY and (
            time.monotonic_ns() - self._hello_sent_ns > _HELLO_RETRY_NS
        ):
            self._connect()

    def _patience_ms(self) -> int:
        deadlines = [ticket.deadline_ns for ticket in (*self._pending.values(), *self._outbox)]
        if self.state is LinkState.AWAY:
            deadlines.append(self._hello_sent_ns + _HELLO_RETRY_NS)
        if not deadlines:
            return _IDLE_MS
        left_ms = (min(deadlines) - time.monotonic_ns()) // 1_000_000 + 1
        return int(min(_IDLE_MS, max(0, left_ms)))

    def _connect(self) -> None:
        """A fresh socket and a hello: a socket that lost its server may hold stale requests."""
        if self._socket is not None:
            self._socket.close(0)
        self._socket = dealer(self._context, self._identity, self._keys)
        self._socket.connect(self.url)
        self._say_hello()

    def _say_hello(self) -> None:
        self._hello_seq = self._next_seq()
        self._hello_sent_ns = time.monotonic_ns()
        self._send(
            m.Hello(
                seq=self._hello_seq,
                version=m.PROTOCOL_VERSION,
                process=this_process(),
                role=self._role,
            )
        )

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _send(self, request: m.Request) -> bool:
        """Whether there was room. Raises: ProtocolError for what cannot be sent at all."""
        assert self._socket is not None
        return send(self._socket, request)

    def _send_loose(self, make_request: Callable[[int], m.Request]) -> None:
        if self.state is not LinkState.READY:
            self._loose.append(make_request)
            return
        try:
            self._send(make_request(self._next_seq()))
        except ProtocolError as error:
            log.warning("%s", error)

    def _accept(self, ticket: Ticket[Any]) -> None:
        if self._closing:
            ticket.fail(UNAVAILABLE, _CLOSED)
            return
        patient = (
            self.state is LinkState.REGISTERING
            or ticket.waits_for_server
            or (self.hello is None and time.monotonic_ns() < self._patient_until_ns)
        )
        if self.state is LinkState.READY:
            self._dispatch(ticket)
        elif patient:
            self._outbox.append(ticket)
        else:
            ticket.fail(UNAVAILABLE, f"no server answers on {self.url}")

    def _dispatch(self, ticket: Ticket[Any]) -> None:
        if ticket.withdrawn:
            ticket.fail(UNAVAILABLE, "withdrawn before it was sent")
            return
        ticket.seq = self._next_seq()
        request = ticket.make_request(ticket.seq)
        kind = str(request.__struct_config__.tag)
        reach(f"client.{kind}.submitted")
        self._pending[ticket.seq] = ticket
        try:
            ticket.sent = self._send(request)
        except ProtocolError as error:
            del self._pending[ticket.seq]
            ticket.fail(m.ErrorCode.BAD_REQUEST.value, str(error))
            return
        reach(f"client.{kind}.sent")
        if not ticket.sent:
            del self._pending[ticket.seq]
            ticket.fail(UNAVAILABLE, "the send queue is full")

    def _receive(self) -> None:
        assert self._socket is not None
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                reply = self._decoder.decode(frames[-1])
            except ProtocolError as error:
                log.warning("%s", error)
                continue
            self._take(reply)

    def _take(self, reply: m.Reply) -> None:
        if reply.seq == self._hello_seq or isinstance(reply, m.HelloReply):
            self._greeted(reply)
        elif reply.seq in self._registering:
            self._pool_answered(self._registering.pop(reply.seq), reply)
        elif reply.seq in self._aborts:
            ticket = self._aborts.pop(reply.seq)
            self._pending.pop(ticket.seq, None)
            ticket.fail(TIMEOUT, "no answer before the deadline; the copy was given up")
        elif reply.seq in self._pending:
            self._answered(self._pending.pop(reply.seq), reply)
        elif reply.seq in self._late:
            late = self._late.pop(reply.seq)
            if late.on_late is not None:
                late.on_late(reply)

    def _answered(self, ticket: Ticket[Any], reply: m.Reply) -> None:
        if ticket.abort_seq is not None:
            self._aborts.pop(ticket.abort_seq, None)
        code = reply.code if isinstance(reply, m.ErrorReply) else ""
        lost = code in (m.ErrorCode.NOT_GREETED.value, m.ErrorCode.UNKNOWN_INSTANCE.value)
        if lost and self._pools and ticket.retries_left and ticket.abort_seq is None:
            ticket.retries_left -= 1
            self._outbox.append(ticket)
            if self.state is LinkState.READY:
                self._connect_again(code)
            return
        request_kind = type(reply).__name__.removesuffix("Reply").lower()
        reach(f"client.{request_kind}.answered")
        ticket.resolve(reply)
        if code == m.ErrorCode.NOT_GREETED.value and self.state is LinkState.READY:
            self._connect_again(code)

    def _connect_again(self, code: str) -> None:
        log.info("the server has lost this client (%s); saying hello again", code)
        self._set_state(LinkState.AWAY)
        self.hello = None
        self._patient_until_ns = time.monotonic_ns() + 2 * _HELLO_RETRY_NS
        self._say_hello()

    def _greeted(self, reply: m.Reply) -> None:
        if isinstance(reply, m.ErrorReply):
            with self._changed:
                self.refusal = reply
                self._changed.notify_all()
            self._fail_outbox(f"{self.url}: {reply.message}", reply.code)
            return
        if not isinstance(reply, m.HelloReply):
            return
        if self._watch is None or self._watch.process != reply.process:
            self._unwatch()
            try:
                self._watch = ProcessWatch(reply.process)
            except ServerUnavailableError as error:
                log.debug("%s", error)
                return
        self.hello, self.refusal = reply, None
        self._set_state(LinkState.REGISTERING)
        for key, make_request in self._pools.items():
            seq = self._next_seq()
            self._registering[seq] = key
            self._send(make_request(seq))
        self._maybe_ready()

    def _pool_answered(self, key: PoolKey, reply: m.Reply) -> None:
        if isinstance(reply, m.ErrorReply):
            log.error("instance %s rank %d was not registered again: %s", *key, reply.message)
            self._pools.pop(key, None)
        self._maybe_ready()

    def _maybe_ready(self) -> None:
        if self._registering or self.state is not LinkState.REGISTERING:
            return
        self._set_state(LinkState.READY)
        while self._loose:
            self._send_loose(self._loose.popleft())
        outbox, self._outbox = self._outbox, deque()
        for ticket in outbox:
            self._dispatch(ticket)

    def _set_state(self, state: LinkState) -> None:
        with self._changed:
            self.state = state
            self._changed.notify_all()

    def _check_deadlines(self) -> None:
        now = time.monotonic_ns()
        for ticket in [each for each in self._outbox if each.deadline_ns <= now]:
            self._outbox.remove(ticket)
            ticket.fail(UNAVAILABLE, f"no server answered on {self.url} in time")
        for ticket in [each for each in self._pending.values() if each.deadline_ns <= now]:
            if ticket.holds_pool:
                self._ask_to_abort(ticket, now)
                continue
            del self._pending[ticket.seq]
            if ticket.on_late is not None:
                self._late[ticket.seq] = ticket
            ticket.fail(TIMEOUT, "no answer before the deadline")

    def _ask_to_abort(self, ticket: Ticket[Any], now: int) -> None:
        """Once more while nobody answers: a server that drops its connections loses both ways."""
        if ticket.abort_seq is None:
            ticket.abort_seq = self._next_seq()
            self._aborts[ticket.abort_seq] = ticket
        ticket.deadline_ns = now + _ABORT_AGAIN_NS
        self._send(m.Abort(seq=ticket.abort_seq, target_seq=ticket.seq))

    def _lose_server(self, why: str) -> None:
        """Nothing that was sent will be answered, and nothing touches the pools any more."""
        self._set_state(LinkState.AWAY)
        self._unwatch()
        self.hello = None
        self._patient_until_ns = 0
        pending = list(self._pending.values())
        self._pending.clear()
        self._aborts.clear()
        self._late.clear()
        self._loose.clear()
        self._registering.clear()
        for ticket in pending:
            ticket.fail(UNAVAILABLE, why)
        self._fail_outbox(why, patient_too=False)

    def _fail_outbox(self, why: str, code: str = UNAVAILABLE, *, patient_too: bool = True) -> None:
        outbox, self._outbox = self._outbox, deque()
        for ticket in outbox:
            if ticket.waits_for_server and not patient_too:
                self._outbox.append(ticket)
            else:
                ticket.fail(code, why)

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _say_goodbye(self) -> None:
        if self._closing:
            return
        if self.state is not LinkState.AWAY and self._send(m.Goodbye(seq=self._next_seq())):
            assert self._socket is not None
            last = self._seq
            until = time.monotonic() + _GOODBYE_WAIT_S
            while (left := until - time.monotonic()) > 0 and self._socket.poll(int(left * 1000)):
                reply = self._decoder.decode(self._socket.recv())
                if reply.seq == last:
                    break
                self._take(reply)
        self._closing = True
