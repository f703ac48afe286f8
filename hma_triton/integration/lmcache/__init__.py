"""Our copy path inside LMCache's multiprocess server. LMCache is imported by `install()` only."""

from __future__ import annotations

from hma_triton.integration.lmcache.install import (
    Installation,
    current_installation,
    install,
    uninstall,
)
from hma_triton.integration.lmcache.path_report import describe_path
from hma_triton.integration.lmcache.versions import VERSION_RANGE

__all__ = [
    "VERSION_RANGE",
    "Installation",
    "current_installation",
    "describe_path",
    "install",
    "uninstall",
]
