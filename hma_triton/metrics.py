"""What the server counts, for Prometheus. One registry per server, so that several can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hma_triton.errors import ConfigError

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
Snapshot = Callable[[], dict[str, Any]]


class _Gauges(Collector):
    """Values read from the server's state when somebody asks."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        state = self._snapshot()
        for name, text, value in (
            ("hma_arena_bytes", "Size of the arena", state["arena"]["nbytes"]),
            ("hma_arena_used_bytes", "Bytes in slots that are taken", state["arena"]["used_bytes"]),
            ("hma_pinned_bytes", "Bytes that leases and copies hold", state["pinned_bytes"]),
            ("hma_leases", "Lookups whose promise still holds", state["leases"]),
            ("hma_queued_copies", "Copies that have not started", state["queued"]),
            ("hma_running_copies", "Copies that run", state["running"]),
            ("hma_overdue_calls", "Driver calls that take too long", state["overdue_calls"]["now"]),
            ("hma_arena_pinned", "Whether the arena is pinned", int(state["arena"]["pinned"])),
            ("hma_peers", "Greeted connections", len(state["peers"])),
            ("hma_registrations", "Registered pools", len(state["registrations"])),
            ("hma_chunks", "Chunks with at least one object", state["chunks"]),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        evicted = CounterMetricFamily(
            "hma_evicted_objects", "Objects evicted, by cause", labels=["cause"]
        )
        for cause, count in state["counters"]["evictions_by_cause"].items():
            evicted.add_metric([cause], count)
        yield evicted
        yield CounterMetricFamily(
            "hma_evicted_bytes", "Bytes evicted", value=state["counters"]["evicted_bytes"]
        )
        yield CounterMetricFamily(
            "hma_corrupt_objects",
            "Objects whose checksum did not match",
            value=state["counters"]["corrupt_objects"],
        )
        yield CounterMetricFamily(
            "hma_ever_overdue_calls",
            "Registrations and releases that took too long",
            value=state["overdue_calls"]["ever"],
        )
        yield CounterMetricFamily(
            "hma_expired_leases", "Leases ended by time", value=state["expired_leases"]
        )


class Metrics:
    """Counters and histograms; gauges come from `snapshot` at scrape time."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Gauges(snapshot))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self.requests = counter("hma_requests", "Requests, by kind", "op")
        self.errors = counter("hma_errors", "Errors answered, by code", "code")
        self.lookups = counter(
            "hma_lookups", "Lookups, by outcome and what ended the hit", "outcome", "reason"
        )
        self.lookup_tokens = counter("hma_lookup_tokens", "Tokens asked for and hit", "kind")
        self.objects = counter("hma_objects", "Objects of stores, by what became of them", "fate")
        self.bytes = counter(
            "hma_copied_bytes", "Bytes copied", "direction", "object_group", "path"
        )
        self.group_seconds = counter(
            "hma_group_copy_seconds",
            "Time of copies, divided among object groups by their bytes",
            "direction",
            "object_group",
            "path",
        )
        self.copy_seconds = Histogram(
            "hma_copy_seconds",
            "Duration of a copy",
            ("direction", "path"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.wait_seconds = Histogram(
            "hma_queue_seconds",
            "From arrival to the end of a copy",
            ("direction",),
            buckets=_SECONDS,
            registry=self.registry,
        )

    def serve(self, port: int) -> Callable[[], None]:
        """Answer scrapes on 127.0.0.1; gives what ends that.

        Raises:
            ConfigError: the port cannot be had.
        """
        try:
            server, thread = start_http_server(port, addr="127.0.0.1", registry=self.registry)
        except OSError as error:
            raise ConfigError(f"metrics port {port}: {error.strerror}") from error

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop

    def totals(self) -> dict[str, dict[str, float]]:
        """Counters by name and labels, for the status view."""
        found: dict[str, dict[str, float]] = {}
        for counter in (self.requests, self.errors, self.lookups, self.lookup_tokens, self.bytes):
            for family in counter.collect():
                found[family.name] = {
                    ",".join(sample.labels.values()): sample.value
                    for sample in family.samples
                    if sample.name.endswith("_total")
                }
        return found


def reason_label(reason: str) -> str:
    """A lookup's reason without the chunk's number, so that labels stay few."""
    if " missing in " in reason:
        return "missing in " + reason.partition(" missing in ")[2]
    return reason.partition(":")[0]
