"""Which of LMCache's and our parts would serve a transfer here, in words."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

from hma_triton.errors import ConfigError
from hma_triton.integration.lmcache.install import current_installation, install, uninstall
from hma_triton.integration.lmcache.native_core import package_folder
from hma_triton.integration.lmcache.versions import VERSION_RANGE


def describe_path() -> str:
    """The path that `hma-triton lmcache-server` takes on this machine, one fact a line.

    Installs the operations to see, and takes them away again if they were not installed before.
    """
    if "lmcache" not in sys.modules and package_folder() is None:
        return f"LMCache: not installed ({VERSION_RANGE} is served)"
    was_installed = current_installation() is not None
    try:
        installation = install()
    except ConfigError as error:
        return f"LMCache: {error}"
    except ImportError as error:
        return f"LMCache: installed, but does not import: {error}"
    try:
        device = str(installation.device_ops.device_type)
        lines = [
            f"LMCache {importlib.metadata.version('lmcache')} on {device}",
            "core: " + _core_words(installation.core.is_compiled, installation.core.problem),
            "transfers: hma_triton, " + _executor_words(device),
        ]
        if device == "cuda":
            extension = (
                "loaded; its copy-engine path keeps the formats that it takes"
                if installation.had_compiled_plan
                else f"not loaded ({_extension_problem()}); hma_triton serves in its place"
            )
            lines.append(f"compiled device extension: {extension}")
    finally:
        if not was_installed:
            uninstall()
    return "\n".join(lines)


def _core_words(is_compiled: bool, problem: str) -> str:
    return "LMCache's, compiled" if is_compiled else f"hma_triton's stand-in, because {problem}"


def _executor_words(device: str) -> str:
    if device == "cpu":
        from hma_triton.kernels.cpu import CpuCopier

        copier = CpuCopier()
        try:
            return f"{copier.name} with {copier.threads} threads"
        finally:
            copier.close()
    if device == "cuda":
        return "a path for each copy (Triton kernels or the copy engine), in LMCache's stream order"
    return f"none for {device}: every call goes to LMCache's own operation"


def _extension_problem() -> str:
    try:
        importlib.import_module("lmcache.cuda_ops")
    except ImportError as error:
        return str(error)
    return "not bound"
