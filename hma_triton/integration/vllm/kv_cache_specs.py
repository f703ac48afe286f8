"""What vLLM's cache specs declare, read by class name and field, so that no vLLM is imported.

Real spec objects of vLLM 0.32 and objects with the same class names and fields are read alike;
the field names of older versions (``compress_ratio``, ``tq_slot_size``) are known too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hma_triton.errors import GroupMismatchError

# the most special class first, as a spec's ancestors are kinds too
_KINDS = (
    ("SlidingWindowMLASpec", "sliding_window_mla"),
    ("SlidingWindowSpec", "sliding_window"),
    ("MLAAttentionSpec", "mla_attention"),
    ("SinkFullAttentionSpec", "sink_full_attention"),
    ("FullAttentionSpec", "full_attention"),
    ("ChunkedLocalAttentionSpec", "chunked_local_attention"),
    ("MambaSpec", "mamba"),
    ("CircularBufferSpec", "circular_buffer"),
    ("CrossAttentionSpec", "cross_attention"),
    ("EncoderOnlyAttentionSpec", "encoder_only_attention"),
    ("AttentionSpec", "attention"),
)
UNSERVED_KINDS = frozenset({"cross_attention", "encoder_only_attention", "unknown"})
SNAPSHOT_MODES = ("align", "all")


def spec_kind(spec: Any) -> str:
    """Kind of a layer's spec, by the names of its classes; ``unknown`` when none is known."""
    names = {cls.__name__ for cls in type(spec).__mro__}
    return next((kind for name, kind in _KINDS if name in names), "unknown")


def is_recurrent(spec: Any) -> bool:
    """Whether the spec's pages are state snapshots."""
    return spec_kind(spec) == "mamba"


def leaf_specs(spec: Any) -> list[Any]:
    """The specs of single layers: those inside a ``UniformTypeKVCacheSpecs``, or the spec."""
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if isinstance(inner, Mapping) and inner else [spec]


def layer_spec(group_spec: Any, layer_name: str) -> Any:
    """The spec of one layer of a group.

    Raises:
        GroupMismatchError: the group has one spec per layer and none for this one.
    """
    inner = getattr(group_spec, "kv_cache_specs", None)
    if not (isinstance(inner, Mapping) and inner):
        return group_spec
    if layer_name not in inner:
        raise GroupMismatchError(f"layer {layer_name}: its group holds no spec for it")
    return inner[layer_name]


def is_scratch_spec(spec: Any) -> bool:
    """Whether vLLM never hashes the blocks of this spec (``prefix_cacheable`` is false)."""
    return not all(getattr(leaf, "prefix_cacheable", True) for leaf in leaf_specs(spec))


def is_cacheable_group(group: Any) -> bool:
    """Whether a group's blocks can be stored: hashed, on the device, open to connectors."""
    return (
        not is_scratch_spec(group.kv_cache_spec)
        and bool(getattr(group, "enable_kv_transfer", True))
        and not getattr(group, "host_resident", False)
    )


def groups_of(kv_cache_config: Any) -> Sequence[Any]:
    """The config's groups; empty without a config."""
    return tuple(getattr(kv_cache_config, "kv_cache_groups", None) or ())


def get_tokens_per_block(spec: Any, dcp_size: int) -> int:
    """Tokens that one block id of ``spec`` covers; 0 for scratch specs.

    Under decode-context parallelism the blocks of a sharded cache stand for
    ``block_size * dcp_size`` tokens; state is replicated on every rank and is not scaled
    (``resolve_kv_cache_block_sizes`` of vLLM 0.32).
    """
    if is_scratch_spec(spec):
        return 0
    leaf = leaf_specs(spec)[0]
    is_attention = spec_kind(leaf) not in ("mamba", "unknown")
    sharded = bool(getattr(leaf, "dcp_sharded", is_attention))
    return int(spec.block_size) * (dcp_size if sharded and dcp_size > 1 else 1)


def window_tokens(spec: Any) -> int:
    """What later tokens can read back, in tokens: the window, -1 without one.

    Chunked-local attention carries its chunk, which is never too short; a state carries its
    block. Tokens that vLLM retains beyond the window (``extra_retained_tokens``) count in.
    """
    kind = spec_kind(spec)
    if kind in ("sliding_window", "sliding_window_mla"):
        return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0) or 0)
    if kind == "chunked_local_attention":
        return int(spec.attention_chunk_size)
    return int(spec.block_size) if kind == "mamba" else -1


def declared_slots(spec: Any) -> int:
    """Physical slots of one block as the spec declares them; 0 when it packs slots by bytes."""
    if is_recurrent(spec):
        return 1
    if getattr(spec, "tq_slot_size", 0):
        return 0
    states = getattr(spec, "num_states", None)
    if isinstance(states, int):
        return states
    ratio = getattr(spec, "tokens_per_state", 1) or 1
    if ratio == 1:
        ratio = getattr(spec, "compress_ratio", 1) or 1
    return int(spec.block_size // ratio)


def declares_packed_slots(spec: Any) -> bool:
    """Whether an older spec declares compression that must not be re-viewed."""
    return (getattr(spec, "compress_ratio", 1) or 1) > 1 or bool(getattr(spec, "tq_slot_size", 0))


def live_page_bytes(spec: Any) -> int | None:
    """Bytes of one layer's block without padding, None where the spec does not say."""
    if is_recurrent(spec):
        shapes, dtypes = getattr(spec, "shapes", None), getattr(spec, "dtypes", None)
        if not shapes or not dtypes:
            return None
        states = zip(shapes, dtypes, strict=True)
        return sum(int(math.prod(shape) * dtype.itemsize) for shape, dtype in states)
    fields = ("unpadded_page_size_bytes", "real_page_size_bytes", "page_size_bytes")
    values: list[object] = [getattr(spec, field, None) for field in fields]
    return next((value for value in values if isinstance(value, int)), None)
