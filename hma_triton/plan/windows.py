"""What a chunk keeps and what a hit needs, per reuse rule; and which chunk lengths are legal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hma_triton.errors import GroupMismatchError
from hma_triton.units import cdiv, lcm

MINIMUM_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class ReuseRule:
    """What a hit needs of one object group.

    `window_tokens` None: every chunk. A window: the chunks over its last `window - 1` tokens.
    `recurrent`: the state at the hit's end, so the last chunk alone.
    """

    window_tokens: int | None = None
    recurrent: bool = False

    def chunks_for_hit(self, chunk_tokens: int) -> int | None:
        """Trailing chunks that a hit needs; None for all of them."""
        if self.recurrent:
            return 1
        if self.window_tokens is None:
            return None
        return max(1, cdiv(self.window_tokens - 1, chunk_tokens))


def kept_blocks(
    tokens_per_block: int, window_tokens: int | None, recurrent: bool, chunk_tokens: int
) -> int:
    """Blocks at the end of a chunk that a later hit can need.

    `ceil((window - 1) / block)`, at least one, at most the chunk; one state block when recurrent.
    """
    blocks_per_chunk = chunk_tokens // tokens_per_block
    if recurrent:
        return 1
    if window_tokens is None:
        return blocks_per_chunk
    return min(max(1, cdiv(window_tokens - 1, tokens_per_block)), blocks_per_chunk)


def chunks_needed(rule: ReuseRule, hit_chunks: int, chunk_tokens: int) -> range:
    """Chunks of an object group that a hit of `hit_chunks` chunks needs."""
    needed = rule.chunks_for_hit(chunk_tokens)
    return range(0 if needed is None else max(0, hit_chunks - needed), hit_chunks)


def choose_chunk_tokens(
    tokens_per_block: Sequence[int], any_recurrent: bool, minimum: int = MINIMUM_CHUNK_TOKENS
) -> int:
    """Chunk length for these blocks; zeros (groups that are not cacheable) are ignored.

    With recurrent groups exactly the least common multiple, since state exists only at block
    boundaries; else its smallest multiple that is at least `minimum`.

    Raises:
        GroupMismatchError: no group is cacheable.
    """
    blocks = [tokens for tokens in tokens_per_block if tokens]
    if not blocks:
        raise GroupMismatchError(
            f"no cacheable group: tokens per block are {list(tokens_per_block)}; "
            "there is nothing to choose a chunk for"
        )
    unit = lcm(*blocks)
    return unit if any_recurrent else cdiv(minimum, unit) * unit


def check_chunk_tokens(chunk_tokens: int, tokens_per_block: Sequence[int]) -> None:
    """Check that every cacheable group's block divides the chunk.

    Raises:
        GroupMismatchError: names the group, its block, and the nearest valid chunk.
    """
    blocks = [tokens for tokens in tokens_per_block if tokens]
    if not blocks:
        choose_chunk_tokens(tokens_per_block, any_recurrent=False)
    unit = lcm(*blocks)
    if chunk_tokens > 0 and chunk_tokens % unit == 0:
        return
    nearest = max(1, round(chunk_tokens / unit)) * unit
    offenders = [
        f"group {index} ({tokens} tokens per block)"
        for index, tokens in enumerate(tokens_per_block)
        if tokens and (chunk_tokens <= 0 or chunk_tokens % tokens)
    ]
    raise GroupMismatchError(
        f"chunk of {chunk_tokens} tokens is no multiple of {', '.join(offenders)}; "
        f"chunks must be multiples of {unit} tokens, the nearest valid chunk is {nearest}"
    )
