"""Field cases of kinds K4, K5, K7, K8 and K9, by number, through a real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from support.server_nursery import Nursery
from support.server_pools import FULL, HYBRID, TestPool, first, prompt
from support.server_thread import ThreadedServer, free_port, register, running_server

from hma_triton.client import HmaClient
from hma_triton.cpu_event import CpuEvent
from hma_triton.errors import RemoteError
from hma_triton.group_view import EngineGroupInfo
from hma_triton.keys import chunk_digests


@dataclass(slots=True)
class Groups:
    """Pools of chosen geometry: one layer per (block tokens, window, recurrent) group."""

    groups: list[tuple[int, int, bool]]
    chunk_tokens: int
    blocks: int = 40
    kv: dict[str, torch.Tensor] = field(default_factory=dict)
    infos: list[EngineGroupInfo] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number, (block, window, recurrent) in enumerate(self.groups):
            slots = 1 if recurrent else block
            values = torch.arange(self.blocks, dtype=torch.uint8)
            shape = (self.blocks, 2, slots, 8)
            self.kv[f"layer.{number}"] = values.reshape(-1, 1, 1, 1).expand(shape).contiguous()
            self.infos.append(
                EngineGroupInfo(number, (number,), block, window, recurrent_state=recurrent)
            )

    def register(self, client: HmaClient, instance: str) -> None:
        client.register_kv_caches(
            instance,
            self.kv,
            "m",
            1,
            "vllm",
            {"kv_layout": "HND"},
            self.infos,
            namespace=instance,
            chunk_tokens=self.chunk_tokens,
            timeout_s=60,
        )

    def digests(self, tokens: int) -> bytes:
        return chunk_digests(np.arange(tokens), self.chunk_tokens)

    def page(self, group: int, block: int) -> int:
        """The one value that all bytes of a block hold."""
        page = self.kv[f"layer.{group}"][block]
        value = int(page.reshape(-1)[0])
        assert bool((page == value).all())
        return value


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def client(server: ThreadedServer) -> Iterator[HmaClient]:
    with server.client() as client:
        yield client


# K4: windows and presence


def test_case_47_a_slid_window_stores_its_tail_and_the_full_group_everything(client) -> None:
    groups = Groups([(16, -1, False), (16, 64, False)], 64)
    groups.register(client, "c47")
    digests = groups.digests(512)
    ids = [np.arange(1, 33), np.concatenate([np.zeros(28, dtype=np.int64), np.arange(1, 5)])]
    reply = client.store("c47", 0, 0, digests, b"", ids)
    assert (reply.code, reply.stored, reply.skipped) == ("", 9, 7)
    assert client.lookup("c47", "r", digests, 512).tokens == 512
    assert client.lookup("c47", "s", digests, 448).tokens == 0


def test_case_49_a_chunk_with_a_null_among_its_kept_blocks_is_not_stored(client) -> None:
    groups = Groups([(64, -1, False), (64, 128, False), (8, 8, False)], 256, blocks=140)
    groups.register(client, "c49")
    digests = groups.digests(1024)
    full = np.arange(1, 17)
    wide, narrow = np.arange(1, 17), np.arange(1, 129)
    wide[0:4] = 0
    narrow[0:32] = 0
    narrow[32:64] = 0
    wide[8 + 3] = 0
    wide[12:14] = 0
    narrow[96:127] = 0
    reply = client.store("c49", 0, 0, digests, b"", [full, wide, narrow])
    # full: 4; wide keeps two of four blocks: chunks 1 and 3; narrow its last block: 2 and 3
    assert (reply.stored, reply.skipped) == (4 + 2 + 2, 4)
    assert client.lookup("c49", "r", digests, 1024).tokens == 1024
    assert client.lookup("c49", "s", digests, 768).tokens == 0


def test_case_50_a_load_reads_only_what_the_ids_name(client) -> None:
    groups = Groups([(32, -1, False), (32, 2, False)], 32)
    groups.register(client, "c50")
    digests = groups.digests(160)
    client.store("c50", 0, 0, digests, b"", [np.arange(1, 6), np.arange(11, 16)])
    before = client.status()["traffic"]["hma_copied_bytes"]
    ids = [np.arange(21, 26), np.array([0, 0, 0, 0, 30])]
    reply = client.retrieve("c50", 0, "r", digests, 0, ids)
    assert reply.ok and reply.nbytes == (5 + 1) * 2 * 32 * 8
    after = client.status()["traffic"]["hma_copied_bytes"]
    moved = {
        key: value - before.get(key, 0)
        for key, value in after.items()
        if key.startswith("retrieve") and value != before.get(key, 0)
    }
    assert sorted(moved.values()) == [512, 2560]
    assert [groups.page(0, block) for block in range(21, 26)] == [1, 2, 3, 4, 5]
    assert groups.page(1, 30) == 15


def test_case_52_blocks_that_decode_has_freed_are_not_stored(client) -> None:
    groups = Groups([(8, 16, False)], 16)
    groups.register(client, "c52")
    digests = groups.digests(80)
    table = np.array([1, 2, 3, 4, 0, 0, 0, 0, 9, 10])
    reply = client.store("c52", 0, 0, digests, b"", [table])
    assert (reply.stored, reply.skipped) == (3, 2)
    assert client.lookup("c52", "r", digests, 64).tokens == 32
    assert client.lookup("c52", "s", digests, 80).tokens == 80


def test_case_53_what_a_lookup_locked_is_released_whatever_was_read(client) -> None:
    groups = Groups([(64, -1, False), (64, 512, False)], 256)
    groups.register(client, "c53")
    digests = groups.digests(1024)
    ids = [np.arange(1, 17), np.arange(17, 33)]
    client.store("c53", 0, 0, digests, b"", ids)
    assert client.lookup("c53", "r", digests, 1024).tokens == 1024
    assert client.status()["pinned_bytes"] > 0
    window = np.arange(1, 17)
    window[:8] = 0
    assert client.retrieve("c53", 0, "r", digests, 768, [np.arange(17, 33), window]).ok
    status = client.status()
    assert (status["pinned_bytes"], status["leases"]) == (0, 0)


def test_case_55_a_missing_first_chunk_does_not_end_a_windowed_hit(client) -> None:
    """Needs four chunks of 32 tokens for a window of 128; one block for a window of one token."""
    groups = Groups([(32, 128, False)], 32)
    groups.register(client, "c55")
    digests = groups.digests(160)
    ids = np.array([0, 2, 3, 4, 5])
    assert client.store("c55", 0, 0, digests, b"", [ids]).stored == 4
    assert client.lookup("c55", "r", digests, 160).tokens == 160
    assert client.lookup("c55", "s", digests, 128).tokens == 0
    single = Groups([(32, 1, False)], 32)
    single.register(client, "c55-one")
    assert single.infos[0].sw_size_tokens == 1
    client.store("c55-one", 0, 0, digests, b"", [ids])
    assert client.lookup("c55-one", "r", digests, 160).tokens == 160
    assert client.lookup("c55-one", "s", digests, 32).tokens == 0


# K5: recurrent state


def test_case_56_a_chunk_whose_state_slot_moved_away_is_not_stored(client) -> None:
    groups = Groups([(4, -1, False), (4, -1, True)], 4)
    groups.register(client, "c56")
    digests = groups.digests(8)
    assert client.store("c56", 0, 0, digests, b"", [[1, 2], [8, 0]]).stored == 3
    assert client.lookup("c56", "r", digests, 8).tokens == 4, "not at the scratch slot's boundary"


def test_case_58_state_comes_from_one_source(client) -> None:
    groups = Groups([(16, -1, False), (16, -1, True)], 16)
    groups.register(client, "c58")
    digests = groups.digests(9 * 16)
    state = np.zeros(9, dtype=np.int64)
    state[8] = 20
    client.store("c58", 0, 0, digests, b"", [np.arange(1, 10), state])
    assert client.lookup("c58", "r", digests, 9 * 16).tokens == 9 * 16, "all of it from outside"
    assert client.lookup("c58", "s", digests, 8 * 16).tokens == 0, "or none"
    target = np.zeros(9, dtype=np.int64)
    target[8] = 33
    loaded = client.retrieve("c58", 0, "r", digests, 6 * 16, [np.arange(21, 30), target])
    assert loaded.ok and groups.page(1, 33) == 20, "the state of the final boundary, whole"
    assert [groups.page(0, block) for block in range(21, 30)] == [*range(21, 27), 7, 8, 9]


def test_case_59_a_state_is_published_at_its_own_blocks_boundary_only(client) -> None:
    groups = Groups([(4, -1, False), (12, -1, True)], 12)
    groups.register(client, "c59")
    digests = groups.digests(12)
    eight = client.store("c59", 0, 0, digests, b"", [[1, 2], [5]])
    assert eight.code == "bad_request" and "2 block ids for info 0" in eight.message
    assert client.store("c59", 0, 0, digests, b"", [[1, 2, 3], [5]]).stored == 2
    assert client.lookup("c59", "r", digests, 8).tokens == 0
    assert client.lookup("c59", "s", digests, 12).tokens == 12
    with pytest.raises(RemoteError, match="16"):
        Groups([(4, -1, False), (12, -1, True)], 16).register(client, "c59-b")


def test_case_62_null_state_slots_are_neither_read_nor_written(client) -> None:
    groups = Groups([(16, -1, False), (16, -1, True)], 16)
    groups.register(client, "c62")
    groups.kv["layer.1"][0] = 0xEE
    digests = groups.digests(48)
    assert client.store("c62", 0, 0, digests, b"", [[1, 2, 3], [0, 0, 9]]).stored == 4
    assert client.retrieve("c62", 0, "r", digests, 0, [[4, 5, 6], [0, 0, 5]]).ok
    assert groups.page(1, 0) == 0xEE and groups.page(1, 5) == 9


# K7: the other side goes away, or fails


def test_case_71_a_hit_that_lost_an_object_fails_for_all_its_blocks(server, client) -> None:
    pool = TestPool()
    register(client, pool, "c71", namespace="c71")
    digests = prompt(71, 3)
    ids = pool.all_ids(3)
    pool.write(digests, ids)
    assert client.store("c71", 0, 0, digests, b"", ids).stored == 9
    assert client.lookup("c71", "r", digests, 96).tokens == 96
    client.release("c71", "r")
    assert client.clear("c71") == 3
    assert (
        client.store(
            "c71",
            0,
            0,
            first(digests, 2),
            b"",
            [i[: 2 * k.blocks_per_chunk] for k, i in zip(HYBRID, ids, strict=True)],
        ).stored
        == 6
    )
    pool.wipe()
    reply = client.retrieve("c71", 0, "r", digests, 0, pool.load_ids(96))
    assert (reply.ok, reply.code) == (False, "missing")
    assert "block id" in reply.message
    assert all(bool((cache[1:] == 0x55).all()) for cache in pool.kv.values()), "not half written"


def test_case_73_idle_is_not_dead_and_a_lost_registration_heals() -> None:
    with running_server(lease_s=0.2) as server, server.client() as client:
        pool = TestPool()
        register(client, pool)
        digests, ids = prompt(73, 2), pool.all_ids(2)
        pool.write(digests, ids)
        time.sleep(1.5)
        assert client.store("i", 0, 0, digests, b"", ids).stored == 6, "idle for many leases"
        handlers = server.server.handlers
        lost = handlers.registrations.get("i", 0)
        assert lost is not None
        server.server.call_later(lambda: handlers.registrar.close(lost))
        while handlers.registrations.get("i", 0) is not None:
            time.sleep(0.005)
        digests = prompt(74, 2)
        pool.write(digests, ids)
        reply = client.store("i", 0, 0, digests, b"", ids)
        assert (reply.code, reply.stored) == ("", 6), "the next operation registers again"


def test_case_73_a_peer_that_the_server_has_forgotten_heals() -> None:
    with running_server() as server, server.client() as client:
        pool = TestPool()
        register(client, pool)
        handlers = server.server.handlers
        for peer in handlers.peers.all():
            server.server.call_later(lambda peer=peer: handlers.drop_peer(peer, "forgotten"))
        while len(handlers.peers):
            time.sleep(0.005)
        digests, ids = prompt(73, 2), pool.all_ids(2)
        pool.write(digests, ids)
        assert client.store("i", 0, 0, digests, b"", ids).stored == 6


@pytest.mark.parametrize("asked_before", [False, True], ids=["in the gap", "before the gap"])
def test_case_83_a_lookup_given_up_while_the_server_is_away_pins_nothing(
    asked_before: bool,
) -> None:
    with running_server() as server, server.client() as client:
        pool = TestPool()
        register(client, pool)
        digests, ids = prompt(83, 2), pool.all_ids(2)
        pool.write(digests, ids)
        assert client.store("i", 0, 0, digests, b"", ids).stored == 6
        link = client._link
        done = threading.Event()
        if asked_before:
            client.lookup_submit("i", "r", digests, 64)
            client.ping()
            assert client.status()["leases"] == 1

        def while_the_server_is_away() -> None:
            link._connect_again("test")
            client.lookup_submit("i", "r", digests, 64)
            client.release("i", "r")
            client.lookup_submit("i", "kept", digests, 64)
            done.set()

        link._inbox.put(while_the_server_is_away)
        assert done.wait(10) and link.wait_ready(10)
        client.ping()
        assert client.status()["leases"] == 1, "that of the lookup that nobody has given up"
        client.release("i", "kept")
        assert client.status()["leases"] == 0


def test_case_83_an_answer_that_comes_late_does_not_end_a_newer_lease() -> None:
    with running_server() as server, server.client() as client:
        pool = TestPool()
        register(client, pool)
        digests, ids = prompt(83, 2), pool.all_ids(2)
        pool.write(digests, ids)
        assert client.store("i", 0, 0, digests, b"", ids).stored == 6
        stalled = threading.Event()
        server.server.call_later(lambda: stalled.wait(20))
        client.lookup_submit("i", "r", digests, 64, limit_s=0.05)
        while (first := client.lookup_poll("r")) is None:
            time.sleep(0.005)
        assert (first.tokens, first.reason) == (0, "timeout")
        client.lookup_submit("i", "r", digests, 64, limit_s=20)
        stalled.set()
        while (second := client.lookup_poll("r")) is None:
            time.sleep(0.005)
        assert second.tokens == 64
        client.ping()
        assert client.status()["leases"] == 1


def test_the_client_knows_how_long_a_lease_lasts() -> None:
    with running_server(lease_s=7.0) as server, server.client() as client:
        assert client.lease_s == 7.0
    assert client.lease_s is None


def test_case_74_a_dead_client_whose_event_never_fires_holds_up_nobody(
    processes: Nursery, url: str
) -> None:
    server = processes.start("server", url=url, host_bytes=4 << 20)
    server.call("ready")
    driver = processes.start("driver", url=url, instance="dead")
    driver.call("register")
    driver.call("store_with_event_that_never_fires", 1, 3)
    with HmaClient(url) as observer:
        observer.connect()
        assert observer.status()["open_copies"] == 1
        driver.kill()
        started = time.monotonic()
        observer.ping(5)
        other = processes.start("driver", url=url, instance="alive")
        other.call("register")
        while observer.status()["open_copies"]:
            assert time.monotonic() - started < 5
            time.sleep(0.01)
        assert [each["instance_id"] for each in observer.status()["registrations"]] == ["alive"]


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_case_76_a_restarted_server_is_found_again(processes: Nursery, url: str, scheme) -> None:
    if scheme == "tcp":
        url = f"tcp://127.0.0.1:{free_port()}"
    server = processes.start("server", url=url, host_bytes=4 << 20)
    server.call("ready")
    driver = processes.start("driver", url=url)
    driver.call("register")
    server.kill()
    gap = [driver.call("store", 1, 3, 20.0) for _ in range(3)]
    assert {(code, stored) for code, stored, _ in gap} == {("unavailable", 0)}
    # the best of three: what the machine's other work adds is not ours
    assert min(waited for _, _, waited in gap) < 1 and max(waited for _, _, waited in gap) < 10
    server = processes.start("server", url=url, host_bytes=4 << 20)
    server.call("ready")
    assert driver.call("connected", 10.0)
    assert driver.call("store", 1, 3, 5.0)[:2] == ("", 9)


def test_case_77_registering_from_another_thread_works(client) -> None:
    pool = TestPool()
    register(client, pool, "c77")
    done = []
    thread = threading.Thread(target=lambda: done.append(register(client, pool, "c77")))
    thread.start()
    thread.join(60)
    assert done and done[0].ranks == 1


def test_case_79_a_killed_clients_pool_goes_at_once_twenty_times(
    processes: Nursery, url: str
) -> None:
    server = processes.start("server", url=url, host_bytes=4 << 20)
    server.call("ready")
    settled = None
    with HmaClient(url) as observer:
        observer.connect()
        for cycle in range(20):
            driver = processes.start("driver", url=url)
            driver.call("register")
            assert len(observer.status()["registrations"]) == 1
            driver.kill()
            until = time.monotonic() + 3
            while observer.status()["registrations"]:
                assert time.monotonic() < until
                time.sleep(0.005)
            driver.close()
            if cycle == 4:
                settled = server.call("facts")
    assert settled is not None
    until = time.monotonic() + 10
    while True:
        after = server.call("facts")
        flat = after["descriptors"] <= settled["descriptors"]
        if flat and after["resident_bytes"] - settled["resident_bytes"] < 8 << 20:
            break
        assert time.monotonic() < until, (settled, after)
        time.sleep(0.05)


def test_case_79_the_same_rank_registering_again_replaces(client) -> None:
    pool = TestPool()
    for _ in range(3):
        register(client, pool, "c79")
    mine = [r for r in client.status()["registrations"] if r["instance_id"] == "c79"]
    assert len(mine) == 1


def test_case_80_one_pool_too_many_is_refused_by_the_settings_name() -> None:
    with (
        running_server(max_registrations=1) as server,
        server.client() as zero,
        server.client() as one,
    ):
        register(zero, TestPool(), world=2)
        with pytest.raises(RemoteError, match="--max-registrations is 1") as refused:
            register(one, TestPool(rank=1), world=2)
        assert refused.value.code == "too_many_registrations"
        status = zero.status()
        assert status["limits"]["max_registrations"] == 1 == len(status["registrations"])
        register(zero, TestPool(), world=2)


# K8: pins


@pytest.mark.parametrize(("hit", "local"), [(128, 80), (128, 128), (128, 0)])
def test_case_82_chunks_that_the_engine_has_itself_are_not_locked_for_ever(
    client, hit: int, local: int
) -> None:
    groups = Groups([(16, -1, False)], 16)
    groups.register(client, f"c82-{local}")
    name, digests = f"c82-{local}", groups.digests(hit)
    client.store(name, 0, 0, digests, b"", [np.arange(1, 9)])
    assert client.lookup(name, "r", digests, hit).tokens == hit
    if local == hit:
        client.release(name, "r")
    else:
        assert client.retrieve(name, 0, "r", digests, local, [np.arange(9, 17)]).ok
    until = time.monotonic() + 5
    while (status := client.status())["pinned_bytes"]:
        assert time.monotonic() < until
    assert status["leases"] == 0


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("mla", [False, True])
def test_case_85_every_rank_is_a_reader(server, ranks: int, mla: bool) -> None:
    name = f"c85-{ranks}-{mla}"
    digests = prompt(85, 2)
    clients = [HmaClient(server.url) for _ in range(ranks)]
    try:
        pools = [TestPool((FULL,), rank=rank) for rank in range(ranks)]
        for client, pool in zip(clients, pools, strict=True):
            register(
                client,
                pool,
                name,
                world=ranks,
                namespace=name,
                replicated_infos=[0] if mla else [],
            )
        ids = pools[0].all_ids(2)
        for rank, client in enumerate(clients):
            pools[rank].write(digests, ids)
            stored = client.store(name, rank, 0, digests, b"", ids).stored
            assert stored == (0 if mla and rank else 2)
        assert clients[0].lookup(name, "r", digests, 64).tokens == 64
        for rank, client in enumerate(clients):
            assert client.status()["leases"] == 1, "not before the last reader"
            assert client.retrieve(name, rank, "r", digests, 0, pools[rank].load_ids(64)).ok
        assert clients[0].status()["leases"] == 0
    finally:
        for client in clients:
            client.close()


def test_case_86_only_the_owner_unpins(client) -> None:
    pool = TestPool()
    register(client, pool, "c86", namespace="c86")
    digests, ids = prompt(86, 2), pool.all_ids(2)
    pool.write(digests, ids)
    client.store("c86", 0, 0, digests, b"", ids)
    client.lookup("c86", "promised", digests, 64)
    pinned = client.status()["pinned_bytes"]
    for _ in range(3):
        assert client.retrieve("c86", 0, "never looked up", digests, 0, pool.load_ids(64)).ok
        client.release("c86", "never looked up")
    assert client.status()["pinned_bytes"] == pinned > 0
    assert client.retrieve("c86", 0, "promised", digests, 0, pool.load_ids(64)).ok
    client.release("c86", "promised")
    client.release("c86", "promised")
    assert client.status()["pinned_bytes"] == 0


# K9: order


@pytest.mark.parametrize("direction", ["store", "retrieve"])
def test_case_91_both_directions_wait_for_the_producers_event(client, direction: str) -> None:
    pool = TestPool()
    register(client, pool, f"c91-{direction}", namespace=f"c91-{direction}")
    name, digests, ids = f"c91-{direction}", prompt(91, 2), pool.all_ids(2)
    event = CpuEvent()
    if direction == "store":
        pool.wipe()
        ticket = client.store_submit(
            name, 0, 0, digests, b"", ids, deadline_s=30, event=event.record()
        )
        time.sleep(0.3)
        assert ticket.poll() is None
        pool.write(digests, ids)
        event.fire()
        assert ticket.result().stored == 6
        pool.wipe()
        target = pool.load_ids(64)
        assert client.retrieve(name, 0, "r", digests, 0, target).ok
        assert pool.wrong(digests, target) == [], "what was stored is what the producer wrote"
        return
    pool.write(digests, ids)
    client.store(name, 0, 0, digests, b"", ids)
    pool.wipe()
    target = pool.load_ids(64)
    ticket = client.retrieve_submit(
        name, 0, "r", digests, 0, target, deadline_s=30, event=event.record()
    )
    time.sleep(0.3)
    assert ticket.poll() is None
    assert all(bool((cache[1:] == 0x55).all()) for cache in pool.kv.values()), "not a byte yet"
    event.fire()
    assert ticket.result().ok and pool.wrong(digests, target) == []


@pytest.mark.parametrize("direction", ["store", "retrieve"])
def test_an_event_that_never_fires_ends_at_the_deadline(client, direction: str) -> None:
    pool = TestPool()
    name = f"never-{direction}"
    register(client, pool, name, namespace=name)
    digests, ids, event = prompt(92, 2), pool.all_ids(2), CpuEvent()
    started = time.monotonic()
    if direction == "store":
        reply = client.store(name, 0, 0, digests, b"", ids, deadline_s=0.2, event=event.record())
        assert reply.code in ("deadline", "timeout")
    else:
        pool.write(digests, ids)
        client.store(name, 0, 0, digests, b"", ids)
        pool.wipe()
        loaded = client.retrieve(
            name, 0, "r", digests, 0, pool.load_ids(64), deadline_s=0.2, event=event.record()
        )
        assert loaded.code in ("deadline", "aborted", "timeout")
        event.fire()
        assert all(bool((cache[1:] == 0x55).all()) for cache in pool.kv.values())
    assert time.monotonic() - started < 5
    assert client.lookup(name, "r2", digests, 64).tokens == (0 if direction == "store" else 64)
