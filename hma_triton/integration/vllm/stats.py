"""What the connector did in an interval, for vLLM's log line and its Prometheus endpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

COUNTERS = {
    "lookups": "Lookups that the server answered, or that ran out of time.",
    "hit_tokens": "Tokens that the engine took from the cache, beyond its own.",
    "loads": "Loads that wrote every block.",
    "failed_loads": "Loads reported as failed; the engine recomputes or fails the request.",
    "loaded_bytes": "Bytes written into the engine's blocks.",
    "load_seconds": "Seconds from the order of a load to its end.",
    "stores": "Stores that were committed.",
    "failed_stores": "Stores of which nothing was committed.",
    "skipped_stores": "Stores not tried because the server was away or slow.",
    "stored_objects": "Objects that were written.",
    "stored_bytes": "Bytes read from the engine's blocks.",
    "store_seconds": "Seconds for which steps waited for their stores.",
}
REASONS = {"lookup_misses": "Lookups without a hit, by reason.", "failures": "Failures, by code."}


@dataclass
class HMAStats(KVConnectorStats):  # type: ignore[misc]
    """Counters by name in `data`; under the names of `REASONS`, counters by reason."""

    data: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, amount: float = 1) -> None:
        """Count `amount` under one of `COUNTERS`."""
        if amount:
            self.data[name] = self.data.get(name, 0) + amount

    def add_reason(self, name: str, reason: str) -> None:
        """Count one event under one of `REASONS`."""
        label = _label(reason)
        counts = self.data.setdefault(name, {})
        counts[label] = counts.get(label, 0) + 1

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> HMAStats:
        """The sums of both: of ranks, of halves, or of intervals."""
        merged: dict[str, Any] = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in self.data.items()
        }
        for name, value in other.data.items():
            if isinstance(value, dict):
                counts = merged.setdefault(name, {})
                for reason, count in value.items():
                    counts[reason] = counts.get(reason, 0) + count
            else:
                merged[name] = merged.get(name, 0) + value
        return HMAStats(data=merged)

    def reduce(self) -> dict[str, int | float]:
        """One flat line for the engine's log."""
        flat: dict[str, int | float] = {}
        for name, value in self.data.items():
            if isinstance(value, dict):
                flat |= {f"{name}[{reason}]": count for reason, count in value.items()}
            else:
                flat[name] = round(value, 4)
        return flat


def _label(reason: str) -> str:
    """A reason without what it names, so that labels stay few: no chunk, no message."""
    if reason.startswith("error: "):
        return reason.split(": ")[1]
    if " missing in " in reason:
        return "incomplete"
    return reason.partition(":")[0] or "unknown"


class HMAPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same counters as `hma_triton_connector_*` beside vLLM's own metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=f"hma_triton_connector_{name}", documentation=text, labelnames=labelnames
            )
            for name, text in COUNTERS.items()
        }
        self._by_reason = {
            name: self._counter_cls(
                name=f"hma_triton_connector_{name}",
                documentation=text,
                labelnames=[*labelnames, "reason"],
            )
            for name, text in REASONS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if isinstance(value, dict):
                for reason, count in value.items():
                    self._by_reason[name].labels(*labels, reason).inc(count)
            else:
                self._counters[name].labels(*labels).inc(value)
