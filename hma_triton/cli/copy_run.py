"""Measures a case: each kernel group and the whole request, both directions, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hma_triton.cli.copy_case import CopyCase, GroupCopy
from hma_triton.cli.copy_peers import lmcache_copy, plain_copy
from hma_triton.cli.copy_rows import ALL_GROUPS, LMCACHE, OURS, PLAIN, CopyRow
from hma_triton.cli.measuring import Run, percentiles_ms, take_turns
from hma_triton.errors import TransferError, UnsupportedLayoutError
from hma_triton.kernels.addressing import Direction
from hma_triton.kernels.cpu import CpuCopier
from hma_triton.kernels.reference import ReferenceCopier

_CHECKED_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """One copy that was timed: `group` None for the whole request; seconds by method."""

    group: GroupCopy | None
    direction: Direction
    seconds: Mapping[str, Sequence[float]]


def check_bytes(case: CopyCase, copier: CpuCopier) -> None:
    """Store each group and compare its first and last blocks with the reference's.

    Raises:
        TransferError: a byte differs.
    """
    reference = ReferenceCopier()
    for group in case.groups:
        for spec, ids, places in group.blocks:
            copier.copy_blocks(spec, Direction.STORE, ids, places)
            for item in {0, len(ids) // 2, len(ids) - 1}:
                found = np.empty(spec.object_extent_bytes, dtype=np.uint8)
                expected = np.empty_like(found)
                for executor, held in ((copier, found), (reference, expected)):
                    held.fill(0xEE)
                    place = np.array([held.ctypes.data], dtype=np.int64)
                    executor.copy_blocks(spec, Direction.STORE, ids[item : item + 1], place)
                if not np.array_equal(found, expected):
                    raise TransferError(
                        f"{case.name}, kernel group {group.kernel_group_index}: block "
                        f"{int(ids[item])} differs from the reference's copy"
                    )


def measure(
    case: CopyCase,
    copier: CpuCopier,
    compare: frozenset[str],
    repeats: int,
    advance: Callable[[], None],
    note: Callable[[str], None],
) -> Iterator[Measured]:
    """Time all groups, then the whole request where it has several groups.

    Args:
        advance: called after each timed copy of a direction.
        note: takes one line for each group that LMCache cannot move.
    """
    threads = copier.threads
    served: list[GroupCopy] = []
    for group in case.groups:
        for direction in Direction:
            runs: dict[str, Run] = {OURS: _ours(copier, group, direction)}
            if PLAIN in compare:
                runs[PLAIN] = plain_copy(case, group.nbytes, direction, threads)
            if LMCACHE in compare:
                try:
                    runs[LMCACHE] = lmcache_copy(case, group, direction, threads)
                    served.append(group)
                except UnsupportedLayoutError as error:
                    note(f"{case.name}: {error}")
            yield Measured(group, direction, take_turns(runs, repeats))
            advance()
    everywhere = len(served) == 2 * len(case.groups)
    for direction in Direction:
        runs = {OURS: _whole_request(case, direction)}
        if PLAIN in compare:
            runs[PLAIN] = plain_copy(case, case.nbytes, direction, threads)
        if LMCACHE in compare and everywhere:
            parts = [lmcache_copy(case, group, direction, threads) for group in case.groups]
            runs[LMCACHE] = _in_turn(parts)
        yield Measured(None, direction, take_turns(runs, repeats))
        advance()


def _ours(copier: CpuCopier, group: GroupCopy, direction: Direction) -> Run:
    def run() -> None:
        for spec, ids, places in group.blocks:
            copier.copy_blocks(spec, direction, ids, places)

    return run


def _whole_request(case: CopyCase, direction: Direction) -> Run:
    """The engine's door, planning included; retrieve names the blocks that were stored."""
    engine = case.engine
    if direction is Direction.STORE:
        return lambda: _discard(engine.store_addresses(case.block_ids, case.object_addresses))
    kept = []
    for group, ids in zip(engine.layout.groups, case.block_ids, strict=True):
        table = ids.reshape(-1, group.blocks_per_chunk).copy()
        # null what no window keeps, as the engine does
        table[:, : group.blocks_per_chunk - group.kept_blocks] = 0
        kept.append(table.reshape(-1))
    return lambda: _discard(engine.retrieve_addresses(kept, case.object_addresses))


def _discard(_result: object) -> None:
    pass


def _in_turn(runs: list[Run]) -> Run:
    def run() -> None:
        for part in runs:
            part()

    return run


def rows_of(case: CopyCase, measured: Measured, copier: CpuCopier) -> list[CopyRow]:
    """One row per method."""
    groups = case.groups if measured.group is None else (measured.group,)
    specs = [spec for group in groups for spec, _, _ in group.blocks]
    widest = max(specs, key=lambda spec: spec.block_bytes)
    formats = {case.format_name(group.kernel_group_index) for group in groups}
    middles = {name: float(np.median(taken)) for name, taken in measured.seconds.items()}
    nbytes = sum(group.nbytes for group in groups)
    name_of_group = str(measured.group.kernel_group_index) if measured.group else ALL_GROUPS
    rows = []
    for name, taken in measured.seconds.items():
        low, middle, high = percentiles_ms(taken)
        ratios = {
            other: middles[other] / middles[name] if other in middles and other != name else None
            for other in (PLAIN, LMCACHE)
        }
        rows.append(
            CopyRow(
                case=case.name,
                kernel_group=name_of_group,
                format="+".join(sorted(formats)),
                object_layout=case.engine.object_layout.value,
                direction=measured.direction.name.lower(),
                method=name,
                implementation=copier.name if name == OURS else name,
                threads=copier.threads,
                tokens=case.num_tokens,
                blocks=sum(len(group.block_ids) for group in groups),
                nbytes=nbytes,
                page_bytes=widest.page_bytes,
                runs_per_page=widest.n0 * widest.n1,
                run_bytes=widest.run_bytes,
                repeats=len(taken),
                p10_ms=low,
                p50_ms=middle,
                p90_ms=high,
                gb_per_s=nbytes / middle / 1e6,
                share_of_memcpy=ratios[PLAIN],
                times_lmcache=ratios[LMCACHE],
            )
        )
    return rows
