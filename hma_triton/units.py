"""Whole-number arithmetic that crosses units, and the units' names.

Tokens, blocks, slots, chunks and bytes are all plain ints at run time; a value crosses from one
unit to another only through :func:`exact_div` (must divide) or :func:`cdiv` (rounds up).
"""

from __future__ import annotations

import math
from typing import NewType

from hma_triton.errors import AlignmentError

Tokens = NewType("Tokens", int)
Blocks = NewType("Blocks", int)
Slots = NewType("Slots", int)
Chunks = NewType("Chunks", int)
Bytes = NewType("Bytes", int)


def cdiv(value: int, divisor: int) -> int:
    """``value / divisor`` rounded up; both must not be negative, the divisor not zero.

    Raises:
        AlignmentError: a divisor below one or a negative value.
    """
    if divisor < 1 or value < 0:
        raise AlignmentError(f"cdiv({value}, {divisor}): needs value >= 0 and divisor >= 1")
    return -(-value // divisor)


def exact_div(value: int, divisor: int, what: str = "value") -> int:
    """``value / divisor`` where nothing may be left over; ``what`` names the value in the error.

    Raises:
        AlignmentError: a divisor below one, or a remainder.
    """
    if divisor < 1:
        raise AlignmentError(f"{what}: cannot divide {value} by {divisor}")
    quotient, rest = divmod(value, divisor)
    if rest:
        raise AlignmentError(f"{what}: {value} is not a multiple of {divisor} ({rest} left over)")
    return quotient


def lcm(*values: int) -> int:
    """Least common multiple of the positive ``values``; 1 when there are none.

    Raises:
        AlignmentError: a value below one.
    """
    for value in values:
        if value < 1:
            raise AlignmentError(f"lcm{values}: {value} is not a positive size")
    return math.lcm(*values)


def align_up(value: int, to: int) -> int:
    """The smallest multiple of ``to`` that is at least ``value``."""
    return cdiv(value, to) * to
