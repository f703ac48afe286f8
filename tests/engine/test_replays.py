"""Families that do not run on the CPU build: their pools and schedules, against both halves.

Mamba models register and schedule there; what vLLM 0.32 registered and which blocks it gave is in
`data/recorded_schedules.json`. Sparse MLA, DeepSeek-V4, GLM and Kimi-Linear do not start; their
pools come from the package's geometries, their schedules follow vLLM's rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.replay_tools import tokens_of
from support.schedule_replay import ReplayEngine

from hma_triton.config import ServerConfig
from hma_triton.geometries import (
    build_cache_config,
    build_raw_caches,
    list_geometries,
    load_geometry,
    stand_ins,
)
from hma_triton.integration.vllm.engine_shape import engine_shape
from hma_triton.server.launch import EmbeddedServer, start_embedded

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "recorded_schedules.json").read_text()
)
NEVER_START = ("deepseek-v3.2", "deepseek-v4-flash", "glm-5.2", "kimi-linear-48b-a3b-instruct")


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    made = start_embedded(ServerConfig(url="ipc:///replaced", host_bytes=4 << 30))
    yield made
    made.close()


def recorded_pool(run: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """The config and the tensors of a recorded run, over one storage."""
    shapes = {tensor["name"]: tensor for tensor in run["tensors"]}
    groups = []
    for group in run["groups"]:
        shape = shapes[group["layers"][0]]["shape"]
        if group["cls"] == "MambaSpec":
            spec: Any = stand_ins.MambaSpec(
                block_size=group["block_size"],
                shapes=((shape[-1],),),
                dtypes=(torch.int8,),
                page_size_bytes=group["page"],
                mamba_cache_mode="align",
            )
        else:
            spec = stand_ins.FullAttentionSpec(
                block_size=group["block_size"],
                num_kv_heads=shape[1],
                head_size=shape[3],
                dtype=torch.bfloat16,
                num_states=group["block_size"],
                unpadded_page_size_bytes=group["page"],
                page_size_bytes=group["page"],
            )
        groups.append(stand_ins.KVCacheGroupSpec(layer_names=group["layers"], kv_cache_spec=spec))
    end = max(t["byte_offset"] + t["shape"][0] * _block_bytes(t) for t in run["tensors"])
    storage = torch.zeros(end, dtype=torch.int8)
    caches = {}
    for tensor in run["tensors"]:
        dtype = getattr(torch, tensor["dtype"].removeprefix("torch."))
        view = storage.view(dtype) if dtype != torch.int8 else storage
        offset = tensor["byte_offset"] // dtype.itemsize
        caches[tensor["name"]] = view.as_strided(tensor["shape"], tensor["stride"], offset)
    config = stand_ins.KVCacheConfig(
        num_blocks=run["num_blocks"], kv_cache_groups=groups, kv_cache_layout="LBHNC"
    )
    return config, caches


def _block_bytes(tensor: dict[str, Any]) -> int:
    dtype = getattr(torch, tensor["dtype"].removeprefix("torch."))
    return int(tensor["stride"][0]) * int(dtype.itemsize)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_schedules(name: str, server: EmbeddedServer) -> None:
    run = RECORDED[name]
    config, caches = recorded_pool(run)
    engine = ReplayEngine(server.url, config, caches, name=name, model=name)
    try:
        tokens = tokens_of(600)
        first = engine.request("a", tokens)
        assert engine.matched(first) == 0
        tables = run["first_step"]
        engine.allocate(first, tables, 0)
        # Mamba-2 runs 600 tokens in one step and keeps the state at 512 beside the last one
        states = [index for index, group in enumerate(run["groups"]) if group["cls"] == "MambaSpec"]
        at_512 = {index: 512 // run["groups"][index]["block_size"] - 1 for index in states}
        offers = {"a": [(index, tables[index][at_512[index]], 512) for index in states]}
        if run["first_step_tokens"] == 512:
            offers = {}
        engine.compute(first, run["first_step_tokens"], tables, offers=offers)
        engine.finish(first)
        right = engine.snapshot(tables, 512)
        engine.wipe()

        stored = engine.request("again", tokens)
        assert engine.matched(stored) == 512
        second = (run["second_request"] or {"block_ids": tables})["block_ids"]
        cut = [
            table[: 512 // group["block_size"]]
            for table, group in zip(second, run["groups"], strict=True)
        ]
        engine.allocate(stored, cut, 512)
        assert engine.drain().failed == set()
        assert engine.snapshot(cut, 512) == right
    finally:
        engine.close()


def tables_for(engine: ReplayEngine, config: Any, hit: int, start: int) -> tuple[Any, int]:
    """Block tables that vLLM would give for a hit of `hit` tokens, from block `start` on."""
    windows = {info.engine_group_id: info for info in engine.infos}
    tables: list[list[int]] = []
    for group in range(len(config.kv_cache_groups)):
        info = windows.get(group)
        if info is None:
            tables.append([])
            continue
        count = hit // info.tokens_per_block
        first = 0
        if info.recurrent_state:
            first = count - 1
        elif info.sw_size_tokens > 0:
            first = max(0, hit - info.sw_size_tokens + 1) // info.tokens_per_block
        tables.append([0] * first + list(range(start, start + count - first)))
        start += count - first
    return tables, start


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in NEVER_START else pytest.mark.long)
        for name in list_geometries()
    ],
)
def test_pools_of_real_models(name: str, server: EmbeddedServer) -> None:
    geometry = load_geometry(name)
    blocks = _blocks_for(geometry)
    config = build_cache_config(geometry, blocks)
    engine = ReplayEngine(
        server.url, config, build_raw_caches(geometry, blocks), name=name, model=name
    )
    try:
        hit = engine.shape.chunk_tokens
        tokens = tokens_of(hit + 5)
        first = engine.request("a", tokens)
        assert engine.matched(first) == 0
        tables, end = tables_for(engine, config, hit, 1)
        engine.allocate(first, tables, 0)
        engine.compute(first, hit, tables)
        right = engine.snapshot(tables, hit)
        engine.finish(first)
        engine.wipe()

        second = engine.request("b", tokens)
        assert engine.matched(second) == hit
        others, end = tables_for(engine, config, hit, end)
        assert end <= blocks
        engine.allocate(second, others, hit)
        assert engine.drain().failed == set()
        assert engine.snapshot(others, hit) == right
    finally:
        engine.close()


def _blocks_for(geometry: Any) -> int:
    """Blocks for two hits of one chunk in every group, and the null block."""
    config = build_cache_config(geometry, 1)
    shape = engine_shape(config)
    return 1 + 2 * sum(shape.chunk_tokens // tokens for tokens in shape.tokens_per_block.values())
