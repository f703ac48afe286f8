"""A simple oracle of what a cache server may serve: which objects were committed, and nothing else.

It knows no memory, no eviction and no leases. What it says is an upper bound for every hit, and the
exact answer as long as nothing was evicted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from support.server_pools import CHUNK_TOKENS, DIGEST, GroupKind


@dataclass(slots=True)
class Oracle:
    kinds: tuple[GroupKind, ...]
    world: int
    committed: set[tuple[int, int, bytes]] = field(default_factory=set)

    def commit(self, rank: int, places: list[tuple[int, bytes]]) -> None:
        self.committed |= {(rank, group, digest) for group, digest in places}

    def clear(self) -> None:
        self.committed.clear()

    def longest_hit(self, digests: bytes, max_tokens: int) -> int:
        """Chunks of the longest prefix that may be served, by trying every length."""
        chain = [digests[i : i + DIGEST] for i in range(0, len(digests), DIGEST)]
        longest = 0
        for chunks in range(1, len(chain) + 1):
            if chunks * CHUNK_TOKENS <= max_tokens and self._serves(chain, chunks):
                longest = chunks
        return longest

    def _serves(self, chain: list[bytes], chunks: int) -> bool:
        for group, kind in enumerate(self.kinds):
            if kind.recurrent:
                needed = range(chunks - 1, chunks)
            elif kind.window < 0:
                needed = range(chunks)
            else:
                first_token = max(0, chunks * CHUNK_TOKENS - (kind.window - 1))
                needed = range(first_token // CHUNK_TOKENS, chunks)
            for rank in range(self.world):
                if any((rank, group, chain[chunk]) not in self.committed for chunk in needed):
                    return False
        return True
