"""Structures that SGLang and TensorRT-LLM register: lists of keys and values, flat pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hma_triton.errors import GeometryError, UnsupportedLayoutError
from hma_triton.kv_format import EngineKVFormat
from hma_triton.layout_hints import LayoutHints


def read_trtllm(kv_caches: Any, hints: LayoutHints) -> tuple[torch.Tensor, list[EngineKVFormat]]:
    """``[NB, NL, 2, NH * BS * HS]`` or its six axes ``[NB, NL, 2, NH, BS, HS]``, heads first.

    Raises:
        GeometryError: a flat page and no ``num_kv_heads``, ``tokens_per_block``, ``head_size``,
            or sizes that do not make up the page.
        UnsupportedLayoutError: any other structure.
    """
    tensor = kv_caches
    if isinstance(tensor, Mapping):
        tensor = list(tensor.values())
    if isinstance(tensor, (list, tuple)) and len(tensor) == 1:
        tensor = tensor[0]
    if not isinstance(tensor, torch.Tensor) or tensor.ndim not in (4, 6) or tensor.shape[2] != 2:
        raise UnsupportedLayoutError(
            "a TensorRT-LLM pool is one tensor [NB, NL, 2, flat] or [NB, NL, 2, NH, BS, HS], not "
            f"{tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__}"
        )
    if tensor.ndim == 4:
        sizes = (hints.num_kv_heads, _block_tokens(hints), hints.head_size)
        flat = tensor.shape[3]
        if 0 in sizes or sizes[0] * sizes[1] * sizes[2] != flat:
            raise GeometryError(
                f"a flat page of {flat} elements is not num_kv_heads {sizes[0]} x tokens_per_block "
                f"{sizes[1]} x head_size {sizes[2]} (hints; 0 is missing)"
            )
        tensor = tensor.view(*tensor.shape[:3], *sizes)
    return tensor, [EngineKVFormat.NB_NL_TWO_NH_BS_HS] * tensor.shape[1]


def read_sglang(kv_caches: Any, hints: LayoutHints) -> tuple[Any, list[EngineKVFormat]]:
    """Lists of keys and values, lists of latents, or independent components.

    With ``tokens_per_block`` the folded axis becomes blocks and slots; without it the folded
    formats are reported, whose blocks are unknown.

    Raises:
        GeometryError: a folded axis that the tokens per block do not divide.
        UnsupportedLayoutError: a structure that none of SGLang's is.
    """
    if isinstance(kv_caches, Mapping):
        kv_caches = list(kv_caches.values())
    if not isinstance(kv_caches, (list, tuple)) or not kv_caches:
        raise UnsupportedLayoutError(f"SGLang registers lists, not {type(kv_caches).__name__}")
    layers = list(kv_caches)
    tokens = _block_tokens(hints)
    if hints.kv_list_layout == "k_v":
        if len(layers) % 2:
            raise UnsupportedLayoutError(f"{len(layers)} tensors are no keys and values of layers")
        half = len(layers) // 2
        return _read_kv_lists(layers[:half], layers[half:], tokens)
    if hints.kv_list_layout == "unified":
        return layers, [_unified_format(index, layer) for index, layer in enumerate(layers)]
    if hints.kv_list_layout is not None:
        raise UnsupportedLayoutError(
            f"kv_list_layout {hints.kv_list_layout!r} is none of 'k_v', 'unified'"
        )
    if len(layers) == 2 and all(isinstance(part, (list, tuple)) for part in layers):
        return _read_kv_lists(layers[0], layers[1], tokens)
    return _read_latents(layers, tokens)


def _block_tokens(hints: LayoutHints) -> int:
    values = set(hints.tokens_per_block) - {0}
    if len(values) > 1:
        raise GeometryError(f"one block size is needed, the hints have {sorted(values)}")
    return values.pop() if values else 0


def _read_kv_lists(
    keys: Sequence[Any], values: Sequence[Any], tokens: int
) -> tuple[list[list[torch.Tensor]], list[EngineKVFormat]]:
    """``[keys, values]``, whose tensors are ``[NB * BS, NH, HS]`` or ``[NB, BS, NH, HS]``."""
    if len(keys) != len(values) or not keys:
        raise UnsupportedLayoutError(f"{len(keys)} key tensors and {len(values)} value tensors")
    tensors = [*keys, *values]
    ranks = {t.ndim if isinstance(t, torch.Tensor) else 0 for t in tensors}
    if ranks == {4}:
        fmt = EngineKVFormat.TWO_X_NL_X_NB_BS_NH_HS
        return [list(keys), list(values)], [fmt] * len(keys)
    if ranks != {3}:
        raise UnsupportedLayoutError(f"key and value tensors have {sorted(ranks)} axes, not 3 or 4")
    if not tokens:
        fmt = EngineKVFormat.TWO_X_NL_X_NBBS_NH_HS
        return [list(keys), list(values)], [fmt] * len(keys)
    unfolded = [
        [_unfold(tensor, tokens, f"{kind} of layer {layer}") for layer, tensor in enumerate(part)]
        for kind, part in (("keys", keys), ("values", values))
    ]
    return unfolded, [EngineKVFormat.TWO_X_NL_X_NB_BS_NH_HS] * len(keys)


def _read_latents(
    layers: Sequence[Any], tokens: int
) -> tuple[list[torch.Tensor], list[EngineKVFormat]]:
    """``[NB * BS, 1, HS]`` per layer, or ``[NB, BS, HS]`` when the block is known."""
    caches: list[torch.Tensor] = []
    formats: list[EngineKVFormat] = []
    for index, layer in enumerate(layers):
        if not isinstance(layer, torch.Tensor) or layer.ndim != 3:
            raise UnsupportedLayoutError(
                f"layer {index}: SGLang latents have three axes; for keys and values pass "
                "kv_list_layout 'k_v', for components 'unified'"
            )
        if tokens and layer.shape[1] == 1:
            caches.append(_unfold(layer, tokens, f"layer {index}").squeeze(2))
            formats.append(EngineKVFormat.NL_X_NB_BS_HS)
        elif tokens and layer.shape[1] == tokens:
            caches.append(layer)
            formats.append(EngineKVFormat.NL_X_NB_BS_HS)
        elif layer.shape[1] == 1:
            caches.append(layer)
            formats.append(EngineKVFormat.NL_X_NBBS_ONE_HS)
        else:
            raise UnsupportedLayoutError(
                f"layer {index}: shape {tuple(layer.shape)} is neither latents [NB*BS, 1, HS] nor "
                f"[NB, {tokens or 'BS'}, HS]; keys and values need kv_list_layout 'k_v'"
            )
    return caches, formats


def _unified_format(index: int, layer: Any) -> EngineKVFormat:
    formats = {3: EngineKVFormat.NL_X_NB_BS_HS, 4: EngineKVFormat.NL_X_NB_BS_NH_HS}
    if not isinstance(layer, torch.Tensor) or layer.ndim not in formats:
        raise UnsupportedLayoutError(
            f"layer {index}: unified components are [NB, BS, HS] or [NB, BS, NH, HS]"
        )
    return formats[layer.ndim]


def _unfold(tensor: torch.Tensor, tokens: int, where: str) -> torch.Tensor:
    """``[NB * BS, ...]`` as ``[NB, BS, ...]``, a view."""
    if tensor.shape[0] % tokens:
        raise GeometryError(
            f"{where}: {tensor.shape[0]} slots are no whole blocks of {tokens} tokens"
        )
    return tensor.view(tensor.shape[0] // tokens, tokens, *tensor.shape[1:])
