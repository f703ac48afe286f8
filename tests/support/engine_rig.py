"""One family's engines and server: with the connector, and without it to compare with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.engine_families import TOKEN_BUDGET, Family
from support.engine_probes import set_token_budget
from support.engine_process import Completion, Engine, Nursery
from support.tiny_models import tiny_config

from hma_triton.config import ServerConfig
from hma_triton.integration.vllm.random_model import write_random_model
from hma_triton.server.launch import EmbeddedServer, start_embedded

CONNECTOR = "hma_triton.integration.vllm.connector"
ARENA_BYTES = 256 << 20
MLA_TOLERANCE = 0.1
# what a busy machine may take; tests of deadlines set their own
PATIENT = {
    "hma.timeout_s": 60,
    "hma.start_timeout_s": 60,
    "hma.lookup_timeout_s": 60,
    "hma.store_timeout_s": 60,
    "hma.slow_store_s": 60,
    "hma.load_timeout_s": 120,
}


class Rig:
    """Makes what is asked for, once, and ends it all in close()."""

    def __init__(self, family: Family, nursery: Nursery, folder: Path) -> None:
        self.family = family
        self._nursery = nursery
        self._folder = folder
        self._server: EmbeddedServer | None = None
        self._engines: list[Engine] = []
        self._plain: Engine | None = None
        self._ours: Engine | None = None
        self._known: dict[str, list[Completion]] = {}
        self.model = write_random_model(tiny_config(family.name), folder / "model")

    @property
    def server(self) -> EmbeddedServer:
        """The server that the engines of this rig share."""
        if self._server is None:
            self._server = start_embedded(
                ServerConfig(url="ipc:///replaced", host_bytes=ARENA_BYTES)
            )
        return self._server

    @property
    def audit_path(self) -> Path:
        """Digests of every page that any engine of this rig stored or loaded."""
        return self._folder / "audit.jsonl"

    @property
    def ours(self) -> Engine:
        """The engine with the connector."""
        if self._ours is None:
            self._ours = self.start_ours()
        return self._ours

    @property
    def plain(self) -> Engine:
        """The engine without."""
        if self._plain is None:
            self._plain = self.start_plain()
        return self._plain

    def start_ours(self, extra: dict[str, Any] | None = None, **changes: Any) -> Engine:
        """Another engine with the connector; `extra` goes to its `hma.*` settings."""
        transfer = changes.pop("kv_transfer_config", {})
        environment = changes.pop("environment", None)
        settings = {**PATIENT, "hma.audit": str(self.audit_path), **(extra or {})}
        if "hma.server_url" not in settings:
            settings["hma.server_url"] = self.server.url
        config = {
            "kv_connector": "HMATritonConnector",
            "kv_connector_module_path": CONNECTOR,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings,
        }
        changes["kv_transfer_config"] = config | transfer
        return self._start(changes, environment)

    def start_plain(self, **changes: Any) -> Engine:
        """Another engine without the connector."""
        return self._start(changes, changes.pop("environment", None))

    def _start(self, changes: dict[str, Any], environment: dict[str, str] | None) -> Engine:
        engine = self._nursery.start(self.family.settings(str(self.model), **changes), environment)
        self._engines.append(engine)
        return engine

    def expected(
        self, prompts: Sequence[Sequence[int]], budget: int = TOKEN_BUDGET, **sampling: Any
    ) -> list[Completion]:
        """What the engine without the connector gives, prompt by prompt, never from its cache.

        `budget` is the most tokens of a step: the gated delta net rounds by how a prefill is cut.
        """
        results = []
        for prompt in prompts:
            key = json.dumps([list(prompt), budget, sampling], sort_keys=True)
            if key not in self._known:
                self.plain.run(set_token_budget, budget)
                self.plain.reset_prefix_cache()
                self._known[key] = self.plain.generate([prompt], **sampling)
            results += self._known[key]
        return results

    def restart_server(self) -> None:
        """A new server, empty, on a new address; engines of the old one stay with that."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def close(self) -> None:
        for engine in self._engines:
            engine.stop()
        if self._server is not None:
            self._server.close()


def audit_lines(path: Path, what: str) -> list[dict[str, Any]]:
    """The records of one kind, in order."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["what"] == what]


def chunk_digests_of(path: Path, num_chunks: int) -> list[bytes]:
    """Digests of the last stored prompt that began at chunk 0 and had `num_chunks` chunks."""
    for line in reversed(audit_lines(path, "store")):
        if line["first_token"] == 0 and len(line["prefix"]) == num_chunks:
            return [bytes.fromhex(digest) for digest in line["prefix"]]
    raise AssertionError(f"no store of {num_chunks} chunks in {path}")


def check_audit(path: Path, chunk_tokens: int) -> int:
    """Every page that was loaded must have the bytes that some store read for that chunk.

    Gives the number of pages compared.
    """
    stored: dict[tuple[int, str, str], set[str]] = {}
    for line in audit_lines(path, "store"):
        for place, digest in line["pages"].items():
            stored.setdefault((line["rank"], *_name(line, place, chunk_tokens)), set()).add(digest)
    compared = 0
    for line in audit_lines(path, "load"):
        for place, digest in line["pages"].items():
            known = stored.get((line["rank"], *_name(line, place, chunk_tokens)), set())
            assert digest in known, f"request {line['request']}: page {place} was never stored so"
            compared += 1
    return compared


def _name(line: dict[str, Any], place: str, chunk_tokens: int) -> tuple[str, str]:
    """A page's chunk digest, and its group and place within the chunk."""
    group, position = (int(part) for part in place.split(":"))
    chunk = (position - line["first_token"]) // chunk_tokens
    return line["prefix"][chunk], f"{group}:{position % chunk_tokens}"


def difference(ours: Completion, plain: Completion) -> float:
    """Largest difference of two log-probabilities; infinite where tokens or top tokens differ."""
    if ours.tokens != plain.tokens or len(ours.logprobs) != len(plain.logprobs):
        return float("inf")
    return max(
        abs(value - other.get(token, float("inf")))
        for step, other in zip(ours.logprobs, plain.logprobs, strict=True)
        for token, value in step.items()
    )
