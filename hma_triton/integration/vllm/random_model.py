"""Writes a small model of a real architecture with random weights, for tests and benchmarks.

The weights are far larger than a trained model's start values: attention is peaked, so that the
log-probabilities depend on every part of the KV, and a wrong page shows in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hma_triton.errors import ConfigError


def write_random_model(config: Mapping[str, Any], folder: Path, *, seed: int = 0) -> Path:
    """Saves config and bfloat16 weights (safetensors) of `config["architectures"][0]` in `folder`.

    The spread of the weights is `config["initializer_range"]`; 0.2 suits hidden sizes of 64 to 128.
    The same config and seed give the same bytes. Needs transformers, which vLLM brings.

    Raises:
        ConfigError: transformers knows no such model type or architecture.
    """
    import torch
    import transformers

    values = dict(config)
    model_type = values.pop("model_type", None)
    names = values.pop("architectures", ())
    mapping = transformers.CONFIG_MAPPING
    if model_type not in mapping or not names or not hasattr(transformers, names[0]):
        raise ConfigError(
            f"transformers {transformers.__version__} has no model of type {model_type!r} with the"
            f" architecture {names!r}; give the config.json of one that it has"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, names[0])(mapping[model_type](**values))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
