"""Where patterns of integers occur."""

from __future__ import annotations

from collections.abc import Sequence


def _positions(pattern: list[int], data: list[int]) -> list[int]:
    length = len(pattern)
    return [i for i in range(len(data) - length + 1) if data[i : i + length] == pattern]


class ParallelPatternMatcher:
    """Finds every occurrence of a pattern, overlapping ones too.

    Raises:
        ValueError: an empty pattern.
    """

    def __init__(self, pattern: Sequence[int]) -> None:
        self._pattern = list(pattern)
        if not self._pattern:
            raise ValueError("an empty pattern")

    def match(self, data: Sequence[int]) -> list[int]:
        """Start positions, ascending."""
        return _positions(self._pattern, list(data))


class RangePatternMatcher:
    """Finds ranges from a start pattern to the nearest end pattern after it.

    LMCache's stub file refuses patterns of more than 5 elements, its core takes them; so do we.

    Raises:
        ValueError: an empty pattern.
    """

    def __init__(self, start_pattern: Sequence[int], end_pattern: Sequence[int]) -> None:
        self._start, self._end = list(start_pattern), list(end_pattern)
        if not self._start or not self._end:
            raise ValueError("an empty pattern")

    def match(self, data: Sequence[int]) -> list[tuple[int, int]]:
        """(start, end) of every range, the end exclusive; ranges do not overlap."""
        values = list(data)
        ends = _positions(self._end, values)
        ranges: list[tuple[int, int]] = []
        free_from = 0
        for start in _positions(self._start, values):
            inside = start + len(self._start)
            after = [end for end in ends if end >= inside]
            if start < free_from or not after:
                continue
            free_from = after[0] + len(self._end)
            ranges.append((start, free_from))
        return ranges
