"""What needs a process of its own: packages that are missing, folders, affinity, peak memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

HEAD = """
import sys
sys.path.insert(0, {tests!r})
import numpy as np
import torch
from hma_triton.kernels.addressing import Direction
"""

COPY_BOTH_WAYS = """
from support.copy_cases import check_copy, single_run_case
from support.guarded_memory import Memory
from support.prepared import Prepared
from support.transposed_cases import transposed_case
memory = Memory(torch.device("cpu"))
for direction in Direction:
    for case in (
        single_run_case(70_000, range(40)),
        single_run_case(132, (3, 1, 2)),
        transposed_case(16, 8, 128, (3, 1, 2, 6)),
        transposed_case(16, 8, 20, (3, 1, 2, 6)),
    ):
        check_copy(Prepared(copier), case, direction, memory)
memory.close()
copier.close()
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", HEAD.format(tests=str(TESTS)) + code],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_without_numba_numpy_gives_the_same_bytes() -> None:
    code = """
sys.modules["numba"] = None
import logging
logging.basicConfig(level=logging.WARNING)
from hma_triton.kernels.cpu import CpuCopier
copier = CpuCopier(2)
print(copier.name)
"""
    refused = """
from hma_triton.errors import ConfigError
try:
    CpuCopier(2, "compiled")
except ConfigError as error:
    print("refused:", error)
"""
    out = run(code + COPY_BOTH_WAYS + refused)
    assert "cpu-numpy" in out
    assert "numba is not installed: CPU pools are copied with numpy, more slowly" in out
    assert "refused: the compiled copy needs numba: pip install 'hma-triton[cpu]'" in out


def test_no_place_for_compiled_code_is_no_obstacle() -> None:
    """Read-only installation and home: numba finds no folder, the movers are compiled anyway."""
    code = """
from numba.core import caching
for locator in caching.CacheImpl._locator_classes:
    def refuse(self):
        raise OSError(30, "Read-only file system")
    locator.ensure_cache_path = refuse
from hma_triton.kernels.cpu import CpuCopier
from hma_triton.kernels.cpu_movers import runs_mover
copier = CpuCopier(2)
print(copier.name, runs_mover().stats.cache_path)
"""
    assert "cpu-compiled None" in run(code + COPY_BOTH_WAYS)


def test_compiled_code_is_kept_and_found_again(tmp_path: Path) -> None:
    code = """
from hma_triton.kernels.cpu_movers import runs_mover
stats = runs_mover().stats
print("hits", sum(stats.cache_hits.values()), stats.cache_path)
"""
    first = run(code, NUMBA_CACHE_DIR=str(tmp_path))
    second = run(code, NUMBA_CACHE_DIR=str(tmp_path))
    assert [line.split()[1] for line in first.splitlines()] == ["0"]
    assert [line.split()[1] for line in second.splitlines()] == ["1"]
    assert str(tmp_path) in second


def test_changed_source_is_compiled_anew(tmp_path: Path) -> None:
    """The cache looks at one file; what the movers call lies in others."""
    code = """
from hma_triton.kernels import cpu_movers
cpu_movers._source_digest = lambda: {digest}
mover = cpu_movers.runs_mover()
print("hits", sum(mover.stats.cache_hits.values()))
"""
    outs = [run(code.format(digest=digest), NUMBA_CACHE_DIR=str(tmp_path)) for digest in (5, 5, 6)]
    assert ["hits 0" in out for out in outs] == [True, False, True]


def test_helpers_leave_the_core_their_parent_is_pinned_to() -> None:
    """Serving engines pin the main thread; a child thread would inherit the one core."""
    code = """
import os, threading
from hma_triton.kernels.cpu import CpuCopier
cores = os.sched_getaffinity(0)
hold = threading.Event()
other = threading.Thread(target=hold.wait)
other.start()
os.sched_setaffinity(0, {min(cores)})
copier = CpuCopier(3)
seen = [copier._helpers().submit(os.sched_getaffinity, 0).result() for _ in range(4)]
hold.set()
other.join()
copier.close()
assert os.sched_getaffinity(0) == {min(cores)}
print(all(found == cores for found in seen))
"""
    assert "True" in run(code)


@pytest.mark.parametrize("implementation", ["compiled", "numpy"])
def test_memory_does_not_grow_with_the_request(implementation: str) -> None:
    """A request of 128 MiB raises the peak no further than one of 2 MiB did."""
    code = f"""
import resource, tracemalloc
from hma_triton.kernels.cpu import CpuCopier
from support.copy_cases import single_run_case
from support.transposed_cases import transposed_case
from dataclasses import replace

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

copier = CpuCopier(2, {implementation!r})
cases = (
    single_run_case(65_536, range(2048), rows=1, num_blocks=2048),
    transposed_case(16, 8, 256, range(4096), rows=1, num_blocks=4096),
)
for case in cases:
    pool = np.ones(case.pool_bytes, dtype=np.uint8)
    host = np.ones(case.object_bytes, dtype=np.uint8)
    spec = replace(case.spec, row_addresses=(pool.ctypes.data,))
    copier.prepare([spec])
    ids = np.random.default_rng(1).permutation(len(case.places)).astype(np.int64)
    places = np.array(case.places, dtype=np.int64) + host.ctypes.data
    few = len(ids) // 64
    for direction in Direction:
        copier.copy_blocks(spec, direction, ids[:few], places[:few])
    before = peak()
    for direction in Direction:
        copier.copy_blocks(spec, direction, ids, places)
    print("grew", peak() - before, "for", len(ids) * spec.block_bytes)
    tracemalloc.start()
    copier.copy_blocks(spec, Direction.STORE, ids, places)
    print("python", tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
copier.close()
"""
    out = run(code)
    grown = [line.split() for line in out.splitlines() if line.startswith("grew")]
    assert len(grown) == 2
    for line in grown:
        assert int(line[3]) >= 128 << 20
        assert int(line[1]) < 2 << 20
    python = [int(line.split()[1]) for line in out.splitlines() if line.startswith("python")]
    assert max(python) < 1 << 20
