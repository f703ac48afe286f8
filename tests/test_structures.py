"""The list of modules in docs/structures.md is the modules' own first lines.

`python tests/test_structures.py` writes the list anew.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "structures.md"
PACKAGE = ROOT / "hma_triton"
BEGIN, END = "<!-- modules: written by tests/test_structures.py -->\n", "<!-- end of modules -->\n"


def first_sentence(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split())


def module_list() -> str:
    """A bullet for each module; those of a package below the package's own."""
    lines = []
    for path in sorted(PACKAGE.rglob("*.py"), key=lambda path: path.relative_to(PACKAGE).parts):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        name = ".".join(parts) or "hma_triton"
        lines.append(f"{'  ' * (len(parts) - 1)}- `{name}`: {first_sentence(path)}\n")
    return "".join(lines)


def page_with_list(page: str) -> str:
    """The page with its list of modules replaced."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + module_list() + END + tail


def test_every_module_says_what_it_is() -> None:
    silent = [str(path) for path in PACKAGE.rglob("*.py") if not first_sentence(path)]
    assert silent == []


def test_the_page_lists_the_modules_as_they_are() -> None:
    page = PAGE.read_text()
    assert BEGIN in page
    assert END in page
    stale = set(page.splitlines()) ^ set(page_with_list(page).splitlines())
    assert not stale, "run python tests/test_structures.py"
    assert page == page_with_list(page)


def test_the_readme_links_every_page_and_no_link_is_dead() -> None:
    links = set(re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()))
    assert {str(path.relative_to(ROOT)) for path in PAGE.parent.glob("*.md")} <= links
    assert [link for link in links if not (ROOT / link).exists()] == []


if __name__ == "__main__":
    PAGE.write_text(page_with_list(PAGE.read_text()))
