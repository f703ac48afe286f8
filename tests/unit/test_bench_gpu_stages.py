"""Every stage of `bench gpu` run once over the fake driver, so that a slip is found before somebody
borrows a device."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.fake_cuda import FakeCudaDriver, FakeGpu, FakeKernel

from hma_triton import engine as engine_module
from hma_triton.cli import (
    gpu_correctness,
    gpu_ipc,
    gpu_other,
    gpu_speed,
    gpu_stage,
)
from hma_triton.cli.gpu_stage import StageContext
from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array, ObjectLayout
from hma_triton.kernels.device import DeviceCopier

CPU = torch.device("cpu")


class _Kernel(FakeKernel):
    """Stands for `TritonCopier(device, ...)`; `skip_last` leaves a block out, as a fault would."""

    def __init__(self, gpu: FakeGpu, *, skip_last: bool = False) -> None:
        super().__init__(gpu)
        self.skip_last = skip_last

    def enqueue(
        self,
        spec: CopySpec,
        direction: Direction,
        block_ids: Int64Array,
        object_addresses: Int64Array,
        stream: int,
    ) -> None:
        end = -1 if self.skip_last else len(block_ids)
        super().enqueue(spec, direction, block_ids[:end], object_addresses[:end], stream)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    made = FakeGpu()
    driver = FakeCudaDriver(made)

    def copier(*args: Any) -> DeviceCopier:
        _, _, _, pinned, settings = args
        return DeviceCopier(
            CPU, pinned, kernel=made.kernel_class(made), settings=settings, driver=driver
        )

    real = engine_module.make_copier
    monkeypatch.setattr(
        engine_module,
        "make_copier",
        lambda backend, *rest: (
            copier(backend, *rest) if backend == "device" else real(backend, *rest)
        ),
    )
    made.kernel_class = _Kernel  # type: ignore[attr-defined]
    for module in (gpu_speed, gpu_ipc):
        monkeypatch.setattr(module, "TritonCopier", lambda device, **rest: _Kernel(made))
        monkeypatch.setattr(
            module,
            "DeviceCopier",
            lambda device, pinned, **rest: DeviceCopier(CPU, pinned, driver=driver, **rest),
        )
    monkeypatch.setattr(gpu_ipc, "CudaDriver", lambda index=0: driver)
    monkeypatch.setattr(StageContext, "driver", lambda context: driver)
    monkeypatch.setattr(StageContext, "device", CPU)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(gpu_stage, "noise", gpu_stage.noise)
    yield made
    made.drain()
    assert not made.leaks()


@pytest.mark.parametrize("layout", ObjectLayout)
@pytest.mark.parametrize(
    ("model", "variant"), [("lfm2-2.6b", "main"), ("gpt-oss-120b", "cuda90_tp8")]
)
def test_a_case_compares_pools_and_objects_by_every_path(
    gpu: FakeGpu, model: str, variant: str, layout: ObjectLayout
) -> None:
    case = gpu_correctness.Case(model, variant, layout)
    found = gpu_correctness.check_case(case, CPU, FakeCudaDriver(gpu))  # type: ignore[arg-type]
    assert found.wrong == ()
    assert found.nbytes > 0
    assert {"store:dma", "store:staged", "store:zero_copy"} <= set(found.paths)
    assert {"retrieve:dma", "retrieve:staged", "retrieve:zero_copy"} <= set(found.paths)


def test_a_case_notices_a_block_that_was_left_out(gpu: FakeGpu) -> None:
    gpu.kernel_class = lambda made: _Kernel(made, skip_last=True)  # type: ignore[attr-defined]
    case = gpu_correctness.Case("gpt-oss-120b", "cuda90_tp8", ObjectLayout.OPAQUE)
    found = gpu_correctness.check_case(case, CPU, FakeCudaDriver(gpu))  # type: ignore[arg-type]
    named = [text.split(":")[0] for text in found.wrong]
    assert named == [
        "zero_copy store, objects",
        "zero_copy retrieve, pool",
        "staged store, objects",
        "staged retrieve, pool",
    ]


def _small(monkeypatch: pytest.MonkeyPatch) -> StageContext:
    for name, value in {
        "RUN_SIZES": (1024, 32768),
        "COUNTS": (1, 4, 64),
        "CELL_BYTES": 1 << 18,
        "REQUEST_BYTES": 1 << 21,
        "REQUEST_RUNS": (1024, 4096),
        "REQUEST_ROWS": 4,
        "CAPS": (8, 32),
        "_CEILING_BYTES": 1 << 18,
        "_REPEATS": 1,
        "_MATRIX": 8,
    }.items():
        monkeypatch.setattr(gpu_speed, name, value)
    return StageContext(0, float("inf"), ".")


def test_the_sweep_measures_every_cell_by_every_path(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = gpu_speed.run_paths(_small(monkeypatch))
    cells = report.data["cells"]
    # 1 KiB by 1, 4, 64 and 32 KiB by 1, 4 (64 of them are more than a cell holds)
    assert len(cells) == 5 * 4 * 2
    forced = [cell for cell in cells if cell["path"] != "auto"]
    assert all(cell["taken"] == f"device:{cell['path']}" for cell in forced)
    assert {cell["taken"] for cell in cells if cell["path"] == "auto"} == {
        "device:dma",
        "device:zero_copy",
    }
    assert all(cell["nbytes"] == cell["run_bytes"] * cell["count"] for cell in cells)
    assert report.missing == ["64 runs of 32768 bytes: over 262144 bytes"]


def test_what_there_is_no_time_for_is_said(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    _small(monkeypatch)
    late = StageContext(0, 0.0, ".")
    assert gpu_speed.run_paths(late).missing[-1] == (
        "5 combinations of run length and count: no time left"
    )
    assert len(gpu_speed.run_requests(late).missing) == 2


def test_requests_report_the_best_path(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    report = gpu_speed.run_requests(_small(monkeypatch))
    cells = report.data["cells"]
    assert len(cells) == 2 * 4 * 2
    assert {cell["nbytes"] for cell in cells} == {1 << 21}
    assert [line.split(",")[0] for line in report.lines] == ["store", "retrieve"]


class _Timing:
    """`torch.cuda.Event` for the two stages that time by device events."""

    def __init__(self, **kwargs: bool) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Timing) -> float:
        return 2.0


def test_a_product_is_timed_alone_and_beside_every_budget(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Timing)
    report = gpu_speed.run_beside(_small(monkeypatch))
    assert report.data["product_ms_alone"] == pytest.approx(0.2)
    rows = report.data["rows"]
    assert [(row["path"], row["programs"]) for row in rows[::2]] == [
        ("zero_copy", 8),
        ("zero_copy", 32),
        ("staged", None),
        ("dma", None),
    ]
    assert all(row["slowdown"] == 1.0 for row in rows)


def test_without_bindings_what_needs_them_is_left_out_by_name(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = _small(monkeypatch)
    for module in (gpu_ipc, gpu_other):
        monkeypatch.setattr(module, "has_bindings", lambda: False)
    found = [
        run(context)
        for run in (gpu_other.run_machine, gpu_ipc.run, gpu_other.run_tests)  # type: ignore[list-item]
    ]
    assert [report.ok for report in found] == [None, None, None]
    assert all("cuda-bindings" in report.missing[0] for report in found)


def test_many_copies_are_not_posted_one_by_one(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.supports_batch = False
    context = _small(monkeypatch)
    monkeypatch.setattr(gpu_speed, "_PLAIN_COPIES", 1024)
    monkeypatch.setattr(StageContext, "driver", lambda context: FakeCudaDriver(gpu))
    report = gpu_speed.run_requests(context)
    assert report.missing == ["2048 runs of 1024 bytes by dma: no batch call"]
    assert len(report.data["cells"]) == 2 * (3 + 4)


def test_ceilings_are_rates_of_whole_copies(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FakeCudaDriver(gpu).create_stream()
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=stream)
    )
    report = gpu_speed.run_ceilings(_small(monkeypatch))
    assert set(report.data) == {
        "engine_store",
        "engine_retrieve",
        "engine_both",
        "device_copy",
        "device_gather",
        "kernel_store",
        "kernel_read",
    }
    assert all(rate > 0 for rate in report.data.values())
    FakeCudaDriver(gpu).destroy_stream(stream)


class _EngineThread:
    """The engine's process as a thread over the same fake machine."""

    pid = -1

    def __init__(self, target: Any, pipe: Connection, device_index: int) -> None:
        # a process would have a copy of its own
        own = Connection(os.dup(pipe.fileno()))

        def run() -> None:
            with suppress(EOFError):
                target(own, device_index)

        self._thread = threading.Thread(target=run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float) -> None:
        pass


class _SlowEvent:
    """An interprocess event of work that ends when somebody has asked or waits for it."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.cuda_event = gpu.pending_event()

    def record(self) -> None:
        pass


def test_the_two_process_stage_over_one_fake_machine(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow only: CPU memory changes at once, so orders are what `test_device_copier` checks."""
    killed: list[int] = []
    me = gpu_ipc.this_process()
    real_pipe = multiprocessing.get_context("spawn").Pipe

    def this_process() -> Any:
        is_engine = threading.current_thread().name == "engine"
        return msgspec.structs.replace(me, pid=me.pid + 1) if is_engine else me

    class Context:
        Pipe = staticmethod(real_pipe)

        @staticmethod
        def Process(target: Any, args: tuple[Any, ...], daemon: bool = False) -> _EngineThread:
            return _EngineThread(target, *args)

    monkeypatch.setattr(gpu_ipc, "this_process", this_process)
    monkeypatch.setattr(gpu_ipc.multiprocessing, "get_context", lambda kind: Context)
    monkeypatch.setattr(torch.cuda, "Event", lambda **kwargs: _SlowEvent(gpu))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None)
    )
    monkeypatch.setattr(gpu_ipc.os, "kill", lambda pid, number: killed.append(pid))
    monkeypatch.setattr(gpu_ipc, "NUM_BLOCKS", 4)
    _share_cpu_memory(gpu, monkeypatch)
    report = gpu_ipc.run(StageContext(0, float("inf"), "."))
    assert report.ok is True, report.lines
    assert killed == [-1]
    for event in gpu.events.values():
        event.destroyed = True


def _share_cpu_memory(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every CPU storage that is exported is an allocation; opened, it is looked at in place."""
    real = gpu_ipc.export_storage

    def export(storage: torch.UntypedStorage, owner: Any, driver: Any) -> Any:
        gpu.allocations[storage.data_ptr()] = storage.nbytes()
        if storage.nbytes() == 4 << 20:
            gpu.vmm.add(storage.data_ptr())
        return real(storage, owner, driver)

    class At:
        def __init__(self, address: int, nbytes: int) -> None:
            self.__array_interface__ = {
                "data": (address, False),
                "shape": (nbytes,),
                "typestr": "|u1",
                "version": 3,
            }

    storages = gpu_ipc.CudaStorages
    monkeypatch.setattr(gpu_ipc, "export_storage", export)
    monkeypatch.setattr(
        gpu_ipc,
        "CudaStorages",
        lambda me: storages(
            me,
            lambda index: FakeCudaDriver(gpu, index),  # type: ignore[arg-type]
            lambda address, nbytes, index: torch.from_numpy(np.asarray(At(address, nbytes))),
        ),
    )
    imported = gpu_ipc.ImportedEvent

    class Asked(imported):  # type: ignore[misc,valid-type]
        def __init__(self, handle: Any, me: Any) -> None:
            super().__init__(handle, me, lambda index: FakeCudaDriver(gpu, index))
            self._producer = int.from_bytes(handle.handle, "little")

        def query(self) -> bool:
            answer: bool = super().query()
            gpu.fire(self._producer)
            return answer

        def wait_on(self, stream: int) -> None:
            super().wait_on(stream)
            gpu.fire(self._producer)

    monkeypatch.setattr(gpu_ipc, "ImportedEvent", Asked)
    real_device = torch.device
    monkeypatch.setattr(gpu_ipc.torch, "device", lambda kind, index=None: real_device("cpu"))
