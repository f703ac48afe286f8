"""`hma-triton inspect FOLDER`: vLLM's own answer for a model folder, without weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONFIGS: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "tiny_models.json").read_text()
)


def inspect(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hma_triton.cli.main", "inspect", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def folder_of(name: str, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return folder


def test_a_hybrid_model_folder(tmp_path: Path) -> None:
    picture = tmp_path / "pool.png"
    saved = tmp_path / "saved.json"
    folder = folder_of("lfm2", tmp_path)
    done = inspect(folder, "--json", "--plot", str(picture), "--save", str(saved))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["platform"].startswith("vLLM 0.32")
    assert found["platform"].endswith("on cpu")
    assert found["layout"] == "LBHNC"
    kinds = [group["kind"] for group in found["engine_groups"]]
    assert kinds.count("mamba") == len(kinds) - 1
    assert kinds.count("full_attention") == 1
    assert {group["tokens_per_block"] for group in found["engine_groups"]} == {128}
    assert [o["recurrent"] for o in found["object_groups"]].count(True) == 1
    assert found["chunk_tokens"] == 128
    assert picture.read_bytes().startswith(b"\x89PNG")
    # the saved geometry gives the same answer where there is no vLLM
    again = inspect(saved, "--json")
    assert json.loads(again.stdout) == {**found, "title": f"{folder} (main)"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            '{"architectures": ["NoSuchModelForCausalLM"], "model_type": "llama"}',
            "NoSuchModelForCausalLM",
        ),
        ("{", "not a valid JSON file"),
    ],
)
def test_a_folder_that_vllm_cannot_build_is_one_line(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "config.json").write_text(text)
    done = inspect(tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"hma-triton: {tmp_path}: vLLM cannot build this model: ")
    assert why in last
