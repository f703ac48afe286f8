"""The claim to one reply."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from hma_triton.messages import ErrorReply, Reply, Request

Answer = TypeVar("Answer")

UNAVAILABLE = "unavailable"
TIMEOUT = "timeout"


class Ticket(Generic[Answer]):
    """One request on its way. `poll` gives None until it is answered, then always the answer.

    `deadline_ns` is when the client gives up waiting; a ticket that `holds_pool` is then aborted
    and stays open until the server has answered, or is known dead (design rule 13).
    """

    def __init__(
        self,
        make_request: Callable[[int], Request],
        convert: Callable[[Reply], Answer],
        deadline_ns: int,
        *,
        holds_pool: bool = False,
        waits_for_server: bool = False,
        on_late: Callable[[Reply], None] | None = None,
    ) -> None:
        self.make_request = make_request
        self.deadline_ns = deadline_ns
        self.holds_pool = holds_pool
        self.waits_for_server = waits_for_server
        self.on_late = on_late
        self.seq = -1
        self.sent = False
        # set by whoever no longer wants the answer: what has not been sent yet is not sent
        self.withdrawn = False
        self.abort_seq: int | None = None
        self.retries_left = 1
        self._convert = convert
        self._reply: Reply | None = None
        self._done = threading.Event()

    def poll(self) -> Answer | None:
        """The answer, or None while there is none."""
        return self._convert(self._reply) if self._reply is not None else None

    def wait(self, timeout_s: float | None = None) -> Answer | None:
        """Wait for the answer; None when `timeout_s` came first."""
        self._done.wait(timeout_s)
        return self.poll()

    def result(self) -> Answer:
        """Wait for the answer, however long; the link answers every ticket in the end."""
        self._done.wait()
        assert self._reply is not None, "set before the event"
        return self._convert(self._reply)

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return self._done.is_set()

    def resolve(self, reply: Reply) -> None:
        """Set the answer; the first one stays. Called by the link."""
        if self._reply is None:
            self._reply = reply
            self._done.set()

    def fail(self, code: str, message: str) -> None:
        """Answer with an error of the client's own."""
        self.resolve(ErrorReply(seq=max(0, self.seq), code=code, message=message))


def let_answers_in() -> None:
    """Let the client's thread run; some 0.1 ms.

    For a caller that asks again and again and does nothing else: it holds the interpreter's lock,
    and the thread would get it after 5 ms only, for every message in either direction.
    """
    time.sleep(2e-5)
