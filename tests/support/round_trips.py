"""Small pools with known bytes, and one chunk or more moved out and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hma_triton.engine import TransferEngine
from hma_triton.group_view import EngineGroupInfo

POISON = 0xEE


def byte_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes under a tensor, padding and siblings included."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def fill_with_noise(tensor: torch.Tensor, seed: int = 0) -> None:
    """Different bytes everywhere under a tensor, none of them the poison."""
    storage = byte_storage(tensor)
    noise = torch.randint(
        0, POISON, storage.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    storage.copy_(noise)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's live bytes, flat, in the order of its own axes."""
    return tensor.contiguous().view(torch.uint8).flatten().clone()


class RoundTrip:
    """One engine over given pools, with room for `chunks` chunks of every object group."""

    def __init__(
        self,
        kv_caches: Mapping[str, Any] | Sequence[Any],
        infos: Sequence[EngineGroupInfo] = (),
        *,
        chunks: int = 1,
        **options: Any,
    ) -> None:
        options.setdefault("backend", "reference")
        options.setdefault("null_block_id", None)
        self.engine = TransferEngine(kv_caches, infos, **options)
        self.objects = [
            [torch.zeros(self.engine.object_nbytes(g), dtype=torch.uint8) for _ in range(chunks)]
            for g in range(self.engine.manager.num_object_groups)
        ]

    def store(self, *block_ids: Sequence[int]) -> Any:
        """Pools to objects; one id list per info."""
        return self.engine.store(list(block_ids), self.objects)

    def retrieve(self, *block_ids: Sequence[int], **options: Any) -> Any:
        """Objects to pools."""
        return self.engine.retrieve(list(block_ids), self.objects, **options)
