"""`bench copy` on small pools: every number of a row, the table, the files it writes."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hma_triton.cli.bench_copy import app
from hma_triton.cli.copy_case import (
    RequestSize,
    make_case,
    model_registration,
    shape_registration,
)
from hma_triton.cli.copy_rows import CopyRow
from hma_triton.cli.copy_run import check_bytes, measure
from hma_triton.cli.measuring import MachineFacts, geometric_mean, percentiles_ms
from hma_triton.errors import ConfigError, TransferError
from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array
from hma_triton.kernels.cpu import CpuCopier

SHAPES = "(2,9,16,2,64):bfloat16:3;(1,9,32,1,576):uint8:2"
# 256 tokens: 16 blocks x 2 planes x 3 layers x 16 x 2 x 64 x 2 bytes; 8 x 2 x 32 x 576
GROUP_BYTES = (16 * 2 * 3 * 16 * 2 * 64 * 2, 8 * 2 * 32 * 576)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_rows_of_a_shape(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    out = run(
        "--kvcache-shape-spec", SHAPES, "--tokens", "300", "--threads", "1", "--threads", "2",
        "--repeats", "3", "--csv", str(path), "--plot", str(tmp_path / "rows.png"),
    )  # fmt: skip
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [field.name for field in (*fields(CopyRow), *fields(MachineFacts))]
    # threads x (two groups and all) x directions x methods
    assert len(rows) == 2 * 3 * 2 * 2
    sizes = {"0": GROUP_BYTES[0], "1": GROUP_BYTES[1], "all": sum(GROUP_BYTES)}
    for row in rows:
        assert int(row["nbytes"]) == sizes[row["kernel_group"]]
        assert int(row["tokens"]) == 256
        assert float(row["p10_ms"]) <= float(row["p50_ms"]) <= float(row["p90_ms"])
        speed = int(row["nbytes"]) / float(row["p50_ms"]) / 1e6
        assert float(row["gb_per_s"]) == pytest.approx(speed)
        assert row["torch"] == torch.__version__
        assert row["numba"] != "none"
        assert (row["share_of_memcpy"] == "") == (row["method"] == "memcpy")
        assert row["times_lmcache"] == ""
    keyed = {
        (row["kernel_group"], row["threads"], row["direction"], row["method"]): row for row in rows
    }
    ours = {key[:3]: row for key, row in keyed.items() if key[3] == "hma-triton"}
    plain = {key[:3]: row for key, row in keyed.items() if key[3] == "memcpy"}
    for key, row in ours.items():
        share = float(plain[key]["p50_ms"]) / float(row["p50_ms"])
        assert float(row["share_of_memcpy"]) == pytest.approx(share)
    assert ours["0", "1", "store"]["run_bytes"] == str(16 * 2 * 64 * 2)
    assert ours["0", "1", "store"]["implementation"] == "cpu-compiled"
    assert "store, 2 thread(s); of a plain copy:" in out
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_in_token_rows_without_numba() -> None:
    out = run(
        "--model", "gpt-oss-20b", "--variant", "cuda100", "--tokens", "256", "--repeats", "1",
        "--threads", "1", "--object-layout", "token_major", "--implementation", "numpy",
    )  # fmt: skip
    lines = [line.split() for line in out.splitlines() if line.startswith("gpt-oss-20b")]
    assert {line[1] for line in lines} == {"0", "1", "all"}
    assert {line[4] for line in lines} == {"hma-triton", "memcpy"}
    # heads-first pages: a run is one head of one slot
    assert {line[6] for line in lines} == {"256"}


def test_nothing_to_compare_with() -> None:
    out = run("--kvcache-shape-spec", SHAPES, "--tokens", "256", "--repeats", "1", "--compare", "")
    assert "memcpy" not in out.split("of memcpy")[1].split("store, ")[0]


def test_what_cannot_be_measured_is_refused() -> None:
    for arguments, message in (
        (["--model", "no-such-model"], "fits no geometry"),
        (["--compare", "memcpy,fast"], "--compare knows memcpy and lmcache, not fast"),
        (["--kvcache-shape-spec", SHAPES, "--tokens", "100"], "100 tokens are less than one chunk"),
        (["--kvcache-shape-spec", SHAPES, "--implementation", "magic"], "'magic' is unknown"),
    ):
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    for option in ("--csv", "--plot"):
        target = tmp_path / "no such folder" / "file.png"
        arguments = ["--kvcache-shape-spec", SHAPES, "--tokens", "256", "--repeats", "1"]
        with pytest.raises(ConfigError, match=r"cannot be written to .*no such folder"):
            CliRunner().invoke(app, [*arguments, option, str(target)], catch_exceptions=False)


def test_a_request_of_a_model_is_what_its_windows_keep() -> None:
    case = make_case(
        "m",
        lambda blocks: model_registration("gemma-3-4b-it", "cpu", blocks),
        RequestSize(512),
        1,
        "opaque",
    )
    layout = case.engine.layout
    for group in case.groups:
        kept = layout.groups[group.kernel_group_index].kept_blocks
        assert len(group.block_ids) == kept * (512 // layout.chunk_tokens)
        assert 0 not in group.block_ids
        assert group.nbytes == sum(len(held) for held in group.objects)
    ids = np.concatenate([group.block_ids for group in case.groups])
    assert np.unique(ids).size == ids.size
    assert case.nbytes == case.engine.store_addresses(case.block_ids, case.object_addresses).nbytes
    case.engine.close()


class _Wrong(CpuCopier):
    """Flips one byte of what it stores."""

    def copy_blocks(
        self,
        spec: CopySpec,
        direction: Direction,
        block_ids: Int64Array,
        object_addresses: Int64Array,
    ) -> None:
        super().copy_blocks(spec, direction, block_ids, object_addresses)
        held = (np.ctypeslib.ctypes.c_uint8 * 1).from_address(int(object_addresses[0]))
        held[0] ^= 1


def test_wrong_bytes_are_never_timed() -> None:
    case = make_case(
        "s", lambda blocks: shape_registration(SHAPES, blocks), RequestSize(256), 1, "opaque"
    )
    check_bytes(case, CpuCopier(1))
    with pytest.raises(TransferError, match=r"s, kernel group 0: block .* differs from the ref"):
        check_bytes(case, _Wrong(1))
    case.engine.close()


def test_measured_retrieve_brings_back_what_store_saved() -> None:
    case = make_case(
        "s", lambda blocks: shape_registration(SHAPES, blocks), RequestSize(256), 1, "opaque"
    )
    before = case.pool.clone()
    copier = CpuCopier(2)
    found = list(measure(case, copier, frozenset(), 1, lambda: None, pytest.fail))
    assert [(m.group is None, m.direction.name) for m in found] == [
        (False, "STORE"), (False, "RETRIEVE"), (False, "STORE"), (False, "RETRIEVE"),
        (True, "STORE"), (True, "RETRIEVE"),
    ]  # fmt: skip
    assert torch.equal(case.pool, before)
    copier.close()
    case.engine.close()


def test_a_request_by_its_size() -> None:
    assert RequestSize(None, 1000).chunks("m", 256, 300) == 4
    assert RequestSize(None, 1).chunks("m", 256, 300) == 1
    assert RequestSize(767).chunks("m", 256, 300) == 2
    out = run("--kvcache-shape-spec", SHAPES, "--mib", "2", "--repeats", "1", "--threads", "1")
    whole = next(line.split() for line in out.splitlines() if " all " in line)
    # four chunks are the first that make 2 MiB
    assert whole[5] == f"{4 * sum(GROUP_BYTES) / 1e6:.1f}"


def test_percentiles_and_means() -> None:
    assert percentiles_ms([0.001 * i for i in range(11)]) == pytest.approx((1.0, 5.0, 9.0))
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert np.isnan(geometric_mean([]))
