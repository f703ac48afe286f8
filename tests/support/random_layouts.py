"""Random registered caches whose meaning is known from how they were made.

Every layer is laid over bytes by hand and tells its planes as `[NB, slots, heads, content]`
views, taken by the axes that were laid down. Nothing here asks the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from hma_triton.group_view import EngineGroupInfo
from hma_triton.layout_hints import LayoutHints

Bytes = npt.NDArray[np.uint8]

DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn)
# registered form of a layer -> format names for slots outside heads, heads outside slots
FORMATS = {
    "packed": ("NL_X_NB_BS_NH_CS", "NL_X_NB_NH_BS_CS"),
    "kv_in_block": ("NL_X_NB_TWO_BS_NH_HS", "NL_X_NB_TWO_NH_BS_HS"),
    "kv_outside": ("NL_X_TWO_NB_BS_NH_HS", "NL_X_TWO_NB_NH_BS_HS"),
    "latent": ("NL_X_NB_BS_HS", "NL_X_NB_BS_HS"),
    "indexer": ("NL_X_NB_BSV_BSS", "NL_X_NB_BSV_BSS"),
    "kv_pair": ("NL_X_TWO_X_NB_BS_NH_HS", "NL_X_TWO_X_NB_BS_NH_HS"),
    "latents": ("NL_X_NP_X_NB_BS_ONE_HS", "NL_X_NP_X_NB_BS_ONE_HS"),
    "rbln": ("NL_X_TWO_NB_NH_ONE_BS_HS", "NL_X_TWO_NB_NH_ONE_BS_HS"),
}
HEADLESS = ("latent", "indexer", "latents")
# blocks of one chunk, so that a chunk stays small enough to check by hand
MOST_BLOCKS_PER_CHUNK = 6


@dataclass(frozen=True)
class Plan:
    """Layers of one engine group that look alike, and how they lie."""

    form: str
    engine_group: int
    num_layers: int
    num_blocks: int
    slots: int
    heads: int
    size: int
    dtype: torch.dtype
    heads_outside: bool
    # shape spelled with heads before slots, whatever the memory order
    heads_first_in_shape: bool
    blocks_outside: bool
    padding_elems: int
    offset_elems: int
    ratio: int
    window_tokens: int
    recurrent: bool
    # place in memory of each layer
    places: tuple[int, ...]

    @property
    def tokens_per_block(self) -> int:
        return self.slots * self.ratio

    @property
    def widths(self) -> tuple[int, ...]:
        """Content elements of each plane."""
        if self.form == "latents":
            return self.size, self.size + 1, self.size + 3
        return (self.size,) * (2 if self.form.startswith("kv") or self.form == "rbln" else 1)

    def format_name(self, is_hinted: bool) -> str:
        """The format to find; strides of a length-1 axis do not say which order it is in."""
        in_strides = self.slots > 1 and self.heads > 1
        return FORMATS[self.form][self.heads_outside and (is_hinted or in_strides)]


@dataclass(frozen=True, repr=False)
class Layer:
    """One registered entry, and its planes `[NB, slots, heads, content elements]`."""

    entry: Any
    planes: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Registration:
    """Everything registered: layer i belongs to plan `plan_of[i]` (None: shares a cache)."""

    plans: tuple[Plan, ...]
    plan_of: tuple[int | None, ...]
    layers: tuple[Layer, ...]
    hints: LayoutHints

    @property
    def kv_caches(self) -> dict[str, Any]:
        return {f"model.layers.{i}": layer.entry for i, layer in enumerate(self.layers)}

    @property
    def expected(self) -> list[tuple[int, list[int]]]:
        """`(plan, layers)` of each kernel group, by first layer."""
        members: dict[int, list[int]] = {}
        for layer, plan in enumerate(self.plan_of):
            if plan is not None:
                members.setdefault(plan, []).append(layer)
        return list(members.items())

    @property
    def infos(self) -> list[EngineGroupInfo]:
        return [
            EngineGroupInfo(
                self.plans[plan].engine_group,
                tuple(layers),
                self.plans[plan].tokens_per_block,
                self.plans[plan].window_tokens,
                0,
                self.plans[plan].recurrent,
            )
            for plan, layers in self.expected
        ]


@st.composite
def plans(draw: st.DrawFn, engine_group: int, heads_outside: bool) -> Plan:
    form = draw(st.sampled_from(sorted(FORMATS)))
    layers = draw(st.integers(1, 3))
    is_indexer = form == "indexer"
    recurrent = form == "packed" and draw(st.booleans())
    return Plan(
        form=form,
        engine_group=engine_group,
        num_layers=layers,
        # an axis of length 2 in front is K and V, so no pool of two blocks: see test_detection
        num_blocks=draw(st.sampled_from((1, 3, 4, 5))),
        slots=draw(st.sampled_from((1, 2, 3, 4, 8))),
        heads=1 if form in HEADLESS else draw(st.integers(1, 33)),
        size=132 if is_indexer else draw(st.integers(1, 19)),
        dtype=torch.uint8 if is_indexer else draw(st.sampled_from(DTYPES)),
        heads_outside=heads_outside or form == "rbln",
        heads_first_in_shape=form == "rbln" or draw(st.booleans()),
        blocks_outside=form not in ("kv_outside", "rbln") and draw(st.booleans()),
        padding_elems=draw(st.integers(0, 5)),
        offset_elems=draw(st.integers(0, 7)),
        ratio=draw(st.sampled_from((1, 1, 2, 4, 128))),
        window_tokens=-1 if recurrent else draw(st.sampled_from((-1, -1, 1, 2, 7, 33, 500))),
        recurrent=recurrent,
        places=tuple(draw(st.permutations(range(layers)))),
    )


@st.composite
def registrations(draw: st.DrawFn) -> Registration:
    """One to three groups, their layers shuffled into one dict, perhaps with a shared layer."""
    heads_outside = draw(st.booleans())
    chosen: list[Plan] = []
    for _ in range(draw(st.integers(1, 3))):
        group = chosen[-1].engine_group + 1 if chosen else 0
        plan = draw(plans(group, heads_outside))
        last = chosen[-1] if chosen else plan
        taken = {other.form for other in chosen if other.engine_group == last.engine_group}
        if chosen and plan.form not in taken and draw(st.booleans()):
            # another kind of layer in the same engine group, as vLLM's uniform groups have
            plan = replace(plan, engine_group=last.engine_group, slots=last.slots, ratio=last.ratio)
        chosen.append(plan)
    chosen = _small_chunk(chosen)
    plan_of: list[int | None] = [i for i, plan in enumerate(chosen) for _ in plan.places]
    plan_of = draw(st.permutations(plan_of))
    layers = _layers(chosen, plan_of, draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):
        plan_of, layers = [*plan_of, None], [*layers, layers[0]]
    tells_apart = all(plan.slots != plan.heads for plan in chosen if plan.form not in HEADLESS)
    by_slots_alone = tells_apart and draw(st.booleans())
    declare_all = by_slots_alone or draw(st.booleans())
    slots = tuple(
        0
        if plan is None or not (declare_all or 1 in (chosen[plan].slots, chosen[plan].heads))
        else chosen[plan].slots
        for plan in plan_of
    )
    layout = None if by_slots_alone else ("HND" if heads_outside else "NHD")
    hints = LayoutHints(kv_layout=layout, slots_per_block=slots)
    return Registration(tuple(chosen), tuple(plan_of), tuple(layers), hints)


def chunk_of(chosen: list[Plan] | tuple[Plan, ...]) -> int:
    """Least common multiple of the plans' blocks."""
    return int(np.lcm.reduce([plan.tokens_per_block for plan in chosen]))


def _small_chunk(chosen: list[Plan]) -> list[Plan]:
    """The plans with small blocks stretched, so that a chunk has few of them."""
    chunk = chunk_of(chosen)
    stretched = []
    for plan in chosen:
        ratio = plan.ratio
        while chunk // (plan.slots * ratio) > MOST_BLOCKS_PER_CHUNK and (
            chunk % (plan.slots * ratio * 2) == 0
        ):
            ratio *= 2
        stretched.append(replace(plan, ratio=ratio))
    return stretched


def _layers(chosen: list[Plan], plan_of: list[int | None], seed: int) -> list[Layer]:
    built = {i: iter(build_layers(plan, seed + i)) for i, plan in enumerate(chosen)}
    return [next(built[plan]) for plan in plan_of if plan is not None]


def build_layers(plan: Plan, seed: int) -> list[Layer]:
    """Layers of `plan` over one storage of random bytes, each at its place."""
    page = plan.slots * plan.heads * max(plan.widths)
    unit = page * (2 if plan.form == "kv_in_block" else 1)
    if plan.blocks_outside:
        step, layer_step = unit * plan.num_layers + plan.padding_elems, unit
        reach = step * plan.num_blocks
    else:
        step = unit + plan.padding_elems
        layer_step = step * plan.num_blocks * (2 if plan.form in ("kv_outside", "rbln") else 1)
        reach = layer_step * plan.num_layers
    reach += plan.offset_elems
    elems = reach * (len(plan.widths) if plan.form in ("kv_pair", "latents") else 1)
    noise = np.random.default_rng(seed).integers(0, 256, elems * plan.dtype.itemsize, np.uint8)
    storage = torch.from_numpy(noise).view(plan.dtype)
    starts = [plan.offset_elems + layer_step * place for place in plan.places]
    return [_layer(plan, storage, start, step, page, reach) for start in starts]


def _layer(
    plan: Plan, storage: torch.Tensor, start: int, step: int, page: int, reach: int
) -> Layer:
    slots, heads = plan.slots, plan.heads

    def plane(offset: int, width: int) -> torch.Tensor:
        inner = (width, slots * width) if plan.heads_outside else (heads * width, width)
        return storage.as_strided((plan.num_blocks, slots, heads, width), (step, *inner, 1), offset)

    def spelled(tensor: torch.Tensor, slot_axis: int) -> torch.Tensor:
        return tensor.transpose(slot_axis, slot_axis + 1) if plan.heads_first_in_shape else tensor

    first = plane(start, plan.size)
    if plan.form == "latent":
        return Layer(first.select(2, 0), (first,))
    if plan.form in ("packed", "indexer"):
        return Layer(spelled(first, 1), (first,))
    if plan.form in ("kv_pair", "latents"):
        # a pool of its own for each plane
        planes = tuple(plane(start + i * reach, width) for i, width in enumerate(plan.widths))
        return Layer(planes, planes)
    apart = page if plan.form == "kv_in_block" else step * plan.num_blocks
    shape, strides = first.shape, first.stride()
    if plan.form == "kv_in_block":
        shape, strides = (shape[0], 2, *shape[1:]), (strides[0], apart, *strides[1:])
    else:
        shape, strides = (2, *shape), (apart, *strides)
    both = spelled(storage.as_strided(shape, strides, start), 2)
    entry = both.unsqueeze(3) if plan.form == "rbln" else both
    return Layer(entry, (first, plane(start + apart, plan.size)))


def as_bytes(plane: torch.Tensor) -> Bytes:
    """`[NB, slots, heads, content bytes]` of a plane, copied by its own axes."""
    array: Bytes = plane.contiguous().view(torch.uint8).numpy()
    return array


def token_rows(plan: Plan, layers: list[Layer], block_ids: list[int]) -> Bytes:
    """LMCache's order of the named blocks: `[plane][layer][slot][heads * content]`, flat.

    Planes of several widths and the fields of a planar page stand side by side in a token's row.
    """
    count = len(block_ids) * plan.slots
    rows = [[as_bytes(p)[block_ids].reshape(count, -1) for p in layer.planes] for layer in layers]
    if plan.form == "indexer":
        rows = [[_rows_of_planar_pages(planes[0], plan.slots)] for planes in rows]
    if plan.form == "latents":
        return np.stack([np.concatenate(planes, axis=1) for planes in rows]).reshape(-1)
    return np.stack([planes[i] for i in range(len(rows[0])) for planes in rows]).reshape(-1)


def _rows_of_planar_pages(pages: Bytes, slots: int) -> Bytes:
    """128 value bytes and 4 scale bytes per slot, out of pages of all values, then all scales."""
    flat = pages.reshape(-1, slots * 132)
    values = flat[:, : slots * 128].reshape(-1, slots, 128)
    scales = flat[:, slots * 128 :].reshape(-1, slots, 4)
    return np.concatenate([values, scales], axis=2).reshape(-1, 132)
