"""Functions that run inside an engine process, through `Engine.run`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from hma_triton.client import HmaClient
from hma_triton.group_view import EngineGroupInfo


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine that runs in one process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def set_token_budget(llm: Any, tokens: int) -> None:
    """The most tokens of a step from now on; a prefill is cut accordingly."""
    scheduler_of(llm).max_num_scheduled_tokens = tokens


def free_blocks(llm: Any) -> int:
    """Blocks of the pool that no request holds."""
    return int(scheduler_of(llm).kv_cache_manager.block_pool.get_num_free_blocks())


def tracked_requests(llm: Any) -> int:
    """Requests that the scheduler half still holds something for."""
    return len(scheduler_of(llm).connector.scheduler._tracked)


def overwrite_one_page_per_object(llm: Any, url: str, digests: Sequence[bytes]) -> int:
    """Replace every stored object of these chunks by one that differs in one page.

    A second instance with the engine's registration, but a pool of its own, takes the objects from
    the server, changes a page in each, and stores them again under the same names. Gives the number
    of pages changed.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    registration = get_kv_transfer_group().worker.registration
    arguments = registration.registration_arguments()
    infos = arguments["engine_group_infos"]
    chunk = registration.chunk_tokens
    instance = f"{registration.instance_id}-other-values"
    caches = _fresh_pool(registration.kv_caches)
    with HmaClient(url) as client:
        client.connect()
        client.register_kv_caches(instance, caches, rank=0, **arguments)
        taken = []
        next_block = 1
        for index in range(len(digests)):
            ids, next_block = _kept_ids(infos, chunk, next_block)
            taken.append(_take(client, instance, digests[: index + 1], infos, ids, chunk))
        assert client.clear(instance) > 0
        changed = 0
        for index, ids in enumerate(taken):
            changed += _change_pages(caches, infos, ids)
            reply = client.store(
                instance, 0, index, [digests[index]], b"" if index == 0 else digests[index - 1], ids
            )
            assert not reply.code and reply.stored, reply
        client.unregister(instance)
    return changed


def _fresh_pool(kv_caches: Any) -> dict[str, torch.Tensor]:
    """Views like those of `kv_caches` over one new, empty storage."""
    first = next(iter(kv_caches.values()))
    base = torch.zeros(first.untyped_storage().nbytes(), dtype=torch.uint8)
    fresh = {}
    for name, cache in kv_caches.items():
        view = torch.empty(0, dtype=cache.dtype)
        view.set_(base.untyped_storage(), cache.storage_offset(), cache.shape, cache.stride())
        fresh[name] = view
    return fresh


def _kept_ids(
    infos: Sequence[EngineGroupInfo], chunk: int, next_block: int
) -> tuple[list[list[int]], int]:
    """Block ids of one chunk, one list per info: own blocks where an object keeps any, else 0."""
    lists = []
    for info in infos:
        blocks = chunk // info.tokens_per_block
        kept = blocks
        if info.recurrent_state:
            kept = 1
        elif info.sw_size_tokens > 0:
            kept = min(blocks, max(1, -(-(info.sw_size_tokens - 1) // info.tokens_per_block)))
        ids = list(range(next_block, next_block + kept))
        next_block += kept
        lists.append([0] * (blocks - kept) + ids)
    return lists, next_block


def _take(
    client: HmaClient,
    instance: str,
    digests: Sequence[bytes],
    infos: Sequence[EngineGroupInfo],
    ids: list[list[int]],
    chunk: int,
) -> list[list[int]]:
    """Load the last chunk of `digests` into `ids`; without its recurrent state if it has none."""
    skip = (len(digests) - 1) * chunk
    for wanted in (
        ids,
        [[0] * len(i) if n.recurrent_state else i for i, n in zip(ids, infos, strict=True)],
    ):
        before = [[0] * (skip // info.tokens_per_block) for info in infos]
        whole = [head + tail for head, tail in zip(before, wanted, strict=True)]
        reply = client.retrieve(instance, 0, "take", digests, skip, whole)
        if reply.ok:
            return wanted
    raise AssertionError(reply)


def _change_pages(
    caches: dict[str, torch.Tensor], infos: Sequence[EngineGroupInfo], ids: list[list[int]]
) -> int:
    """Other values in the last block of one layer for every rule, that is, for every object."""
    layers = list(caches.values())
    seen = set()
    for info, blocks in zip(infos, ids, strict=True):
        rule = (info.sw_size_tokens, info.recurrent_state)
        if rule in seen or blocks[-1] == 0:
            continue
        seen.add(rule)
        page = layers[info.layer_indices[0]][blocks[-1]]
        if page.dtype == torch.int8:
            page.copy_(page.roll(page.numel() // 2 // 4 * 4, -1))
        else:
            page.copy_(torch.randn(page.shape, generator=torch.Generator().manual_seed(1)))
    return len(seen)


def count_preemptions(llm: Any) -> None:
    """Counts preemptions from now on, for `preemptions`."""
    scheduler = scheduler_of(llm)
    preempt = scheduler._preempt_request
    scheduler.preemptions_seen = 0

    def counted(*arguments: Any, **named: Any) -> Any:
        scheduler.preemptions_seen += 1
        return preempt(*arguments, **named)

    scheduler._preempt_request = counted


def preemptions(llm: Any) -> int:
    """Preemptions since `count_preemptions`."""
    return int(scheduler_of(llm).preemptions_seen)


def usage_together(
    llm: Any, prompts: list[list[int]], max_tokens: int
) -> tuple[int, list[tuple[int, ...]]]:
    """The most blocks in use when all prompts are in, and the outputs."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
    )
    for index, prompt in enumerate(prompts):
        engine.add_request(f"u{index}", {"prompt_token_ids": prompt}, sampling)
    total = free_blocks(llm)
    used, tokens = [], {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = tuple(output.outputs[0].token_ids)
        if len(tokens) == len(prompts):
            used.append(total - free_blocks(llm))
    return max(used), [tokens[f"u{index}"] for index in range(len(prompts))]


def forget_our_keys(llm: Any) -> int:
    """Clear the server's keys of this engine behind the scheduler half's back."""
    half = scheduler_of(llm).connector.scheduler
    return int(half._client.clear(half._instance_id))


def prometheus_values(llm: Any, prefix: str) -> dict[str, float]:
    """Samples of the engine's Prometheus registry whose name starts with `prefix`, summed."""
    from prometheus_client import REGISTRY

    values: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith(prefix) and sample.name.endswith("_total"):
                name = sample.name.removeprefix(prefix).removesuffix("_total")
                reason = sample.labels.get("reason")
                name = f"{name}[{reason}]" if reason else name
                values[name] = values.get(name, 0.0) + sample.value
    return values


def reset_while_running(llm: Any) -> bool:
    """Resets both caches as for new weights: what runs is preempted and starts anew."""
    return bool(llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True))


def wait_for_lookups(llm: Any) -> None:
    """Return when the server has answered the lookups of all waiting requests."""
    half = scheduler_of(llm).connector.scheduler
    waiting = [name for name, tracked in half._tracked.items() if tracked.asked_at is not None]
    deadline = time.monotonic() + 60
    while any(half._client.lookup_poll(name) is None for name in waiting):
        if time.monotonic() > deadline:
            raise TimeoutError("a lookup was not answered in 60 s")
        time.sleep(0.005)
