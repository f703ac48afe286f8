"""Stores, hits and loads through a real server and shared memory, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from support.server_pools import (
    CHUNK_TOKENS,
    FULL,
    HYBRID,
    NULL,
    STATE,
    WINDOW,
    TestPool,
    first,
    prompt,
)
from support.server_thread import ThreadedServer, register, running_server

from hma_triton.client import HmaClient
from hma_triton.errors import RemoteError
from hma_triton.group_view import EngineGroupInfo
from hma_triton.tensor_ipc import ImportedCaches


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    with running_server(verify="all") as running:
        yield running


@pytest.fixture
def client(server: ThreadedServer) -> Iterator[HmaClient]:
    with server.client() as client:
        yield client


def test_a_prefix_comes_back_in_other_blocks(client: HmaClient) -> None:
    pool = TestPool()
    register(client, pool, "back")
    digests = prompt(1, 5)
    ids = pool.all_ids(5)
    pool.write(digests, ids)
    stored = client.store("back", 0, 0, digests, b"", ids)
    assert (stored.code, stored.stored, stored.skipped) == ("", 15, 0)
    pool.wipe()
    hit = client.lookup("back", "r", digests, 5 * CHUNK_TOKENS)
    assert (hit.tokens, hit.chunks, hit.reason) == (160, 5, "all")
    target = pool.load_ids(160, first=7)
    loaded = client.retrieve("back", 0, "r", digests, 0, target)
    assert loaded.ok, loaded
    assert pool.wrong(digests, target) == []
    assert pool.null_blocks_untouched()
    named = {id_ for of_group in target for id_ in of_group.tolist()}
    for kind, of_group in zip(HYBRID, target, strict=True):
        others = [b for b in range(1, pool.blocks) if b not in of_group]
        for layer in range(kind.layers):
            assert (pool.kv[f"{kind.name}.{layer}"][others] == 0x55).all()
    assert named


def test_only_what_is_behind_the_skip_is_written(client: HmaClient) -> None:
    pool = TestPool((FULL, WINDOW))
    register(client, pool, "skip")
    digests = prompt(2, 4)
    ids = pool.all_ids(4)
    pool.write(digests, ids)
    assert client.store("skip", 0, 0, digests, b"", ids).stored == 8
    pool.wipe()
    target = pool.load_ids(128, first=3)
    assert client.retrieve("skip", 0, "r", digests, 64, target).ok
    for kind, of_group in zip(pool.kinds, target, strict=True):
        held = of_group[: 64 // kind.tokens_per_block]
        assert (pool.kv[f"{kind.name}.0"][held[held != NULL]] == 0x55).all()
        of_group[: 64 // kind.tokens_per_block] = NULL
    assert pool.wrong(digests, target) == []


def test_a_later_range_hangs_on_its_parent(client: HmaClient) -> None:
    pool = TestPool()
    register(client, pool, "parent")
    digests = prompt(3, 6)
    ids = pool.all_ids(6)
    pool.write(digests, ids)

    def part(start: int, end: int) -> tuple[bytes, bytes, list[np.ndarray]]:
        own = digests[start * 32 : end * 32]
        before = digests[(start - 1) * 32 : start * 32] if start else b""
        blocks = [
            i[start * k.blocks_per_chunk : end * k.blocks_per_chunk]
            for k, i in zip(HYBRID, ids, strict=True)
        ]
        return own, before, blocks

    own, before, blocks = part(3, 6)
    orphan = client.store("parent", 0, 3, own, before, blocks)
    assert (orphan.code, orphan.stored) == ("", 0), "no hit can reach chunks without their prefix"
    own, before, blocks = part(0, 3)
    assert client.store("parent", 0, 0, own, before, blocks).stored == 9
    own, before, blocks = part(3, 6)
    assert client.store("parent", 0, 3, own, before, blocks).stored == 9
    assert client.lookup("parent", "r", digests, 192).tokens == 192


def test_what_is_there_is_not_copied_again(client: HmaClient) -> None:
    pool = TestPool()
    register(client, pool, "again")
    digests = prompt(4, 3)
    ids = pool.all_ids(3)
    pool.write(digests, ids)
    assert client.store("again", 0, 0, digests, b"", ids).stored == 9
    pool.wipe()
    again = client.store("again", 0, 0, digests, b"", ids)
    assert (again.stored, again.skipped, again.nbytes) == (0, 9, 0)
    target = pool.load_ids(96)
    assert client.retrieve("again", 0, "r", digests, 0, target).ok
    assert pool.wrong(digests, target) == []


def test_two_engines_share_hits_and_salted_prompts_do_not(server: ThreadedServer) -> None:
    with server.client() as one, server.client() as two:
        first_pool, second_pool = TestPool(), TestPool()
        register(one, first_pool, "share-a")
        register(two, second_pool, "share-b")
        digests = prompt(5, 3)
        ids = first_pool.all_ids(3)
        first_pool.write(digests, ids)
        assert one.store("share-a", 0, 0, digests, b"", ids).stored == 9
        assert two.lookup("share-b", "r", digests, 96).tokens == 96
        target = second_pool.load_ids(96)
        assert two.retrieve("share-b", 0, "r", digests, 0, target).ok
        assert second_pool.wrong(digests, target) == []
        salted = prompt(5, 3, salt="tenant-2")
        assert two.lookup("share-b", "r2", salted, 96).tokens == 0
        register(two, second_pool, "share-c", namespace="other")
        assert two.lookup("share-c", "r3", digests, 96).tokens == 0


def test_every_rank_must_have_stored(server: ThreadedServer) -> None:
    with server.client() as scheduler, server.client() as zero, server.client() as one:
        pools = [TestPool(rank=0), TestPool(rank=1)]
        register(zero, pools[0], "tp", world=2)
        digests = prompt(6, 3)
        early = scheduler.lookup("tp", "r0", digests, 96)
        assert (early.tokens, early.reason) == (0, "ranks: 1 of 2 are registered")
        register(one, pools[1], "tp", world=2)
        ids = pools[0].all_ids(3)
        for pool in pools:
            pool.write(digests, ids)
        assert zero.store("tp", 0, 0, digests, b"", ids).stored == 9
        assert scheduler.lookup("tp", "r1", digests, 96).tokens == 0
        half = [i[: 2 * k.blocks_per_chunk] for k, i in zip(HYBRID, ids, strict=True)]
        assert one.store("tp", 1, 0, first(digests, 2), b"", half).stored == 6
        hit = scheduler.lookup("tp", "r2", digests, 96)
        assert hit.tokens == 64
        target = pools[0].load_ids(64, first=9)
        for client, pool in zip((zero, one), pools, strict=True):
            pool.wipe()
            assert client.retrieve("tp", pool.rank, "r2", first(digests, 2), 0, target).ok
            assert pool.wrong(first(digests, 2), target) == [], "each rank has its own bytes"


def test_replicated_groups_are_stored_once_and_read_by_all(server: ThreadedServer) -> None:
    with server.client() as zero, server.client() as one:
        pools = [TestPool((FULL, STATE), rank=0), TestPool((FULL, STATE), rank=0)]
        for rank, client in enumerate((zero, one)):
            pools[rank].rank = rank
            register(client, pools[rank], "mla", world=2, replicated_infos=[0])
        digests = prompt(7, 3)
        ids = pools[0].all_ids(3)
        for pool in pools:
            pool.rank, rank = 0, pool.rank
            pool.write(digests, ids)
            pool.rank = rank
        assert one.store("mla", 1, 0, digests, b"", ids).stored == 3, "rank 1 stores its state only"
        assert zero.store("mla", 0, 0, digests, b"", ids).stored == 6
        assert zero.lookup("mla", "r", digests, 96).tokens == 96
        target = pools[1].load_ids(96, first=4)
        pools[1].wipe()
        assert one.retrieve("mla", 1, "r", digests, 0, target).ok
        pools[1].rank = 0
        assert pools[1].wrong(digests, target) == []


def test_merged_object_groups(server: ThreadedServer) -> None:
    with server.client() as client:
        pool = TestPool((FULL, WINDOW))
        reply = register(client, pool, "merged", separate_object_groups=False)
        assert len(reply.object_nbytes) == 1
        digests = prompt(8, 3)
        ids = pool.all_ids(3)
        pool.write(digests, ids)
        assert client.store("merged", 0, 0, digests, b"", ids).stored == 3
        pool.wipe()
        assert client.lookup("merged", "r", digests, 96).tokens == 96
        target = pool.load_ids(96, first=2)
        assert client.retrieve("merged", 0, "r", digests, 0, target).ok
        assert pool.wrong(digests, target) == []


def test_clear_forgets_the_namespace_alone(client: HmaClient) -> None:
    kept, cleared = TestPool(), TestPool()
    register(client, kept, "kept", namespace="kept")
    register(client, cleared, "cleared", namespace="cleared")
    digests = prompt(9, 4)
    ids = kept.all_ids(4)
    for pool, name in ((kept, "kept"), (cleared, "cleared")):
        pool.write(digests, ids)
        assert client.store(name, 0, 0, digests, b"", ids).stored == 12
    assert client.clear("cleared") == 4
    assert client.lookup("cleared", "r", digests, 128).tokens == 0
    assert client.lookup("kept", "r", digests, 128).tokens == 128
    assert client.store("cleared", 0, 0, digests, b"", ids).stored == 12


def test_ranks_of_one_instance_must_agree(server: ThreadedServer) -> None:
    with server.client() as zero, server.client() as one:
        register(zero, TestPool(rank=0), "agree", world=2)
        with pytest.raises(RemoteError, match="world size 3") as refused:
            register(one, TestPool(rank=1), "agree", world=3)
        assert refused.value.code == "bad_registration"
        with pytest.raises(RemoteError, match="another key fingerprint than rank 0"):
            register(one, TestPool((FULL, WINDOW), rank=1), "agree", world=2)
        with pytest.raises(RemoteError, match="rank 2 of a world of 2"):
            register(one, TestPool(rank=2), "agree", world=2)


@pytest.mark.parametrize(
    ("world", "stage"), [(600, "3 object groups on 600 ranks"), (1, "chunk of 32 tokens")]
)
def test_a_refused_registration_lets_go_of_the_pool(world: int, stage: str, monkeypatch) -> None:
    """Whatever refuses it; a GPU's memory does not go with the last reference."""
    closed = []
    close = ImportedCaches.close
    monkeypatch.setattr(
        ImportedCaches, "close", lambda caches: (closed.append(caches), close(caches))[1]
    )
    pool = TestPool()
    if world == 1:
        pool.infos[0] = msgspec.structs.replace(pool.infos[0], tokens_per_block=48)
    with running_server() as server, server.client() as client:
        with pytest.raises(RemoteError, match=stage):
            register(client, pool, world=world)
        assert len(closed) == 1


def test_wrong_lengths_are_refused_before_a_byte_moves(client: HmaClient) -> None:
    pool = TestPool()
    register(client, pool, "short")
    digests = prompt(10, 2)
    ids = pool.all_ids(2)
    short = [ids[0][:-1], *ids[1:]]
    reply = client.store("short", 0, 0, digests, b"", short)
    assert reply.code == "bad_request" and "3 block ids for info 0: 2 chunks" in reply.message
    outside = [np.append(ids[0][:-1], 9999), *ids[1:]]
    reply = client.store("short", 0, 0, digests, b"", outside)
    assert reply.code == "bad_request" and "9999" in reply.message
    assert client.lookup("short", "r", digests, 64).tokens == 0
    missing = client.retrieve("short", 0, "r", digests, 0, pool.load_ids(64))
    assert (missing.ok, missing.code) == (False, "missing")


NB, BS, NH, HS = 6, 16, 4, 8


def tokens_first() -> torch.Tensor:
    return torch.zeros(NB, BS, NH, HS, dtype=torch.uint8)


def heads_first() -> torch.Tensor:
    return torch.zeros(NB, NH, BS, HS, dtype=torch.uint8).permute(0, 2, 1, 3)


def planes_apart() -> list[torch.Tensor]:
    return [tokens_first(), tokens_first()]


def planes_together() -> list[torch.Tensor]:
    return list(torch.zeros(NB, 2, BS, NH, HS, dtype=torch.uint8).unbind(1))


@pytest.mark.parametrize(
    ("one", "other", "engine", "hints"),
    [
        (lambda: {"l": (tokens_first(), tokens_first())}, None, "vllm", {}),
        (lambda: {"l": tokens_first()}, None, "vllm", {"formats": '["NL_X_NB_BS_NH_CS"]'}),
        (lambda: {"l": tokens_first()}, None, "sglang", {"kv_list_layout": "unified"}),
        (
            lambda: {"k": tokens_first(), "v": tokens_first()},
            None,
            "sglang",
            {"kv_list_layout": "k_v"},
        ),
        (
            lambda: {"l": tuple(planes_apart())},
            lambda: {"l": tuple(planes_together())},
            "vllm",
            {},
        ),
        (
            lambda: dict(zip("ab", planes_apart(), strict=True)),
            lambda: dict(zip("ab", planes_together(), strict=True)),
            "vllm",
            {"kv_layout": "NHD"},
        ),
    ],
    ids=["plane-tuples", "stated", "unified", "k_v-lists", "planes-together", "layers-together"],
)
def test_one_format_that_lies_in_two_ways_never_mixes(one, other, engine: str, hints) -> None:
    """Objects take over the order of a page: where only strides tell, the fingerprint must too."""
    names = one().keys()
    turned = other or (
        lambda: {
            name: tuple(heads_first() for _ in cache) if isinstance(cache, tuple) else heads_first()
            for name, cache in one().items()
        }
    )
    layers = (0,) if engine == "sglang" else tuple(range(len(names)))
    with running_server() as server, server.client() as client:
        prints = [
            client.register_kv_caches(
                f"{number}",
                caches,
                "model",
                1,
                engine,
                {**hints, "tokens_per_block": "[16]"},
                [EngineGroupInfo(0, layers, BS)],
                chunk_tokens=32,
                timeout_s=60,
            ).fingerprint
            for number, caches in enumerate((one(), one(), turned()))
        ]
        assert prints[0] == prints[1], "the same engine twice shares"
        digests, ids = prompt(1, 1), [np.array([1, 2])]
        assert client.store("0", 0, 0, digests, b"", ids).stored == 1
        assert client.lookup("1", "r", digests, 32).tokens == 32
        assert client.lookup("2", "r", digests, 32).tokens == 0, prints
