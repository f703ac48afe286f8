"""Windows, skips, nulls and hits (rules of meaning 3, 5, 6, 7 and 9)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hma_triton.errors import (
    AlignmentError,
    BlockIdError,
    GroupMismatchError,
    IncompleteRetrieveError,
)
from hma_triton.plan import (
    PlanGroup,
    PlanLayout,
    ReuseRule,
    check_chunk_tokens,
    choose_chunk_tokens,
    chunks_needed,
    kept_blocks,
    longest_hit,
    plan_retrieve,
    plan_store,
    storable_chunks,
)


def make_layout(
    groups: list[tuple[int, int | None, bool, int]],
    chunk_tokens: int,
    num_blocks: int = 10_000,
    null_block_id: int | None = 0,
) -> PlanLayout:
    """Groups as (tokens_per_block, window, recurrent, object_group)."""
    rules: dict[int, ReuseRule] = {}
    plan_groups = []
    for index, (tokens, window, recurrent, object_group) in enumerate(groups):
        rules.setdefault(object_group, ReuseRule(window, recurrent))
        plan_groups.append(
            PlanGroup(
                kernel_group_index=index,
                engine_group_idx=index,
                object_group=object_group,
                tokens_per_block=tokens,
                num_blocks=num_blocks,
                blocks_per_chunk=chunk_tokens // tokens,
                kept_blocks=kept_blocks(tokens, window, recurrent, chunk_tokens),
            )
        )
    ordered = tuple(rules[index] for index in sorted(rules))
    return PlanLayout(chunk_tokens, null_block_id, tuple(plan_groups), ordered)


@pytest.mark.parametrize(
    ("block", "window", "recurrent", "chunk", "kept"),
    [
        (16, None, False, 256, 16),
        (16, 1024, False, 256, 16),
        # case 55: ceil(127 / 32) = 4, ceil(32 / 32) = 1, a window of one token keeps one block
        (32, 128, False, 256, 4),
        (32, 33, False, 256, 1),
        (32, 34, False, 256, 2),
        (32, 1, False, 256, 1),
        (544, None, True, 1088, 1),
        (4, 8, False, 256, 2),
        (8, 128, False, 256, 16),
    ],
)
def test_kept_blocks(
    block: int, window: int | None, recurrent: bool, chunk: int, kept: int
) -> None:
    assert kept_blocks(block, window, recurrent, chunk) == kept


@pytest.mark.parametrize(
    ("blocks", "recurrent", "minimum", "chunk"),
    [
        # case 40: the least multiple of the blocks that is at least the minimum; 0 is ignored
        ([640, 0, 640], False, 256, 640),
        ([400], False, 256, 400),
        ([544], False, 256, 544),
        ([16, 32], False, 256, 256),
        ([100], False, 256, 300),
        ([256, 64, 8, 4], False, 256, 256),
        # design rule 7: with recurrent groups exactly the least common multiple
        ([128, 128], True, 256, 128),
        ([9216, 2304], True, 256, 9216),
    ],
)
def test_choose_chunk(blocks: list[int], recurrent: bool, minimum: int, chunk: int) -> None:
    assert choose_chunk_tokens(blocks, recurrent, minimum) == chunk


def test_no_cacheable_group_is_an_error() -> None:
    with pytest.raises(GroupMismatchError, match="no cacheable group"):
        choose_chunk_tokens([0], False)


@pytest.mark.parametrize(
    ("chunk", "nearest"), [(256, 544), (0, 544), (1000, 1088), (-544, 544), (545, 544)]
)
def test_wrong_chunk_names_the_nearest_valid_one(chunk: int, nearest: int) -> None:
    with pytest.raises(GroupMismatchError, match=rf"nearest valid chunk is {nearest}$") as error:
        check_chunk_tokens(chunk, [544, 0, 272])
    assert "group 0 (544 tokens per block)" in str(error.value)


def test_case_34_chunk_below_the_resolved_spans_is_rejected() -> None:
    assert choose_chunk_tokens([9216, 2304], True) == 9216
    check_chunk_tokens(9216, [9216, 2304])
    with pytest.raises(GroupMismatchError, match="9216"):
        check_chunk_tokens(2304, [9216, 2304])


def test_case_46_a_chunk_is_a_hit_only_when_its_whole_slice_is_set() -> None:
    # world 2, 2 groups, 3 chunks, bits 1111 1101 1111 in chunk-major order
    bits = np.array([[1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1]], dtype=bool)
    per_group = bits.reshape(3, 2, 2).all(axis=2).T  # chunk, rank, group -> group, chunk
    hit = longest_hit([ReuseRule(), ReuseRule()], per_group, 16, 48)
    assert hit.chunks == 1
    assert hit.tokens == 16
    assert hit.reason.startswith("chunk 1 missing in object group")


def test_case_47_full_groups_bind_by_coverage_windows_by_presence() -> None:
    layout = make_layout([(16, None, False, 0), (16, 64, False, 1)], 64)
    full = np.arange(1, 33)
    window = np.concatenate([np.zeros(28, dtype=int), np.arange(40, 44)])
    storable = storable_chunks(layout, [full, window], 8)
    assert storable.tolist() == [[True] * 8, [False] * 7 + [True]]


def test_case_49_a_partly_null_window_chunk_is_never_stored() -> None:
    blocks = [64, 64, 256, 256, 256, 4, 8]
    windows = [128, 128, None, None, None, 8, 128]
    # one object group for all windowed kernel groups, one for the full ones
    layout = make_layout(
        [(b, w, False, 0 if w else 1) for b, w in zip(blocks, windows, strict=True)], 256
    )
    chunks = 4
    ids = [np.arange(1, chunks * 256 // b + 1) for b in blocks]

    def drop(group: int, chunk: int, first: int, last: int) -> None:
        per_chunk = 256 // blocks[group]
        ids[group][chunk * per_chunk + first : chunk * per_chunk + last] = 0

    for group in (0, 1, 5, 6):  # chunk 0: all windows absent
        drop(group, 0, 0, 256 // blocks[group])
    drop(5, 1, 0, 64)  # chunk 1: the narrow window absent
    drop(5, 2, 63, 64)  # chunk 2: one retained narrow block absent
    drop(5, 3, 0, 62)  # chunk 3: only the discarded prefix absent (window 8 keeps 2 of 64)
    drop(0, 3, 0, 2)  # window 128 keeps the last 2 of 4
    storable = storable_chunks(layout, ids, chunks)
    assert storable.tolist() == [[False, False, False, True], [True] * 4]


@pytest.mark.parametrize(("ids", "storable"), [([0, 0, 0, 9], [False, False])])
def test_upstream_disagreement_partly_null_chunk_is_skipped(
    ids: list[int], storable: list[bool]
) -> None:
    layout = make_layout([(16, None, False, 0)], 32)
    assert storable_chunks(layout, [np.array(ids)], 2)[0].tolist() == storable


def test_case_50_retrieve_reads_only_chunks_inside_the_window() -> None:
    layout = make_layout([(16, None, False, 0), (16, 1, False, 1)], 16)
    present = np.array([[True] * 5, [False] * 4 + [True]])
    plan = plan_retrieve(layout, [np.array([1, 2, 3, 4, 5]), np.array([0, 0, 0, 0, 9])], present)
    assert plan.groups[0].chunk_indices.tolist() == [0, 1, 2, 3, 4]
    assert plan.groups[1].chunk_indices.tolist() == [4]
    assert plan.groups[1].block_ids.tolist() == [9]
    assert [list(chunks_needed(rule, 5, 16)) for rule in layout.rules] == [[0, 1, 2, 3, 4], [4]]


def test_case_41_blocks_below_the_local_hit_are_never_written() -> None:
    layout = make_layout([(16, None, False, 0)], 64)
    present = np.array([[True]])
    plan = plan_retrieve(layout, [np.array([7, 8, 9, 6])], present, skip_tokens=48)
    assert plan.groups[0].block_ids.tolist() == [6]
    assert plan.groups[0].kept_indices.tolist() == [3]


def test_case_55_the_rightmost_full_window_wins_over_a_hole_before_it() -> None:
    rules = [ReuseRule(window_tokens=4 * 16)]  # needs ceil(63 / 16) = 4 chunks of 16
    # present {2, 3, 4, 5}: query [2, 1, 3, 4, 5] -> 1 leading chunk
    assert longest_hit(rules, np.array([[1, 0, 1, 1, 1]], dtype=bool), 16, 80).chunks == 1
    # query [1', 2, 3, 4, 5], the first missing -> 5
    assert longest_hit(rules, np.array([[0, 1, 1, 1, 1]], dtype=bool), 16, 80).chunks == 5


def test_case_58_recurrent_state_comes_from_one_boundary() -> None:
    rules = [ReuseRule(), ReuseRule(recurrent=True)]
    present = np.ones((2, 9), dtype=bool)
    present[1] = False
    present[1, 5] = True
    assert longest_hit(rules, present, 16, 9 * 16).chunks == 6
    present[1, 8] = True
    assert longest_hit(rules, present, 16, 9 * 16).chunks == 9
    # the cap of one token less than the prompt
    assert longest_hit(rules, present, 16, 9 * 16 - 1).chunks == 6


def test_case_62_the_null_state_is_never_written() -> None:
    layout = make_layout([(16, None, True, 0)], 16)
    plan = plan_retrieve(layout, [np.array([0, 0, 5])], np.array([[False, False, True]]))
    assert plan.groups[0].block_ids.tolist() == [5]
    assert plan.groups[0].chunk_indices.tolist() == [2]


def test_a_real_id_without_bytes_fails_the_retrieve_and_is_named() -> None:
    layout = make_layout([(16, None, False, 0), (16, 17, False, 1)], 32)
    full = np.array([1, 2, 3, 4])
    with pytest.raises(IncompleteRetrieveError, match=r"kernel group 0.*block id 3.*chunk 1"):
        plan_retrieve(layout, [full, np.array([0, 0, 0, 9])], np.array([[1, 0], [1, 1]], bool))
    # the window keeps one of two blocks: an id before it has nothing to be filled with
    with pytest.raises(IncompleteRetrieveError, match=r"block id 8 at position 2.*not kept"):
        plan_retrieve(layout, [full, np.array([0, 0, 8, 9])], np.ones((2, 2), bool))


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([1, 2, 3], r"3 block ids for 2 chunks, which take 4"),
        ([1, 2, 3, 100], r"block id 100 at position 3 is outside the pool of 100 blocks"),
        ([1, -1, 3, 4], r"block id -1 at position 1"),
    ],
)
def test_bad_ids_are_refused_before_a_byte_moves(ids: list[int], match: str) -> None:
    layout = make_layout([(16, None, False, 0)], 32, num_blocks=100)
    with pytest.raises(BlockIdError, match=match):
        plan_store(layout, [np.array(ids)], np.ones((1, 2), bool))
    with pytest.raises(BlockIdError, match=match):
        plan_retrieve(layout, [np.array(ids)], np.ones((1, 2), bool))


def test_one_list_per_info() -> None:
    layout = make_layout([(16, None, False, 0), (16, None, False, 0)], 32)
    with pytest.raises(BlockIdError, match="1 block-id lists for 2 kernel groups"):
        plan_store(layout, [np.array([1, 2])], np.ones((1, 1), bool))


def test_a_retrieve_never_writes_one_block_twice() -> None:
    layout = make_layout([(16, None, False, 0)], 32)
    with pytest.raises(BlockIdError, match="names block id 4 more than once"):
        plan_retrieve(layout, [np.array([4, 4])], np.ones((1, 1), bool))
    # a store may read one block for two places
    plan = plan_store(layout, [np.array([4, 4])], np.ones((1, 1), bool))
    assert plan.groups[0].block_ids.tolist() == [4, 4]


def test_skips_must_lie_on_edges() -> None:
    layout = make_layout([(16, None, False, 0), (64, None, False, 1)], 64)
    ids = [np.arange(1, 9), np.arange(1, 3)]
    with pytest.raises(AlignmentError, match="whole chunks of 64"):
        plan_store(layout, ids, np.ones((2, 2), bool), skip_tokens=32)
    with pytest.raises(AlignmentError, match="kernel group 1"):
        plan_retrieve(layout, ids, np.ones((2, 2), bool), skip_tokens=32)
    with pytest.raises(AlignmentError):
        plan_retrieve(layout, ids, np.ones((2, 2), bool), skip_tokens=-64)
    plan = plan_store(layout, ids, np.ones((2, 2), bool), skip_tokens=64)
    assert plan.groups[0].block_ids.tolist() == [5, 6, 7, 8]


def test_another_null_id_and_none() -> None:
    layout = make_layout([(16, None, False, 0)], 16, null_block_id=7)
    plan = plan_store(layout, [np.array([0, 7, 3])], np.ones((1, 3), bool))
    assert plan.groups[0].block_ids.tolist() == [0, 3]
    assert plan.skipped == ((0, 1),)
    layout = make_layout([(16, None, False, 0)], 16, null_block_id=None)
    plan = plan_store(layout, [np.array([0, 7, 3])], np.ones((1, 3), bool))
    assert plan.groups[0].block_ids.tolist() == [0, 7, 3]
    layout = make_layout([(16, None, False, 0)], 16, null_block_id=-1)
    plan = plan_store(layout, [np.array([0, -1, 3])], np.ones((1, 3), bool))
    assert plan.groups[0].block_ids.tolist() == [0, 3]


def test_store_moves_only_the_kept_end_of_each_chunk() -> None:
    layout = make_layout([(16, 33, False, 0)], 64)  # keeps 2 of 4
    plan = plan_store(layout, [np.arange(1, 9)], np.ones((1, 2), bool))
    assert plan.groups[0].block_ids.tolist() == [3, 4, 7, 8]
    assert plan.groups[0].chunk_indices.tolist() == [0, 0, 1, 1]
    assert plan.groups[0].kept_indices.tolist() == [0, 1, 0, 1]


def brute_force_hit(
    rules: list[ReuseRule], present: np.ndarray, chunk_tokens: int, max_tokens: int
) -> int:
    """The longest hit by the words of rules 6 and 7, token by token."""
    best = 0
    for chunks in range(1, present.shape[1] + 1):
        end = chunks * chunk_tokens
        if end > max_tokens:
            break
        served = True
        for group, rule in enumerate(rules):
            if rule.recurrent:
                needed = {chunks - 1}
            elif rule.window_tokens is None:
                needed = set(range(chunks))
            else:
                tokens = range(max(0, end - max(rule.window_tokens - 1, 1)), end)
                needed = {token // chunk_tokens for token in tokens}
            served &= all(present[group, chunk] for chunk in needed)
        if served:
            best = chunks
    return best


RULES = st.one_of(
    st.just(ReuseRule()),
    st.just(ReuseRule(recurrent=True)),
    st.integers(1, 200).map(lambda window: ReuseRule(window_tokens=window)),
)


@given(
    rules=st.lists(RULES, min_size=1, max_size=4),
    chunk_tokens=st.integers(1, 48),
    num_chunks=st.integers(0, 12),
    slack=st.integers(-60, 10),
    seed=st.integers(0, 2**32 - 1),
)
def test_longest_hit_equals_its_definition(
    rules: list[ReuseRule], chunk_tokens: int, num_chunks: int, slack: int, seed: int
) -> None:
    present = np.random.default_rng(seed).random((len(rules), num_chunks)) < 0.8
    max_tokens = max(0, num_chunks * chunk_tokens + slack)
    hit = longest_hit(rules, present, chunk_tokens, max_tokens)
    assert hit.chunks == brute_force_hit(rules, present, chunk_tokens, max_tokens)
    assert hit.tokens == hit.chunks * chunk_tokens
    for group, rule in enumerate(rules):
        assert all(present[group, chunk] for chunk in chunks_needed(rule, hit.chunks, chunk_tokens))


@given(
    groups=st.lists(
        st.tuples(st.sampled_from([1, 2, 4, 8]), st.one_of(st.none(), st.integers(1, 40))),
        min_size=1,
        max_size=4,
    ),
    num_chunks=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_store_plan_holds_exactly_the_kept_blocks(
    groups: list[tuple[int, int | None]], num_chunks: int, seed: int
) -> None:
    chunk_tokens = 16
    rng = np.random.default_rng(seed)
    layout = make_layout(
        [(block, window, False, index) for index, (block, window) in enumerate(groups)],
        chunk_tokens,
    )
    ids = []
    for block, _ in groups:
        count = num_chunks * chunk_tokens // block
        ids.append(np.where(rng.random(count) < 0.2, 0, rng.permutation(count) + 1))
    wanted = rng.random((len(groups), num_chunks)) < 0.9
    plan = plan_store(layout, ids, wanted)
    for index, (group, plan_group) in enumerate(zip(plan.groups, layout.groups, strict=True)):
        expected = []
        for chunk in range(num_chunks):
            first = (chunk + 1) * plan_group.blocks_per_chunk - plan_group.kept_blocks
            kept = ids[index][first : (chunk + 1) * plan_group.blocks_per_chunk]
            if not wanted[index, chunk]:
                continue
            if (kept == 0).any():
                assert (index, chunk) in plan.skipped
                continue
            expected += [(int(id_), chunk, place) for place, id_ in enumerate(kept)]
        actual = zip(group.block_ids, group.chunk_indices, group.kept_indices, strict=True)
        assert [tuple(int(x) for x in row) for row in actual] == expected
