"""Small hybrid pools whose bytes are a function of the chunk's digest, so that any hit can be
judged without knowing who stored it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hma_triton.group_view import EngineGroupInfo
from hma_triton.keys import chunk_digests

DIGEST = 32
CHUNK_TOKENS = 32
NULL = 0


@dataclass(frozen=True, slots=True)
class GroupKind:
    """One engine group: `layers` tensors [blocks, heads, slots, content] of bytes."""

    name: str
    tokens_per_block: int
    layers: int = 2
    heads: int = 2
    slots: int = 0
    content: int = 16
    window: int = -1
    recurrent: bool = False

    @property
    def blocks_per_chunk(self) -> int:
        return CHUNK_TOKENS // self.tokens_per_block

    def needed_blocks(self, hit_tokens: int) -> range:
        """Blocks that an engine asks for when it loads a prefix."""
        end = hit_tokens // self.tokens_per_block
        if self.recurrent:
            return range(end - 1, end)
        if self.window < 0:
            return range(end)
        return range(max(0, hit_tokens - self.window + 1) // self.tokens_per_block, end)


FULL = GroupKind("full", 16)
WINDOW = GroupKind("window", 16, layers=3, window=40)
STATE = GroupKind("state", 32, heads=1, slots=1, content=320, recurrent=True)
HYBRID = (FULL, WINDOW, STATE)


@dataclass(slots=True)
class TestPool:
    """One rank's pool. Block 0 of every group is the null block and keeps its pattern."""

    kinds: Sequence[GroupKind] = HYBRID
    blocks: int = 33
    rank: int = 0
    kv: dict[str, torch.Tensor] = field(default_factory=dict)
    infos: list[EngineGroupInfo] = field(default_factory=list)
    __test__ = False

    def __post_init__(self) -> None:
        for number, kind in enumerate(self.kinds):
            first = len(self.kv)
            slots = kind.slots or kind.tokens_per_block
            for layer in range(kind.layers):
                shape = (self.blocks, kind.heads, slots, kind.content)
                self.kv[f"{kind.name}.{layer}"] = torch.full(shape, 0xEE, dtype=torch.uint8)
            self.infos.append(
                EngineGroupInfo(
                    number,
                    tuple(range(first, len(self.kv))),
                    kind.tokens_per_block,
                    kind.window,
                    recurrent_state=kind.recurrent,
                )
            )

    def registration(self) -> dict[str, object]:
        return {
            "kv_caches": self.kv,
            "model_name": "test-model",
            "engine_type": "vllm",
            "layout_hints": {"kv_layout": "HND"},
            "engine_group_infos": self.infos,
            "rank": self.rank,
            "chunk_tokens": CHUNK_TOKENS,
        }

    def content(self, digest: bytes, kind: GroupKind, layer: int, block: int) -> torch.Tensor:
        """What the block must hold for this chunk."""
        cache = self.kv[f"{kind.name}.{layer}"]
        seed = digest + f"/{kind.name}/{layer}/{block}/{self.rank}".encode()
        page = hashlib.shake_128(seed).digest(cache[0].numel())
        return torch.frombuffer(bytearray(page), dtype=torch.uint8).reshape(cache[0].shape)

    def write(self, digests: bytes, ids: Sequence[npt.NDArray[np.int64]]) -> None:
        """Put the content of all chunks into the blocks named, nulls left out."""
        for kind, of_group in zip(self.kinds, ids, strict=True):
            for position, block in enumerate(of_group.tolist()):
                if block != NULL:
                    self._page(digests, kind, position, block, check=False)

    def wrong(self, digests: bytes, ids: Sequence[npt.NDArray[np.int64]]) -> list[str]:
        """Blocks that do not hold what the digests say."""
        found = []
        for kind, of_group in zip(self.kinds, ids, strict=True):
            for position, block in enumerate(of_group.tolist()):
                if block != NULL and not self._page(digests, kind, position, block, check=True):
                    found.append(f"{kind.name} block {block} at position {position}")
        return found

    def _page(
        self, digests: bytes, kind: GroupKind, position: int, block: int, *, check: bool
    ) -> bool:
        chunk, within = divmod(position, kind.blocks_per_chunk)
        digest = digests[chunk * DIGEST : (chunk + 1) * DIGEST]
        for layer in range(kind.layers):
            wanted = self.content(digest, kind, layer, within)
            page = self.kv[f"{kind.name}.{layer}"][block]
            if check:
                if not torch.equal(page, wanted):
                    return False
            else:
                page.copy_(wanted)
        return True

    def wipe(self, value: int = 0x55) -> None:
        for cache in self.kv.values():
            cache[1:] = value

    def null_blocks_untouched(self) -> bool:
        return all(bool((cache[0] == 0xEE).all()) for cache in self.kv.values())

    def all_ids(self, chunks: int, first: int = 1) -> list[npt.NDArray[np.int64]]:
        """Real ids for every block of `chunks` chunks, in a shuffled order of the pool."""
        found = []
        for number, kind in enumerate(self.kinds):
            count = chunks * kind.blocks_per_chunk
            order = np.random.default_rng(number + first).permutation(self.blocks - 1) + 1
            found.append(order[:count].astype(np.int64))
        return found

    def load_ids(self, hit_tokens: int, first: int = 1) -> list[npt.NDArray[np.int64]]:
        """Ids as an engine names them for a hit: real where it needs the block, else null."""
        ids = self.all_ids(hit_tokens // CHUNK_TOKENS, first)
        for kind, of_group in zip(self.kinds, ids, strict=True):
            needed = kind.needed_blocks(hit_tokens)
            of_group[: needed.start] = NULL
        return ids


def prompt(seed: int, chunks: int, salt: str = "") -> bytes:
    """Digests of a prompt of that many chunks."""
    tokens = np.random.default_rng(seed).integers(0, 50_000, chunks * CHUNK_TOKENS)
    return chunk_digests(tokens, CHUNK_TOKENS, salt)


def first(digests: bytes, chunks: int) -> bytes:
    """The first `chunks` digests."""
    return digests[: chunks * DIGEST]


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
