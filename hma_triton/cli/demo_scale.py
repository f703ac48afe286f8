"""How much of a model's geometry a machine's memory is asked to hold for the demonstration."""

from __future__ import annotations

from dataclasses import dataclass

from hma_triton.cli.demo_pool import blocks_needed, with_fewer_layers
from hma_triton.errors import ConfigError
from hma_triton.geometries import Geometry
from hma_triton.plan import check_chunk_tokens, choose_chunk_tokens
from hma_triton.units import cdiv

PROMPT_TOKENS = 4096
STEP_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of one demonstration. `layers_kept` of `layers_in_all` fit into the memory given."""

    geometry: Geometry
    chunk_tokens: int
    prompt_tokens: int
    step_tokens: int
    num_blocks: int
    pool_bytes: int
    object_bytes: int
    layers_kept: int
    layers_in_all: int

    @property
    def stored_tokens(self) -> int:
        """Tokens of the prompt's whole chunks."""
        return self.prompt_tokens // self.chunk_tokens * self.chunk_tokens


def _layers(geometry: Geometry) -> int:
    return sum(len(group.layer_names) for group in geometry.groups)


def _scale(full: Geometry, layers_per_group: int, chunk_tokens: int) -> Scale:
    """Sizes with at most so many layers of each group."""
    geometry = with_fewer_layers(full, layers_per_group)
    prompt = max(PROMPT_TOKENS, chunk_tokens + 1)
    step = cdiv(STEP_TOKENS, chunk_tokens) * chunk_tokens
    num_blocks = blocks_needed(geometry, prompt, step)
    stored = sum(
        len(group.layer_names)
        * group.live_bytes
        * (
            prompt // chunk_tokens
            if group.mamba_cache_mode is not None
            else prompt // group.tokens_per_block
        )
        for group in geometry.groups
    )
    return Scale(
        geometry=geometry,
        chunk_tokens=chunk_tokens,
        prompt_tokens=prompt,
        step_tokens=step,
        num_blocks=num_blocks,
        pool_bytes=num_blocks * geometry.bytes_per_block,
        object_bytes=stored,
        layers_kept=_layers(geometry),
        layers_in_all=_layers(full),
    )


def fit(full: Geometry, memory_bytes: int, chunk_tokens: int | None = None) -> Scale:
    """The deepest cut of a model whose pool and objects fit into `memory_bytes` together.

    Raises:
        ConfigError: not even one layer of each group fits.
        GroupMismatchError: a group's block does not divide `chunk_tokens`.
    """
    blocks = [group.tokens_per_block for group in full.groups]
    recurrent = any(group.mamba_cache_mode is not None for group in full.groups)
    if chunk_tokens is None:
        chunk_tokens = choose_chunk_tokens(blocks, recurrent)
    check_chunk_tokens(chunk_tokens, blocks)
    deepest = max(len(group.layer_names) for group in full.groups)
    for layers_per_group in range(deepest, 0, -1):
        scale = _scale(full, layers_per_group, chunk_tokens)
        if scale.pool_bytes + scale.object_bytes <= memory_bytes:
            return scale
    raise ConfigError(
        f"{full.model}: one layer of each group and a prompt of {scale.prompt_tokens} tokens need "
        f"{(scale.pool_bytes + scale.object_bytes) / 2**30:.2f} GiB, {memory_bytes / 2**30:.2f} "
        "are allowed: raise --memory-gb"
    )
