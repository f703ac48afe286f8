"""The README's flag for vLLM, read as vLLM reads it; the pages' keys and defaults."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from hma_triton.integration.vllm.config import ConnectorSettings
from hma_triton.integration.vllm.connector import HMATritonConnector

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


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


def rows_of(page: str) -> dict[str, str]:
    """Keys and defaults in the page's table."""
    return dict(re.findall(r"^\| `(hma\.\w+)` \| `?([\w.]+)`? \|", page, re.MULTILINE))


def check_defaults(rows: dict[str, str]) -> None:
    shown = {"": "none", 0: "auto"}
    settings = ConnectorSettings()
    for name, default in rows.items():
        value = getattr(settings, name.removeprefix("hma."))
        if isinstance(value, bool):
            assert default == str(value).lower(), name
        else:
            assert default == shown.get(value, f"{value:g}" if value else ""), name


def test_the_keys_in_the_readme_and_their_defaults_are_the_connectors() -> None:
    rows = rows_of(README)
    assert set(rows) >= {"hma.server_url", "hma.chunk_tokens", "hma.host_gb"}
    check_defaults(rows)


def test_the_page_has_all_keys() -> None:
    rows = rows_of((ROOT / "docs" / "connector.md").read_text())
    assert set(rows) == {f"hma.{field.name}" for field in fields(ConnectorSettings)}
    check_defaults(rows)
