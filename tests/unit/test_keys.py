"""Digests and fingerprints: what differs never meets."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hma_triton.errors import ConfigError, ProtocolError
from hma_triton.keys import (
    EngineFacts,
    KernelGroupKey,
    KeyFields,
    chunk_digests,
    fingerprint,
    pack_digests,
)

GROUP = KernelGroupKey(
    layer_names=("l0", "l1"),
    kv_size=2,
    num_heads=4,
    head_size=64,
    slots_per_block=16,
    engine_group_idx=0,
    dtype="torch.uint8",
    engine_kv_format="NB_NH_BS_CONTENT",
    tokens_per_block=16,
    window_tokens=None,
    recurrent=False,
    page_bytes=4096,
    page_strides=((64, 1024),),
    object_runs=((0, 2, 4096, 16, 4096, 1, 4096, 1, 4096, 4096),),
)
FACTS = EngineFacts()
FIELDS = KeyFields(
    model_name="m",
    facts=FACTS,
    world_size=1,
    engine_type="vllm",
    layout_hints={"kv_layout": "HND"},
    layer_names=("l0", "l1"),
    kernel_groups=(GROUP,),
    object_groups=((0,),),
    replicated_object_groups=(),
    object_nbytes=(65536,),
    object_layout="opaque",
    chunk_tokens=256,
    namespace="",
)
_OTHER_FACTS = {
    "model_revision": "abc",
    "quantization": "fp8",
    "kv_cache_dtype": "fp8_e5m2",
    "overrides": {"rope_theta": "1e6"},
    "dcp_size": 2,
    "dcp_interleave": 16,
    "attention_backend": "FLASH",
    "edits": ("mamba",),
    "extra": {"lora": "x"},
}
_OTHER_GROUP = {
    "layer_names": ("l1", "l0"),
    "kv_size": 1,
    "num_heads": 8,
    "head_size": 128,
    "slots_per_block": 8,
    "engine_group_idx": 1,
    "dtype": "torch.int8",
    "engine_kv_format": "NB_BS_NH_CONTENT",
    "tokens_per_block": 32,
    "window_tokens": 128,
    "recurrent": True,
    "page_bytes": 8192,
    "page_strides": ((256, 64),),
    "object_runs": ((0, 2, 4096, 16, 8192, 1, 4096, 1, 4096, 4096),),
}
_OTHER_FIELDS = {
    "model_name": "n",
    "world_size": 2,
    "engine_type": "sglang",
    "layout_hints": {"kv_layout": "NHD"},
    "layer_names": ("l1", "l0"),
    "object_groups": ((0,), (1,)),
    "replicated_object_groups": (0,),
    "object_nbytes": (65600,),
    "object_layout": "token_major",
    "chunk_tokens": 512,
    "namespace": "tenant",
}


def variants() -> list[tuple[str, KeyFields]]:
    replace = msgspec.structs.replace
    found = [(name, replace(FIELDS, **{name: value})) for name, value in _OTHER_FIELDS.items()]
    for name, value in _OTHER_FACTS.items():
        found.append((f"facts.{name}", replace(FIELDS, facts=replace(FACTS, **{name: value}))))
    for name, value in _OTHER_GROUP.items():
        other = (replace(GROUP, **{name: value}),)
        found.append((f"group.{name}", replace(FIELDS, kernel_groups=other)))
    return found


def test_every_field_has_a_variant() -> None:
    assert set(_OTHER_FACTS) == set(EngineFacts.__struct_fields__)
    assert set(_OTHER_GROUP) == set(KernelGroupKey.__struct_fields__)
    expected = set(KeyFields.__struct_fields__) - {"facts", "kernel_groups"}
    assert set(_OTHER_FIELDS) == expected


@pytest.mark.parametrize(("name", "other"), variants(), ids=[name for name, _ in variants()])
def test_a_difference_in_any_field_is_another_namespace(name: str, other: KeyFields) -> None:
    """Rule 12, and K11 case 103."""
    assert fingerprint(other) != fingerprint(FIELDS), name


def test_no_two_variants_meet() -> None:
    prints = [fingerprint(other) for _, other in variants()] + [fingerprint(FIELDS)]
    assert len(set(prints)) == len(prints)


def test_two_kinds_of_fp8_that_both_register_as_uint8_do_not_meet() -> None:
    one = msgspec.structs.replace(FIELDS, facts=EngineFacts(kv_cache_dtype="fp8_e4m3"))
    two = msgspec.structs.replace(FIELDS, facts=EngineFacts(kv_cache_dtype="fp8_e5m2"))
    assert fingerprint(one) != fingerprint(two)


def test_the_order_of_a_mapping_does_not_matter_and_that_of_groups_does() -> None:
    one = EngineFacts(overrides={"a": "1", "b": "2"})
    two = EngineFacts(overrides={"b": "2", "a": "1"})
    replace = msgspec.structs.replace
    assert fingerprint(replace(FIELDS, facts=one)) == fingerprint(replace(FIELDS, facts=two))
    other = replace(GROUP, engine_group_idx=1)
    forward = replace(FIELDS, kernel_groups=(GROUP, other))
    assert fingerprint(forward) != fingerprint(replace(FIELDS, kernel_groups=(other, GROUP)))


def test_fingerprints_are_the_same_in_every_process() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests/unit'); sys.path.insert(0, 'tests')\n"
        "from test_keys import FIELDS, fingerprint; print(fingerprint(FIELDS).hex())"
    )
    for seed in ("0", "7"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path)},
        )
        assert done.stdout.strip() == fingerprint(FIELDS).hex()


def test_facts_round_trip_and_keep_what_they_do_not_know() -> None:
    facts = EngineFacts(**_OTHER_FACTS)
    assert EngineFacts.from_wire(facts.to_wire()) == facts
    newer = EngineFacts.from_wire({**facts.to_wire(), "attention_sink": "3"})
    assert newer.extra == {"lora": "x", "attention_sink": "3"}
    assert fingerprint(msgspec.structs.replace(FIELDS, facts=newer)) != fingerprint(
        msgspec.structs.replace(FIELDS, facts=facts)
    )


@pytest.mark.parametrize(
    ("wire", "why"), [({"dcp_size": '"two"'}, "dcp_size"), ({"edits": "{"}, "no JSON")]
)
def test_facts_of_the_wrong_kind_are_named(wire: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EngineFacts.from_wire(wire)


def test_digests_are_chained_from_the_salt() -> None:
    tokens = np.arange(1000)
    link = hashlib.sha256(b"hma-triton/1/").digest()
    expected = []
    for start in (0, 256, 512):
        link = hashlib.sha256(link + tokens[start : start + 256].astype("<i8").tobytes()).digest()
        expected.append(link)
    assert chunk_digests(tokens, 256) == b"".join(expected)
    assert chunk_digests(tokens.tolist(), 256) == b"".join(expected)
    assert chunk_digests(tokens[:255], 256) == b""


@given(
    st.lists(st.integers(0, 9), min_size=8, max_size=40),
    st.lists(st.integers(0, 9), min_size=8, max_size=40),
    st.sampled_from(["", "a", "b"]),
    st.sampled_from(["", "a", "b"]),
)
def test_digests_agree_exactly_where_the_prefix_and_the_salt_do(one, two, salt, other) -> None:
    first, second = chunk_digests(one, 4, salt), chunk_digests(two, 4, other)
    for chunk in range(min(len(first), len(second)) // 32):
        same = salt == other and one[: 4 * chunk + 4] == two[: 4 * chunk + 4]
        place = slice(chunk * 32, chunk * 32 + 32)
        assert (first[place] == second[place]) == same


def test_digests_of_other_lengths_are_padded_or_refused() -> None:
    assert pack_digests([b"x" * 16]) == b"x" * 16 + bytes(16)
    assert pack_digests([b"x" * 32, b"y" * 32]) == b"x" * 32 + b"y" * 32
    with pytest.raises(ProtocolError, match="a digest has 8 bytes"):
        pack_digests([b"x" * 8])
    with pytest.raises(ProtocolError, match="33 bytes of digests"):
        pack_digests(b"x" * 33)
    with pytest.raises(ConfigError, match="chunk_tokens 0"):
        chunk_digests([1], 0)
