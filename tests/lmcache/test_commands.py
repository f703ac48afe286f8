"""`hma-triton lmcache-server` and `hma-triton bench lmcache`."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.lmcache_stack import OWN_SERVER, QUIET
from typer.testing import CliRunner

from hma_triton.cli import bench_lmcache
from hma_triton.errors import ConfigError
from hma_triton.kv_format import EngineKVFormat

SMALL = ["--megabytes", "2", "--repeats", "2", "--threads", "1", "--no-servers"]
COMMAND = [sys.executable, "-m", "hma_triton.cli.main"]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        args, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **QUIET}
    )


def test_every_argument_is_passed_on() -> None:
    """Its help is LMCache's help, its complaints are LMCache's."""
    ours = run(*COMMAND, "lmcache-server", "--help")
    theirs = run(*OWN_SERVER, "--help")
    assert ours.returncode == theirs.returncode == 0
    options = theirs.stdout[theirs.stdout.index("options:") :]
    assert "--l1-size-gb" in options and "--eviction-policy" in options
    assert ours.stdout.endswith(options)
    wrong = ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--no-such-option", "7"]
    answer = run(*COMMAND, "lmcache-server", *wrong)
    assert answer.returncode == 2
    assert "unrecognized arguments: --no-such-option 7" in answer.stderr


def test_bench_of_formats(tmp_path: Path) -> None:
    """Small, one thread, three layouts: rows of both operations and of a plain copy."""
    table = tmp_path / "rows.csv"
    formats = ["NL_X_NB_NH_BS_CS", "NL_X_NB_BSV_BSS", "NL_X_NP_X_NB_BS_ONE_HS"]
    options = [part for name in formats for part in ("--format", name)]
    answer = CliRunner().invoke(
        bench_lmcache.app,
        [*options, *SMALL, "--csv", str(table)],
        catch_exceptions=False,
    )
    assert answer.exit_code == 0
    assert "store: " in answer.output and "x LMCache over 3 layouts (mark 5 x:" in answer.output
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 3 * 2 * 3
    assert {row["method"] for row in rows} == {"hma-triton", "lmcache", "memcpy"}
    for row in rows:
        assert float(row["gb_per_s"]) == pytest.approx(
            int(row["nbytes"]) / float(row["p50_ms"]) / 1e6
        )
        assert (row["times_lmcache"] != "") == (row["method"] == "hma-triton")
        assert row["lmcache"] == "0.5.6"


def test_bench_refuses_unknown_layouts() -> None:
    with pytest.raises(ConfigError, match="no layout is called NB_XX; there are NB_NL_TWO"):
        CliRunner().invoke(bench_lmcache.app, ["--format", "NB_XX"], catch_exceptions=False)


@pytest.mark.long
def test_bench_of_servers() -> None:
    """Two running servers, each asked twice; every byte that comes back is checked."""
    rows = bench_lmcache.measure_servers(
        "(2,64,16,2,32):bfloat16:2;(1,64,16,1,96):bfloat16:3", 512, 2, 1, lambda: None
    )
    assert [(row.direction, row.method) for row in rows] == [
        ("store", "lmcache"),
        ("store", "hma-triton"),
        ("retrieve", "lmcache"),
        ("retrieve", "hma-triton"),
    ]
    assert all(row.repeats == 2 for row in rows)
    assert all(row.nbytes == 512 * (2 * 2 * 32 * 2 * 2 + 3 * 96 * 2) for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("fmt", list(EngineKVFormat), ids=lambda f: f.name)
def test_bench_of_every_format(fmt: EngineKVFormat) -> None:
    """Both operations give the same objects at a bench's size."""
    rows = bench_lmcache.measure_format(fmt, 8_000_000, 1, 1)
    assert len(rows) == 6
