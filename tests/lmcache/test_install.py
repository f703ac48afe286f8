"""Installing and taking away, what falls through, versions, and a core that does not load."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmcache
import lmcache.lmcache_native as core
import pytest
import torch
from lmcache.v1.multiprocess.transfer_context.base import _detect_block_transfer_accepts_tensor
from support.lmcache_cases import Case, Setting, block_ids, pointer_tensor, shape_desc
from support.lmcache_stack import copy_without_core

from hma_triton.errors import ConfigError
from hma_triton.integration.lmcache import (
    Installation,
    current_installation,
    describe_path,
    install,
    uninstall,
)
from hma_triton.integration.lmcache.versions import VERSION_RANGE, check_lmcache
from hma_triton.kernels.reference import ReferenceCopier
from hma_triton.kv_format import EngineKVFormat

STORE, RETRIEVE = 1, 0
planner = importlib.import_module("lmcache.v1.multiprocess.object_group_transfer")


@pytest.fixture
def installed() -> Iterator[Installation]:
    yield install()
    uninstall()


def test_uninstall_restores_exactly() -> None:
    operations = lmcache.device_ops
    before = dict(vars(operations))
    switch = planner._HAS_NATIVE_OBJECT_GROUP_TRANSFER
    installation = install()
    assert vars(operations) != before
    assert planner._HAS_NATIVE_OBJECT_GROUP_TRANSFER is True
    assert hasattr(operations, "execute_object_group_transfer")
    assert current_installation() is installation
    assert install() is installation
    with pytest.raises(ConfigError, match="uninstall"):
        install(ReferenceCopier())
    uninstall()
    assert dict(vars(operations)) == before
    assert planner._HAS_NATIVE_OBJECT_GROUP_TRANSFER is switch
    assert not hasattr(operations, "execute_object_group_transfer")
    assert current_installation() is None
    uninstall()


def test_the_signature_is_lmcaches(installed: Installation) -> None:
    """LMCache reads from it whether an operation takes tensors, and passes arguments by name."""
    ours = lmcache.device_ops.multi_layer_block_kv_transfer
    theirs = type(lmcache.device_ops).multi_layer_block_kv_transfer
    assert (
        list(inspect.signature(ours).parameters.values())
        == list(inspect.signature(theirs).parameters.values())[1:]
    )
    assert _detect_block_transfer_accepts_tensor(ours)
    case = Case(EngineKVFormat.NL_X_NB_BS_HS)
    mine, plain = Setting.make(case), Setting.make(case)
    ours(
        skip_prefix_n_blocks=case.skip,
        engine_kv_format=core.EngineKVFormat(int(case.format)),
        lmcache_chunk_size=case.chunk_slots,
        shape_desc=shape_desc(case, mine.caches),
        direction=core.TransferDirection.D2H,
        device="cpu",
        block_ids=block_ids(case),
        lmcache_objects_ptrs=mine.objects,
        paged_buffer_ptrs_tensor=mine.caches,
    )
    plain.expect(STORE)
    assert torch.equal(mine.arena.bytes, plain.arena.bytes)


def test_a_compiled_operation_without_signature_stays_pointer_only() -> None:
    from hma_triton.integration.lmcache.install import _like
    from hma_triton.integration.lmcache.operation import BlockTransfer

    transfer = BlockTransfer(print, Any, Any, planar_rows=True)  # type: ignore[arg-type]
    replacement = _like(transfer.multi_layer_block_kv_transfer, core.is_mla)
    assert next(iter(inspect.signature(replacement).parameters)) == "paged_buffer_ptrs_tensor"
    assert not _detect_block_transfer_accepts_tensor(replacement)


def test_any_executor_can_serve() -> None:
    class Recorder(ReferenceCopier):
        moved = 0

        def copy_blocks(self, spec: Any, direction: Any, ids: Any, addresses: Any) -> None:
            Recorder.moved += len(ids)
            super().copy_blocks(spec, direction, ids, addresses)

    install(Recorder())
    try:
        case = Case(EngineKVFormat.NL_X_NB_NH_BS_CS)
        mine, plain = Setting.make(case), Setting.make(case)
        mine.call(lmcache.device_ops.multi_layer_block_kv_transfer, STORE)
        plain.expect(STORE)
        assert torch.equal(mine.arena.bytes, plain.arena.bytes)
        assert Recorder.moved == case.num_ids
    finally:
        uninstall()


def convert_objects(setting: Setting) -> None:
    setting.objects = [torch.zeros(o.shape, dtype=torch.float32) for o in setting.objects]


def stride_objects(setting: Setting) -> None:
    setting.objects = [
        torch.zeros((*o.shape[:-1], 2 * o.shape[-1]), dtype=o.dtype)[..., ::2]
        for o in setting.objects
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (convert_objects, "whose values it would convert"),
        (stride_objects, "an object with strides"),
    ],
)
def test_what_we_do_not_serve_is_lmcaches_with_one_line(
    installed: Installation, caplog: pytest.LogCaptureFixture, change: Any, reason: str
) -> None:
    own = installed.replaced["multi_layer_block_kv_transfer"]
    case = Case(EngineKVFormat.NL_X_TWO_NB_BS_NH_HS, dtype=torch.float16)
    mine, theirs = Setting.make(case), Setting.make(case)
    for setting in (mine, theirs):
        setting.arena.bytes.fill_(0x3C)
        change(setting)
    with caplog.at_level(logging.WARNING, "hma_triton.integration.lmcache"):
        for _ in range(3):
            mine.call(lmcache.device_ops.multi_layer_block_kv_transfer, STORE)
    theirs.call(type(lmcache.device_ops)().multi_layer_block_kv_transfer, STORE)
    assert all(map(torch.equal, mine.objects, theirs.objects))
    assert not bool((mine.objects[0] == 0).all())
    lines = [r.getMessage() for r in caplog.records if r.name == "hma_triton.integration.lmcache"]
    assert len(lines) == 1
    assert lines[0].startswith("NL_X_TWO_NB_BS_NH_HS: LMCache's own operation serves it, because")
    assert reason in lines[0]
    assert list(installed.fallthrough.counts.values()) == [3]
    assert own is not None


def test_pointers_of_latent_tuples_fall_through_to_lmcaches_refusal(
    installed: Installation,
) -> None:
    case = Case(EngineKVFormat.NL_X_NP_X_NB_BS_ONE_HS)
    setting = Setting.make(case)
    with pytest.raises(TypeError, match="tensor"):
        setting.call(
            lmcache.device_ops.multi_layer_block_kv_transfer,
            STORE,
            pointers=True,
            object_pointers=True,
        )
    assert list(installed.fallthrough.counts) == [
        (case.format.name, "pointers do not say the widths of a tuple's planes")
    ]


def test_geometries_are_made_once(installed: Installation) -> None:
    case = Case(EngineKVFormat.NL_X_NB_NH_BS_CS)
    setting = Setting.make(case)
    for _ in range(3):
        for direction in (STORE, RETRIEVE):
            setting.call(
                lmcache.device_ops.multi_layer_block_kv_transfer,
                direction,
                pointers=True,
                object_pointers=True,
            )
    assert len(installed.executors._geometries) == 1
    assert pointer_tensor(case, setting.caches).numel() == case.layers
    assert installed.executors.blocks_moved == (3 * case.num_ids, 3 * case.num_ids)


class OldDescriptor:
    kv_size = nl = nb = bs = nh = hs = element_size = 0


class OldOperations:
    PageBufferShapeDesc = OldDescriptor

    def lmcache_memcpy_async(self) -> None: ...

    def multi_layer_block_kv_transfer(self, pointers: Any, direction: Any) -> None: ...


def test_versions_outside_the_range_are_refused() -> None:
    fine = (lmcache.device_ops, core, planner)
    for version in ("0.5.6", "0.5.7.dev3+g12", "v0.5.99", "unknown"):
        check_lmcache(version, *fine)
    for version in ("0.5.5", "0.4.9", "0.6.0", "1.0.0"):
        with pytest.raises(ConfigError, match=f"LMCache {version} .*outside {VERSION_RANGE}"):
            check_lmcache(version, *fine)


def test_missing_capabilities_are_named() -> None:
    formats = {"NB_NL_TWO_BS_NH_HS": 0, "NL_X_TWO_NB_BS_NH_HS": 7}
    old_core = SimpleNamespace(
        EngineKVFormat=SimpleNamespace(__members__=formats),
        TransferDirection=SimpleNamespace(__members__={"H2D": 1, "D2H": 0}),
    )
    with pytest.raises(ConfigError) as error:
        check_lmcache("0.5.6", OldOperations(), old_core, SimpleNamespace())
    for part in (
        "multi_layer_block_kv_transfer takes pointers, direction",
        "device_ops has no tensor_from_ptr",
        "PageBufferShapeDesc has no block_stride_elems",
        "EngineKVFormat.NL_X_TWO_NB_BS_NH_HS is 7, not 1",
        "EngineKVFormat has no NL_X_NB_BS_NH_HS",
        "TransferDirection is {'H2D': 1, 'D2H': 0}",
        "its planner has no _HAS_NATIVE_OBJECT_GROUP_TRANSFER",
        f"Install a version in {VERSION_RANGE}",
    ):
        assert part in str(error.value)
    with pytest.raises(ConfigError, match="device_ops has no multi_layer_block_kv_transfer"):
        check_lmcache("0.5.6", None, core, planner)


def test_the_path_is_described(installed: Installation) -> None:
    lines = describe_path().splitlines()
    assert lines[0] == "LMCache 0.5.6 on cpu"
    assert lines[1] == "core: LMCache's, compiled"
    assert lines[2].startswith("transfers: hma_triton, cpu-")
    assert current_installation() is installed
    uninstall()
    assert describe_path().splitlines() == lines
    assert current_installation() is None
    install()


def run_python(code: str, path: Path | None = None, **environment: str) -> str:
    """Output of `code` in a fresh interpreter, `path` first on its import path."""
    places = [str(path)] if path else []
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*places, str(Path(__file__).parents[1])]),
            "LMCACHE_LOG_LEVEL": "WARNING",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return answer.stdout


def test_nothing_of_lmcache_is_imported_before_install() -> None:
    code = (
        "import sys, hma_triton.integration.lmcache, hma_triton.cli.lmcache_server;"
        "print([name for name in sys.modules if name.partition('.')[0] == 'lmcache'])"
    )
    assert run_python(code).strip() == "[]"


IMPORT_ALONE = """
import lmcache
print(hasattr(lmcache, "device_ops"))
"""
WITH_OURS = """
import json, sys
from hma_triton.integration.lmcache import describe_path, install
installation = install()
import lmcache, torch
from support.lmcache_cases import Case, Setting
from hma_triton.kv_format import EngineKVFormat
same = []
for fmt in EngineKVFormat:
    if fmt is EngineKVFormat.NL_X_NB_BSV_BSS:
        continue
    for direction in (0, 1):
        mine, plain = Setting.make(Case(fmt, skip=1)), Setting.make(Case(fmt, skip=1))
        mine.call(lmcache.device_ops.multi_layer_block_kv_transfer, direction)
        plain.expect(direction)
        same.append(torch.equal(mine.arena.bytes, plain.arena.bytes))
print(json.dumps([installation.core.is_compiled, installation.core.problem, all(same), len(same),
                  len(installation.fallthrough.counts), describe_path()]))
"""


@pytest.mark.parametrize("broken", [False, True], ids=["missing", "not-loadable"])
def test_a_core_that_does_not_load(tmp_path: Path, broken: bool) -> None:
    """LMCache alone has no operations then; with ours it has all of them."""
    place = copy_without_core(tmp_path, broken)
    assert run_python(IMPORT_ALONE, place).strip() == "False"
    answer = json.loads(run_python(WITH_OURS, place).splitlines()[-1])
    is_compiled, problem, all_same, count, fell_through, path = answer
    assert not is_compiled
    assert ("has no compiled lmcache_native" in problem) != broken
    assert (all_same, count, fell_through) == (True, 36, 0)
    assert f"core: hma_triton's stand-in, because {problem}" in path


def test_lmcache_imported_too_early_without_its_core(tmp_path: Path) -> None:
    place = copy_without_core(tmp_path, False)
    code = """
import lmcache
from hma_triton.errors import ConfigError
from hma_triton.integration.lmcache import install
try:
    install()
except ConfigError as error:
    print(error)
"""
    assert "call install() first" in run_python(code, place)


def test_without_lmcache(tmp_path: Path) -> None:
    code = """
import sys
sys.meta_path.insert(0, type("Hide", (), {"find_spec": staticmethod(
    lambda name, path=None, target=None: (_ for _ in ()).throw(ModuleNotFoundError(
        "No module named 'lmcache'", name="lmcache")) if name == "lmcache" else None)}))
from hma_triton.integration.lmcache import describe_path, install
import importlib.util
importlib.util.find_spec = lambda name: None
print(describe_path())
try:
    install()
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert run_python(code).splitlines() == [
        f"LMCache: not installed ({VERSION_RANGE} is served)",
        "lmcache",
    ]


class Compiled:
    """Stands where LMCache's CUDA extension binds its plan entry; records what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def execute(self, *args: Any) -> None:
        self.calls.append(args)


def test_plans_fall_through_to_a_compiled_entry_in_its_own_types() -> None:
    """What `install()` finds bound on `device_ops` is what falls through and what comes back."""
    operations, compiled = lmcache.device_ops, Compiled()
    bound = {
        "execute_object_group_transfer": compiled.execute,
        "KernelGroupSpec": lambda *fields: ("spec", *fields),
        "StagingCopy": lambda *fields: ("copy", *fields),
        "LaunchVar": lambda *fields: ("launch", *fields),
        "BatchStep": lambda *fields: ("step", *fields),
    }
    before = dict(vars(operations))
    for name, value in bound.items():
        setattr(operations, name, value)
    try:
        installation = install()
        assert installation.had_compiled_plan
        case = Case(EngineKVFormat.NL_X_NP_X_NB_BS_ONE_HS)
        desc = shape_desc(case, Setting.make(case).caches)
        fmt = core.EngineKVFormat(int(case.format))
        spec = operations.KernelGroupSpec(1, [2, 3], desc, 8, fmt, 4, 5)
        step = operations.BatchStep(
            [operations.StagingCopy(6, 7, 8, 9)], [operations.LaunchVar(0, 0, 2, 1, 0)]
        )
        operations.execute_object_group_transfer(
            core.TransferDirection.D2H, "cpu", 64, [spec], [step], True, "a transfer"
        )
        assert compiled.calls == [
            (
                core.TransferDirection.D2H,
                "cpu",
                64,
                [("spec", 1, [2, 3], desc, 8, fmt, 4, 5)],
                [("step", [("copy", 6, 7, 8, 9)], [("launch", 0, 0, 2, 1, 0)])],
            )
        ]
        uninstall()
        assert {name: vars(operations)[name] for name in bound} == bound
    finally:
        uninstall()
        for name in bound:
            delattr(operations, name)
    assert dict(vars(operations)) == before


def test_callers_at_once(installed: Installation) -> None:
    """Four threads, each with its own pools and directions, through one installation."""
    operation = lmcache.device_ops.multi_layer_block_kv_transfer
    formats = [f for f in EngineKVFormat if f is not EngineKVFormat.NL_X_NB_BSV_BSS]

    def work(worker: int) -> bool:
        same = True
        for number, fmt in enumerate(formats[worker::4] * 3):
            case = Case(fmt, seed=worker * 100 + number, blocks=40, slots=8, layers=4)
            mine, plain = Setting.make(case), Setting.make(case)
            direction = number % 2
            mine.call(operation, direction)
            plain.expect(direction)
            same &= torch.equal(mine.arena.bytes, plain.arena.bytes)
        return same

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
