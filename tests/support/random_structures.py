"""Random caches in the structures that are no plain list of layers: one tensor, lists of lists.

As in `random_layouts`, the planes of every layer are taken by the axes that were laid down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

FORMS = {
    "cross_layer": ("vllm", "NB_NL_TWO_BS_NH_HS"),
    "cross_layer_heads_outside": ("vllm", "NB_NL_TWO_NH_BS_HS"),
    "flat_pool": ("trtllm", "NB_NL_TWO_NH_BS_HS"),
    "keys_then_values": ("sglang", "TWO_X_NL_X_NB_BS_NH_HS"),
    "two_lists": ("sglang", "TWO_X_NL_X_NB_BS_NH_HS"),
    "folded_latents": ("sglang", "NL_X_NB_BS_HS"),
    "components": ("sglang", "NL_X_NB_BS_NH_HS"),
    "split": ("vllm", "NL_X_NB_BS_NH_TWO_HS"),
    "split_heads_outside": ("vllm", "NL_X_NB_NH_BS_TWO_HS"),
}


@dataclass(frozen=True)
class Structure:
    """Caches as an engine hands them over, and each layer's planes `[NB, slots, heads, C]`."""

    form: str
    caches: Any
    hints: dict[str, Any]
    planes: list[list[torch.Tensor]]
    num_blocks: int
    slots: int
    heads: int

    @property
    def engine(self) -> str:
        return FORMS[self.form][0]

    @property
    def format_name(self) -> str:
        return FORMS[self.form][1]


def _noise(seed: int, *shape: int) -> torch.Tensor:
    raw = np.random.default_rng(seed).integers(0, 256, 2 * int(np.prod(shape)), np.uint8)
    return torch.from_numpy(raw).view(torch.bfloat16).view(shape)


@st.composite
def structures(draw: st.DrawFn) -> Structure:
    form = draw(st.sampled_from(sorted(FORMS)))
    layers, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    slots, size = draw(st.integers(1, 8)), draw(st.integers(1, 19))
    heads = 1 if form == "folded_latents" else draw(st.integers(1, 33))
    seed = draw(st.integers(0, 2**32 - 1))
    caches, hints, planes = _build(form, layers, blocks, slots, heads, size, seed)
    return Structure(form, caches, hints, planes, blocks, slots, heads)


def _build(
    form: str, layers: int, blocks: int, slots: int, heads: int, size: int, seed: int
) -> tuple[Any, dict[str, Any], list[list[torch.Tensor]]]:
    each = range(layers)
    if form.startswith("cross_layer") or form == "flat_pool":
        outside = form != "cross_layer"
        inner = (heads, slots) if outside else (slots, heads)
        pool = _noise(seed, blocks, layers, 2, *inner, size)
        by_slot = pool.transpose(3, 4) if outside else pool
        planes = [[by_slot[:, i, kv] for kv in (0, 1)] for i in each]
        if form == "flat_pool":
            hints = {"num_kv_heads": heads, "tokens_per_block": slots, "head_dim": size}
            return pool.flatten(3), hints, planes
        layout = "HND" if outside else "NHD"
        return pool, {"kv_layout": layout, "slots_per_block": slots}, planes
    if form in ("keys_then_values", "two_lists"):
        parts = [
            [_noise(seed + kv * layers + i, blocks * slots, heads, size) for i in each]
            for kv in (0, 1)
        ]
        planes = [[parts[kv][i].view(blocks, slots, heads, size) for kv in (0, 1)] for i in each]
        if form == "two_lists":
            return parts, {"tokens_per_block": slots}, planes
        hints = {"kv_list_layout": "k_v", "tokens_per_block": slots}
        return [*parts[0], *parts[1]], hints, planes
    if form == "folded_latents":
        flat = [_noise(seed + i, blocks * slots, 1, size) for i in each]
        return flat, {"tokens_per_block": slots}, [[t.view(blocks, slots, 1, size)] for t in flat]
    if form == "components":
        parts_18 = [_noise(seed + i, blocks, slots, heads, size) for i in each]
        return parts_18, {"kv_list_layout": "unified"}, [[t] for t in parts_18]
    outside = form == "split_heads_outside"
    inner = (heads, slots) if outside else (slots, heads)
    split = [_noise(seed + i, blocks, *inner, 2, size) for i in each]
    joined = [t.flatten(3) for t in split]
    planes = [[t.transpose(1, 2) if outside else t] for t in joined]
    return split, {"formats": FORMS[form][1]}, planes
