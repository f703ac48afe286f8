"""The connector's two halves on real pools and a real server, with schedules given by a test.

This stands where vLLM's scheduler and model runner stand: it hands both halves what those would,
and writes into the pool what a model would, a function of the token position and the layer.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from support.engine_rig import PATIENT
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.outputs import KVConnectorOutput

from hma_triton.client import HmaClient
from hma_triton.errors import HmaError
from hma_triton.integration.vllm.config import ConnectorSettings
from hma_triton.integration.vllm.engine_identity import EngineIdentity
from hma_triton.integration.vllm.engine_shape import engine_shape
from hma_triton.integration.vllm.metadata import HMAConnectorMetadata
from hma_triton.integration.vllm.registration import PoolRegistration
from hma_triton.integration.vllm.scheduler_half import SchedulerHalf
from hma_triton.integration.vllm.stored_events import StoredEvents
from hma_triton.integration.vllm.worker_half import WorkerHalf
from hma_triton.keys import EngineFacts

Tables = Sequence[Sequence[int]]
PATIENCE_S = 60.0


@dataclass(eq=False)
class Request:
    """What the halves read of vLLM's request."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    hash_tokens: int
    salt: str = ""
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    @property
    def block_hashes(self) -> list[bytes]:
        """Chained hashes of whole blocks, as vLLM's sha256."""
        link = hashlib.sha256(f"root/{self.salt}".encode()).digest()
        hashes = []
        for end in range(self.hash_tokens, self.num_tokens + 1, self.hash_tokens):
            block = self.tokens[end - self.hash_tokens : end]
            link = hashlib.sha256(link + repr(block).encode()).digest()
            hashes.append(link)
        return hashes


@dataclass
class StepResult:
    """What a step's hooks gave."""

    meta: HMAConnectorMetadata
    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class ReplayEngine:
    """One engine: a pool, both halves, and a client each, on the server at `url`."""

    def __init__(
        self,
        url: str,
        kv_cache_config: Any,
        kv_caches: Mapping[str, torch.Tensor],
        *,
        name: str = "replay",
        settings: Mapping[str, Any] | None = None,
        stores: bool = True,
        loads: bool = True,
        model: str = "replayed",
        rank: int = 0,
        world_size: int = 1,
        events: StoredEvents | None = None,
        identity: EngineIdentity | None = None,
    ) -> None:
        chosen = ConnectorSettings.from_extra_config(
            {"hma.server_url": url, **PATIENT, **(settings or {})}
        )
        self.shape = engine_shape(kv_cache_config, chunk_tokens=chosen.chunk_tokens)
        if identity is None:
            identity = EngineIdentity(name, model, EngineFacts(), world_size, 1)
        self.worker_client = HmaClient(url, role="replay-worker")
        self.scheduler_client = HmaClient(url, role="replay-scheduler")
        registration = PoolRegistration(
            self.worker_client, identity, kv_cache_config, rank, self.shape.chunk_tokens, chosen
        )
        self.worker = WorkerHalf(self.worker_client, registration, chosen)
        try:
            self.worker.register(kv_caches)
        except HmaError:
            self.worker.shutdown()
            self.scheduler_client.close()
            raise
        self.scheduler = SchedulerHalf(
            self.scheduler_client,
            name,
            self.shape,
            chosen,
            stores=stores,
            loads=loads,
            world_size=world_size,
            events=events,
        )
        # the engines of the other ranks: this one's scheduler half orders for all
        self.other_ranks: list[ReplayEngine] = []
        self._results = KVOutputAggregator(expected_finished_count=world_size)
        self.caches = registration.kv_caches
        self.infos = registration.infos

    def request(
        self, name: str, tokens: Sequence[int], *, outputs: int = 0, salt: str = ""
    ) -> Request:
        """A request that has arrived; the last `outputs` tokens were generated."""
        made = Request(name, list(tokens), len(tokens) - outputs, self.shape.hash_tokens, salt)
        self.scheduler.on_new_request(made)
        return made

    def matched(self, request: Any, local_tokens: int = 0) -> int:
        """Tokens that can be loaded beyond `local_tokens`, once the server has answered."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            tokens, asynchronous = self.scheduler.matched_tokens(request, local_tokens)
            if tokens is not None:
                assert asynchronous == (tokens > 0)
                return tokens
            time.sleep(0.005)
        raise AssertionError("no answer to the lookup")

    def allocate(self, request: Any, tables: Tables, external_tokens: int) -> None:
        """The engine's blocks for the request, `external_tokens` of them to be loaded."""
        lists = tuple(list(table) for table in tables)
        blocks = SimpleNamespace(get_block_ids=lambda: lists)
        self.scheduler.after_alloc(request, blocks, external_tokens)

    def step(
        self,
        scheduled: Mapping[str, tuple[Any, int, Tables]],
        *,
        offers: Mapping[str, list[tuple[int, int, int]]] | None = None,
        preempted: Sequence[str] = (),
    ) -> StepResult:
        """One step: per request its tokens and its block tables. Advances the requests."""
        result = self.carry_out(self.order(scheduled, offers=offers, preempted=preempted))
        for request, count, _ in scheduled.values():
            request.num_computed_tokens += count
        return result

    def order(
        self,
        scheduled: Mapping[str, tuple[Any, int, Tables]],
        *,
        offers: Mapping[str, list[tuple[int, int, int]]] | None = None,
        preempted: Sequence[str] = (),
    ) -> HMAConnectorMetadata:
        """The first half of a step: what the scheduler half tells the workers to do."""
        tables = {name: tuple(map(list, table)) for name, (_, _, table) in scheduled.items()}
        output = SimpleNamespace(
            num_scheduled_tokens={name: count for name, (_, count, _) in scheduled.items()},
            preempted_req_ids=set(preempted),
            kv_connector_block_state=KVConnectorBlockState(
                set(tables), tables.__getitem__, dict(offers or {})
            ),
        )
        return self.scheduler.build_meta(output)

    def carry_out(self, meta: HMAConnectorMetadata) -> StepResult:
        """The other half: the workers do it, the scheduler half sees their results."""
        return self.tell([self.work(meta), *(one.work(meta) for one in self.other_ranks)], meta)

    def work(self, meta: HMAConnectorMetadata) -> KVConnectorOutput:
        """What one rank's worker does with its orders, and says."""
        self.worker.start_loads(meta)
        self.worker.save(meta)
        finished, failed = self.worker.finished_loads()
        output = KVConnectorOutput()
        output.finished_recving, output.failed_recving = finished, failed
        output.kv_connector_worker_meta = self.worker.take_meta()
        return output

    def tell(self, outputs: list[KVConnectorOutput], meta: HMAConnectorMetadata) -> StepResult:
        """The ranks' results, joined by vLLM's own code, reach the scheduler half."""
        of_ranks = [SimpleNamespace(kv_connector_output=output) for output in outputs]
        joined = self._results.aggregate(of_ranks).kv_connector_output
        self.scheduler.update_output(joined)
        return StepResult(meta, joined.finished_recving or set(), joined.failed_recving or set())

    def drain(self) -> StepResult:
        """Idle steps until no load is in flight."""
        total = StepResult(HMAConnectorMetadata())
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            result = self.step({})
            total.finished |= result.finished
            total.failed |= result.failed
            if not any(one.worker._loading for one in (self, *self.other_ranks)):
                return total
            time.sleep(0.002)
        raise AssertionError("a load did not end")

    def compute(self, request: Request, count: int, tables: Tables, **step: Any) -> StepResult:
        """One step of one request, its blocks filled as the model would."""
        end = request.num_computed_tokens + count
        self.fill(request, tables, request.num_computed_tokens, end)
        return self.step({request.request_id: (request, count, tables)}, **step)

    def fill(self, request: Request, tables: Tables, start: int, end: int) -> None:
        """Write the pages of tokens [start, end): state pages at the step's end alone."""
        for info in self.infos:
            table = tables[info.engine_group_id]
            tokens = info.tokens_per_block
            positions = range(start // tokens, -(-end // tokens))
            for position in positions:
                if position >= len(table) or table[position] == 0:
                    continue
                label = min(end, (position + 1) * tokens) if info.recurrent_state else position
                for layer in info.layer_indices:
                    self.page(layer, table[position]).copy_(
                        expected_page(self.page(layer, 0), request, position * tokens, layer, label)
                    )

    def page(self, layer: int, block: int) -> torch.Tensor:
        """One layer's page of one block."""
        return list(self.caches.values())[layer][block]

    def snapshot(self, tables: Tables, hit_tokens: int, skip_tokens: int = 0) -> dict[Any, bytes]:
        """Bytes of every real page in the tables between `skip_tokens` and `hit_tokens`."""
        pages = {}
        for info in self.infos:
            tokens = info.tokens_per_block
            table = tables[info.engine_group_id]
            for position in range(skip_tokens // tokens, hit_tokens // tokens):
                if position < len(table) and table[position] != 0:
                    for layer in info.layer_indices:
                        page = self.page(layer, table[position])
                        pages[info.engine_group_id, position, layer] = bytes_of(page)
        return pages

    def wipe(self) -> None:
        """Every byte of the pool becomes 0xEE."""
        for cache in self.caches.values():
            cache.untyped_storage().fill_(0xEE)

    def finish(self, request: Any) -> None:
        """The request has ended."""
        self.scheduler.finished(request)

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def bytes_of(page: torch.Tensor) -> bytes:
    return page.contiguous().view(torch.uint8).numpy().tobytes()


def expected_page(
    like: torch.Tensor, request: Request, token: int, layer: int, label: int
) -> torch.Tensor:
    """Bytes that belong to this prefix, layer and place, in the form of `like`."""
    prefix = repr(request.tokens[: token + 1]).encode()
    seed = hashlib.sha256(prefix + f"/{layer}/{label}".encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
    count = like.numel() * like.element_size()
    flat = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return flat.view(like.dtype).reshape(like.shape)
