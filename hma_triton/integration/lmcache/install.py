"""Puts our operations behind `lmcache.device_ops`, and takes them away again."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hma_triton.copiers import Copier
from hma_triton.errors import ConfigError
from hma_triton.integration.lmcache.executors import Executors
from hma_triton.integration.lmcache.fallthrough import FallthroughLog
from hma_triton.integration.lmcache.native_core import CORE_NAME, NativeCore, ensure_core
from hma_triton.integration.lmcache.operation import BlockTransfer
from hma_triton.integration.lmcache.own_operations import OwnOperations
from hma_triton.integration.lmcache.plan_entry import ObjectGroupTransfer
from hma_triton.integration.lmcache.plan_types import (
    BatchStep,
    KernelGroupSpec,
    LaunchVar,
    StagingCopy,
)
from hma_triton.integration.lmcache.versions import PLAN_SWITCH, check_lmcache

logger = logging.getLogger("hma_triton.integration.lmcache")

_PLANNER = "lmcache.v1.multiprocess.object_group_transfer"
_MISSING = object()
_lock = threading.Lock()
_current: Installation | None = None


@dataclass(frozen=True, slots=True)
class Installation:
    """What `install()` did: where, over which core, and what `uninstall()` puts back."""

    device_ops: Any
    planner: Any
    core: NativeCore
    fallthrough: FallthroughLog
    executors: Executors
    had_compiled_plan: bool
    # attributes of device_ops itself, `_MISSING` where only its class had one
    replaced: dict[str, Any]
    plan_switch: bool


def install(copier: Copier | None = None) -> Installation:
    """Serve LMCache's KV transfers in this process; the second call finds the first's work.

    Call it before anything imports LMCache where its compiled core may not load.

    Args:
        copier: an executor for every pool, instead of the device's own.

    Raises:
        ModuleNotFoundError: LMCache is not installed.
        ConfigError: an LMCache outside the range, or without something that we need; or another
            `copier` than the first call's.
    """
    global _current
    with _lock:
        if _current is not None:
            if copier is not None:
                raise ConfigError("hma_triton's operations are installed; uninstall() them first")
            return _current
        _current = _install(copier)
        return _current


def uninstall() -> None:
    """Put back exactly what was there before `install()`; does nothing where nothing is."""
    global _current
    with _lock:
        installation, _current = _current, None
        if installation is None:
            return
        for name, value in installation.replaced.items():
            if value is _MISSING:
                delattr(installation.device_ops, name)
            else:
                setattr(installation.device_ops, name, value)
        setattr(installation.planner, PLAN_SWITCH, installation.plan_switch)
        installation.executors.close()


def current_installation() -> Installation | None:
    """What is installed in this process, None where nothing is."""
    return _current


def _install(copier: Copier | None) -> Installation:
    core = ensure_core()
    lmcache = importlib.import_module("lmcache")
    device_ops: Any = getattr(lmcache, "device_ops", None)
    planner = importlib.import_module(_PLANNER)
    check_lmcache(lmcache.__version__, device_ops, importlib.import_module(CORE_NAME), planner)
    native = vars(device_ops)
    own = OwnOperations(
        device_ops=device_ops,
        transfer=device_ops.multi_layer_block_kv_transfer,
        execute_plan=native.get("execute_object_group_transfer"),
        kernel_group_spec=native.get("KernelGroupSpec", device_ops.KernelGroupSpec),
        staging_copy=native.get("StagingCopy"),
        launch_var=native.get("LaunchVar"),
        batch_step=native.get("BatchStep"),
    )
    executors, fallthrough = Executors(copier), FallthroughLog()
    if device_ops.device_type == "cpu":
        executors.warm(torch.device("cpu"))
    transfer = BlockTransfer(own.transfer, executors, fallthrough, _has_planar_rows(device_ops))
    plan = ObjectGroupTransfer(transfer, executors, own, fallthrough)
    ours = {
        "multi_layer_block_kv_transfer": _like(
            transfer.multi_layer_block_kv_transfer, own.transfer
        ),
        "execute_object_group_transfer": plan.execute_object_group_transfer,
        "KernelGroupSpec": KernelGroupSpec,
        "StagingCopy": StagingCopy,
        "LaunchVar": LaunchVar,
        "BatchStep": BatchStep,
    }
    replaced = {name: native.get(name, _MISSING) for name in ours}
    for name, value in ours.items():
        setattr(device_ops, name, value)
    plan_switch = getattr(planner, PLAN_SWITCH)
    setattr(planner, PLAN_SWITCH, True)
    logger.info(
        "hma_triton serves the KV transfers of LMCache %s on %s (core: %s)",
        lmcache.__version__,
        device_ops.device_type,
        "compiled" if core.is_compiled else f"stand-in, because {core.problem}",
    )
    return Installation(
        device_ops=device_ops,
        planner=planner,
        core=core,
        fallthrough=fallthrough,
        executors=executors,
        had_compiled_plan=own.execute_plan is not None,
        replaced=replaced,
        plan_switch=plan_switch,
    )


def _has_planar_rows(device_ops: Any) -> bool:
    """Whether blocked-scale pages are slot rows in this server's objects; see docs/lmcache.md.

    LMCache's compiled kernels make them rows, its torch operations leave the page as it lies. On
    the CPU only the latter exist, and a server's objects must stay readable by both.
    """
    return str(device_ops.device_type) != "cpu"


def _like(ours: Callable[..., None], theirs: Callable[..., Any]) -> Callable[..., None]:
    """`ours` with the signature of `theirs`, from which LMCache reads whether it takes tensors."""

    @functools.wraps(ours)
    def multi_layer_block_kv_transfer(*args: Any, **kwargs: Any) -> None:
        ours(*args, **kwargs)

    try:
        signature = inspect.signature(theirs)
    except (TypeError, ValueError):
        # a compiled operation, which takes pointers only and says nothing
        plain = inspect.signature(ours)
        signature = plain.replace(
            parameters=[p.replace(annotation=p.empty) for p in plain.parameters.values()]
        )
    multi_layer_block_kv_transfer.__signature__ = signature  # type: ignore[attr-defined]
    return multi_layer_block_kv_transfer
