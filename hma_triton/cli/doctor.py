"""`hma-triton doctor`: one line for each thing that matters here: there, or missing and why."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import torch
import typer

from hma_triton.cli import machine

app = typer.Typer(pretty_exceptions_enable=False)


class Mode(str, Enum):
    """What this machine is meant to do."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    VLLM = "vllm"
    LMCACHE = "lmcache"


@dataclass(frozen=True, slots=True)
class Check:
    """A probe and the modes that cannot work without what it looks for.

    `slow`: takes seconds, so only the modes that need it pay for it.
    """

    name: str
    probe: machine.Probe
    needed_by: frozenset[Mode]
    slow: bool = False


_ALL = frozenset({Mode.CPU, Mode.CUDA, Mode.VLLM, Mode.LMCACHE})
_CPU, _CUDA = frozenset({Mode.CPU}), frozenset({Mode.CUDA})
_NOBODY: frozenset[Mode] = frozenset()

CHECKS = (
    Check("torch", machine.torch_build, _ALL),
    Check("triton", machine.triton_release, _CUDA),
    Check("driver", machine.driver, _CUDA),
    Check("compiler", machine.launcher_compiler, _CUDA),
    Check("kernel cache", machine.kernel_cache, _CUDA),
    Check("cuda-bindings", machine.cuda_bindings, _CUDA),
    Check("GPU IPC", machine.gpu_ipc, _CUDA),
    Check("shared memory", machine.shared_memory, _CPU),
    Check("peer mapping", machine.peer_mapping, _CPU),
    Check("numba", machine.numba_compiler, _NOBODY),
    Check("pinned memory", machine.pinned_memory, _NOBODY),
    Check("huge pages", machine.hugepages, _NOBODY),
    Check("NUMA", machine.numa, _NOBODY),
    Check("vLLM", machine.vllm_release, frozenset({Mode.VLLM})),
    Check("LMCache", machine.lmcache_release, frozenset({Mode.LMCACHE})),
    Check("LMCache path", machine.lmcache_path, frozenset({Mode.LMCACHE}), slow=True),
)


def _needs(mode: Mode) -> frozenset[Mode]:
    """The modes whose needs this one has: an engine also needs those of the device it runs on."""
    if mode in (Mode.CPU, Mode.CUDA):
        return frozenset({mode})
    device = Mode.CUDA if torch.cuda.is_available() else Mode.CPU
    return frozenset({device} if mode is Mode.AUTO else {device, mode})


@app.command()
def doctor(
    mode: Annotated[
        Mode, typer.Option(help="What this machine is to do; auto: cuda where torch finds a device")
    ] = Mode.AUTO,
) -> None:
    """Say what this machine can do and why not; exit 1 when the chosen mode cannot work."""
    needs = _needs(mode)
    lacking = []
    for check in CHECKS:
        needed = bool(check.needed_by & needs)
        if check.slow and not needed:
            continue
        found = check.probe()
        word = "ok" if found.present else "missing" if needed else "note"
        typer.echo(f"{word:8} {check.name:14} {found.detail}")
        if needed and not found.present:
            lacking.append(check.name)
    name = "+".join(sorted(need.value for need in needs))
    if lacking:
        typer.echo(f"mode {name} cannot work here: {', '.join(lacking)}")
        sys.exit(1)
    typer.echo(f"mode {name} can work here")
