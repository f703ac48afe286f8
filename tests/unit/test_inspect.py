"""`hma-triton inspect`: numbers, JSON, picture, refusals, and a model folder without vLLM."""

from __future__ import annotations

import json
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hma_triton.cli.inspect import app
from hma_triton.cli.inspect_plot import Piece, lane_of
from hma_triton.cli.inspect_report import build_report, layer_looks
from hma_triton.cli.inspect_subject import subject_of_spec, subject_of_target
from hma_triton.errors import ConfigError, GroupMismatchError

runner = CliRunner()


def run(*args: str) -> Any:
    return runner.invoke(app, list(args))


def as_json(*args: str) -> dict[str, Any]:
    result = run(*args, "--json")
    parsed: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (0 if parsed["refused"] is None else 1)
    return parsed


def test_numbers_of_a_hybrid() -> None:
    found = as_json("gemma-3-27b")
    assert found["title"] == "google/gemma-3-27b-it (main)"
    assert found["platform"].startswith("CUDA SM90")
    assert found["layout"] == "LBNHC"
    assert [g["kind"] for g in found["engine_groups"]] == ["sliding_window"] * 6 + [
        "full_attention"
    ]
    assert [g["num_layers"] for g in found["engine_groups"]] == [9, 9, 9, 9, 8, 8, 10]
    # 16 slots of 16 heads of K and V of 128 elements of 2 bytes
    page = 16 * 16 * 2 * 128 * 2
    assert [k["block_bytes"] for k in found["kernel_groups"]] == [
        page * layers for layers in (9, 9, 9, 9, 8, 8, 10)
    ]
    assert found["bytes_per_token"] == 62 * page / 16
    assert found["pool_block_bytes"] == 10 * page
    assert found["chunk_tokens"] == 256
    # a window of 1024 tokens keeps all of a chunk of 256
    assert [o["object_bytes"] for o in found["object_groups"]] == [52 * page * 16, 10 * page * 16]
    assert found["chunk_bytes"] == 62 * page * 16
    assert found["object_groups"][0]["kernel_groups"] == [0, 1, 2, 3, 4, 5]


def test_a_window_smaller_than_the_chunk_keeps_part_of_it() -> None:
    found = as_json("deepseek-v4", "--chunk-tokens", "512")
    by_window = {o["window_tokens"]: o["object_bytes"] for o in found["object_groups"]}
    rows = {k["kernel_group"]: k["block_bytes"] for k in found["kernel_groups"]}
    # window 8 over blocks of 4 keeps ceil(7 / 4) = 2 blocks of kernel groups 5 and 6
    assert by_window[8] == 2 * (rows[5] + rows[6])
    assert by_window[None] == 2 * (rows[2] + rows[3] + rows[4])
    formats = {k["format"] for k in found["kernel_groups"]}
    assert formats == {"NL_X_NB_NH_BS_CS", "NL_X_NB_BSV_BSS"}


def test_edits_and_shared_layers_are_shown() -> None:
    found = as_json("qwen3.5-0.8b", "--variant", "cuda100")
    assert found["kernel_groups"][3]["edit"] == "kernel pages of 32 as bytes"
    assert found["kernel_groups"][3]["slots_per_block"] == 544
    assert found["platform"].startswith("CUDA SM100")
    assert found["object_groups"][0]["recurrent"] is True
    shared = as_json("gemma-4-e4b")
    assert len(shared["excluded_layers"]) == 18
    text = run("gemma-4-e4b").stdout
    assert "not moved: model.layers.24.self_attn.attn .. model.layers.41" in text.replace("\n", " ")


def test_the_tables_name_platform_groups_and_costs() -> None:
    text = run("gemma-3-27b").stdout
    for part in (
        "google/gemma-3-27b-it (main): layout LBNHC",
        "platform: CUDA SM90 (H100/H200)",
        "engine groups",
        "kernel groups",
        "object groups",
        "1,024 tokens",
        "every chunk",
        "chunk 256 tokens, 130,023,424 bytes; 507,904.0 bytes per token",
        "a block id takes 1,310,720 bytes of the pool; the fullest group uses 100.0%",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("variant", "why"),
    [
        ("cuda90_LHBNC", "LHBNC is refused: heads lie outside the blocks"),
        ("cuda90_BHLNC", "BHLNC is refused: layers lie inside the heads"),
    ],
)
def test_a_refused_layout_is_explained(variant: str, why: str) -> None:
    found = as_json("gemma-3-27b", "--variant", variant)
    assert why in found["refused"]
    assert {look["kind"].split(": ")[1] for look in found["caches"]} == {
        "sliding_window",
        "full_attention",
    }
    assert sum(len(look["layers"]) for look in found["caches"]) == 62
    assert found["caches"][0]["shape"] == [3, 16, 16, 256]
    result = run("gemma-3-27b", "--variant", variant)
    assert result.exit_code == 1
    assert "refused" in result.stdout
    assert "strides" in result.stdout


def test_a_chunk_that_does_not_divide_is_a_refusal_with_the_nearest() -> None:
    result = run("qwen3.5-0.8b", "--chunk-tokens", "256")
    assert result.exit_code == 1
    assert "the nearest valid chunk is 544" in result.stdout.replace("\n", " ")


def test_shape_specs() -> None:
    spec = "(2,16,16,8,128):float16:4;(1,8,16,1,576):bfloat16:2"
    found = as_json("--kvcache-shape-spec", spec)
    assert found["title"] == spec
    assert found["pool_block_bytes"] is None
    assert [k["block_bytes"] for k in found["kernel_groups"]] == [
        4 * 2 * 16 * 8 * 128 * 2,
        2 * 16 * 576 * 2,
    ]
    assert found["chunk_bytes"] == 16 * (4 * 65536 + 2 * 18432)
    assert "shape spec" in run("--kvcache-shape-spec", spec).stdout


def test_a_saved_geometry_is_read_like_a_packaged_one(tmp_path: Path) -> None:
    packaged = resources.files("hma_triton.geometries").joinpath("gemma-3-27b-it.json")
    saved = tmp_path / "mine.json"
    saved.write_text(packaged.read_text(encoding="utf-8"))
    assert as_json(str(saved)) == as_json("gemma-3-27b-it")
    assert as_json(str(saved), "--variant", "cpu")["layout"] == "LBHNC"


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ([], "either TARGET or --kvcache-shape-spec"),
        (["gemma-3-27b", "--kvcache-shape-spec", "(1,1,1,1,1):int8:1"], "either TARGET"),
        (["no-such-model"], "fits no geometry"),
        (["gemma-3-27b", "--variant", "tpu"], "no variant 'tpu'"),
        (["gemma-3-27b", "--save", "unwritten.json"], "only a model folder can be saved"),
        (["gemma-3-27b", "--chunk-tokens", "many"], "neither a number of tokens nor 'auto'"),
    ],
)
def test_bad_arguments_are_one_clear_error(args: list[str], why: str) -> None:
    result = run(*args)
    assert result.exit_code == 1
    assert isinstance(result.exception, ConfigError)
    assert why in str(result.exception)


def test_files_that_are_no_geometry_are_named(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"model": "m"}', '{"model": "m", "variants": {"main": {}}}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match=r"bad\.json is no saved geometry"):
            subject_of_target(str(tmp_path / "bad.json"), "main")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        subject_of_target(str(tmp_path), "main")


def test_pieces_of_a_picture() -> None:
    pool = torch.empty(0, dtype=torch.int8, device="meta")
    storage = torch.empty(1000, dtype=torch.int8, device="meta")
    assert pool.numel() == 0
    # two layers inside each block, padding at its end
    layers = [storage.as_strided((3, 1, 4, 10), (100, 40, 10, 1), start) for start in (0, 45)]
    lane = lane_of("g", layers, num_blocks=3)
    assert lane.pieces[:3] == (Piece(0, 0, 0, 40), Piece(0, 1, 100, 40), Piece(0, 2, 200, 40))
    assert lane.pieces[3:] == (Piece(1, 0, 45, 40), Piece(1, 1, 145, 40), Piece(1, 2, 245, 40))
    # heads outside the blocks: a block is one piece per head
    split = storage.as_strided((3, 2, 4, 10), (40, 120, 10, 1))
    assert lane_of("g", [split], 3).pieces[:2] == (Piece(0, 0, 0, 40), Piece(0, 0, 120, 40))
    # kernel pages of one block carry its number
    paged = storage.as_strided((6, 1, 2, 10), (20, 20, 10, 1))
    assert [p.block for p in lane_of("g", [paged], 3).pieces] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    "args",
    [
        ["gemma-3-27b"],
        ["deepseek-v4"],
        ["zamba2"],
        ["gemma-3-27b", "--variant", "cuda90_LHBNC"],
        ["--kvcache-shape-spec", "(2,16,16,8,128):float16:4"],
    ],
    ids=lambda args: " ".join(args),
)
def test_a_picture_is_written(args: list[str], tmp_path: Path) -> None:
    file = tmp_path / "pool.png"
    run(*args, "--plot", str(file))
    raw = file.read_bytes()
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(raw[at : at + 4], "big") for at in (16, 20))
    assert (width, height > 200) == (1820, True)


def test_live_bytes_and_padding_of_a_picture_add_up_to_the_pool(tmp_path: Path) -> None:
    subject = subject_of_target("zamba2", "main")
    caches = list(subject.register().kv_caches.items())
    groups = subject.kv_cache_config.kv_cache_groups
    by_name = dict(caches)
    mamba = lane_of("m", [by_name[n] for n in groups[1].layer_names], subject.num_blocks)
    live = sum(piece.num_bytes for piece in mamba.pieces)
    assert live == 12 * 962048 * subject.num_blocks
    ends = sorted((p.start_bytes, p.start_bytes + p.num_bytes) for p in mamba.pieces)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    assert ends[-1][1] <= subject.pool_bytes
    attention = lane_of("a", [by_name[n] for n in groups[0].layer_names], subject.num_blocks)
    assert sum(piece.num_bytes for piece in attention.pieces) == subject.pool_bytes


def test_reports_come_from_the_same_grouping_as_a_registration() -> None:
    subject = subject_of_spec("(2,16,16,8,128):float16:4")
    assert build_report(subject, None).chunk_tokens == 256
    with pytest.raises(GroupMismatchError, match="nearest valid chunk is 32"):
        build_report(subject, 40)
    assert len(layer_looks(subject)) == 1
