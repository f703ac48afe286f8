"""LMCache's operation and plan entry on the Triton kernels, interpreted, against LMCache's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from lmcache.v1.platform import torch_ops
from support.lmcache_cases import Case, Setting, assert_planar_rows, refuse
from support.lmcache_context import RETRIEVE, STORE, Layers, registered

from hma_triton.integration.lmcache import install, uninstall
from hma_triton.integration.lmcache.executors import Executors
from hma_triton.integration.lmcache.fallthrough import FallthroughLog
from hma_triton.integration.lmcache.operation import BlockTransfer
from hma_triton.kernels.triton_copier import TritonCopier
from hma_triton.kv_format import EngineKVFormat

BOTH_WAYS = pytest.mark.parametrize("direction", [1, 0], ids=["store", "retrieve"])
TUPLES = (EngineKVFormat.NL_X_TWO_X_NB_BS_NH_HS, EngineKVFormat.NL_X_NP_X_NB_BS_ONE_HS)


@pytest.fixture
def executors(copier: TritonCopier) -> Iterator[Executors]:
    made = Executors(copier)
    yield made
    made.close()


@BOTH_WAYS
@pytest.mark.parametrize("fmt", list(EngineKVFormat), ids=lambda f: f.name)
def test_every_format(
    executors: Executors, copier: TritonCopier, fmt: EngineKVFormat, direction: int
) -> None:
    ours = BlockTransfer(refuse, executors, FallthroughLog(), planar_rows=False)
    pointers = fmt not in TUPLES
    for skip, given in ((0, None), (3, 5)):
        case = Case(fmt, layers=2, skip=skip, given=given, seed=skip)
        mine, theirs = Setting.make(case), Setting.make(case)
        for setting, operation in (
            (mine, ours.multi_layer_block_kv_transfer),
            (theirs, torch_ops.multi_layer_block_kv_transfer),
        ):
            setting.call(operation, direction, pointers=pointers, object_pointers=pointers)
        assert torch.equal(mine.arena.bytes, theirs.arena.bytes)
    assert copier.launch_count > 0


@BOTH_WAYS
def test_blocks_that_lie_apart(executors: Executors, direction: int) -> None:
    ours = BlockTransfer(refuse, executors, FallthroughLog(), planar_rows=False)
    case = Case(EngineKVFormat.NL_X_NB_NH_BS_CS, padding=40, head_size=3)
    mine, theirs = Setting.make(case), Setting.make(case)
    mine.call(ours.multi_layer_block_kv_transfer, direction, pointers=True, object_pointers=True)
    theirs.call(torch_ops.multi_layer_block_kv_transfer, direction)
    assert torch.equal(mine.arena.bytes, theirs.arena.bytes)


@BOTH_WAYS
def test_planar_pages_become_rows_on_devices(executors: Executors, direction: int) -> None:
    ours = BlockTransfer(refuse, executors, FallthroughLog(), planar_rows=True)
    assert_planar_rows(ours.multi_layer_block_kv_transfer, direction)


def test_an_object_group_in_one_call(copier: TritonCopier) -> None:
    """Through LMCache's planner: three kernel groups, two chunks, there and back."""
    layers = [
        Layers(2, (40, 2, 8, 24)),
        Layers(1, (40, 2, 16, 24), window=16),
        Layers(2, (40, 16, 132), torch.uint8),
    ]

    def there_and_back() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        with registered(layers, 32, 2, False) as cache:
            cache.move(STORE, 0)
            stored = cache.object_bytes(0)
            for pool in cache.pools:
                pool.view(torch.uint8).fill_(0xAB)
            cache.move(RETRIEVE, 0, batch=2, skip_tokens=16)
            return stored, cache.pool_bytes()

    own = there_and_back()
    install(copier)
    try:
        before = copier.launch_count
        ours = there_and_back()
        assert copier.launch_count - before == 2 * len(layers)
    finally:
        uninstall()
    for left, right in zip(own, ours, strict=True):
        assert all(map(torch.equal, left, right))
