"""Messages on the wire: golden bytes, old and new peers, bounds checked before memory is taken."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.golden_messages import EXAMPLES, FOLDER, file_of, tag_of

from hma_triton import messages as m
from hma_triton.errors import ProtocolError

REQUESTS, REPLIES = get_args(m.Request), get_args(m.Reply)
DOCS = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_every_message_has_an_example_a_golden_file_and_a_section() -> None:
    tags = {kind.__struct_config__.tag for kind in (*REQUESTS, *REPLIES)}
    assert {tag_of(example) for example in EXAMPLES} == tags
    assert {path.stem for path in FOLDER.iterdir()} == tags
    text = DOCS.read_text()
    for kind in (*REQUESTS, *REPLIES):
        assert f"`{kind.__struct_config__.tag}`" in text, kind
        for name in kind.__struct_fields__:
            assert f"`{name}`" in text, f"{kind.__name__}.{name} is not described"
    for code in m.ErrorCode:
        assert f"`{code.value}`" in text, code


@pytest.mark.parametrize("example", EXAMPLES, ids=tag_of)
def test_bytes_are_the_golden_ones(example) -> None:
    golden = bytes.fromhex(file_of(example).read_text().replace("\n", ""))
    assert m.encode(example) == golden, "the wire format changed: that needs a new version"
    decoder = m.RequestDecoder() if isinstance(example, REQUESTS) else m.ReplyDecoder()
    assert decoder.decode(golden) == example


@pytest.mark.parametrize("example", EXAMPLES, ids=tag_of)
def test_fields_of_a_newer_peer_are_ignored(example) -> None:
    fields = msgspec.msgpack.decode(m.encode(example))
    fields["from_the_future"] = {"a": [1, 2]}
    decoder = m.RequestDecoder() if isinstance(example, REQUESTS) else m.ReplyDecoder()
    assert decoder.decode(msgspec.msgpack.encode(fields)) == example


@pytest.mark.parametrize("example", EXAMPLES, ids=tag_of)
def test_fields_with_defaults_may_be_missing(example) -> None:
    fields = msgspec.msgpack.decode(m.encode(example))
    defaults = {
        field.name
        for field in msgspec.structs.fields(type(example))
        if field.default is not msgspec.NODEFAULT or field.default_factory is not msgspec.NODEFAULT
    }
    for name in defaults:
        fields.pop(name)
    decoder = m.RequestDecoder() if isinstance(example, REQUESTS) else m.ReplyDecoder()
    assert type(decoder.decode(msgspec.msgpack.encode(fields))) is type(example)


@given(st.binary(max_size=200))
def test_no_bytes_make_the_decoders_raise_anything_else(frame: bytes) -> None:
    request = m.RequestDecoder().decode(frame)
    assert isinstance(request, (*REQUESTS, m.ErrorReply))
    with contextlib.suppress(ProtocolError):
        m.ReplyDecoder().decode(frame)


@pytest.mark.parametrize("example", [e for e in EXAMPLES if isinstance(e, REQUESTS)], ids=tag_of)
def test_every_truncation_is_malformed_and_keeps_its_seq_if_it_can(example) -> None:
    whole = m.encode(example)
    for end in range(len(whole)):
        reply = m.RequestDecoder().decode(whole[:end])
        assert isinstance(reply, m.ErrorReply)


@pytest.mark.parametrize(
    "header",
    [
        b"\x82\xa2op\xa5store\xa9block_ids\xdd\xff\xff\xff\xff",
        b"\x82\xa2op\xa5store\xa9block_ids\xdd\x7f\xff\xff\xff",
        b"\x82\xa2op\xa6lookup\xa7digests\xc6\xff\xff\xff\xff",
        b"\x82\xa2op\xa6lookup\xaainstance_id\xdb\xff\xff\xff\xff",
        b"\x82\xa2op\xb1register_kv_cache\xacfuture_field\xdd\xff\xff\xff\xff",
        b"\x82\xa2op\xb1register_kv_cache\xaclayout_hints\xdf\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 100_000,
    ],
)
def test_sizes_are_checked_before_memory_is_taken(header: bytes) -> None:
    decoder = m.RequestDecoder()
    tracemalloc.start()
    started = time.monotonic()
    reply = decoder.decode(header)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(reply, m.ErrorReply)
    assert peak < 1 << 20 and time.monotonic() - started < 5


def test_unknown_messages_are_told_from_malformed_ones() -> None:
    decoder = m.RequestDecoder()
    unknown = decoder.decode(msgspec.msgpack.encode({"op": "dethrone", "seq": 7}))
    assert (unknown.seq, unknown.code) == (7, "unknown_message")
    malformed = decoder.decode(msgspec.msgpack.encode({"op": "abort", "seq": 7}))
    assert (malformed.seq, malformed.code) == (7, "malformed")
    assert "target_seq" in malformed.message
    hostile = decoder.decode(msgspec.msgpack.encode({"op": "ping", "seq": -5}))
    assert (hostile.seq, hostile.code) == (0, "malformed")


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_block_ids_round_trip(ids: list[int]) -> None:
    packed = m.pack_block_ids(ids)
    assert len(packed) == 4 * len(ids)
    assert m.unpack_block_ids(packed).tolist() == ids
    assert m.pack_block_ids(np.array(ids, dtype=np.int64)) == packed


@pytest.mark.parametrize("bad", [2**31, -(2**31) - 1])
def test_block_ids_that_do_not_fit_are_named(bad: int) -> None:
    with pytest.raises(ProtocolError, match=str(bad)):
        m.pack_block_ids([1, bad])
    with pytest.raises(ProtocolError, match="5 bytes of block ids"):
        m.unpack_block_ids(b"12345")


def test_offsets_beyond_32_bits_keep_their_value() -> None:
    """K10 case 98: sizes are 64-bit on the wire."""
    register = next(e for e in EXAMPLES if isinstance(e, m.RegisterKVCache))
    layer = register.kv_caches[0]
    far = msgspec.structs.replace(layer.tensors[0], offset=2**32 + 5)
    moved = msgspec.structs.replace(layer, tensors=(far,))
    sent = msgspec.structs.replace(register, kv_caches=(moved,))
    got = m.RequestDecoder().decode(m.encode(sent))
    assert got.kv_caches[0].tensors[0].offset == 2**32 + 5
