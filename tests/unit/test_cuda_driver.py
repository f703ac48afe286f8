"""The module that calls CUDA: against the real bindings as far as they go without a driver, and
against a recording of their two modules for what is called, with what, on which thread."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_cuda import FakeCudaDriver

from hma_triton import cuda_driver
from hma_triton.cuda_driver import BATCH_ENTRIES, CudaCallError, CudaDriver, PointerKind
from hma_triton.errors import ConfigError


def _public(kind: type) -> dict[str, object]:
    return {
        name: str(inspect.signature(member))
        for name, member in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def test_the_fake_has_exactly_the_surface_of_the_driver() -> None:
    assert _public(FakeCudaDriver) == _public(CudaDriver)


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(ConfigError, match=r"pip install 'hma-triton\[cuda\]'"):
        CudaDriver()


class _NoDriver(CudaDriver):
    """The real bindings, past the question whether there is a device."""

    def __init__(self) -> None:
        self._rt = cuda_driver._load("runtime")
        self._cu = cuda_driver._load("driver")
        self.device_index = 0
        self._uuids = {}
        self.is_rocm = False
        self.supports_batch = True

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        # without cudaSetDevice, whose answer would end every call here
        return self._check(function.__name__, function(*args))


# Without a driver the bindings convert the arguments, then answer; a wrong name, count or type of
# argument is an AttributeError or a TypeError instead.
@pytest.mark.parametrize(
    ("call", "args"),
    [
        ("uuid_of", (0,)),
        ("device_info", ()),
        ("allocate", (4096,)),
        ("free", (4096,)),
        ("register_host", (4096, 4096)),
        ("unregister_host", (4096,)),
        ("host_device_address", (4096,)),
        ("pointer", (4096,)),
        ("ipc_memory_handle", (4096,)),
        ("open_ipc_memory", (bytes(64),)),
        ("close_ipc_memory", (4096,)),
        ("create_stream", ()),
        ("destroy_stream", (5,)),
        ("create_event", (True,)),
        ("destroy_event", (5,)),
        ("record_event", (5, 6)),
        ("wait_event", (5, 6)),
        ("query_event", (5,)),
        ("ipc_event_handle", (5,)),
        ("open_ipc_event", (bytes(64),)),
        ("copy_async", (1, 2, 3, 4)),
        ("copy_batch_async", ([1, 2], [3, 4], [5, 6], 7)),
    ],
)
@pytest.mark.usefixtures("without_devices")
def test_the_real_bindings_take_every_call(call: str, args: tuple[object, ...]) -> None:
    with pytest.raises(CudaCallError) as refused:
        getattr(_NoDriver(), call)(*args)
    assert refused.value.name.startswith("cudaError")


@pytest.fixture
def without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every address above is made up, so that no test here may reach a device."""
    runtime = cuda_driver._load("runtime")
    if int(runtime.cudaGetDeviceCount()[0]) == 0:

        class NoDevice(IntEnum):
            cudaErrorNoDevice = 100

        for name in [name for name in vars(runtime) if name.startswith("cuda")]:
            if callable(getattr(runtime, name)) and not isinstance(getattr(runtime, name), type):
                monkeypatch.setattr(runtime, name, lambda *_: (NoDevice.cudaErrorNoDevice,))


@pytest.mark.usefixtures("without_devices")
def test_a_machine_without_a_device_is_a_config_error() -> None:
    driver = _NoDriver()
    assert driver.device_count() == 0
    with pytest.raises(ConfigError, match="CUDA device 0 of 0 devices is not there"):
        CudaDriver()


def test_the_driver_api_has_the_names_that_are_used() -> None:
    driver = cuda_driver._load("driver")
    assert callable(driver.cuMemGetAddressRange) and callable(driver.cuPointerGetAttribute)
    assert driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE


@pytest.mark.parametrize("kind", ["cudaIpcMemHandle_t", "cudaIpcEventHandle_t"])
def test_the_bindings_handles_are_64_bytes_at_an_address(kind: str) -> None:
    """12.9 shows the bytes as `reserved`, 13 does not: both wrap and show an address."""
    runtime = cuda_driver._load("runtime")
    data = np.arange(64, dtype=np.uint8)
    handle = getattr(runtime, kind)(data.ctypes.data)
    assert np.asarray(cuda_driver._Bytes(handle.getPtr(), 64)).tobytes() == bytes(range(64))


class Status(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorNotReady = 600


class _Handle:
    def __init__(self, address: int = 0) -> None:
        self.own = np.arange(64, dtype=np.uint8)
        self.address = address or self.own.ctypes.data

    def getPtr(self) -> int:
        return int(self.address)


class Recorder:
    """Both modules of the bindings: answers success, and notes calls and threads."""

    def __init__(self, **answers: tuple[object, ...]) -> None:
        self.calls: list[tuple[int, str, tuple[object, ...]]] = []
        self.answers = {
            "cudaGetDeviceCount": (Status.cudaSuccess, 2),
            "cudaDriverGetVersion": (Status.cudaSuccess, 13000),
            "cudaStreamCreateWithPriority": (Status.cudaSuccess, 77),
            "cudaDeviceGetStreamPriorityRange": (Status.cudaSuccess, 0, -5),
            "cudaIpcGetMemHandle": (Status.cudaSuccess, _Handle()),
            "cudaIpcOpenMemHandle": (Status.cudaSuccess, 4096),
            **answers,
        }
        self.cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)
        self.cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream=1)
        self.cudaMemcpyAttributes = SimpleNamespace
        self.cudaIpcMemHandle_t = _Handle
        self.cudaMemoryType = SimpleNamespace(
            cudaMemoryTypeHost=1, cudaMemoryTypeDevice=2, cudaMemoryTypeManaged=3
        )
        self.cudaIpcMemLazyEnablePeerAccess = 1
        self.cudaStreamNonBlocking = 1
        self.cudaHostRegisterMapped, self.cudaHostRegisterPortable = 2, 1

    def __getattr__(self, name: str) -> Callable[..., tuple[object, ...]]:
        def call(*args: object) -> tuple[object, ...]:
            self.calls.append((threading.get_ident(), name, args))
            return self.answers.get(name, (Status.cudaSuccess,))

        call.__name__ = name
        return call

    def named(self, name: str) -> list[tuple[object, ...]]:
        return [args for _, found, args in self.calls if found == name]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recorder]:
    def make(**answers: tuple[object, ...]) -> Recorder:
        recorder = Recorder(**answers)
        monkeypatch.setattr(cuda_driver, "_load", lambda name: recorder)
        return recorder

    return make


def test_case_77_every_thread_that_calls_sets_the_device_first(
    record: Callable[..., Recorder],
) -> None:
    recorder = record()
    driver = CudaDriver(1)
    driver.open_ipc_memory(bytes(64))

    def again() -> None:
        driver.open_ipc_memory(bytes(64))

    thread = threading.Thread(target=again)
    thread.start()
    thread.join()
    for ident in {call[0] for call in recorder.calls}:
        names = [name for thread_id, name, _ in recorder.calls if thread_id == ident]
        opened = names.index("cudaIpcOpenMemHandle")
        assert names[opened - 1] == "cudaSetDevice"
    assert len({call[0] for call in recorder.calls}) == 2
    assert set(recorder.named("cudaSetDevice")) == {(1,)}


def test_texts_end_where_c_strings_end(record: Callable[..., Recorder]) -> None:
    """The bindings give a buffer of blanks with the text and its zero byte in front (12.9)."""
    facts = SimpleNamespace(
        name=b"NVIDIA H200" + bytes(245), uuid=SimpleNamespace(bytes=bytes(16)), major=9, minor=0,
        multiProcessorCount=132,
    )  # fmt: skip
    recorder = record(
        cudaGetDeviceProperties=(Status.cudaSuccess, facts),
        cudaDeviceGetPCIBusId=(Status.cudaSuccess, b"0000:AB:00.0\0".ljust(32)),
        cudaDeviceGetAttribute=(Status.cudaSuccess, 1),
    )
    recorder.cudaDeviceAttr = SimpleNamespace(  # type: ignore[attr-defined]
        cudaDevAttrCanUseHostPointerForRegisteredMem=1,
        cudaDevAttrCanMapHostMemory=2,
        cudaDevAttrIpcEventSupport=3,
    )
    info = CudaDriver().device_info()
    assert (info.name, info.pci_bus_id) == ("NVIDIA H200", "0000:ab:00.0")


def test_host_memory_is_mapped_and_portable(record: Callable[..., Recorder]) -> None:
    recorder = record()
    CudaDriver().register_host(4096, 8192)
    assert recorder.named("cudaHostRegister") == [(4096, 8192, 3)]


def test_streams_have_the_lowest_priority_and_do_not_wait_for_the_default_stream(
    record: Callable[..., Recorder],
) -> None:
    recorder = record()
    assert CudaDriver().create_stream() == 77
    assert recorder.named("cudaStreamCreateWithPriority") == [(1, 0)]


def test_handles_are_opaque_bytes_both_ways(record: Callable[..., Recorder]) -> None:
    recorder = record()
    driver = CudaDriver()
    data = driver.ipc_memory_handle(4096)
    assert data == bytes(range(64))
    assert driver.open_ipc_memory(data) == 4096
    ((handle, flags),) = recorder.named("cudaIpcOpenMemHandle")
    assert flags == 1 and isinstance(handle, _Handle)


def test_batches_are_posted_in_pieces_with_one_attribute(record: Callable[..., Recorder]) -> None:
    recorder = record()
    count = 2 * BATCH_ENTRIES + 5
    numbers = list(range(count))
    CudaDriver().copy_batch_async(numbers, numbers[::-1], [8] * count, 9)
    calls = recorder.named("cudaMemcpyBatchAsync")
    assert [args[3] for args in calls] == [BATCH_ENTRIES, BATCH_ENTRIES, 5]
    assert [value for args in calls for value in args[0]] == numbers  # type: ignore[attr-defined]
    assert [v for args in calls for v in args[1]] == numbers[::-1]  # type: ignore[attr-defined]
    for args in calls:
        assert args[5:] == ([0], 1, 9)
        (attribute,) = args[4]  # type: ignore[misc]
        assert attribute.srcAccessOrder == 1


def test_an_old_driver_gets_plain_copies(record: Callable[..., Recorder]) -> None:
    recorder = record(cudaDriverGetVersion=(Status.cudaSuccess, 12070))
    driver = CudaDriver()
    assert not driver.supports_batch
    driver.copy_batch_async([1, 2], [3, 4], [5, 6], 9)
    assert recorder.named("cudaMemcpyAsync") == [(1, 3, 5, 4, 9), (2, 4, 6, 4, 9)]


def test_a_pending_event_is_not_an_error(record: Callable[..., Recorder]) -> None:
    recorder = record(cudaEventQuery=(Status.cudaErrorNotReady,))
    assert CudaDriver().query_event(5) is False
    # the runtime keeps the last error for whoever asks next, who must not find ours
    assert recorder.named("cudaGetLastError") == [()]
    recorder.answers["cudaEventQuery"] = (Status.cudaErrorInvalidValue,)
    with pytest.raises(CudaCallError, match="cudaEventQuery failed: cudaErrorInvalidValue"):
        CudaDriver().query_event(5)
    recorder.answers["cudaEventQuery"] = (Status.cudaSuccess,)
    assert CudaDriver().query_event(5) is True


@pytest.mark.parametrize(
    ("kind", "address", "expected"),
    [
        (0, 0, (PointerKind.PAGEABLE, 0)),
        (1, 4096, (PointerKind.PINNED, 4096)),
        (1, 0, (PointerKind.PAGEABLE, 0)),
        (2, 8192, (PointerKind.DEVICE, 8192)),
        (3, 8192, (PointerKind.DEVICE, 8192)),
    ],
)
def test_what_lies_at_an_address(
    record: Callable[..., Recorder], kind: int, address: int, expected: tuple[PointerKind, int]
) -> None:
    facts = SimpleNamespace(type=kind, devicePointer=address)
    record(cudaPointerGetAttributes=(Status.cudaSuccess, facts))
    assert CudaDriver().pointer(1) == expected


def test_rocm_refuses_what_is_not_served_there(
    record: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = record()
    monkeypatch.setattr(cuda_driver.torch.version, "hip", "7.2")
    driver = CudaDriver()
    assert driver.is_rocm and not driver.supports_batch
    for call in (
        lambda: driver.is_ipc_capable(1),
        lambda: driver.open_ipc_memory(bytes(64)),
        lambda: driver.create_event(interprocess=True),
    ):
        with pytest.raises(ConfigError, match="ROCm"):
            call()
    assert not recorder.named("cudaIpcOpenMemHandle")


@pytest.mark.parametrize("index", [-1, 2])
def test_a_device_that_is_not_there(record: Callable[..., Recorder], index: int) -> None:
    record()
    with pytest.raises(ConfigError, match=f"CUDA device {index} of 2"):
        CudaDriver(index)
