"""Encoding and decoding of the messages that a long request sends."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.hybrid_request import CHUNK_TOKENS, NUM_CHUNKS, NUM_TOKENS, ids_of_infos
from hma_triton.messages import (
    DIGEST_BYTES,
    ChunkRange,
    Lookup,
    RequestDecoder,
    Store,
    encode,
    pack_block_ids,
    unpack_block_ids,
)

_DIGESTS = np.random.default_rng(0).bytes(NUM_CHUNKS * DIGEST_BYTES)
_IDS = ids_of_infos()


def _store() -> Store:
    return Store(
        seq=1,
        instance_id="engine-0",
        rank=0,
        key=ChunkRange(start_chunk=0, digests=_DIGESTS),
        block_ids=tuple(pack_block_ids(ids) for ids in _IDS),
        deadline_ns=1,
    )


def test_pack_block_ids(benchmark: Any) -> None:
    packed = benchmark(pack_block_ids, _IDS[0])
    assert len(packed) == 4 * NUM_CHUNKS * CHUNK_TOKENS // 16


def test_unpack_block_ids(benchmark: Any) -> None:
    ids = benchmark(unpack_block_ids, pack_block_ids(_IDS[0]))
    assert np.array_equal(ids, _IDS[0])


def test_encode_store(benchmark: Any) -> None:
    frame = benchmark(encode, _store())
    assert len(frame) > sum(4 * len(ids) for ids in _IDS)


def test_decode_store(benchmark: Any) -> None:
    message = _store()
    assert benchmark(RequestDecoder().decode, encode(message)) == message


def test_lookup_there_and_back(benchmark: Any) -> None:
    """Digests, not tokens: what a lookup of 128k tokens costs on both sides."""
    lookup = Lookup(
        seq=1, instance_id="engine-0", request_id="r", digests=_DIGESTS, max_tokens=NUM_TOKENS
    )
    decoder = RequestDecoder()
    assert benchmark(lambda: decoder.decode(encode(lookup))) == lookup
