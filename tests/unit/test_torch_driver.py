"""CUDA by what torch offers: the same surface as the bindings' driver, over a recorded torch."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hma_triton import cuda_driver, torch_driver
from hma_triton.cuda_driver import CudaCallError, CudaDriver, PointerKind
from hma_triton.errors import ConfigError
from hma_triton.torch_driver import TorchDriver, open_driver

OWN = {"copy_batch_async", "index_of"}
IPC = {"is_ipc_capable", "ipc_memory_handle", "open_ipc_memory", "ipc_event_handle",
       "open_ipc_event"}  # fmt: skip


class _Stream:
    def __init__(self, device: Any = None, handle: int = 7, priority: int | None = None) -> None:
        self.cuda_stream, self.priority = handle, priority
        self.waits: list[_Event] = []

    def wait_event(self, event: _Event) -> None:
        self.waits.append(event)


class _Event:
    """As torch's: it exists for the driver once it was recorded, and has fired until then."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.fired = True

    def record(self, stream: _Stream) -> None:
        self.recorded.append(stream.cuda_stream)
        self.fired = False

    def query(self) -> bool:
        return self.fired


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    seen = SimpleNamespace(registered=[], status=0, streams=[], current=[])

    def external(handle: int, device: Any) -> _Stream:
        assert handle, "torch takes 0 for a wish for a new stream"
        seen.streams.append(_Stream(handle=handle))
        return seen.streams[-1]

    def register(*args: int) -> int:
        seen.registered.append(args)
        return int(seen.status)

    def inside(stream: _Stream) -> Any:
        seen.current.append(stream.cuda_stream)
        return nullcontext()

    facts = SimpleNamespace(
        name="H", uuid="0-1", major=9, minor=0, multi_processor_count=132,
        pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0,
    )  # fmt: skip
    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=register)
    for name, value in {
        "device_count": lambda: 1,
        "cudart": lambda: cudart,
        "device": lambda device: nullcontext(),
        "stream": inside,
        "Stream": _Stream,
        "ExternalStream": external,
        "default_stream": lambda device: _Stream(handle=0),
        "Event": _Event,
        "get_device_properties": lambda device: facts,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    seen.driver = TorchDriver(0)
    return seen


def test_it_has_every_call_of_the_driver_and_its_signatures() -> None:
    wanted = dict(inspect.getmembers(CudaDriver, inspect.isfunction))
    for name, member in wanted.items():
        if name.startswith("_"):
            continue
        found = getattr(TorchDriver, name)
        assert inspect.signature(found) == inspect.signature(member), name
        assert (found is member) == (name in OWN | IPC), f"{name} would go to the bindings"


@pytest.mark.parametrize("name", sorted(IPC))
def test_sharing_between_processes_is_refused_by_name(made: SimpleNamespace, name: str) -> None:
    with pytest.raises(ConfigError, match="cuda-bindings"):
        getattr(made.driver, name)(b"" if "open" in name else 4096)
    with pytest.raises(ConfigError, match="cuda-bindings"):
        made.driver.create_event(interprocess=True)


def test_the_bindings_come_first(made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_driver, "CudaDriver", lambda index: f"bindings {index}")
    assert open_driver(0) == "bindings 0"
    monkeypatch.setattr(torch_driver, "has_bindings", lambda: False)
    assert isinstance(open_driver(0), TorchDriver)


def test_missing_bindings_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_driver.has_bindings()

    def refuse(name: str) -> None:
        raise ConfigError(name)

    monkeypatch.setattr(cuda_driver, "_load", refuse)
    assert not cuda_driver.has_bindings()


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="CUDA device 0 of 0 devices is not there"):
        TorchDriver()


def test_what_the_device_is(made: SimpleNamespace) -> None:
    info = made.driver.device_info()
    assert (info.pci_bus_id, info.architecture, info.uuid) == ("0000:17:00.0", "sm_90", "GPU-0-1")
    assert made.driver.driver_version() == 13000
    assert made.driver.index_of("GPU-0-1") == 0
    assert not made.driver.supports_batch and not info.ipc_events


def test_host_memory_is_mapped_and_portable_and_refusals_are_named(made: SimpleNamespace) -> None:
    made.driver.register_host(4096, 8192)
    made.driver.unregister_host(4096)
    assert made.registered == [(4096, 8192, 3), (4096,)]
    made.status = 2
    with pytest.raises(CudaCallError, match="cudaHostRegister failed"):
        made.driver.register_host(4096, 8192)


def test_events_are_numbers_and_streams_are_handles(made: SimpleNamespace) -> None:
    driver = made.driver
    stream, event = driver.create_stream(), driver.create_event()
    assert driver.query_event(event), "nothing was recorded yet"
    driver.wait_event(stream, event)
    driver.record_event(event, stream)
    assert not driver.query_event(event)
    driver.record_event(event, 0)
    known = driver._events[event]
    assert known.recorded == [7, 0], "handle 0 is the default stream, not a new one"
    assert made.streams[0].waits == [known]
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    assert not driver._events


def test_host_addresses_are_looked_at_in_place(
    made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies go through two views of the addresses, on the stream that was named."""

    def device_bytes(address: int, nbytes: int, index: int) -> torch.Tensor:
        raise RuntimeError("resides on host memory and is not registered")

    monkeypatch.setattr(torch_driver, "device_bytes", device_bytes)
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    assert made.driver.pointer(source.ctypes.data) == (PointerKind.PAGEABLE, 0)
    made.driver.copy_batch_async([target.ctypes.data], [source.ctypes.data], [60], 9)
    assert target.tolist() == [*range(60), 0, 0, 0, 0]
    assert made.current == [9]
    monkeypatch.setattr(
        torch_driver, "device_bytes", lambda address, nbytes, index: torch.zeros(nbytes)
    )
    assert made.driver.pointer(4096) == (PointerKind.DEVICE, 4096)
