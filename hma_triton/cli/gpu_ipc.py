"""Stage `ipc`: a pool of another process, its events, its threads and its end.

The engine's side is a process of its own. Its work is made slow on purpose, so that an order which
nobody asked for shows as old bytes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import torch

from hma_triton.cli.gpu_stage import StageContext, StageReport, noise
from hma_triton.cuda_driver import CudaDriver, has_bindings
from hma_triton.errors import HmaError, UnsupportedLayoutError
from hma_triton.handles import CudaEventHandle, CudaIpcHandle
from hma_triton.host_memory import HostMemory, PinnedHost
from hma_triton.kernels.addressing import CopySpec, Direction
from hma_triton.kernels.device import CopyJob, DeviceCopier, DeviceSettings
from hma_triton.kernels.paths import Path
from hma_triton.kernels.triton_copier import TritonCopier
from hma_triton.process_identity import this_process
from hma_triton.tensor_ipc_cuda import CudaStorages, ImportedEvent, export_event, export_storage

PAGE_BYTES = 64 << 10
NUM_BLOCKS = 128
_SLOW_CYCLES = 1_500_000_000
_OLD, _NEW, _BACK = 1, 2, 3


def page_spec(address: int) -> CopySpec:
    """Pages of one run, one row, blocks side by side on both sides."""
    return CopySpec(
        kernel_group_index=0,
        row_addresses=(address,),
        block_stride_bytes=PAGE_BYTES,
        num_blocks=NUM_BLOCKS,
        region_offset_bytes=0,
        object_row_stride_bytes=NUM_BLOCKS * PAGE_BYTES,
        object_block_stride_bytes=PAGE_BYTES,
        blocks_per_object=NUM_BLOCKS,
        n0=1,
        pool_stride0_bytes=PAGE_BYTES,
        object_stride0_bytes=PAGE_BYTES,
        n1=1,
        pool_stride1_bytes=PAGE_BYTES,
        object_stride1_bytes=PAGE_BYTES,
        run_bytes=PAGE_BYTES,
    )


def engine_process(pipe: Connection, device_index: int) -> None:
    """The engine's side: owns the pool, does slow work, answers one word at a time."""
    device = torch.device("cuda", device_index)
    torch.cuda.set_device(device)
    driver = CudaDriver(device_index)
    pool = noise(NUM_BLOCKS * PAGE_BYTES, _OLD).to(device)
    new = noise(NUM_BLOCKS * PAGE_BYTES, _NEW).to(device)
    me = this_process()
    handle = export_storage(pool.untyped_storage(), me, driver)
    pipe.send_bytes(msgspec.msgpack.encode(handle))
    seen = pool.clone()
    events = []
    while True:
        word = pipe.recv()
        event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        events.append(event)
        if word == "write":
            torch.cuda._sleep(_SLOW_CYCLES)  # type: ignore[no-untyped-call]
            pool.copy_(new)
        elif word == "read":
            torch.cuda._sleep(_SLOW_CYCLES)  # type: ignore[no-untyped-call]
            seen.copy_(pool)
        elif word == "check":
            torch.cuda.current_stream().synchronize()
            expected = noise(NUM_BLOCKS * PAGE_BYTES, _BACK)
            pipe.send((bool(torch.equal(seen, new)), bool(torch.equal(pool.cpu(), expected))))
            continue
        else:
            return
        event.record()
        pipe.send_bytes(msgspec.msgpack.encode(export_event(event.cuda_event, me, driver)))


class _Server:
    """This process: the pool mapped, an arena, a copier."""

    def __init__(self, device_index: int, handle: CudaIpcHandle, path: Path) -> None:
        self.driver = CudaDriver(device_index)
        self.storages = CudaStorages(this_process())
        self.pool = self.storages.open(handle)
        self.memory = HostMemory(NUM_BLOCKS * PAGE_BYTES)
        self.pinned = PinnedHost(self.driver, self.memory.address, self.memory.pieces)
        device = torch.device("cuda", device_index)
        self.copier = DeviceCopier(
            device, self.pinned, kernel=TritonCopier(device), settings=DeviceSettings(path)
        )
        spec = page_spec(self.pool.data_ptr())
        self.copier.prepare((spec,))
        ids = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int64)
        self.job = CopyJob(spec, ids, self.memory.address + PAGE_BYTES * ids)

    def arena(self) -> torch.Tensor:
        """The objects' bytes, a copy."""
        return torch.frombuffer(self.memory.buffer, dtype=torch.uint8).clone()

    def fill(self, seed: int) -> None:
        """Write all objects."""
        torch.frombuffer(self.memory.buffer, dtype=torch.uint8).copy_(
            noise(self.memory.nbytes, seed)
        )

    def close(self) -> None:
        """Release everything; the peer may be gone."""
        self.copier.close()
        self.pinned.close()
        self.memory.close()
        del self.pool
        self.storages.close()


def _event(pipe: Any) -> ImportedEvent:
    handle = msgspec.msgpack.decode(pipe.recv_bytes(), type=CudaEventHandle)
    return ImportedEvent(handle, this_process())


def _exchange(report: StageReport, pipe: Any, server: _Server, path: Path) -> None:
    """One store and one retrieve, each against slow work of the engine."""
    pipe.send("write")
    event = _event(pipe)
    report.expect(not event.query(), f"{path.value}: an event of pending work looks done (case 92)")
    server.copier.start(Direction.STORE, (server.job,), event).synchronize()
    new = noise(server.memory.nbytes, _NEW)
    report.expect(
        torch.equal(server.arena(), new), f"{path.value}: a store read before the engine wrote"
    )
    event.close()
    server.fill(_BACK)
    pipe.send("read")
    event = _event(pipe)
    server.copier.start(Direction.RETRIEVE, (server.job,), event).synchronize()
    event.close()
    pipe.send("check")
    undisturbed, written = pipe.recv()
    report.expect(undisturbed, f"{path.value}: a retrieve wrote while the engine read (case 91)")
    report.expect(written, f"{path.value}: the engine does not see what was retrieved")


def _start(device_index: int) -> tuple[Any, Any, CudaIpcHandle]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=engine_process, args=(theirs, device_index), daemon=True)
    child.start()
    theirs.close()
    return child, ours, msgspec.msgpack.decode(ours.recv_bytes(), type=CudaIpcHandle)


def _bounded(work: Callable[[], None], seconds: float) -> bool:
    """Whether `work` ended in time, on a thread of its own."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def run(context: StageContext) -> StageReport:
    """Every path against one engine process, then a new thread, a kill, and VMM memory."""
    context.driver()
    report = StageReport()
    if not has_bindings():
        report.missing.append("two processes over IPC: cuda-bindings is not installed")
        return report
    child, pipe, handle = _start(context.device_index)
    for path in Path:
        server = _Server(context.device_index, handle, path)
        _exchange(report, pipe, server, path)
        server.close()
    failures: list[str] = []

    def register_again() -> None:
        try:
            _Server(context.device_index, handle, Path.DMA).close()
        except (HmaError, RuntimeError) as error:
            failures.append(str(error))

    ended = _bounded(register_again, 30)
    report.expect(
        ended and not failures, f"registering again from a new thread (case 77): {failures}"
    )
    server = _Server(context.device_index, handle, Path.ZERO_COPY)
    os.kill(child.pid, signal.SIGKILL)
    child.join(10)
    started = time.monotonic()
    report.expect(
        _bounded(server.close, 10), "unmapping a killed engine's pool did not end (case 79)"
    )
    report.data["close_after_kill_seconds"] = round(time.monotonic() - started, 3)
    report.lines.append("stores and retrieves over IPC in event order by every path")
    _check_expandable(context, report)
    return report


def _check_expandable(context: StageContext, report: StageReport) -> None:
    """Memory of an expandable segment is refused by name, in a process that has such segments."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    # the second name is the one of torch before 2.9
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "expandable_segments:True"))
    try:
        child = spawn.Process(target=_expandable_process, args=(theirs, context.device_index))
        child.start()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    answer = ours.recv() if ours.poll(60) else "no answer"
    child.join(10)
    report.expect(
        "expandable_segments" in answer, f"expandable segments are not refused: {answer} (case 101)"
    )


def _expandable_process(pipe: Connection, device_index: int) -> None:
    pool = torch.zeros(4 << 20, dtype=torch.uint8, device=torch.device("cuda", device_index))
    try:
        export_storage(pool.untyped_storage(), this_process(), CudaDriver(device_index))
    except UnsupportedLayoutError as error:
        pipe.send(str(error))
        return
    pipe.send("it was exported")
