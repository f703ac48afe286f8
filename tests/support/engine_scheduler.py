"""vLLM's real scheduler and the real connector, with an oracle where the model would run.

Every slot that a forward pass writes gets a number that names the whole prefix up to its token;
every slot that a later pass would read is compared with the number that belongs there. All groups
share the same bytes, as vLLM lays them out, so that a block read or written at the wrong moment,
or for the wrong group, shows at once.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support.engine_driver import register_architecture
from support.engine_rig import CONNECTOR, PATIENT
from support.tiny_models import tiny_config
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

BLOCK = 16
PAGE = 512
# a prompt that ends on a block's edge: its last token reaches a block further back than the next
WINDOW = 2 * BLOCK + 1
LAYERS = 2
_ATTENTION: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 2,
    "head_size": 8,
    "head_size_v": 0,
    "dtype": torch.bfloat16,
    "state_content_bytes": 16,
}
FULL = specs.FullAttentionSpec(**_ATTENTION)
SLIDING = specs.SlidingWindowSpec(**_ATTENTION, sliding_window=WINDOW)
STATE = specs.MambaSpec(
    block_size=BLOCK,
    shapes=((PAGE - 32,),),
    dtypes=(torch.int8,),
    page_size_padded=PAGE,
    mamba_cache_mode="align",
)


def vllm_config(folder: Path, url: str, *, recurrent: bool, **extra: Any) -> VllmConfig:
    """The config of an engine whose model is never made."""
    (folder / "config.json").write_text(json.dumps(tiny_config("llama")))
    register_architecture(str(folder))
    transfer = KVTransferConfig(
        kv_connector="HMATritonConnector",
        kv_connector_module_path=CONNECTOR,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"hma.server_url": url, **PATIENT, **extra},
    )
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        block_size=BLOCK,
        max_model_len=512,
        max_num_batched_tokens=512,
        max_num_seqs=4,
        enforce_eager=True,
        scheduling_policy="priority",
        kv_transfer_config=transfer,
    ).create_engine_config()
    config.cache_config.block_size = BLOCK
    config.cache_config.mamba_cache_mode = "align" if recurrent else "none"
    return config


def pool(groups: Sequence[Any], num_blocks: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Groups whose layers lie over the same bytes."""
    storage = torch.zeros(LAYERS * num_blocks * PAGE, dtype=torch.int8)
    named, caches = [], {}
    for index, spec in enumerate(groups):
        names = [f"model.layers.{index}.{layer}.attn" for layer in range(LAYERS)]
        named.append(specs.KVCacheGroupSpec(names, spec))
        for layer, name in enumerate(names):
            first = layer * num_blocks * PAGE
            if spec is STATE:
                live = PAGE - 32
                shape, strides = (num_blocks, 1, 1, live), (PAGE, live, live, 1)
                caches[name] = storage.as_strided(shape, strides, first)
            else:
                part = storage[first : first + num_blocks * PAGE].view(torch.bfloat16)
                caches[name] = part.view(num_blocks, 2, BLOCK, 8)
    config = specs.KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=named, kv_cache_layout="LBHNC"
    )
    return config, caches


class NoGrammar:
    """Stands for the manager of structured outputs; no request has one."""

    def accept_tokens(self, request: Request, tokens: list[int]) -> bool:
        return True


class BareEngine:
    """Steps the scheduler and both halves; `check` and `write` stand for the model."""

    def __init__(self, config: VllmConfig, groups: Sequence[Any], num_blocks: int) -> None:
        config.cache_config.num_gpu_blocks = num_blocks
        kv_config, caches = pool(groups, num_blocks)
        block_size, hash_block = resolve_kv_cache_block_sizes(kv_config, config)
        kv_config.hash_block_size = hash_block
        self.groups = list(groups)
        self.worker = KVConnectorFactory.create_connector(
            config=config, role=KVConnectorRole.WORKER, kv_cache_config=kv_config
        )
        self.worker.register_kv_caches(caches)
        self.caches = list(caches.values())
        self.scheduler = Scheduler(
            config, kv_config, NoGrammar(), block_size=block_size, hash_block_size=hash_block
        )
        function = get_hash_fn_by_name("sha256")
        init_none_hash(function)
        self._hasher = get_request_block_hasher(hash_block, function)
        self.pages_checked = 0
        self.preemptions = 0
        self.failed_loads = 0
        self.weights = 0

    @property
    def half(self) -> Any:
        """The connector's scheduler half."""
        return self.scheduler.connector.scheduler

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, name: str, tokens: list[int], *, salt: str = "", priority: int = 0) -> Request:
        """A request for eight more tokens."""
        request = Request(
            name,
            tokens,
            SamplingParams(max_tokens=8, ignore_eos=True),
            None,
            priority=priority,
            cache_salt=salt or None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        """As when its client has gone."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def load_new_weights(self) -> None:
        """Other weights, and the reset that goes with them: from now on all numbers are others.

        Raises:
            RuntimeError: a waiting request holds blocks; the others are preempted.
        """
        if self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            self.weights += 1

    def step(self, source: random.Random | None = None) -> None:
        """One step of the engine; with `source` the workers' results of loads may come later."""
        output = self.scheduler.schedule()
        meta = output.kv_connector_metadata
        if source is not None and meta.loads and source.random() < 0.2:
            # what was promised is gone when the load comes for it
            self.half._client.clear(self.half._instance_id)
        self.preemptions += len(output.preempted_req_ids or ())
        self.worker.handle_preemptions(meta)
        self.worker.bind_connector_metadata(meta)
        counts = output.num_scheduled_tokens
        sampled = [self._forward(self.scheduler.requests[name], n) for name, n in counts.items()]
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = KVConnectorOutput()
        if source is None or source.random() < 0.7:
            told = self.worker.get_transfer_results(output.finished_req_ids)
            results.finished_recving = told.finished_recving
            results.failed_recving = told.failed_recving
            self.failed_loads += len(told.failed_recving)
        results.kv_connector_worker_meta = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                list(counts),
                {name: index for index, name in enumerate(counts)},
                sampled,
                kv_connector_output=results,
            ),
        )

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def _forward(self, request: Request, count: int) -> list[int]:
        """Check what the new tokens read, write what they make; the next token, if it is due."""
        end = request.num_computed_tokens
        start = end - count
        prefix = numbers(request, self.weights)
        tables = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for group, (spec, table) in enumerate(zip(self.groups, tables, strict=True)):
            for layer in range(LAYERS):
                cache = self.caches[group * LAYERS + layer]
                if spec is STATE:
                    self._state(request, cache, table, (start, end), prefix)
                    continue
                first = 0 if spec is FULL else max(0, start - WINDOW + 1)
                self._tokens(request, cache, table, range(first, start), prefix, writes=False)
                self._tokens(request, cache, table, range(start, end), prefix, writes=True)
        if end < request.num_tokens:
            return []
        return [next_token(prefix[end - 1])]

    def _tokens(
        self,
        request: Request,
        cache: torch.Tensor,
        table: list[int],
        positions: range,
        prefix: list[int],
        *,
        writes: bool,
    ) -> None:
        while positions:
            index = positions.start // BLOCK
            here = range(positions.start, min(positions.stop, (index + 1) * BLOCK))
            assert table[index] != 0, f"{request.request_id}: null block at token {here.start}"
            slots = cache[table[index]].view(torch.int64)
            wanted = torch.tensor([prefix[position] for position in here]).view(1, -1, 1)
            part = slots[:, here.start % BLOCK : here.start % BLOCK + len(here)]
            if writes:
                part.copy_(wanted.expand(part.shape))
            else:
                self.pages_checked += 1
                assert bool((part == wanted).all()), f"{request.request_id}: tokens {here}"
            positions = range(here.stop, positions.stop)

    def _state(
        self,
        request: Request,
        cache: torch.Tensor,
        table: list[int],
        span: tuple[int, int],
        prefix: list[int],
    ) -> None:
        start, end = span
        if start:
            block = table[(start - 1) // BLOCK]
            assert block != 0, f"{request.request_id}: null state at {start}"
            self.pages_checked += 1
            state = cache[block].view(torch.int64)
            assert bool((state == prefix[start - 1]).all()), f"{request.request_id}: state {start}"
        cache[table[(end - 1) // BLOCK]].view(torch.int64).fill_(prefix[end - 1])


def numbers(request: Request, weights: int) -> list[int]:
    """One number per token, for all tokens up to it, the salt and the weights."""
    of_weights: dict[int, list[int]] = request.__dict__.setdefault("numbers", {})
    known = of_weights.setdefault(weights, [])
    tokens = request.all_token_ids
    for token in tokens[len(known) :]:
        link = f"{known[-1] if known else (request.cache_salt, weights)}/{token}".encode()
        known.append(int.from_bytes(hashlib.sha256(link).digest()[:7], "little"))
    return known


def next_token(number: int) -> int:
    """What the model would say next."""
    return number % 500
