"""The tiny models of the engine tests: real architectures, random weights, made on first use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent.parent / "engine" / "data" / "tiny_models.json"


def tiny_config(name: str, **changes: Any) -> dict[str, Any]:
    """The config of `name`, with `changes` on top."""
    return {**json.loads(CONFIGS.read_text())[name], **changes}
