"""`hma-triton bench server`: what it prints is what it measured, and a wrong byte ends it."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import pytest
import torch

from hma_triton.cli.copy_case import model_registration, shape_registration
from hma_triton.cli.main import app
from hma_triton.cli.server_sides import LOOKUP, PING, RETRIEVE, STORE, OurSide
from hma_triton.errors import TransferError

SHAPE = "(2,64,16,2,32):bfloat16:2;(1,64,16,1,64):uint8:3"


def test_rows_echo_the_geometry_and_have_percentiles(tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.csv"
    sizes = ("--tokens", "512", "--requests", "4", "--threads", "1")
    with pytest.raises(SystemExit) as ended:
        app(
            args=["bench", "server", "--kvcache-shape-spec", SHAPE, "--csv", str(path), *sizes],
            prog_name="hma-triton",
        )
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "(2,64,16,2,32):bfloat16:2;(1,64,16,1,64):uint8:3" in text
    assert "group 1: 3 layers, 16 tokens a block" in text
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["what"] for row in rows] == [PING, LOOKUP, STORE, RETRIEVE]
    moved = 512 * (2 * 2 * 2 * 32 * 2 + 3 * 64)
    for row in rows:
        assert row["method"] == "hma-triton" and row["repeats"] == "4" and row["tokens"] == "512"
        assert 0 < float(row["p50_ms"]) <= float(row["p90_ms"]) <= float(row["p99_ms"])
        assert float(row["per_s"]) > 0 and row["machine"] and row["torch"]
        assert int(row["nbytes"]) == (moved if row["what"] in (STORE, RETRIEVE) else 0)


def test_a_hybrid_model_by_name() -> None:
    register = partial(model_registration, "gemma-3-4b-it", "cpu")
    with OurSide(register, 256, 1, 1) as side:
        side.start()
        side.request(1)
        side.check()
        assert len(side.object_nbytes) >= 2 and side.nbytes == side.chunks * sum(side.object_nbytes)
        assert {name: len(taken) for name, taken in side.seconds.items()} == {
            PING: 1,
            STORE: 1,
            LOOKUP: 1,
            RETRIEVE: 1,
        }


def test_other_bytes_are_noticed() -> None:
    with OurSide(partial(shape_registration, SHAPE), 256, 1, 1) as side:
        side.start()
        side.request(1)
        side.check()
        cache: torch.Tensor = next(iter(side._caches.values()))
        cache[:, int(side.target[0][3])] += 1
        with pytest.raises(TransferError, match="object group 0: other bytes came back"):
            side.check()


def test_an_unknown_comparison_is_one_line(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        app(args=["bench", "server", "--compare", "memcpy"], prog_name="hma-triton")
    assert ended.value.code == 2
    assert "--compare knows lmcache, not 'memcpy'" in capsys.readouterr().err
