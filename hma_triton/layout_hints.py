"""What an engine tells us about its caches beside the tensors; travels with the registration.

The server re-derives formats and groups from the same tensors and the same hints, so that it sees
exactly what the worker saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from hma_triton.errors import GeometryError, UnsupportedLayoutError
from hma_triton.group_view import EngineGroupInfo

TOKENS_FIRST = "NHD"
HEADS_FIRST = "HND"

# letters outer to inner: L layers, B blocks, N slots, H heads, C content
_ORDERS = {
    "NHD": TOKENS_FIRST,
    "LBNHC": TOKENS_FIRST,
    "BLNHC": TOKENS_FIRST,
    "HND": HEADS_FIRST,
    "LBHNC": HEADS_FIRST,
    "BLHNC": HEADS_FIRST,
}
_FRAGMENTED = {
    "LHBNC": "heads lie outside the blocks, so a block is one piece per head",
    "BHLNC": "layers lie inside the heads, so a layer's block is one piece per head",
}


class LayoutHints(msgspec.Struct, frozen=True, omit_defaults=True):
    """Per-layer tuples are in registration order; one value counts for all layers, none: unknown.

    ``kv_layout``: the memory order by the engine's name (``NHD``, ``LBHNC``, ...).
    ``slots_per_block``: physical slots of a block that the engine declares, 0 unknown. Binding.
    ``formats``: format names that state the axes of the tensors as registered, "" to detect.
    ``edits``: what was done to a layer's tensor before registration, "" for nothing. Only for
    the fingerprint.
    ``tokens_per_block``: tokens of a block, 0 unknown. Settles readings that nothing else tells
    apart, and unfolds layouts whose blocks and slots are one axis.
    ``kv_list_layout``: ``k_v`` (keys of all layers, then values) or ``unified`` (SGLang's lists).
    ``num_kv_heads``, ``head_size``: for engines that register flat pages (TensorRT-LLM).
    """

    kv_layout: str | None = None
    slots_per_block: tuple[int, ...] = ()
    formats: tuple[str, ...] = ()
    edits: tuple[str, ...] = ()
    tokens_per_block: tuple[int, ...] = ()
    kv_list_layout: str | None = None
    num_kv_heads: int = 0
    head_size: int = 0

    def to_wire(self) -> dict[str, str]:
        """What is known, as strings for a registration message; ``edits`` go with the facts.

        :func:`as_layout_hints` takes them back. A tuple whose values are all the same is one value.
        """
        wire: dict[str, str] = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name == "edits" or not value:
                continue
            if isinstance(value, tuple):
                value = value[:1] if len(set(value)) == 1 else value
            wire[name] = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        return wire


_TEXT_FIELDS = ("kv_layout", "kv_list_layout")
_TUPLE_FIELDS = ("slots_per_block", "tokens_per_block", "formats", "edits")


def as_layout_hints(hints: LayoutHints | Mapping[str, Any] | str | None) -> LayoutHints:
    """Hints from any form a caller may have: our struct, what it wrote, LMCache's dict, a name.

    Raises:
        GeometryError: a key that no hint has, or a value of the wrong kind.
    """
    if hints is None:
        return LayoutHints()
    if isinstance(hints, LayoutHints):
        return hints
    if isinstance(hints, str):
        return LayoutHints(kv_layout=hints)
    fields = dict(hints)
    if "head_dim" in fields:
        fields["head_size"] = fields.pop("head_dim")
    unknown = sorted(set(fields) - set(LayoutHints.__struct_fields__))
    if unknown:
        raise GeometryError(
            f"layout hints {unknown} are unknown; there are {list(LayoutHints.__struct_fields__)}"
        )
    for name, value in fields.items():
        if isinstance(value, str) and name not in _TEXT_FIELDS and value[:1] in set("[0123456789"):
            fields[name] = _decoded(name, value)
    for name in _TUPLE_FIELDS:
        if isinstance(fields.get(name), (int, str)):
            fields[name] = (fields[name],)
    try:
        return msgspec.convert(fields, LayoutHints)
    except msgspec.ValidationError as error:
        raise GeometryError(f"layout hints: {error}") from error


def _decoded(name: str, text: str) -> Any:
    """A number or a list of a registration message."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise GeometryError(f"layout hint {name}: {text[:80]!r} is no JSON") from error


def memory_order(kv_layout: str | None) -> str | None:
    """``NHD`` or ``HND`` for any accepted layout name, None for no hint.

    Raises:
        UnsupportedLayoutError: a layout whose blocks are fragmented, or an unknown name.
    """
    if kv_layout is None:
        return None
    if kv_layout in _ORDERS:
        return _ORDERS[kv_layout]
    if kv_layout in _FRAGMENTED:
        raise UnsupportedLayoutError(
            f"cache layout {kv_layout} is refused: {_FRAGMENTED[kv_layout]}; "
            f"choose one of {', '.join(_ORDERS)}"
        )
    meant = kv_layout.upper()
    guess = f"; did you mean {meant!r}?" if meant in _ORDERS or meant in _FRAGMENTED else ""
    raise UnsupportedLayoutError(
        f"cache layout hint {kv_layout!r} is none of {', '.join(_ORDERS)}{guess}"
    )


def value_for_layer(values: Sequence[Any], layer: int, num_layers: int, name: str) -> Any:
    """``values[layer]``; a single value stands for all layers, none gives None.

    Raises:
        GeometryError: a list that is neither empty, nor single, nor as long as the layers.
    """
    if not values:
        return None
    if len(values) == 1:
        return values[0]
    if len(values) != num_layers:
        raise GeometryError(f"hint {name} has {len(values)} entries for {num_layers} layers")
    return values[layer]


def hints_with_blocks(
    hints: LayoutHints | Mapping[str, Any] | str | None,
    infos: Sequence[EngineGroupInfo],
    kv_caches: Mapping[str, Any] | Sequence[Any] | torch.Tensor,
) -> LayoutHints:
    """``hints`` with the infos' tokens per block filled in where the hints have none.

    ``kv_caches`` only says how many layers there are.
    """
    known = as_layout_hints(hints)
    if known.tokens_per_block or not infos:
        return known
    # one tensor of all layers is [NB, NL, ...]
    layers = kv_caches[0] if isinstance(kv_caches, torch.Tensor) else kv_caches
    tokens = [0] * len(layers)
    for info in infos:
        for layer in info.layer_indices:
            if 0 <= layer < len(tokens):
                tokens[layer] = info.tokens_per_block
    return msgspec.structs.replace(known, tokens_per_block=tuple(tokens))
