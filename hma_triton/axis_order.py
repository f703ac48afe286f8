"""Which of two axes counts slots and which counts heads.

Strides give the memory order, a hint says what that order means, the engine's declared slots
settle the rest. A size alone never decides between two long axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hma_triton.errors import AmbiguousLayoutError, GroupMismatchError
from hma_triton.layout_hints import HEADS_FIRST, TOKENS_FIRST


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one layer besides its tensor; ``slots`` and ``tokens`` 0 are unknown.

    ``order``: ``NHD`` (slots outside heads), ``HND``, or None. ``slots``: declared slots of a
    block, binding. ``tokens``: tokens of a block, used only where all else leaves two readings.
    """

    order: str | None
    slots: int
    tokens: int
    label: str

    def check_slots(self, *found: int) -> None:
        """Raise GroupMismatchError unless one of the ``found`` slot counts is the declared one."""
        if self.slots and self.slots not in found:
            counts = " or ".join(str(count) for count in sorted(set(found)))
            under = f" under the layout hint {self.order}" if self.order is not None else ""
            raise GroupMismatchError(
                f"{self.label}: the tensor has {counts} slots per block, the engine declares "
                f"{self.slots}{under}; a tensor paged at a smaller kernel block must be re-viewed "
                "first"
            )


def order_axes(
    tensor: torch.Tensor, first: int, second: int, evidence: Evidence
) -> tuple[int, int, bool]:
    """``(slots axis, heads axis, heads lie outside)`` of the two axes.

    Raises:
        AmbiguousLayoutError: both readings fit; names both.
        GroupMismatchError: no reading has the declared slots.
    """
    readings = [(first, second), (second, first)]
    fitting = [r for r in readings if _fits_order(tensor, *r, evidence.order)]
    if evidence.slots:
        evidence.check_slots(*(int(tensor.shape[slots]) for slots, _ in fitting))
        fitting = [r for r in fitting if tensor.shape[r[0]] == evidence.slots]
    if len(fitting) > 1:
        fitting = _settle(tensor, fitting, evidence)
    slots, heads = fitting[0]
    return slots, heads, _heads_outside(tensor, slots, heads, evidence.order)


def _is_open(tensor: torch.Tensor, one: int, other: int) -> bool:
    """Whether strides say nothing about the order of two axes."""
    return 1 in (tensor.shape[one], tensor.shape[other]) or (
        tensor.stride(one) == tensor.stride(other)
    )


def _fits_order(tensor: torch.Tensor, slots: int, heads: int, order: str | None) -> bool:
    if order is None or _is_open(tensor, slots, heads):
        return True
    return (tensor.stride(slots) > tensor.stride(heads)) == (order == TOKENS_FIRST)


def _settle(
    tensor: torch.Tensor, readings: list[tuple[int, int]], evidence: Evidence
) -> list[tuple[int, int]]:
    """The one reading of two that the last evidence leaves.

    Both axes of length 1: the readings are the same. Tokens per block equal to one reading's
    slots: that one. With a hint, a length-1 axis beside a longer one counts heads.
    """
    first, second = readings[0]
    lengths = tensor.shape[first], tensor.shape[second]
    if lengths == (1, 1):
        return readings[:1]
    by_tokens = [r for r in readings if evidence.tokens and tensor.shape[r[0]] == evidence.tokens]
    if len(by_tokens) == 1:
        return by_tokens
    if evidence.order is not None and 1 in lengths:
        return [r for r in readings if tensor.shape[r[1]] == 1]
    one, other = (f"{tensor.shape[s]} slots of {tensor.shape[h]} heads" for s, h in readings)
    raise AmbiguousLayoutError(
        f"{evidence.label}: shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())} reads as "
        f"{one} and as {other}; give the layout hint (NHD, HND, ...) or the slots per block"
    )


def _heads_outside(tensor: torch.Tensor, slots: int, heads: int, order: str | None) -> bool:
    if _is_open(tensor, slots, heads):
        return order == HEADS_FIRST
    return tensor.stride(heads) > tensor.stride(slots)
