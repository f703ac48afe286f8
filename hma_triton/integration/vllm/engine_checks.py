"""What the connector says at start-up about the engine's settings: refusals, warnings, advice."""

from __future__ import annotations

from typing import Any

from hma_triton.errors import ConfigError
from hma_triton.integration.vllm.engine_identity import hashes_repeat
from hma_triton.integration.vllm.engine_shape import EngineShape

SUPPORTED_VERSIONS = ("0.32",)
"""Minor versions of vLLM that the engine tests run."""
CPU_BLOCK_TOKENS = 128


def check_version(version: str) -> str | None:
    """A warning for a vLLM that was never run with this connector, None for one that was."""
    if version.startswith(tuple(f"{supported}." for supported in SUPPORTED_VERSIONS)):
        return None
    return (
        f"vLLM {version} was never run with this connector; the engine tests run "
        f"{', '.join(SUPPORTED_VERSIONS)}.x"
    )


def refused_features(vllm_config: Any) -> list[str]:
    """Names of the features in use under which no reuse was ever tested, and may be wrong."""
    parallel = vllm_config.parallel_config
    refused = []
    if vllm_config.speculative_config is not None:
        refused.append("speculative decoding (--speculative-config)")
    if parallel.pipeline_parallel_size > 1:
        refused.append(f"pipeline parallelism ({parallel.pipeline_parallel_size} stages)")
    if parallel.decode_context_parallel_size > 1:
        refused.append(
            f"decode context parallelism ({parallel.decode_context_parallel_size} ranks)"
        )
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        refused.append(
            f"prefill context parallelism ({parallel.prefill_context_parallel_size} ranks)"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        refused.append("KV scales calculated from the first prompt (--calculate-kv-scales)")
    return refused


def refuse_untested(vllm_config: Any, *, allow: bool) -> list[str]:
    """Refuse features that were never run; with `allow` the same text is returned as a warning.

    Raises:
        ConfigError: names every such feature in use.
    """
    refused = refused_features(vllm_config)
    if not refused:
        return []
    text = f"never run with this connector: {', '.join(refused)}"
    if not allow:
        raise ConfigError(
            f"{text}; turn it off, or set hma.allow_untested to try it at your own risk"
        )
    return [text]


def start_warnings(vllm_config: Any, *, own_server: bool = False) -> list[str]:
    """What an operator should know before the first request; scheduler half.

    `own_server`: the engine starts a server that no other engine uses.
    """
    warnings = []
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        warnings.append(
            "kv_load_failure_policy is 'fail': a request whose load fails (server lost, object"
            " evicted) ends with an error; set it to 'recompute' to have such requests recomputed"
        )
    if vllm_config.scheduler_config.async_scheduling:
        warnings.append("asynchronous scheduling was never run with this connector")
    if vllm_config.parallel_config.data_parallel_size > 1:
        warnings.append("data parallelism was never run with this connector")
    if own_server and not (transfer.is_kv_producer and transfer.is_kv_consumer):
        warnings.append(
            f"no hit is possible: kv_role is {transfer.kv_role!r} and the server is this engine's"
            " own, so that nobody "
            + ("loads what it stores" if transfer.is_kv_producer else "stores what it could load")
            + "; set hma.server_url to a server that others use too"
        )
    if not hashes_repeat(vllm_config):
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        warnings.append(
            f"block hashes ({algorithm}) are seeded at random in every process: nothing is shared"
            " with other engines or after a restart; set PYTHONHASHSEED to one value everywhere,"
            " or use sha256"
        )
    return warnings


def reuse_warnings(vllm_config: Any, shape: EngineShape) -> list[str]:
    """Settings that make hits impossible or rare: state exists where a step ended on its block.

    A token budget below the state's block is none of them: steps then end inside a block and again
    on its edge.
    """
    longest = int(vllm_config.model_config.max_model_len)
    warnings = []
    # one token of the model's length is left for the output
    if shape.chunk_tokens + shape.leave_tokens >= longest:
        warnings.append(
            f"no hit is possible: a chunk has {shape.chunk_tokens} tokens, no prompt within"
            f" max_model_len {longest} is long enough to use one"
        )
    if not shape.recurrent:
        return warnings
    state_tokens = max(shape.tokens_per_block[group] for group in shape.recurrent)
    split_tokens = _split_tokens(vllm_config)
    if split_tokens % state_tokens:
        warnings.append(
            f"few hits are possible: the scheduler ends its steps on multiples of {split_tokens}"
            f" tokens, recurrent state is kept every {state_tokens}; give --block-size"
            f" {state_tokens}"
        )
    return warnings


def _split_tokens(vllm_config: Any) -> int:
    """The block length on whose multiples the scheduler will end its steps.

    On the CPU the engine core sets it back to that platform's default after start-up, unless the
    user gave one (vLLM 0.32, `v1/engine/core.py`).
    """
    cache = vllm_config.cache_config
    on_cpu = vllm_config.device_config.device_type == "cpu"
    if on_cpu and not getattr(cache, "user_specified_block_size", True):
        return CPU_BLOCK_TOKENS
    return int(cache.block_size)
