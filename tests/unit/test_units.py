"""Exact arithmetic and the tree of errors."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hma_triton import errors
from hma_triton.errors import AlignmentError, HmaError, RemoteError
from hma_triton.units import align_up, cdiv, exact_div, lcm


@given(st.integers(0, 1 << 70), st.integers(1, 1 << 66))
def test_division_up_and_exact(value: int, divisor: int) -> None:
    up = cdiv(value, divisor)
    assert (up - 1) * divisor < value <= up * divisor or (value, up) == (0, 0)
    assert align_up(value, divisor) == up * divisor
    assert exact_div(up * divisor, divisor) == up
    if value % divisor:
        with pytest.raises(AlignmentError, match=f"rows: {value} is not a multiple of {divisor}"):
            exact_div(value, divisor, "rows")


@given(st.lists(st.integers(1, 10_000), max_size=4))
def test_lcm(values: list[int]) -> None:
    least = lcm(*values)
    assert all(least % value == 0 for value in values)
    assert least >= max(values, default=1)
    assert lcm() == 1


def test_what_has_no_quotient_is_refused() -> None:
    for call in (
        lambda: cdiv(1, 0),
        lambda: cdiv(-1, 2),
        lambda: exact_div(4, 0),
        lambda: lcm(4, 0),
    ):
        with pytest.raises(AlignmentError):
            call()


def test_the_drawn_tree_of_errors_is_the_real_one() -> None:
    drawn = re.findall(r"^(    [ │├└]*)(\w+Error)\b(?:.*?\((\w+)\))?", errors.__doc__ or "", re.M)
    classes = {name: getattr(errors, name) for _, name, _ in drawn}
    found = {
        name: cls
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, HmaError)
    }
    assert classes == found
    depths = {name: len(indent) for indent, name, _ in drawn}
    path: list[str] = []
    for _, name, builtin in drawn:
        while path and depths[path[-1]] >= depths[name]:
            path.pop()
        if path:
            assert classes[name].__bases__[0] is classes[path[-1]]
        if builtin:
            assert issubclass(classes[name], getattr(__import__("builtins"), builtin))
        path.append(name)


def test_a_remote_error_has_the_servers_code() -> None:
    assert RemoteError("gone", "unknown_instance").code == "unknown_instance"
    assert RemoteError("gone").code == "error"
