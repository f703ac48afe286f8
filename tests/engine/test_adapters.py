"""Adapters on a real engine: each has a cache of its own, with the outputs it has without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.engine_cases import check_equal
from support.engine_families import prompt
from support.engine_process import Engine
from support.engine_rig import Rig, check_audit, difference
from support.tiny_models import tiny_config

pytestmark = pytest.mark.long

RANK = 8
WITH_ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}


def write_adapter(folder: Path, config: dict[str, Any], seed: int) -> str:
    """Random low-rank changes of what makes keys and values, in every layer."""
    generator = torch.Generator().manual_seed(seed)
    hidden, head = config["hidden_size"], config["head_dim"]
    width = config["num_key_value_heads"] * head
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for part in ("k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            for side, shape in (("lora_A", (RANK, hidden)), ("lora_B", (width, RANK))):
                values = 0.3 * torch.randn(shape, generator=generator)
                tensors[f"{name}.{side}.weight"] = values.to(torch.bfloat16)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    settings["target_modules"] = ["k_proj", "v_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.parametrize("rig", ["llama"], indirect=True)
def test_adapters_share_nothing_and_change_nothing(rig: Rig, tmp_path: Path) -> None:
    config = tiny_config("llama")
    asked = [prompt(700, seed=120)]
    kinds: list[dict[str, Any]] = [
        {},
        {"adapter": ["one", 1, write_adapter(tmp_path / "one", config, 1)]},
        {"adapter": ["two", 2, write_adapter(tmp_path / "two", config, 2)]},
    ]

    def all_of(engine: Engine) -> list[Any]:
        given = [engine.generate(asked, **kind)[0] for kind in kinds]
        engine.reset_prefix_cache()
        return given

    with rig.start_plain(**WITH_ADAPTERS) as plain:
        expected = all_of(plain)
    with rig.start_ours(**WITH_ADAPTERS) as engine:
        cold, warm = all_of(engine), all_of(engine)

    assert min(difference(one, expected[0]) for one in expected[1:]) > 0.1
    assert [one.cached_tokens for one in cold] == [0, 0, 0]
    assert [one.cached_tokens for one in warm] == [512, 512, 512]
    check_equal(rig, cold, expected)
    check_equal(rig, warm, expected)
    assert check_audit(rig.audit_path, 256) > 0

    # other weights at the same place, and an engine that has not seen the old ones
    write_adapter(tmp_path / "one", config, 3)
    with rig.start_ours(**WITH_ADAPTERS) as engine:
        assert [one.cached_tokens for one in all_of(engine)] == [512, 0, 512]
