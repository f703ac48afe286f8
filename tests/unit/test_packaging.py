"""What is built and installed: the package with its data, everywhere, and nothing beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Only in the sources: what they produce, what they were fetched with, what they run in.
NOT_SOURCES = shutil.ignore_patterns(".git", ".venv*", "build", "dist", ".*_cache", ".hypothesis")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, links as links."""
    copy = tmp_path_factory.mktemp("sources") / "hma"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=NOT_SOURCES)
    return copy


def build(sources: Path, target: str) -> Path:
    """Builds `target` (`sdist`, `wheel`, `wheel:editable`) without a compiler on PATH."""
    where = sources.parent / target.replace(":", "-")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target.partition(":")[0], "-d", where]
        if ":" not in target
        else [sys.executable, "-c", EDITABLE, str(where)],
        cwd=sources,
        env=os.environ | {"PATH": ""},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    (artifact,) = where.iterdir()
    return artifact


EDITABLE = """
import os, sys
from hatchling.build import build_editable
os.makedirs(sys.argv[1])
build_editable(sys.argv[1])
"""


@pytest.fixture(scope="module")
def sdist(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build(sources, "sdist")) as archive:
        archive.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    return top


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, as pip would lay it."""
    return unpack(build(sources, "wheel"), tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def editable(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel of an editable install of `sources`."""
    return unpack(build(sources, "wheel:editable"), tmp_path_factory.mktemp("editable"))


def unpack(wheel: Path, folder: Path) -> Path:
    assert wheel.name.endswith("-py3-none-any.whl"), "pure Python, so that no install compiles"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


LOOK = """
import importlib.util, site, sys
sys.path += [{site!r}, *{outside!r}]
site.addsitedir({site!r})
import hma_triton.kernels
from importlib.resources import files
print(hma_triton.kernels.__file__)
print(sorted(file.name for file in files("hma_triton.autotune_configs").iterdir()))
print([name for name in ("kernels", "autotune_configs", "bench") if (spec :=
    importlib.util.find_spec(name)) and not str(spec.origin).startswith({known!r})])
"""


def look(folder: Path, site: Path) -> list[str]:
    """What a fresh interpreter sees that runs in `folder` with `site` as its only site folder."""
    outside = sysconfig.get_paths()["purelib"]
    code = LOOK.format(outside=[outside], site=str(site), known=(outside,))
    seen = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=folder, capture_output=True, text=True
    )
    assert seen.returncode == 0, seen.stderr
    return seen.stdout.splitlines()


DATA = str(sorted(path.name for path in (ROOT / "hma_triton/autotune_configs").iterdir()))


def test_a_wheel_has_the_package_alone(wheel: Path, tmp_path: Path) -> None:
    tops = sorted(path.name for path in wheel.iterdir())
    assert len(tops) == 2
    assert tops[0] == "hma_triton"
    assert tops[1].endswith(".dist-info")
    where, data, extra = look(tmp_path, wheel)
    assert where == str(wheel / "hma_triton" / "kernels" / "__init__.py")
    assert eval(data) == [name for name in eval(DATA) if name != "__pycache__"]
    assert extra == "[]"


def test_an_editable_install_maps_the_package_alone(
    editable: Path, sources: Path, tmp_path: Path
) -> None:
    where, _, extra = look(tmp_path, editable)
    assert where == str(sources / "hma_triton" / "kernels" / "__init__.py")
    assert extra == "[]"


@pytest.mark.parametrize("place", ["sources", "sdist"])
def test_the_package_imports_from_its_sources(place: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(place)
    where, *_ = look(folder, folder)
    assert where == str(folder / "hma_triton" / "kernels" / "__init__.py")


def test_the_four_folders_are_two_folders_and_two_links(sources: Path) -> None:
    assert (sources / "hma_triton").is_dir()
    assert (sources / "bench").is_dir()
    for name in ("kernels", "autotune_configs"):
        link = sources / name
        assert link.is_symlink()
        assert os.readlink(link) == f"hma_triton/{name}"
        assert link.resolve() == (sources / "hma_triton" / name).resolve()


def shipped(folder: Path, suffixes: tuple[str, ...]) -> set[str]:
    package = folder / "hma_triton"
    return {
        str(path.relative_to(folder))
        for path in package.rglob("*")
        if path.is_file() and path.name.endswith(suffixes) and "__pycache__" not in path.parts
    }


def test_code_data_and_types_are_in_both(wheel: Path, sdist: Path, sources: Path) -> None:
    wanted = shipped(sources, (".py", ".json", "py.typed"))
    assert "hma_triton/py.typed" in wanted
    assert any(name.startswith("hma_triton/autotune_configs/") for name in wanted)
    assert any(name.startswith("hma_triton/geometries/") for name in wanted)
    assert shipped(wheel, (".py", ".json", "py.typed")) == wanted
    assert shipped(sdist, (".py", ".json", "py.typed")) == wanted


def test_an_sdist_holds_what_a_build_and_a_test_run_need(sdist: Path) -> None:
    names = {path.name for path in sdist.iterdir()}
    wanted = {"hma_triton", "tests", "bench", "docs", "requirements", "scripts", "LICENSE"}
    assert wanted | {"README.md", "pyproject.toml", "PKG-INFO"} <= names
    assert not {"kernels", "autotune_configs"} & names


def test_metadata_names_the_command_and_the_licence(wheel: Path) -> None:
    (info,) = wheel.glob("*.dist-info")
    assert "hma-triton = hma_triton.cli.main:app" in (info / "entry_points.txt").read_text()
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()
    metadata = (info / "METADATA").read_text()
    assert "Requires-Python: >=3.10" in metadata
    for need in ("torch<2.16,>=2.11", "triton<3.10,>=3.6"):
        assert f"Requires-Dist: {need}" in metadata
