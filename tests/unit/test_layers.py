"""The floors of the house: ``docs/architecture.md`` lists every module, and a module imports only what stands above it.

"Above" is above on the page: the list begins with the ground floor. Because the list is one order of all files, there
can be no circle among files or folders either. Imports inside functions and under ``TYPE_CHECKING`` count like others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "phalanx"
PAGE = ROOT / "docs" / "architecture.md"
LONGEST = 450  # lines; in a longer file a room is missing
SOURCES = sorted(
    path.relative_to(PACKAGE)
    for pattern in ("*.py", "*.c", "*.h")
    for path in PACKAGE.rglob(pattern)
    if path.name != "__init__.py" or path.parent == PACKAGE
)
MODULES = [path for path in SOURCES if path.suffix == ".py"]


def listed() -> list[Path]:
    """The paths of the first code block of the page after the heading "The floors", in its order."""
    block = re.search(r"^## The floors$.*?^```\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block, "docs/architecture.md has no list of floors"
    paths, folders = [], [Path()]
    for line in block[1].splitlines():
        found = re.match(r"( *)([\w./]+)  ", line + "  ")
        if not found or len(found[1]) > 2 * len(folders):
            continue  # a description that goes on
        del folders[1 + len(found[1]) // 2 :]
        path = folders[-1] / found[2]
        if found[2].endswith("/"):
            folders.append(path)
        else:
            paths.append(path)
    return paths


def imported(module: Path) -> Iterator[tuple[int, Path]]:
    """The modules of the package that a module imports, each with the line."""
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno}: imports are absolute here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == "phalanx":
                yield node.lineno, file_of(name)


def file_of(name: str) -> Path:
    """The file of a module, or of the module that has this name in it."""
    parts = name.split(".")[1:]
    while parts:
        path = Path(*parts).with_suffix(".py")
        if (PACKAGE / path).exists():
            return path
        if (PACKAGE / Path(*parts) / "__init__.py").exists():
            return Path(*parts) / "__init__.py"
        parts.pop()
    return Path("__init__.py")


def test_every_module_has_its_place_on_the_page() -> None:
    names = listed()
    assert len(names) == len(set(names)), "a module is listed twice"
    assert {str(path) for path in MODULES} == {str(path) for path in names if path.suffix == ".py"}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_imports_only_what_stands_above_it(module: Path) -> None:
    floor = {path: number for number, path in enumerate(listed())}
    wrong = [
        f"{module}:{line} imports {other}"
        for line, other in imported(module)
        if floor.get(other, len(floor)) >= floor.get(module, -1)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_no_file_is_so_long_that_a_room_is_missing(path: Path) -> None:
    lines = len((PACKAGE / path).read_text().splitlines())
    assert lines <= LONGEST, f"{path} has {lines} lines"
