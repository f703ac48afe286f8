"""Settings of the connector: the `hma.*` keys of vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hma_triton.errors import ConfigError

PREFIX = "hma."


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """One field per key, without the `hma.` prefix. Seconds end in `_s`.

    server_url: where `hma-triton serve` listens; empty starts a server of the engine's own.
    chunk_tokens: tokens of one stored object; 0 is `auto` (`plan.choose_chunk_tokens`).
    host_gb: arena of the engine's own server, in GiB.
    timeout_s: bound of a request to the server that has no bound of its own.
    start_timeout_s: how long start-up waits for a server before it goes on without one.
    lookup_timeout_s: after this a lookup that was not answered counts as a miss.
    store_timeout_s: the longest that one engine step waits for its stores.
    slow_store_s: a store that took longer, beside the time its bytes need, counts as slow.
    load_timeout_s: after this a load is given up and reported as failed.
    breaker_s: how long stores are skipped after the server failed or was slow.
    namespace: keeps engines with different namespaces apart.
    curve_key: file with the CURVE keys, for `tcp://` servers.
    store_decode: also store chunks that generated tokens fill.
    allow_untested: warn about engine features never run with this connector, do not refuse them.
    audit: file to which a digest of every page stored and loaded is written, for fault finding.
    """

    server_url: str = ""
    chunk_tokens: int = 0
    host_gb: float = 4.0
    timeout_s: float = 5.0
    start_timeout_s: float = 10.0
    lookup_timeout_s: float = 0.5
    store_timeout_s: float = 2.0
    slow_store_s: float = 0.1
    load_timeout_s: float = 30.0
    breaker_s: float = 10.0
    namespace: str = ""
    curve_key: str = ""
    store_decode: bool = False
    allow_untested: bool = False
    audit: str = ""

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """Settings from vLLM's extra config; values may be strings, as command lines give them.

        Raises:
            ConfigError: an unknown key (with the nearest known one), or a value that does not fit.
        """
        known = {PREFIX + field.name: field for field in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in extra.items():
            if key not in known:
                raise ConfigError(_unknown(key, list(known)))
            values[known[key].name] = _convert(key, value, str(known[key].type))
        return cls(**values)


def _unknown(key: str, known: list[str]) -> str:
    wanted = PREFIX + key.removeprefix(PREFIX).removeprefix("hma_").replace("-", "_")
    close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
    return f"kv_connector_extra_config: unknown key {key!r}; {hint}"


def _convert(key: str, value: Any, kind: str) -> Any:
    if kind == "bool":
        return _as_bool(key, value)
    if kind == "str":
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{key}: {value!r} is no text")
        return value or ""
    if key == PREFIX + "chunk_tokens" and value == "auto":
        return 0
    try:
        number = int(value) if kind == "int" else float(value)
    except (TypeError, ValueError) as error:
        wanted = "'auto' or a whole number of tokens" if kind == "int" else "a number"
        raise ConfigError(f"{key}: {value!r} is not {wanted}") from error
    if isinstance(value, bool) or not number > 0 or number == float("inf"):
        raise ConfigError(f"{key}: {value!r} must be a number above zero")
    return number


def _as_bool(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text in ("true", "1", "yes", "on"):
        return True
    if text in ("false", "0", "no", "off"):
        return False
    raise ConfigError(f"{key}: {value!r} is neither true nor false")
