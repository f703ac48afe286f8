"""What an operator sees and does: metrics, status, checksums, shutdown, keys, limits, top."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from rich.console import Console
from support.server_pools import FULL, HYBRID, TestPool, prompt
from support.server_thread import free_port, register, running_server

from hma_triton.cli.main import app
from hma_triton.cli.top import human, view
from hma_triton.client import HmaClient
from hma_triton.config import ServerConfig
from hma_triton.cpu_event import CpuEvent
from hma_triton.curve_keys import make_key_file
from hma_triton.errors import ConfigError, RemoteError, ServerUnavailableError
from hma_triton.objects.chunk_index import PRESENT
from hma_triton.objects.namespace import NamespaceShape
from hma_triton.plan import ReuseRule
from hma_triton.server.launch import start_embedded
from hma_triton.server.loop import CacheServer

CLI = (sys.executable, "-m", "hma_triton.cli.main")


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in lines
        if not line.startswith("#")
    }


# checksums


def corrupt_objects(server: CacheServer, how_many: int) -> list[int]:
    """Flip a bit in that many stored objects; their group numbers."""
    store, groups = server.handlers.store, []
    for namespace in store._space.namespaces.values():
        index = namespace.index
        for record, column in np.argwhere(index.state[: index.top] == PRESENT)[:how_many]:
            offset = int(index.offset[record, column])
            store.arena.view(offset, 64)[17] ^= 1
            groups.append(int(column))
    return groups


@pytest.mark.parametrize("verify", ["all", "sample", "off"])
def test_a_changed_byte_is_never_served_when_all_are_verified(verify: str, caplog) -> None:
    with running_server(verify=verify) as server, server.client() as client:
        pool = TestPool()
        register(client, pool)
        digests, ids = prompt(1, 4), pool.all_ids(4)
        pool.write(digests, ids)
        assert client.store("i", 0, 0, digests, b"", ids).stored == 12
        corrupt_objects(server.server, 12)
        assert client.lookup("i", "r", digests, 128).tokens == 128
        pool.wipe()
        reply = client.retrieve("i", 0, "r", digests, 0, pool.load_ids(128))
        if verify == "off":
            assert reply.ok
            return
        for number in range(16):
            if reply.ok and verify == "sample":
                reply = client.retrieve("i", 0, f"r{number}", digests, 0, pool.load_ids(128))
        assert (reply.ok, reply.code) == (False, "checksum")
        assert "are not what was stored" in reply.message
        assert any("checksum mismatch instance=i" in line for line in caplog.messages)
        if verify == "all":
            assert all(bool((cache[1:] == 0x55).all()) for cache in pool.kv.values())
        assert client.status()["counters"]["corrupt_objects"] > 0
        until = time.monotonic() + 5
        while client.lookup("i", "again", digests, 128).tokens == 128:
            assert time.monotonic() < until, "a mismatch is a miss from then on"
        while client.store("i", 0, 0, digests, b"", ids).stored == 0:
            client.release("i", "again")
            assert time.monotonic() < until, "and what was dropped can be stored again"


def test_bytes_that_nobody_changed_verify() -> None:
    with running_server(verify="all") as server, server.client() as client:
        pool = TestPool()
        register(client, pool)
        for seed in range(30):
            digests, ids = prompt(seed, 4), pool.all_ids(4)
            pool.write(digests, ids)
            client.store("i", 0, 0, digests, b"", ids)
            target = pool.load_ids(128, first=seed)
            pool.wipe()
            assert client.retrieve("i", 0, "r", digests, 0, target).ok
            assert pool.wrong(digests, target) == []
        assert client.status()["counters"]["corrupt_objects"] == 0


# metrics and status


def test_metrics_say_what_happened_and_why() -> None:
    port = free_port()
    with running_server(metrics_port=port, host_bytes=1 << 20) as server:
        with server.client() as client:
            pool = TestPool()
            register(client, pool)
            digests, ids = prompt(1, 4), pool.all_ids(4)
            pool.write(digests, ids)
            client.lookup("i", "a", digests, 128)
            client.store("i", 0, 0, digests, b"", ids)
            client.lookup("i", "b", digests, 128)
            client.lookup("i", "c", digests, 64)
            assert client.retrieve("i", 0, "b", digests, 0, pool.load_ids(128)).ok
            client.store("nobody", 0, 0, digests, b"", ids)
            seen = scrape(port)
            status = client.status()
        missing = "object group 0, object group 1, object group 2"
        assert seen[f'hma_lookups_total{{outcome="miss",reason="missing in {missing}"}}'] == 1
        assert seen['hma_lookups_total{outcome="hit",reason="all"}'] == 1
        assert seen['hma_lookups_total{outcome="partial",reason="limit"}'] == 1
        assert seen['hma_lookup_tokens_total{kind="asked"}'] == 3 * 128
        assert seen['hma_lookup_tokens_total{kind="hit"}'] == 128 + 64
        assert seen['hma_objects_total{fate="stored"}'] == 12
        assert seen['hma_errors_total{code="unknown_instance"}'] >= 1
        backend = status["registrations"][0]["backend"]
        sizes = [group["nbytes"] for group in status["registrations"][0]["object_groups"]]
        for group, (kind, nbytes) in enumerate(zip(HYBRID, sizes, strict=True)):
            labels = f'object_group="{group}",path="{backend}"'
            stored = seen[f'hma_copied_bytes_total{{direction="store",{labels}}}']
            loaded = seen[f'hma_copied_bytes_total{{direction="retrieve",{labels}}}']
            assert stored == 4 * nbytes
            needed = {block // kind.blocks_per_chunk for block in kind.needed_blocks(128)}
            assert loaded == len(needed) * nbytes
        assert seen[f'hma_copy_seconds_count{{direction="store",path="{backend}"}}'] == 1
        for direction in ("store", "retrieve"):
            whole = seen[f'hma_copy_seconds_sum{{direction="{direction}",path="{backend}"}}']
            parts = [
                value
                for name, value in seen.items()
                if name.startswith(f'hma_group_copy_seconds_total{{direction="{direction}"')
            ]
            assert len(parts) == 3 and min(parts) > 0
            assert sum(parts) == pytest.approx(whole)
        assert seen["hma_leases"] == 1 and seen["hma_registrations"] == 1 and seen["hma_peers"] == 1
        assert seen["hma_arena_used_bytes"] == status["arena"]["used_bytes"] > 0
        assert seen["hma_chunks"] == 4 and seen["hma_queued_copies"] == 0
        assert seen['hma_requests_total{op="lookup"}'] == 3
    with pytest.raises(OSError):
        scrape(port)


def test_scrapes_do_not_mind_what_the_server_does_meanwhile() -> None:
    """They come on a thread of their own."""
    shape = NamespaceShape((ReuseRule(),), (4096,), (False,), 1, 32, (((0, 4096),),))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with running_server() as server:
            handlers = server.server.handlers
            until = time.monotonic() + 1.5

            def churn() -> None:
                for number in range(10):
                    namespace = handlers.store.namespace(os.urandom(32), shape)
                    one = np.ones((1, 1), dtype=np.bool_)
                    digest = os.urandom(32)
                    handlers.store.commit(handlers.store.reserve(namespace, 0, digest, b"", one))
                    if number % 2:
                        handlers.store.clear(namespace)
                if time.monotonic() < until:
                    server.server.call_later(churn)

            server.server.call_later(churn)
            while time.monotonic() < until:
                assert list(handlers.metrics.registry.collect())
    finally:
        sys.setswitchinterval(before)


def test_a_metrics_port_that_is_taken_is_one_clear_error(url: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics port {port}"):
            CacheServer(ServerConfig(url=url, host_bytes=1 << 20, metrics_port=port))


def test_evictions_are_counted_by_cause() -> None:
    port = free_port()
    with (
        running_server(metrics_port=port, host_bytes=1 << 17) as server,
        server.client() as client,
    ):
        pool = TestPool()
        register(client, pool)
        for seed in range(12):
            digests, ids = prompt(seed, 4), pool.all_ids(4)
            pool.write(digests, ids)
            assert client.store("i", 0, 0, digests, b"", ids).code == ""
        client.clear("i")
        until = time.monotonic() + 10
        while client.status()["chunks"]:
            assert time.monotonic() < until
        seen = scrape(port)
        assert seen['hma_evicted_objects_total{cause="room"}'] > 0
        assert seen['hma_evicted_objects_total{cause="clear"}'] > 0
        assert seen["hma_evicted_bytes_total"] > 0
        assert seen["hma_arena_used_bytes"] == 0


def test_top_draws_what_the_status_says() -> None:
    with running_server() as server, server.client() as client:
        pool = TestPool()
        register(client, pool, "watched")
        before = client.status()
        digests, ids = prompt(1, 4), pool.all_ids(4)
        client.store("watched", 0, 0, digests, b"", ids)
        now = client.status()
        console = Console(width=140, record=True, file=io.StringIO())
        console.print(view(now, before, 1.0))
        console.print(view({**now, "away": True}, now, 1.0))
        text = console.export_text()
        assert "watched" in text and "0/1" in text and "w40" in text and "state" in text
        assert "copied bytes: store,0," in text and "requests: store" in text
        assert "chunks 4" in text and "away" in text
        done = subprocess.run(
            [*CLI, "top", "--url", server.url, "--count", "2", "--interval-s", "0.05"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert "arena" in done.stdout and "watched" in done.stdout
    assert [human(n) for n in (0, 1023, 1024, 1 << 20, 1 << 50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.0 MiB",
        "1024.0 TiB",
    ]


def test_top_without_a_server_says_so_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [*CLI, "top", "--url", f"ipc://{tmp_path}/none.sock"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "no cache server answered" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


# concurrency and back-pressure


def test_a_slow_rank_does_not_hold_up_the_others() -> None:
    with (
        running_server(copy_threads=2) as server,
        server.client() as slow,
        server.client() as fast,
    ):
        stuck, free = TestPool(), TestPool()
        register(slow, stuck, "slow", namespace="slow")
        register(fast, free, "fast", namespace="fast")
        release = threading.Event()
        engine = server.server.handlers.registrations.get("slow", 0).engine
        original = engine.store_addresses

        def held_up(*arguments, **options):
            assert release.wait(60)
            return original(*arguments, **options)

        engine.store_addresses = held_up
        tickets = [
            slow.store_submit("slow", 0, 0, prompt(seed, 2), b"", stuck.all_ids(2), deadline_s=60)
            for seed in range(8)
        ]
        try:
            for seed in range(8):
                reply = fast.store("fast", 0, 0, prompt(seed, 2), b"", free.all_ids(2))
                assert (reply.code, reply.stored) == ("", 6)
            assert all(ticket.poll() is None for ticket in tickets)
            assert fast.ping() < 5
        finally:
            release.set()
        assert [ticket.result().stored for ticket in tickets] == [6] * 8


def test_a_full_queue_turns_stores_into_misses_at_once() -> None:
    with running_server(queue_limit=3) as server, server.client() as client:
        pool = TestPool()
        register(client, pool)
        event = CpuEvent()
        handle = event.record()
        waiting = [
            client.store_submit(
                "i", 0, 0, prompt(seed, 1), b"", pool.all_ids(1), deadline_s=60, event=handle
            )
            for seed in range(3)
        ]
        started = time.monotonic()
        for seed in range(3, 9):
            reply = client.store(
                "i", 0, 0, prompt(seed, 1), b"", pool.all_ids(1), deadline_s=60, event=handle
            )
            assert (reply.code, reply.stored) == ("busy", 0)
        assert time.monotonic() - started < 5
        event.fire()
        assert [ticket.result().stored for ticket in waiting] == [3, 3, 3]
        assert client.lookup("i", "r", prompt(4, 1), 32).tokens == 0


def test_a_full_arena_is_a_miss_not_a_wait() -> None:
    with running_server(host_bytes=1 << 16, pin_share=1.0) as server, server.client() as client:
        pool = TestPool((FULL,))
        register(client, pool)
        digests = prompt(1, 8)
        stored = 0
        for chunks in range(1, 9):
            part = digests[: chunks * 32]
            reply = client.store("i", 0, 0, part, b"", pool.all_ids(chunks))
            stored += reply.stored
        assert stored == 8
        for seed in range(2, 10):
            client.store("i", 0, 0, prompt(seed, 3), b"", pool.all_ids(3))
        for seed in range(1, 10):
            client.lookup("i", f"pin-{seed}", prompt(seed, 8)[: 32 * 8], 10**6)
            client.lookup("i", f"pin3-{seed}", prompt(seed, 3), 10**6)
        assert client.status()["pinned_bytes"] > (1 << 16) * 0.8
        started = time.monotonic()
        reply = client.store("i", 0, 0, prompt(99, 8), b"", pool.all_ids(8))
        assert (reply.code, reply.stored) == ("capacity", 0)
        assert "pinned or being written" in reply.message
        assert time.monotonic() - started < 5


def test_aborting_what_has_not_started_answers_both() -> None:
    with running_server() as server, server.client() as client:
        pool = TestPool()
        register(client, pool)
        event = CpuEvent()
        digests, ids = prompt(1, 2), pool.all_ids(2)
        pool.write(digests, ids)
        client.store("i", 0, 0, digests, b"", ids)
        pool.wipe()
        ticket = client.retrieve_submit(
            "i", 0, "r", digests, 0, pool.load_ids(64), deadline_s=0.1, event=event.record()
        )
        reply = ticket.result()
        assert (reply.ok, reply.code in ("deadline", "aborted", "timeout")) == (False, True)
        event.fire()
        assert client.status()["open_copies"] == 0
        assert all(bool((cache[1:] == 0x55).all()) for cache in pool.kv.values())


# starting and stopping


@pytest.fixture
def serve(tmp_path: Path) -> Iterator:
    """`hma-triton serve` as a process."""
    tmp_path.chmod(0o700)
    url = f"ipc://{tmp_path / 'serve.sock'}"
    started: list[subprocess.Popen] = []

    def start(*options: str, at: str = url) -> tuple[subprocess.Popen, str]:
        process = subprocess.Popen(
            [*CLI, "serve", "--url", at, "--host-gb", "0.01", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process, at

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_serve_stops_on_sigterm_with_json_lines_and_status_zero(serve, tmp_path: Path) -> None:
    process, url = serve("--log-json", "--verify", "all", "--no-separate-object-groups")
    with HmaClient(url, connect_timeout_s=60) as client:
        client.connect()
        pool = TestPool((FULL, HYBRID[1]))
        assert len(register(client, pool).object_nbytes) == 1
        status = client.status()
        assert status["verify"] == "all" and status["separate_object_groups"] is False
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and time.monotonic() - started < 10
    lines = [json.loads(line) for line in errors.splitlines()]
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    assert any("serving url=" in line["message"] for line in lines)
    assert any("all copies ended=True" in line["message"] for line in lines)
    assert not (tmp_path / "serve.sock").exists()


def test_a_second_server_on_the_same_socket_is_refused(serve) -> None:
    _, url = serve()
    with HmaClient(url, connect_timeout_s=60) as client:
        client.connect()
        second, _ = serve()
        _, errors = second.communicate(timeout=60)
        assert second.returncode == 2 and "already listens" in errors
        assert client.ping() < 5, "the first one serves on"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--verify", "often"], "verify 'often' is unknown"),
        (["--host-gb", "100000"], "does not fit"),
        (["--log-level", "loud"], "log level 'loud'"),
        (["--curve-key", "/nowhere/key"], "key file /nowhere/key"),
        (["--lease-s", "0"], "lease_s 0.0 is outside"),
        (["--host-gb", "inf"], "host_bytes"),
    ],
)
def test_serve_with_bad_settings_ends_in_one_line(
    options: list[str], why: str, url: str, capsys
) -> None:
    with pytest.raises(SystemExit) as ended:
        app(args=["serve", "--url", url, *options], prog_name="hma-triton")
    errors = capsys.readouterr().err
    assert ended.value.code == 2
    assert why in errors and len(errors.strip().splitlines()) == 1, errors


def test_a_copy_that_does_not_end_cannot_hold_the_shutdown() -> None:
    with running_server(shutdown_s=0.3, copy_threads=2) as server, server.client() as client:
        pool = TestPool()
        register(client, pool)
        release = threading.Event()
        engine = server.server.handlers.registrations.get("i", 0).engine
        original = engine.store_addresses

        def held_up(*arguments, **options):
            assert release.wait(60)
            return original(*arguments, **options)

        engine.store_addresses = held_up
        ticket = client.store_submit("i", 0, 0, prompt(1, 1), b"", pool.all_ids(1), deadline_s=60)
        while not client.status()["running"]:
            time.sleep(0.005)
        started = time.monotonic()
        server.server.stop()
        server.thread.join(10)
        assert not server.thread.is_alive() and time.monotonic() - started < 5
        release.set()
        assert ticket.poll() is None or ticket.poll().code


def test_work_that_has_not_started_is_refused_at_shutdown() -> None:
    with running_server() as server, server.client() as client:
        pool = TestPool()
        register(client, pool)
        ticket = client.store_submit(
            "i",
            0,
            0,
            prompt(1, 1),
            b"",
            pool.all_ids(1),
            deadline_s=60,
            event=CpuEvent().record(),
        )
        while not client.status()["open_copies"]:
            time.sleep(0.005)
        server.stop()
        assert ticket.result().code == "shutting_down"


def test_an_embedded_server_ends_with_its_process_however_it_ends() -> None:
    code = (
        "import os, signal\n"
        "from hma_triton.config import ServerConfig\n"
        "from hma_triton.server.launch import start_embedded\n"
        "server = start_embedded(ServerConfig(url='ipc:///x', host_bytes=1 << 20), timeout_s=90)\n"
        "print(server.pid, server.url, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pid, url = done.stdout.split()
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < until, "the server outlived its parent"
        time.sleep(0.02)
    assert not Path(url.removeprefix("ipc://")).parent.exists()


def test_an_embedded_server_that_cannot_start_says_why_in_seconds() -> None:
    started = time.monotonic()
    with pytest.raises(ServerUnavailableError, match="does not fit"):
        start_embedded(ServerConfig(url="ipc:///x", host_bytes=1 << 46), timeout_s=60)
    assert time.monotonic() - started < 50


# the network


def test_a_network_address_needs_the_key_file(tmp_path: Path) -> None:
    key, other = tmp_path / "key", tmp_path / "other"
    make_key_file(key)
    make_key_file(other)
    url = f"tcp://0.0.0.0:{free_port()}"
    reach = url.replace("0.0.0.0", "127.0.0.1")
    with (
        running_server(url=url, curve_key_file=str(key)),
        HmaClient(reach, curve_key=key) as client,
    ):
        client.connect(20)
        pool = TestPool()
        register(client, pool)
        digests, ids = prompt(1, 2), pool.all_ids(2)
        assert client.store("i", 0, 0, digests, b"", ids).stored == 6
        for keyless in ({}, {"curve_key": other}):
            with HmaClient(reach, **keyless) as stranger, pytest.raises(ServerUnavailableError):
                stranger.connect(0.5)
        assert client.ping() < 5


def test_loopback_tcp_works_and_a_peer_from_elsewhere_is_refused(monkeypatch) -> None:
    import msgspec

    from hma_triton.client import link
    from hma_triton.process_identity import this_process

    url = f"tcp://127.0.0.1:{free_port()}"
    with running_server(url=url) as server:
        with server.client() as client:
            assert client.ping() < 5
        foreign = msgspec.structs.replace(this_process(), boot_id="elsewhere")
        monkeypatch.setattr(link, "this_process", lambda: foreign)
        with HmaClient(url) as stranger, pytest.raises(RemoteError, match="another host") as error:
            stranger.connect(20)
        assert error.value.code == "no_data_path"


def test_a_client_in_another_process_namespace_is_refused_by_name(url: str) -> None:
    code = (
        "import sys\n"
        "from hma_triton.client import HmaClient\n"
        "from hma_triton.errors import RemoteError\n"
        "with HmaClient(sys.argv[1]) as client:\n"
        "    try:\n"
        "        client.connect(60)\n"
        "    except RemoteError as error:\n"
        "        print(error.code, error)\n"
    )
    with running_server(url=url):
        done = subprocess.run(
            ["unshare", "-Urpf", "--mount-proc", sys.executable, "-c", code, url],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.stdout.startswith("no_data_path"), done.stderr
    assert "another process namespace" in done.stdout


def test_the_socket_is_for_its_user_alone(tmp_path: Path) -> None:
    import stat

    folder = tmp_path / "made"
    with running_server(url=f"ipc://{folder / 's.sock'}"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "s.sock").stat().st_mode) & 0o077 == 0


# clients


def test_a_client_without_a_server_is_quick_about_it(tmp_path: Path) -> None:
    with HmaClient(f"ipc://{tmp_path / 'none.sock'}", connect_timeout_s=0.3) as client:
        started = time.monotonic()
        with pytest.raises(ServerUnavailableError, match="no cache server answered"):
            client.connect()
        with pytest.raises(ServerUnavailableError):
            client.ping(0.2)
        pool = TestPool()
        with pytest.raises(ServerUnavailableError):
            client.register_kv_caches("i", world_size=1, timeout_s=0.3, **pool.registration())
        assert client.store("i", 0, 0, prompt(1, 1), b"", pool.all_ids(1)).code == "unavailable"
        assert client.lookup("i", "r", prompt(1, 1), 32).reason == "unavailable"
        loaded = client.retrieve("i", 0, "r", prompt(1, 1), 0, pool.load_ids(32))
        assert (loaded.ok, loaded.code) == (False, "unavailable")
        assert time.monotonic() - started < 5
        assert not client.connected and client.server_id is None


def test_a_client_made_before_its_server_waits_for_it(tmp_path: Path) -> None:
    url = f"ipc://{tmp_path / 'made' / 's.sock'}"
    with HmaClient(url, connect_timeout_s=30, timeout_s=30) as client:
        client.lookup_submit("i", "early", prompt(1, 1), 32)
        assert client.lookup_poll("early") is None
        with running_server(url=url):
            client.connect()
            until = time.monotonic() + 20
            while (reply := client.lookup_poll("early")) is None:
                assert time.monotonic() < until
                time.sleep(0.005)
            assert reply.reason.startswith("error: unknown_instance")


def test_lookups_are_answered_later_and_their_answers_stay() -> None:
    with running_server() as server, server.client() as client:
        pool = TestPool()
        register(client, pool)
        digests, ids = prompt(1, 3), pool.all_ids(3)
        pool.write(digests, ids)
        client.store("i", 0, 0, digests, b"", ids)
        for _ in range(5):
            client.lookup_submit("i", "r", digests, 96)
        until = time.monotonic() + 20
        while client.lookup_poll("r") is None:
            assert time.monotonic() < until
        for _ in range(3):
            assert client.lookup_poll("r").tokens == 96
        assert client.status()["leases"] == 1
        client.release("i", "r")
        assert client.lookup_poll("r").reason == "unknown request"
        assert client.status()["leases"] == 0


def test_a_hit_that_comes_too_late_is_released() -> None:
    with running_server() as server, server.client() as client:
        pool = TestPool()
        register(client, pool)
        digests, ids = prompt(1, 3), pool.all_ids(3)
        client.store("i", 0, 0, digests, b"", ids)
        gate = threading.Event()
        server.server.call_later(lambda: gate.wait(30) and None)
        reply = client.lookup("i", "late", digests, 96, timeout_s=0.1)
        assert (reply.tokens, reply.reason) == (0, "timeout")
        gate.set()
        until = time.monotonic() + 20
        while client.status()["leases"] or not client.status()["traffic"]["hma_requests"].get(
            "release"
        ):
            assert time.monotonic() < until
        assert client.status()["pinned_bytes"] == 0


def test_closing_says_goodbye_and_a_closed_client_refuses() -> None:
    with running_server() as server:
        client = HmaClient(server.url)
        client.connect()
        register(client, TestPool())
        client.close()
        client.close()
        until = time.monotonic() + 10
        while server.server.handlers.peers.all():
            assert time.monotonic() < until
            time.sleep(0.005)
        assert server.server.snapshot()["registrations"] == []
        with pytest.raises(ServerUnavailableError, match="closed"):
            client.ping()


def test_too_many_peers_are_refused_by_number() -> None:
    with (
        running_server(max_peers=2) as server,
        server.client(),
        server.client(),
        HmaClient(server.url) as third,
        pytest.raises(RemoteError, match="limit is 2"),
    ):
        third.connect(10)


def test_requests_from_many_threads_share_one_client() -> None:
    with running_server() as server, server.client() as client:
        pool = TestPool((FULL,), blocks=65)
        register(client, pool)
        faults: list[str] = []

        def use(number: int) -> None:
            for round_ in range(20):
                digests = prompt(number * 100 + round_, 2)
                ids = [np.arange(1 + 4 * number, 5 + 4 * number)]
                pool.write(digests, ids)
                if client.store("i", 0, 0, digests, b"", ids).stored != 2:
                    faults.append("store")
                request = f"{number}/{round_}"
                if client.lookup("i", request, digests, 64).tokens != 64:
                    faults.append("lookup")
                if not client.retrieve("i", 0, request, digests, 0, ids).ok:
                    faults.append("load")
                faults.extend(pool.wrong(digests, ids))

        threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert faults == []


def test_zeromq_has_what_the_network_needs() -> None:
    assert zmq.has("curve") and zmq.has("ipc")
