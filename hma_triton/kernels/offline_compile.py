"""Compiles copy kernels for devices that are not there, and reads the machine code."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hma_triton.errors import ConfigError
from hma_triton.kernels import block_copy
from hma_triton.kernels.block_copy import compile_signature, constexprs, is_interpreted
from hma_triton.kernels.machine_code import (
    MachineCode,
    SourceLines,
    missed_marks,
    read_amd,
    read_cuda,
)
from hma_triton.kernels.specialize import KernelSpecialization


@dataclass(frozen=True, slots=True)
class Target:
    """A device architecture to compile for."""

    name: str
    backend: str
    threads_per_warp: int

    def gpu_target(self) -> Any:
        """Triton's own name for it."""
        arch = self.name if self.backend == "hip" else int(self.name.removeprefix("sm_"))
        return GPUTarget(self.backend, arch, self.threads_per_warp)


TARGETS = (
    Target("sm_80", "cuda", 32),
    Target("sm_90", "cuda", 32),
    Target("sm_100", "cuda", 32),
    Target("gfx942", "hip", 64),
)


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One kernel for one target."""

    special: KernelSpecialization
    target: Target


def compile_kernel(job: CompileJob) -> MachineCode:
    """Compile afresh and read the code, with the marks it misses.

    Raises:
        ConfigError: `TRITON_INTERPRET=1`, or a Triton without NVIDIA's binary tools.
    """
    if is_interpreted():
        raise ConfigError("TRITON_INTERPRET=1 is set: nothing can be compiled in this process")
    special, target = job.special, job.target
    source = ASTSource(block_copy._block_copy_kernel, compile_signature(), constexprs(special))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hma-compile-") as folder:
        with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
            triton.knobs.cache.dir = folder
            triton.knobs.compilation.always_compile = True
            triton.knobs.compilation.disable_line_info = False
            kernel = triton.compile(
                source, target=target.gpu_target(), options={"num_warps": special.warps}
            )
        seconds = time.perf_counter() - start
        if target.backend == "cuda":
            code = _read_cubin(kernel.asm["cubin"], Path(folder))
        else:
            code = read_amd(kernel.asm["amdgcn"], data_lines())
    code = replace(code, compile_seconds=seconds)
    return replace(code, missed=missed_marks(special, code))


def compile_kernels(jobs: Iterable[CompileJob], processes: int) -> Iterator[MachineCode]:
    """`compile_kernel` of every job, in order, over `processes` processes."""
    waiting = list(jobs)
    if processes <= 1:
        yield from map(compile_kernel, waiting)
        return
    # Triton and torch hold threads: their processes cannot be forked
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(compile_kernel, waiting, chunksize=4)


def data_lines() -> SourceLines:
    """The source lines of the function that moves data.

    With the two blank lines behind it: inline assembly of several lines, as a load with an
    eviction policy is, counts on from its statement.
    """
    lines, first = inspect.getsourcelines(block_copy._move_tile.fn)
    return SourceLines("block_copy.py", first, first + len(lines) + 1)


def _read_cubin(cubin: bytes, folder: Path) -> MachineCode:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    sass = _run_tool(triton.knobs.nvidia.nvdisasm, "-g", "-c", os.fspath(path))
    usage = _run_tool(triton.knobs.nvidia.cuobjdump, "-res-usage", os.fspath(path))
    return read_cuda(sass, usage, data_lines())


def _run_tool(tool: Any, *arguments: str) -> str:
    done = subprocess.run(
        [tool.path, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    if done.returncode:
        raise ConfigError(f"{Path(tool.path).name} failed: {done.stderr.strip()[:300]}")
    return done.stdout
