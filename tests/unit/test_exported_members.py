"""What others import from `hma_triton` is there, and is the thing its module defines."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import hma_triton


@pytest.mark.parametrize("name", hma_triton.__all__)
def test_every_exported_name_is_its_modules_own(name: str) -> None:
    module = importlib.import_module(f"hma_triton.{hma_triton._MODULE_OF[name]}")
    assert getattr(hma_triton, name) is getattr(module, name)
    assert name in dir(hma_triton)


def test_the_list_and_the_table_agree() -> None:
    assert sorted(hma_triton.__all__) == sorted(hma_triton._MODULE_OF)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hma_triton.no_such_name


def test_importing_the_package_alone_does_not_load_torch() -> None:
    probe = "import sys, hma_triton; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
