"""The README's flag for vLLM, read as vLLM reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from hma_triton.integration.vllm.config import ConnectorSettings
from hma_triton.integration.vllm.connector import HMATritonConnector

README = (Path(__file__).parents[2] / "README.md").read_text()


def flag() -> dict[str, Any]:
    (text,) = re.findall(r"--kv-transfer-config '(.*?)'", README, re.DOTALL)
    read: dict[str, Any] = json.loads(text)
    return read


def test_the_flag_loads_our_connector_and_asks_for_recomputation() -> None:
    config = KVTransferConfig(**flag())
    assert KVConnectorFactory.get_connector_class(config) is HMATritonConnector
    assert config.kv_load_failure_policy == "recompute"
    assert config.is_kv_producer
    assert config.is_kv_consumer
    settings = ConnectorSettings.from_extra_config(config.kv_connector_extra_config)
    assert settings.host_gb == 64


def test_the_keys_in_the_table_and_their_defaults_are_the_connectors() -> None:
    rows = re.findall(r"^\| `(hma\.\w+)` \| `?([\w.]+)`? \|", README, re.MULTILINE)
    shown = {"": "none", 0: "auto"}
    settings = ConnectorSettings()
    assert {name for name, _ in rows} >= {"hma.server_url", "hma.chunk_tokens", "hma.host_gb"}
    for name, default in rows:
        value = getattr(settings, name.removeprefix("hma."))
        assert default == shown.get(value, f"{value:g}" if value else "")
