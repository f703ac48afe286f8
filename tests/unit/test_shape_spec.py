"""Shape specs: parsed, formatted, and what is wrong with a bad one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hma_triton.errors import GeometryError
from hma_triton.kv_layer_groups import KernelGroupInfo, PageBufferShapeDesc
from hma_triton.shape_spec import DTYPES, format_kvcache_shape_spec, parse_kvcache_shape_spec

TWO = "(2,1024,16,8,128):float16:30;(1,1024,16,4,64):bfloat16:2"


def test_a_spec_of_two_groups() -> None:
    first, second = parse_kvcache_shape_spec(TWO)
    assert first == KernelGroupInfo(
        layer_indices=tuple(range(30)),
        shape_desc=PageBufferShapeDesc(2, 30, 1024, 16, 8, 128, 2, 0),
        dtype=torch.float16,
        tokens_per_block=16,
    )
    assert second.layer_indices == (30, 31)
    assert (second.dtype, second.shape_desc.kv_size) == (torch.bfloat16, 1)
    assert format_kvcache_shape_spec([first, second]) == TWO


def test_spaces_case_and_empty_groups_are_forgiven() -> None:
    assert (
        format_kvcache_shape_spec(
            parse_kvcache_shape_spec(
                " ( 2, 1024 ,16,8,128 ) : Float16 : 30 ; ; (1,1024,16,4,64):bfloat16:2;"
            )
        )
        == TWO
    )


sizes = st.integers(1, 1 << 40)
groups = st.tuples(
    st.sampled_from((1, 2)),
    sizes,
    sizes,
    sizes,
    sizes,
    st.sampled_from(sorted(DTYPES)),
    st.integers(1, 99),
)


@given(st.lists(groups, min_size=1, max_size=5))
def test_format_of_parse_is_the_identity(
    parts: list[tuple[int, int, int, int, int, str, int]],
) -> None:
    spec = ";".join(f"({a},{b},{c},{d},{e}):{dtype}:{n}" for a, b, c, d, e, dtype, n in parts)
    parsed = parse_kvcache_shape_spec(spec)
    assert format_kvcache_shape_spec(parsed) == spec
    assert parse_kvcache_shape_spec(format_kvcache_shape_spec(parsed)) == parsed
    indices = [layer for group in parsed for layer in group.layer_indices]
    assert indices == list(range(sum(part[-1] for part in parts)))


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("", "has no group"),
        (" ; ", "has no group"),
        ("2,4,8,1,6:float16:1", "is not"),
        ("(2,4,8,1,6):float16", "is not"),
        ("(2,4,8,1,6):float16:1:2", "is not"),
        ("(2,4,8,1):float16:1", "4 numbers for kv_size, NB, BS, NH, HS"),
        ("(2,4,8,1,x):float16:1", "HS is 'x', not a positive number"),
        ("(2,4,0,1,6):float16:1", "BS is '0'"),
        ("(2,4,-8,1,6):float16:1", "BS is '-8'"),
        ("(3,4,8,1,6):float16:1", "kv_size is 3; it is 1 or 2"),
        ("(2,4,8,1,6):float8:1", "'float8' is none of float16"),
        ("(2,4,8,1,6):float16:0", "layers is '0'"),
        ("(2,4,8,1,6):float16:1;(1,4", "group '.1,4' is not"),
        ("(2,4,16,8,64):float16:9999999999", "at most 4096 layers"),
        ("(2,4,16,8,64):float16:4000;(2,4,16,8,64):float16:97", "at most 4096 layers"),
    ],
)
def test_bad_specs_are_named(spec: str, why: str) -> None:
    with pytest.raises(GeometryError, match=why):
        parse_kvcache_shape_spec(spec)


def test_what_the_grammar_cannot_say_is_refused() -> None:
    with pytest.raises(GeometryError, match="empty"):
        format_kvcache_shape_spec([])
    odd = KernelGroupInfo((0,), PageBufferShapeDesc(1, 1, 1, 1, 1, 1, 8), torch.float64)
    with pytest.raises(GeometryError, match=r"torch.float64 of layers \[0\]"):
        format_kvcache_shape_spec([odd])
