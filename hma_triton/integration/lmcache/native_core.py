"""LMCache's compiled core: loaded if it loads, else our stand-in under its name."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch  # noqa: F401  the compiled core finds torch's libraries only after this

from hma_triton.errors import ConfigError
from hma_triton.integration.lmcache import standin

CORE_NAME = "lmcache.lmcache_native"


@dataclass(frozen=True, slots=True)
class NativeCore:
    """Which core is in use; `problem` says why the compiled one is not, "" where it is."""

    is_compiled: bool
    problem: str


def package_folder() -> Path | None:
    """Folder of the installed LMCache, found without importing it; None where there is none."""
    spec = importlib.util.find_spec("lmcache")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def ensure_core() -> NativeCore:
    """Make `import lmcache.lmcache_native` work, and with it `import lmcache`.

    Without its core, LMCache imports in part and stays so. So this must run before anything
    imports it; where LMCache is already there, whatever core it has is reported.

    Raises:
        ConfigError: LMCache was imported before this, without a core.
        ModuleNotFoundError: LMCache is not installed.
    """
    found = sys.modules.get(CORE_NAME)
    if found is not None:
        is_compiled = found is not standin
        return NativeCore(is_compiled, "" if is_compiled else _load_core()[1])
    if "lmcache" in sys.modules:
        raise ConfigError(
            "LMCache was imported before hma_triton.integration.lmcache.install() and could not "
            "load its compiled core; call install() first"
        )
    core, problem = _load_core()
    sys.modules[CORE_NAME] = core if core is not None else standin
    return NativeCore(core is not None, problem)


def _load_core() -> tuple[ModuleType | None, str]:
    folder = package_folder()
    if folder is None:
        raise ModuleNotFoundError("No module named 'lmcache'", name="lmcache")
    stem = CORE_NAME.rpartition(".")[2]
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / (stem + suffix)
        if path.exists():
            return _load_file(path)
    return None, f"{folder.name} has no compiled {stem} for this Python"


def _load_file(path: Path) -> tuple[ModuleType | None, str]:
    loader = importlib.machinery.ExtensionFileLoader(CORE_NAME, str(path))
    spec = importlib.util.spec_from_file_location(CORE_NAME, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        return None, str(error)
    return module, ""
