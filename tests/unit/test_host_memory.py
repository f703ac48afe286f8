"""The arena's bytes: pieces, touching, NUMA, and registrations that are undone."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cuda import MAPPED_OFFSET, FakeCudaDriver, FakeGpu

from hma_triton import host_memory
from hma_triton.errors import CapacityError, ConfigError
from hma_triton.host_memory import (
    HostMemory,
    Piece,
    PinnedHost,
    available_bytes,
    device_numa_node,
    node_cpus,
    parse_cpu_list,
    split_pieces,
)

PAGE = mmap.PAGESIZE


@given(st.integers(1, 1 << 50), st.integers(1, 1 << 30).map(lambda n: n * PAGE))
def test_pieces_cover_the_arena_without_gap_or_overlap(nbytes: int, piece_bytes: int) -> None:
    if nbytes // piece_bytes > 10_000:
        nbytes %= piece_bytes * 100
        nbytes += 1
    pieces = split_pieces(nbytes, piece_bytes)
    end = 0
    for piece in pieces:
        assert piece.offset_bytes == end
        assert 0 < piece.nbytes <= piece_bytes
        end += piece.nbytes
    assert end == nbytes
    assert all(piece.nbytes == piece_bytes for piece in pieces[:-1])


def test_a_terabyte_is_registered_in_pieces_of_64_gib() -> None:
    pieces = split_pieces(1 << 40)
    assert len(pieces) == 16
    assert {piece.nbytes for piece in pieces} == {64 << 30}


@pytest.mark.parametrize(("nbytes", "piece"), [(0, PAGE), (PAGE, 0), (PAGE, PAGE + 1)])
def test_pieces_that_are_no_pages_are_refused(nbytes: int, piece: int) -> None:
    with pytest.raises(ConfigError, match="whole pages"):
        split_pieces(nbytes, piece)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0-1,4-5\n", {0, 1, 4, 5})],
)
def test_the_kernel_s_cpu_lists(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


def test_every_page_is_in_memory_after_the_start_and_all_bytes_are_zero() -> None:
    memory = HostMemory(64 * PAGE, touch_threads=3)
    resident = _resident_bytes(memory.address)
    assert resident == memory.nbytes
    assert not np.frombuffer(memory.buffer, dtype=np.uint8).any()
    memory.close()


def test_untouched_memory_is_not_taken_and_touching_writes_nothing() -> None:
    memory = HostMemory(64 * PAGE, touch_threads=0)
    assert _resident_bytes(memory.address) == 0
    memory.buffer[5 * PAGE] = 7
    memory.touch(threads=2)
    assert _resident_bytes(memory.address) == memory.nbytes
    assert bytes(memory.buffer).count(0) == memory.nbytes - 1 and memory.buffer[5 * PAGE] == 7
    memory.close()


def test_touching_in_the_background_takes_all_and_writes_nothing() -> None:
    memory = HostMemory(64 * PAGE, touch_threads=0)
    memory.buffer[5 * PAGE] = 7
    memory.touch_in_background().join(30)
    assert _resident_bytes(memory.address) == memory.nbytes
    assert bytes(memory.buffer).count(0) == memory.nbytes - 1 and memory.buffer[5 * PAGE] == 7
    memory.close()


def test_touching_in_the_background_ends_with_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_TOUCH_STEP_BYTES", PAGE)
    memory = HostMemory(1 << 28, touch_threads=0)
    thread = memory.touch_in_background()
    memory.close()
    thread.join(5)
    assert not thread.is_alive(), "65,536 steps were left"


def _resident_bytes(address: int) -> int:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and ":" not in first:
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= address < high
        if inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the mapping is not in smaps")


def test_the_mapping_is_shared_unlinked_and_gone_after_close() -> None:
    memory = HostMemory(PAGE)
    address = memory.address
    (line,) = (
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16)
    )
    assert line.split()[1] == "rw-s"
    assert "memfd:hma-arena" in line
    memory.close()
    assert "memfd:hma-arena" not in Path("/proc/self/maps").read_text()


def test_more_than_there_is_is_refused_before_it_is_mapped() -> None:
    wanted = 2 * available_bytes()
    with pytest.raises(CapacityError, match=r"lower --host-gb"):
        HostMemory(wanted)


@pytest.mark.parametrize("text", ["always within_size advise [never] deny force", "[deny]"])
def test_hugepages_that_the_kernel_has_off_are_refused_by_name(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = tmp_path / "shmem_enabled"
    setting.write_text(text)
    monkeypatch.setattr(host_memory, "_SHMEM_THP", setting)
    with pytest.raises(ConfigError, match="shmem_enabled"):
        HostMemory(PAGE, hugepages="thp")


def test_too_few_explicit_hugepages_are_refused_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = tmp_path / "free_hugepages"
    free.write_text("3\n")
    monkeypatch.setattr(host_memory, "_HUGETLB_FREE", free)
    with pytest.raises(CapacityError, match=f"{8 << 20} bytes wanted, {6 << 20} bytes"):
        HostMemory(7 << 20, hugepages="hugetlb")


def test_unknown_hugepages_are_refused() -> None:
    with pytest.raises(ConfigError, match="off, thp, hugetlb"):
        HostMemory(PAGE, hugepages="huge")


def test_the_group_s_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    assert available_bytes() == 600000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() > 600000


def test_touching_threads_are_bound_to_the_device_s_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = os.sched_getaffinity(0)
    chosen = max(allowed)
    node = tmp_path / "nodes" / "node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text(f"{chosen},100000\n")
    device = tmp_path / "pci" / "0000:17:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    monkeypatch.setattr(host_memory, "_NODES", tmp_path / "nodes")
    monkeypatch.setattr(host_memory, "_PCI", tmp_path / "pci")
    assert device_numa_node("0000:17:00.0") == 1
    assert device_numa_node("0000:99:00.0") is None
    assert node_cpus(1) == {chosen}
    assert node_cpus(7) == frozenset()
    bound: list[tuple[int, set[int]]] = []
    real = os.sched_setaffinity

    def note(pid: int, cpus: frozenset[int]) -> None:
        real(pid, cpus)
        bound.append((threading.get_ident(), os.sched_getaffinity(0)))

    monkeypatch.setattr(os, "sched_setaffinity", note)
    HostMemory(8 * PAGE, numa_node=1, touch_threads=2).close()
    # an identity may come again: a thread can end before the next one starts
    assert [cpus for _, cpus in bound] == [{chosen}, {chosen}]
    assert threading.get_ident() not in [ident for ident, _ in bound]
    assert os.sched_getaffinity(0) == allowed


def test_a_kernel_without_nodes_says_minus_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "0000:17:00.0"
    device.mkdir()
    (device / "numa_node").write_text("-1\n")
    monkeypatch.setattr(host_memory, "_PCI", tmp_path)
    assert device_numa_node("0000:17:00.0") is None


def test_every_piece_is_registered_once_and_unregistered() -> None:
    gpu = FakeGpu()
    driver = FakeCudaDriver(gpu)
    pieces = split_pieces(5 * PAGE, 2 * PAGE)
    pinned = PinnedHost(driver, 1 << 20, pieces)
    assert gpu.pinned == {
        1 << 20: 2 * PAGE,
        (1 << 20) + 2 * PAGE: 2 * PAGE,
        (1 << 20) + 4 * PAGE: PAGE,
    }
    pinned.close()
    pinned.close()
    assert not gpu.pinned
    assert gpu.names().count("register_host") == gpu.names().count("unregister_host") == 3


def test_a_piece_that_cannot_be_pinned_leaves_nothing_pinned() -> None:
    gpu = FakeGpu(refuse_register_after=2)
    with pytest.raises(CapacityError, match=r"piece 2 of 3 .*cudaErrorMemoryAllocation"):
        PinnedHost(FakeCudaDriver(gpu), 0, split_pieces(3 * PAGE, PAGE))
    assert not gpu.pinned


@pytest.mark.parametrize("host_pointers", [True, False])
def test_device_addresses_come_from_each_piece_s_mapping(host_pointers: bool) -> None:
    gpu = FakeGpu(host_pointers=host_pointers)
    driver = FakeCudaDriver(gpu)
    base = 1 << 20
    pinned = PinnedHost(driver, base, (Piece(0, PAGE), Piece(PAGE, PAGE)))
    view = pinned.view(driver)
    hosts = np.array([base, base + PAGE - 1, base + PAGE, base + 2 * PAGE - 1])
    pieces = view.piece_of(hosts)
    assert pieces.tolist() == [0, 0, 1, 1]
    offsets = np.array([1, 1, 2, 2]) * (0 if host_pointers else MAPPED_OFFSET)
    assert view.device_addresses(hosts, pieces).tolist() == (hosts + offsets).tolist()
    assert view.piece_of(np.array([base - 1, base + 2 * PAGE])).tolist() == [-1, -1]
    pinned.close()
