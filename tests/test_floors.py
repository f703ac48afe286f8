"""Holds every module to the floors table of docs/structures.md, and lists what has grown large."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "structures.md"
PACKAGE = "hma_triton"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# Reading any of these from a socket or a file runs what the sender wants.
UNSAFE = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


@dataclass(frozen=True, slots=True)
class Floor:
    level: int
    modules: tuple[str, ...]
    outside: frozenset[str]


@dataclass(frozen=True, slots=True)
class Module:
    """One source file and every import statement in it, at any depth."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def key(self) -> str:
        """The name that the table uses: without the package, `__init__` for the package itself."""
        return "__init__" if self.name == PACKAGE else self.name.removeprefix(PACKAGE + ".")


def read_floors(text: str) -> tuple[Floor, ...]:
    rows = re.findall(r"^\| F(\d) [^|]*\|([^|]*)\|([^|]*)\|", text, re.MULTILINE)
    names = re.compile(r"`([\w.]+)`")
    return tuple(
        Floor(int(level), tuple(names.findall(modules)), frozenset(names.findall(outside)))
        for level, modules, outside in rows
    )


def read_modules(root: Path) -> dict[str, Module]:
    modules = {}
    for folder in (PACKAGE, "bench"):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = Module(name, path, ast.parse(path.read_text(), str(path)))
    return modules


def floor_of(module: Module, floors: tuple[Floor, ...]) -> Floor | None:
    """The floor of the longest table entry that is the module or a package around it."""
    entries = [
        (len(entry), floor)
        for floor in floors
        for entry in floor.modules
        if module.key == entry or module.key.startswith(entry + ".")
    ]
    return max(entries, key=lambda found: found[0])[1] if entries else None


def imported(module: Module, modules: dict[str, Module]) -> Iterator[tuple[int, str]]:
    """(line, full name) of everything imported; a submodule is named in full."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.path}:{node.lineno}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if inner in modules else str(node.module)


def own_imports(module: Module, modules: dict[str, Module]) -> Iterator[tuple[int, str]]:
    return (
        (line, name)
        for line, name in imported(module, modules)
        if name.split(".")[0] in (PACKAGE, "bench")
    )


def violations(root: Path, floors: tuple[Floor, ...]) -> list[str]:
    """One line for each import, and each module, that the table does not allow."""
    modules = read_modules(root)
    found = []
    for module in modules.values():
        floor = floor_of(module, floors)
        if floor is None:
            found.append(f"{module.name}: on no floor")
            continue
        for line, name in imported(module, modules):
            top = name.split(".")[0]
            where = f"{module.path.relative_to(root)}:{line}"
            if top in UNSAFE:
                found.append(f"{where}: {top} is not allowed anywhere")
            elif top in (PACKAGE, "bench"):
                target = floor_of(modules[name], floors) if name in modules else None
                if name == PACKAGE and module.name != PACKAGE:
                    found.append(f"{where}: imports from the package's door, not from a module")
                elif name not in modules:
                    found.append(f"{where}: there is no module {name}")
                elif top == "bench" and module.name.startswith(PACKAGE):
                    found.append(f"{where}: {name} is not installed with the package")
                elif target and target.level > floor.level:
                    found.append(f"{where}: {name} (F{target.level}) is above F{floor.level}")
            elif top not in sys.stdlib_module_names and top not in floor.outside:
                found.append(f"{where}: {top} is not listed for F{floor.level}")
    return list(dict.fromkeys(found))


def circles(root: Path) -> list[str]:
    """Each strongly connected set of modules as one line; imports inside functions count."""
    modules = read_modules(root)
    edges = {
        name: {target for _, target in own_imports(module, modules) if target in modules} - {name}
        for name, module in modules.items()
    }
    reach = {name: _reachable(name, edges) for name in edges}
    knots = {
        frozenset(other for other in reach[name] if name in reach[other])
        for name in edges
        if name in reach[name]
    }
    return [" <-> ".join(sorted(knot)) for knot in knots]


def _reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(edges[name])
    return seen


def size_report(root: Path) -> list[str]:
    """Files and functions that are longer than the house wants them, longest first."""
    large: list[tuple[int, str]] = []
    for module in read_modules(root).values():
        where = module.path.relative_to(root)
        lines = len(module.path.read_text().splitlines())
        if lines > MAX_FILE_LINES:
            large.append((lines, f"{where}"))
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    large.append((length, f"{where}:{node.lineno} {node.name}"))
    return [f"{lines:5} lines  {what}" for lines, what in sorted(large, reverse=True)]


def test_every_module_keeps_to_its_floor() -> None:
    floors = read_floors(TABLE.read_text())
    assert [floor.level for floor in floors] == list(range(7))
    found = violations(ROOT, floors)
    assert not found, "\n".join(found)


def test_nothing_imports_in_a_circle() -> None:
    assert circles(ROOT) == []


def test_sizes_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    report = size_report(ROOT)
    with capsys.disabled():
        print("".join(f"\nlarge: {line}" for line in report), end="")


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A small house: `low` on F0, `mid` on F1, `high` on F2."""
    (tmp_path / PACKAGE / "mid").mkdir(parents=True)
    for name in ("__init__", "low", "mid/__init__", "high"):
        (tmp_path / PACKAGE / f"{name}.py").write_text("")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "tool.py").write_text("")
    return tmp_path


FLOORS = read_floors(
    "| F0 a | `low` | |\n| F1 b | `mid`, `__init__` | `numpy` |\n"
    "| F2 c | `high`, `bench` | `torch` |"
)


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("low.py", "from hma_triton import high", "hma_triton.high (F2) is above F0"),
        ("low.py", "from hma_triton.high import x", "hma_triton.high (F2) is above F0"),
        ("mid/__init__.py", "import hma_triton.high", "hma_triton.high (F2) is above F1"),
        ("low.py", "def f():\n    import hma_triton.mid", "hma_triton.mid (F1) is above F0"),
        ("low.py", "import numpy as np", "numpy is not listed for F0"),
        ("mid/deep.py", "import torch.cuda", "torch is not listed for F1"),
        ("high.py", "from hma_triton import x", "imports from the package's door"),
        ("high.py", "import pickle", "pickle is not allowed anywhere"),
        ("high.py", "import bench.tool", "bench.tool is not installed with the package"),
        ("attic.py", "", "hma_triton.attic: on no floor"),
    ],
)
def test_a_broken_rule_is_named(house: Path, file: str, source: str, complaint: str) -> None:
    assert violations(house, FLOORS) == []
    (house / PACKAGE / file).write_text(source)
    found = violations(house, FLOORS)
    assert len(found) == 1
    assert complaint in found[0]


def test_downward_imports_and_listed_packages_are_fine(house: Path) -> None:
    (house / PACKAGE / "high.py").write_text(
        "import os\nimport torch\nimport hma_triton.low\nfrom hma_triton.mid import x\n"
    )
    assert violations(house, FLOORS) == []


def test_a_circle_is_named_though_one_half_hides_in_a_function(house: Path) -> None:
    (house / PACKAGE / "low.py").write_text("def f():\n    import hma_triton.mid")
    (house / PACKAGE / "mid" / "__init__.py").write_text("import hma_triton.low")
    assert circles(house) == ["hma_triton.low <-> hma_triton.mid"]


def test_long_functions_and_files_are_listed(house: Path) -> None:
    body = "    pass\n" * MAX_FUNCTION_LINES
    (house / PACKAGE / "low.py").write_text(f"def f():\n{body}" + "x = 0\n" * MAX_FILE_LINES)
    assert size_report(house) == [
        "  461 lines  hma_triton/low.py",
        "   61 lines  hma_triton/low.py:1 f",
    ]


if __name__ == "__main__":
    print("\n".join(size_report(ROOT)) or "nothing is larger than it should be")
