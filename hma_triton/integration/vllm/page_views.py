"""Views of a cache's own bytes at another grain: never a copy, always the same address."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hma_triton.errors import GroupMismatchError, UnsupportedLayoutError


def byte_view(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """int8 view over the tensor's storage from its first byte on; shape and strides in bytes.

    int8 marks a page as opaque: no layout that has a meaning of its own registers as int8 rows
    except vLLM's recurrent state, which is opaque too.
    """
    return torch.empty(0, dtype=torch.int8, device=tensor.device).set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * tensor.element_size(),
        tuple(shape),
        tuple(strides),
    )


def check_same_bytes(before: torch.Tensor, after: torch.Tensor, label: str) -> torch.Tensor:
    """``after``, checked to lie on the storage and at the address of ``before``.

    Raises:
        GroupMismatchError: another storage or address, or a view past the storage's end.
    """
    if after is before:
        return after
    storage = before.untyped_storage()
    other = after.untyped_storage()
    if (
        storage.data_ptr() != other.data_ptr()
        or before.storage_offset() * before.element_size()
        != after.storage_offset() * after.element_size()
    ):
        raise GroupMismatchError(f"{label}: the edited view left the registered storage or address")
    reach = after.storage_offset() + sum(
        (length - 1) * stride for length, stride in zip(after.shape, after.stride(), strict=True)
    )
    if (reach + 1) * after.element_size() > storage.nbytes():
        raise GroupMismatchError(
            f"{label}: the edited view ends at byte {(reach + 1) * after.element_size()} of a "
            f"storage of {storage.nbytes()} bytes"
        )
    return after


def state_page(states: Sequence[torch.Tensor], page_bytes: int | None, label: str) -> torch.Tensor:
    """The states of one block (``[conv, ssm]``) as one opaque page ``[NB, 1, 1, bytes]``.

    The page is the live bytes of all states, the step between pages that of the first state.

    Raises:
        UnsupportedLayoutError: states that do not follow each other in one page.
        GroupMismatchError: more live bytes than ``page_bytes`` or than the step.
    """
    if not states or any(not isinstance(s, torch.Tensor) or s.ndim < 2 for s in states):
        raise UnsupportedLayoutError(f"{label}: recurrent state is a list of [NB, ...] tensors")
    first = states[0]
    num_blocks, step = int(first.shape[0]), int(first.stride(0)) * first.element_size()
    end = first.storage_offset() * first.element_size()
    start = end
    for index, state in enumerate(states):
        width = state.element_size()
        here = state.storage_offset() * width
        same = (
            state.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and state.shape[0] == num_blocks
            and state.stride(0) * width == step
        )
        if not same or here != end or not _is_dense(state[0]):
            raise UnsupportedLayoutError(
                f"{label}: state {index} (shape {tuple(state.shape)}, strides "
                f"{tuple(state.stride())}, byte {here}) does not follow the states before it, "
                f"which end at byte {end} of pages {step} bytes apart"
            )
        end += int(state[0].numel()) * width
    live = int(end - start)
    limit = step if num_blocks > 1 else live
    if page_bytes is not None:
        limit = min(limit, page_bytes)
    if live > limit:
        raise GroupMismatchError(f"{label}: {live} bytes of state in a page of {limit} bytes")
    return byte_view(first, (num_blocks, 1, 1, live), (step, live, live, 1))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one extent, in any order of axes."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True


def merged_rows(pages: torch.Tensor, block_axis: int, slot_axis: int, ratio: int) -> torch.Tensor:
    """Kernel pages whose slots lie outside their heads, as blocks of ``ratio`` pages' slots."""
    shape, strides = list(pages.shape), list(pages.stride())
    shape[block_axis] //= ratio
    shape[slot_axis] *= ratio
    strides[block_axis] *= ratio
    return pages.as_strided(shape, strides)


def merged_bytes(
    pages: torch.Tensor, block_axis: int, slots: int, ratio: int, outer_axis: int | None
) -> torch.Tensor:
    """Kernel pages as opaque blocks ``[NB, slots, 1, bytes]``, with ``outer_axis`` kept in front.

    The bytes of ``ratio`` neighbouring pages are spread evenly over ``slots``.
    """
    width = pages.element_size()
    step = pages.stride(block_axis) * width * ratio
    row = step // slots
    shape = [pages.shape[block_axis] // ratio, slots, 1, row]
    strides = [step, row, row, 1]
    if outer_axis is not None:
        shape.insert(0, pages.shape[outer_axis])
        strides.insert(0, pages.stride(outer_axis) * width)
    return byte_view(pages, shape, strides)
