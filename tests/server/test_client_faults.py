"""What callers do wrong or at the wrong moment costs one answer, never the client."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from support.server_pools import CHUNK_TOKENS, TestPool, prompt
from support.server_thread import register, running_server

from hma_triton.client import HmaClient
from hma_triton.client.inbox import Inbox
from hma_triton.errors import ConfigError, ServerUnavailableError

ONE_DIGEST = b"\1" * 32


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda client: client.lookup("i", "r", ONE_DIGEST, 1 << 70).reason, "ints"),
        (lambda client: client.lookup("i", "\udc80", ONE_DIGEST, 1).reason, "surrogates"),
        (lambda client: client.lookup("i", 3 + 1j, ONE_DIGEST, 1).reason, "no place in a message"),
        (
            lambda client: client.retrieve("i", 0, "r", ONE_DIGEST, 0, [np.zeros(3 << 20)]).message,
            "a message has at most 8388608",
        ),
    ],
    ids=["number", "text", "kind", "size"],
)
def test_a_request_that_cannot_be_sent_fails_alone(
    ask: Callable[[HmaClient], str], said: str
) -> None:
    with running_server() as server, server.client() as client:
        assert said in ask(client)
        client.release("i", "\udc80")
        assert client.ping() < 5


def test_numpy_numbers_are_numbers() -> None:
    pool, digests = TestPool(), prompt(1, 2)
    one, none = np.int64(1), np.int32(0)
    with running_server() as server, server.client() as client:
        register(client, pool)
        ids = pool.all_ids(2)
        pool.write(digests, ids)
        assert not client.store("i", none, none, digests, b"", ids).code
        assert client.lookup("i", "r", digests, one * 2 * CHUNK_TOKENS).chunks == 2
        pool.wipe()
        assert client.retrieve("i", none, "r", digests, none, pool.load_ids(64)).ok
        assert not pool.wrong(digests, pool.load_ids(64))


def test_no_limit_is_a_limit_too() -> None:
    with running_server() as server, server.client() as client:
        assert client.ping(float("inf")) < 5
        assert client.lookup("i", "r", ONE_DIGEST, 1, 1e300).tokens == 0


def test_a_url_that_is_no_address_is_refused_at_once() -> None:
    for url in ("nonsense", "ipc://", "tcp://127.0.0.1"):
        with pytest.raises(ConfigError, match=r"no address of a server"):
            HmaClient(url)


def test_a_forked_child_is_told_to_make_its_own_client() -> None:
    with running_server() as server, server.client() as client:
        child = os.fork()
        if not child:
            status = 1
            try:
                client.lookup("i", "r", ONE_DIGEST, 1)
            except ServerUnavailableError as error:
                status = 0 if "make one in each process" in str(error) else 2
            client.close()
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert client.ping() < 5


def test_closing_from_many_threads_closes_no_descriptor_twice() -> None:
    with running_server() as server:
        for _ in range(10):
            client = HmaClient(server.url)
            client.connect()
            failures: list[BaseException] = []
            ready = threading.Barrier(4)

            def close(
                client: HmaClient = client,
                ready: threading.Barrier = ready,
                failures: list[BaseException] = failures,
            ) -> None:
                ready.wait()
                try:
                    client.close()
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=close) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert not failures


def test_what_is_asked_while_the_client_closes_is_answered() -> None:
    with running_server() as server:
        for _ in range(10):
            client = HmaClient(server.url)
            client.connect()
            unanswered: list[str] = []

            def ask(client: HmaClient = client, unanswered: list[str] = unanswered) -> None:
                while True:
                    try:
                        ticket = client.store_submit("i", 0, 0, ONE_DIGEST, b"", [])
                    except ServerUnavailableError:
                        return
                    if ticket.wait(10) is None:
                        unanswered.append("no answer")
                        return

            threads = [threading.Thread(target=ask) for _ in range(3)]
            for thread in threads:
                thread.start()
            time.sleep(0.01)
            client.close()
            for thread in threads:
                thread.join(20)
            assert not unanswered


def test_an_inbox_does_what_was_put_before_it_closed_and_takes_nothing_after() -> None:
    inbox, done = Inbox("the inbox"), []
    inbox.put(lambda: done.append(1))
    inbox.close()
    assert done == [1]
    with pytest.raises(ServerUnavailableError, match="the inbox is closed"):
        inbox.put(lambda: done.append(2))


def test_an_error_in_the_client_s_thread_fails_what_waits(monkeypatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with running_server() as server, server.client() as client:
        pool = TestPool()
        register(client, pool)
        ticket = client.retrieve_submit("i", 0, "r", ONE_DIGEST, 0, pool.all_ids(1))
        client._link._inbox.put(lambda: 1 / 0)
        assert ticket.wait(10) is not None
        with pytest.raises(ServerUnavailableError, match="closed"):
            client.lookup("i", "r", ONE_DIGEST, 1)


def test_a_retrieve_whose_abort_was_lost_with_the_connections_still_ends(monkeypatch) -> None:
    monkeypatch.setattr("hma_triton.client.link._ABORT_AGAIN_NS", 300_000_000)
    with running_server() as server, server.client() as client:
        pool = TestPool()
        register(client, pool)

        def stall() -> None:
            # the retrieve and its abort arrive meanwhile, and go with the socket
            time.sleep(1.0)
            server.server._renew_socket()

        server.server.call_later(stall)
        time.sleep(0.1)
        ids = pool.all_ids(1)
        ticket = client.retrieve_submit("i", 0, "r", ONE_DIGEST, 0, ids, deadline_s=0.3)
        answer = ticket.wait(20)
        assert answer is not None
        assert not answer.ok
