"""What makes Triton compile again: nothing but the specialisation."""

from __future__ import annotations

import ast
import inspect
from itertools import product
from pathlib import Path

import torch
import triton
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

import hma_triton
from hma_triton.kernels import block_copy
from hma_triton.kernels.addressing import Direction
from hma_triton.kernels.block_copy import (
    RUNTIME_ARGUMENTS,
    compile_signature,
    constexprs,
    is_interpreted,
)
from hma_triton.kernels.offline_compile import TARGETS
from hma_triton.kernels.specialize import KernelSpecialization

KERNEL = block_copy._block_copy_kernel
SPECIAL = KernelSpecialization(Direction.STORE, 5, 1, 1, 36, 16, 8, 0, 0, False, 64, 1, 1)
COUNTS = (1, 3, 16, 17, 32)
STEPS = (0, 1, 7, 16, 2**31 - 1, 2**31, 2**40)


def test_counts_steps_and_tables_share_one_variant() -> None:
    """Cases 106 and 110: Triton's own key of a launch, for arguments of every kind it tells apart.

    Tables at 8-byte offsets stand for slices of one upload; steps pass the edge of int32.
    """
    table = torch.zeros(64, dtype=torch.int64)
    for target in TARGETS:
        bind = create_function_from_signature(
            KERNEL.signature, KERNEL.params, make_backend(target.gpu_target())
        )
        keys = set()
        for count, step, first in product(COUNTS, STEPS, (0, 1)):
            tables = (table[first:], table[first + 1 :], table[first + 2 :])
            _, key, _ = bind(*tables, count, *([step] * 6), **constexprs(SPECIAL))
            keys.add(str(key))
        assert len(keys) == 1


def test_the_gate_compiles_what_a_launch_compiles() -> None:
    """The types in Triton's key are those of `compile_signature`, and no attribute is assumed."""
    bind = create_function_from_signature(
        KERNEL.signature, KERNEL.params, make_backend(TARGETS[1].gpu_target())
    )
    table = torch.zeros(64, dtype=torch.int64)
    _, key, _ = bind(table, table, table, 16, *([16] * 6), **constexprs(SPECIAL))
    types = [kind for kind, _ in key]
    attributes = [attribute for kind, attribute in key if kind != "constexpr"]
    assert types == list(compile_signature().values())
    assert set(attributes) == {None}


def test_every_runtime_argument_is_left_unspecialised() -> None:
    constants = set(constexprs(SPECIAL))
    assert {param.name for param in KERNEL.params if param.is_constexpr} == constants
    for param in KERNEL.params:
        assert param.is_constexpr or param.do_not_specialize
    assert set(RUNTIME_ARGUMENTS) | constants == set(KERNEL.arg_names)


def test_the_compiled_process_is_not_interpreted() -> None:
    assert not is_interpreted()


def test_launches_report_their_bytes() -> None:
    """Read and written, with the tail of every run."""
    special = KernelSpecialization(Direction.RETRIEVE, 5, 2, 3, 8, 16, 8, 3, 1, False, 64, 1, 1)
    arguments = {**constexprs(special), "num_blocks": 7}
    assert block_copy._launch_metadata((1,), None, arguments) == {
        "name": "block_copy_retrieve_16B",
        "bytes": 2 * 7 * 5 * 2 * 3 * 131,
    }
    assert KERNEL.launch_metadata is block_copy._launch_metadata


def modules() -> dict[Path, ast.Module]:
    root = Path(inspect.getfile(hma_triton)).parent
    return {path: ast.parse(path.read_text()) for path in root.rglob("*.py")}


def test_nothing_is_tuned_on_live_buffers() -> None:
    """Case 104: no autotuner or heuristic of Triton anywhere, so a first launch is one launch."""
    banned = {"autotune", "heuristics", "Autotuner"}
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in banned:
                assert not (isinstance(node.value, ast.Name) and node.value.id == "triton"), path
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triton"):
                assert not banned & {alias.name for alias in node.names}, path


def test_the_kernel_reads_no_environment() -> None:
    """Neither variables nor device names: the host chose, and its choice is in the arguments."""
    tree = ast.parse(inspect.getsource(block_copy))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not {"os", "environ", "getenv", "platform"} & (names | attributes)
    assert triton.JITFunction is type(KERNEL)
