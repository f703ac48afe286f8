"""A fixed number of bits in one integer."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any


class Bitmap:
    """`size` bits, the first `prefix_bits` of them set. Positions past the end read as 0.

    Raises:
        TypeError: a negative position or size.
    """

    def __init__(self, size: int, prefix_bits: int = 0) -> None:
        self._size = _natural(size)
        self._bits = (1 << min(_natural(prefix_bits), size)) - 1

    @classmethod
    def of(cls, size: int, bits: int) -> Bitmap:
        """The bitmap whose bit i is bit i of `bits`."""
        made = cls(size)
        made._bits = bits & ((1 << size) - 1)
        return made

    @property
    def bits(self) -> int:
        """All bits as one integer."""
        return self._bits

    def set(self, index: int) -> None:
        """Set one bit; a position past the end is ignored."""
        if _natural(index) < self._size:
            self._bits |= 1 << index

    def batched_set(self, indices: Sequence[int]) -> None:
        """Set several bits."""
        for index in [_natural(i) for i in indices]:
            self.set(index)

    def set_range(self, start: int, end: int) -> None:
        """Set `[start, end)`, cut at the size."""
        end = min(_natural(end), self._size)
        if _natural(start) < end:
            self._bits |= (1 << end) - (1 << start)

    def clear(self, index: int) -> None:
        """Clear one bit; a position past the end is ignored."""
        self._bits &= ~(1 << _natural(index))

    def test(self, index: int) -> bool:
        """Whether the bit is set."""
        return bool(self._bits >> _natural(index) & 1)

    def size(self) -> int:
        """Number of bits."""
        return self._size

    def __len__(self) -> int:
        return self._size

    def copy(self) -> Bitmap:
        """An independent copy."""
        return Bitmap.of(self._size, self._bits)

    def popcount(self) -> int:
        """Bits that are set."""
        return bin(self._bits).count("1")

    def count_leading_zeros(self) -> int:
        """Length of the run of zeros at position 0."""
        return _first_set(self._bits, self._size)

    def count_leading_ones(self) -> int:
        """Length of the run of ones at position 0."""
        return _first_set(~self._bits, self._size)

    def highest_set_bit(self) -> int:
        """Position of the last set bit, -1 where there is none."""
        return self._bits.bit_length() - 1

    def __and__(self, other: Bitmap) -> Bitmap:
        size = min(self._size, other._size)
        return Bitmap.of(size, self._bits & other._bits)

    def __or__(self, other: Bitmap) -> Bitmap:
        size = min(self._size, other._size)
        return Bitmap.of(size, self._bits | other._bits)

    def __invert__(self) -> Bitmap:
        return Bitmap.of(self._size, ~self._bits)

    def __repr__(self) -> str:
        return "".join("01"[self.test(i)] for i in range(self._size))

    def get_indices_list(self) -> list[int]:
        """Positions of the set bits, ascending."""
        return [i for i in range(self._size) if self._bits >> i & 1]

    def get_indices_set(self) -> builtins.set[int]:
        """Positions of the set bits."""
        return builtins.set(self.get_indices_list())

    def gather(self, items: Sequence[Any]) -> list[Any]:
        """Items at the positions of set bits; positions without an item are left out."""
        return [items[i] for i in self.get_indices_list() if i < len(items)]


def _natural(value: int) -> int:
    if value < 0:
        raise TypeError(f"a position or size of {value}")
    return value


def _first_set(bits: int, limit: int) -> int:
    return limit if bits == 0 else min(limit, (bits & -bits).bit_length() - 1)
