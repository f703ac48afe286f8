"""Pools in shared memory: views that keep their offsets, refusals by name, nothing left behind."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

from hma_triton.cpu_event import CpuEvent, ImportedCpuEvent
from hma_triton.errors import (
    ConfigError,
    ProtocolError,
    ServerUnavailableError,
    TransferError,
    UnsupportedLayoutError,
)
from hma_triton.handles import CudaIpcHandle
from hma_triton.process_identity import ProcessWatch, check_same_kernel, this_process
from hma_triton.tensor_ipc import export_kv_caches, import_kv_caches, map_segment, share_storage

ROOT = Path(__file__).parents[2]
HERE = this_process()


def test_views_of_one_storage_move_together_and_keep_their_places() -> None:
    """K2 case 17: an offset, a common block step; K9 case 94: it is a view, not a copy."""
    whole = torch.arange(200_000, dtype=torch.int64).to(torch.uint8)
    first = whole.as_strided((20, 64, 132), (9600, 132, 1), 0)
    second = whole.as_strided((20, 8, 132), (9600, 132, 1), 8640 - 192)
    outside = whole[5:9]
    expected = first.clone(), second.clone()
    storages, layers = export_kv_caches({"a": first, "b": second})
    assert len(storages) == 1, "one segment per storage"
    imported = import_kv_caches(storages, layers)
    for name, mine, before in zip("ab", (first, second), expected, strict=True):
        theirs = imported.kv_caches[name]
        assert theirs.shape == mine.shape and theirs.stride() == mine.stride()
        assert theirs.storage_offset() == mine.storage_offset()
        assert torch.equal(theirs, before) and torch.equal(mine, before)
        assert theirs.data_ptr() != mine.data_ptr()
    imported.kv_caches["b"][3] = 7
    assert bool((second[3] == 7).all()), "written there, read here"
    assert torch.equal(first, expected[0]), "the neighbour is untouched"
    outside[0] = 99
    assert first.reshape(-1)[5] == 99, "views that were never registered moved along"
    imported.close()


def test_segments_are_anonymous_private_and_gone_with_their_owner() -> None:
    before = set(os.listdir("/dev/shm"))
    tensor = torch.zeros(4096, dtype=torch.uint8)
    handle = share_storage(tensor.untyped_storage())
    info = os.stat(f"/proc/self/fd/{handle.fd}")
    assert stat.S_IMODE(info.st_mode) == 0o600 and info.st_nlink == 0
    assert not {name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name} - before
    again = share_storage(tensor.untyped_storage())
    assert again == handle, "a shared storage stays where it is"


def test_nothing_is_left_when_the_owner_is_killed() -> None:
    code = (
        "import os, signal, torch\n"
        "from hma_triton.tensor_ipc import export_kv_caches\n"
        "caches = {'a': torch.zeros(1 << 20, dtype=torch.uint8)}\n"
        "export_kv_caches(caches)\n"
        "print(os.getpid(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    pid = done.stdout.strip()
    assert pid.isdigit(), done.stderr
    assert [name for name in os.listdir("/dev/shm") if f"_{pid}_" in name] == []


def test_shared_memory_that_is_too_small_is_an_error_in_seconds() -> None:
    """In a mount namespace of its own, where `/dev/shm` has 1 MiB."""
    code = (
        "import time, torch\n"
        "from hma_triton.errors import CapacityError\n"
        "from hma_triton.tensor_ipc import export_kv_caches\n"
        "cache = torch.full((4 << 20,), 7, dtype=torch.uint8)\n"
        "started = time.monotonic()\n"
        "try:\n"
        "    export_kv_caches({'layer.0': cache})\n"
        "except CapacityError as error:\n"
        "    print(error)\n"
        "assert time.monotonic() - started < 5\n"
        "assert bool((cache == 7).all()), 'nothing is lost'\n"
    )
    command = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", command, sys.executable, code],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "4194304 bytes of KV cache do not fit into /dev/shm" in done.stdout
    assert "1048576 bytes free" in done.stdout and "--shm-size" in done.stdout


def test_lists_and_dtypes_survive() -> None:
    pair = [torch.zeros(3, 4, dtype=torch.bfloat16), torch.ones(3, 2, dtype=torch.float8_e4m3fn)]
    plain = torch.zeros(2, 2)
    storages, layers = export_kv_caches({"mamba": pair, "kv": plain})
    imported = import_kv_caches(storages, layers)
    theirs = imported.kv_caches["mamba"]
    assert isinstance(theirs, list) and [t.dtype for t in theirs] == [t.dtype for t in pair]
    assert list(imported.kv_caches) == ["mamba", "kv"]
    assert imported.nbytes == 24 + 6 + 16


@pytest.mark.parametrize(
    ("caches", "why"),
    [
        ({"layer.3": torch.empty(0)}, "layer 'layer.3'.*empty"),
        ({"layer.3": torch.zeros(2, 2).to_sparse()}, "layer 'layer.3'.*no strided tensor"),
        ({"layer.3": torch.zeros(2, 2, device="meta")}, "layer 'layer.3'.*meta"),
        ({"layer.3": ["no tensor"]}, "layer 'layer.3'.*str"),
    ],
)
def test_what_cannot_be_shared_names_its_layer(caches, why: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=why):
        export_kv_caches(caches)


def test_a_device_pool_is_refused_by_a_server_without_devices() -> None:
    handle = CudaIpcHandle(
        owner=HERE, device_uuid="GPU-7", handle=b"x" * 64, offset_bytes=0, nbytes=1
    )
    with pytest.raises((UnsupportedLayoutError, ConfigError)):
        import_kv_caches([handle], [])


def changed(**changes: object):
    return msgspec.structs.replace(HERE, **changes)


@pytest.mark.parametrize(
    ("owner", "error", "why"),
    [
        (changed(boot_id="x"), ConfigError, "another host"),
        (changed(pid_namespace=7), ConfigError, "another process namespace"),
        (changed(time_namespace=7), ConfigError, "another time namespace"),
        (changed(start_ticks=1), ProtocolError, "not the segment"),
    ],
)
def test_foreign_owners_are_refused_by_name(owner, error, why: str) -> None:
    pool = torch.zeros(64)
    handle = share_storage(pool.untyped_storage())
    with pytest.raises(error, match=why):
        map_segment(msgspec.structs.replace(handle, owner=owner))


def test_a_pipe_is_not_opened() -> None:
    read, write = os.pipe()
    handle = share_storage(torch.zeros(64).untyped_storage())
    started = time.monotonic()
    with pytest.raises(ProtocolError, match="no shared-memory segment"):
        map_segment(msgspec.structs.replace(handle, fd=read))
    assert time.monotonic() - started < 1
    os.close(read)
    os.close(write)


def test_a_watch_notices_the_end_of_a_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    from hma_triton.process_identity import start_ticks

    reference = changed(pid=child.pid, start_ticks=start_ticks(child.pid))
    watch = ProcessWatch(reference)
    assert watch.alive
    child.kill()
    child.wait()
    assert not watch.alive
    watch.close()
    watch.close()
    with pytest.raises(ServerUnavailableError, match="is gone"):
        ProcessWatch(reference)
    with pytest.raises(ServerUnavailableError, match="belongs to another process"):
        ProcessWatch(changed(start_ticks=1))


def test_this_process_shares_its_own_kernel() -> None:
    check_same_kernel(HERE)
    assert this_process() is HERE


# events


def test_an_imported_event_stands_for_pending_work() -> None:
    """K9 case 92: imported early, it is not done; then it waits, and what was written is there."""
    code = (
        "import sys, time, msgspec, torch\n"
        "from hma_triton.cpu_event import CpuEvent\n"
        "from hma_triton.tensor_ipc import share_storage\n"
        "data = torch.zeros(8, dtype=torch.uint8)\n"
        "event, handle = CpuEvent(), share_storage(data.untyped_storage())\n"
        "both = [msgspec.json.encode(h).hex() for h in (handle, event.record())]\n"
        "print(*both, flush=True)\n"
        "input()\n"
        "time.sleep(0.5)\n"
        "data.fill_(42)\n"
        "event.fire()\n"
        "input()\n"
    )
    from hma_triton.handles import CpuEventHandle, ShmHandle

    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as producer:
        assert producer.stdin is not None and producer.stdout is not None
        segment, event = (bytes.fromhex(part) for part in producer.stdout.readline().split())
        mapped = map_segment(msgspec.json.decode(segment, type=ShmHandle))
        imported = ImportedCpuEvent(msgspec.json.decode(event, type=CpuEventHandle))
        assert not imported.query() and mapped[0] == 0
        with pytest.raises(TransferError, match="did not end before the deadline"):
            imported.synchronize(time.monotonic_ns() + 10_000_000)
        producer.stdin.write("\n")
        producer.stdin.flush()
        imported.synchronize(time.monotonic_ns() + 60 * 10**9)
        assert imported.query() and mapped[0] == 42
        producer.stdin.write("\n")
        producer.stdin.flush()


def test_an_event_fires_for_everything_recorded_before_and_nothing_after() -> None:
    event = CpuEvent()
    one, two = ImportedCpuEvent(event.record()), ImportedCpuEvent(event.record())
    event.fire()
    three = ImportedCpuEvent(event.record())
    assert (one.query(), two.query(), three.query()) == (True, True, False)
    event.fire()
    three.synchronize()
    event.close()
    event.close()


def test_a_word_outside_its_segment_is_refused() -> None:
    handle = CpuEvent().record()
    for offset in (4, 4096, 1 << 40):
        with pytest.raises(ProtocolError, match=f"byte {offset} "):
            ImportedCpuEvent(msgspec.structs.replace(handle, offset_bytes=offset))
