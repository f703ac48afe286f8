"""`bench copy --compare lmcache`: both sides move the same bytes of the same pages."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from hma_triton.cli.bench_copy import app
from hma_triton.cli.copy_case import (
    Register,
    RequestSize,
    make_case,
    model_registration,
    shape_registration,
)
from hma_triton.cli.copy_peers import lmcache_copy
from hma_triton.errors import UnsupportedLayoutError
from hma_triton.kernels.addressing import Direction
from hma_triton.kernels.cpu import CpuCopier

SHAPES = "(2,9,16,2,64):bfloat16:3;(1,9,32,1,576):uint8:2"
CASES: dict[str, tuple[Register, int]] = {
    "shapes": (partial(shape_registration, SHAPES), 512),
    "heads first, windows": (partial(model_registration, "gpt-oss-20b", "cuda100"), 256),
    "states": (partial(model_registration, "qwen3.5-0.8b", "cpu"), 1280),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_bytes_move(name: str) -> None:
    register, tokens = CASES[name]
    case = make_case(name, register, RequestSize(tokens), 1, "token_major")
    before = case.pool.clone()
    copier = CpuCopier(1)
    for group in case.groups:
        for held in group.objects:
            held.fill_(0xEE)
        lmcache_copy(case, group, Direction.STORE, 1)()
        theirs = [held.clone() for held in group.objects]
        for held in group.objects:
            held.fill_(0xDD)
        for spec, ids, places in group.blocks:
            copier.copy_blocks(spec, Direction.STORE, ids, places)
        for found, expected in zip(group.objects, theirs, strict=True):
            assert torch.equal(found, expected), group.kernel_group_index
        lmcache_copy(case, group, Direction.RETRIEVE, 1)()
        assert torch.equal(case.pool, before)
    case.engine.close()


def test_what_lmcache_cannot_move_is_a_reason_and_no_number() -> None:
    case = make_case("s", partial(shape_registration, SHAPES), RequestSize(512), 1, "opaque")
    narrow = [held[:-1] for held in case.groups[0].objects]
    broken = type(case.groups[0])(0, case.groups[0].block_ids, case.groups[0].blocks, tuple(narrow))
    with pytest.raises(UnsupportedLayoutError, match="LMCache cannot move kernel group 0: "):
        lmcache_copy(case, broken, Direction.STORE, 1)
    case.engine.close()


def test_rows_have_both_ratios() -> None:
    arguments = ["--kvcache-shape-spec", SHAPES, "--tokens", "512", "--repeats", "1"]
    result = CliRunner().invoke(
        app, [*arguments, "--threads", "1", "--compare", "memcpy,lmcache"], catch_exceptions=False
    )
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines() if line.startswith("(2,9")]
    assert len(rows) == 3 * 2 * 3
    ours = [row for row in rows if row[4] == "hma-triton"]
    assert all(len(row) == 13 for row in ours)
    assert "x LMCache:" in result.output
