"""A record of every page that was stored or loaded, read from the pool itself (`hma.audit`).

For fault finding and for tests: a loaded page must have the digest that it had when it was stored.
The pages are read through the registered tensors, by block id, without the code that copied them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from hma_triton.group_view import EngineGroupInfo
from hma_triton.integration.vllm.metadata import GroupIds

NULL_BLOCK = 0


class Audit:
    """Appends one JSON line per moved range to `path`, with a digest per (group, block).

    `pages` maps "group:token position" to the digest of that block's pages in every layer.
    """

    def __init__(
        self, path: str, kv_caches: Mapping[str, Any], infos: Sequence[EngineGroupInfo], rank: int
    ) -> None:
        self._path = Path(path)
        self._rank = rank
        tensors = list(kv_caches.values())
        self._layers: dict[int, list[torch.Tensor]] = {}
        self._tokens: dict[int, int] = {}
        for info in infos:
            layers = self._layers.setdefault(info.engine_group_id, [])
            layers.extend(tensors[index] for index in info.layer_indices)
            self._tokens[info.engine_group_id] = info.tokens_per_block

    def record(
        self,
        what: str,
        request_id: str,
        digests: Sequence[bytes],
        block_ids: GroupIds,
        first_token: int,
        skip_tokens: int = 0,
    ) -> None:
        """`block_ids[g]` starts at `first_token`; blocks before `skip_tokens` are left out."""
        pages = {}
        for group, ids in block_ids.items():
            tokens = self._tokens[group]
            for index, block in enumerate(ids):
                position = first_token + index * tokens
                if block != NULL_BLOCK and position >= skip_tokens:
                    pages[f"{group}:{position}"] = self._digest(group, block)
        line = {
            "what": what,
            "rank": self._rank,
            "request": request_id,
            "prefix": [digest.hex() for digest in digests],
            "first_token": first_token,
            "pages": pages,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _digest(self, group: int, block: int) -> str:
        digest = xxhash.xxh3_128()
        for tensor in self._layers[group]:
            page = tensor[block].contiguous().view(torch.uint8)
            digest.update(page.numpy(force=True).tobytes())
        return digest.hexdigest()
