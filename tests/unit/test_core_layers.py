"""The floors of the C files: ``docs/architecture.md`` lists every one, and each includes only headers listed above it.

The list is one order of all files, so there can be no circle. A source may include the header of its own name wherever
that is listed. Lengths of files are tested in ``test_layers.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "src" / "phalanx" / "native"
# The core, and the module of the stable ABI, which may include the core's header for callers besides its own.
FOLDERS = {"core": NATIVE / "csrc", "entry": NATIVE / "csrc_entry"}
PAGE = ROOT / "docs" / "architecture.md"
FILES = sorted((part, path.name) for part, folder in FOLDERS.items() for path in folder.iterdir())
LONGEST = 120  # characters in a line of the page


def listed(part: str) -> dict[str, str]:
    """The files of the code block after the heading "The floors of the …", in its order, with their descriptions."""
    block = re.search(rf"^## The floors of the {part}$.*?^```\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block, f"docs/architecture.md has no list of the files of the {part}"
    lines = [line.split(maxsplit=1) for line in block[1].splitlines()]
    assert len({name for name, *_ in lines}) == len(lines), "a file is listed twice"
    return {name: "".join(description) for name, *description in lines}


def included(part: str, name: str) -> Iterator[tuple[int, str]]:
    """The headers in quotes that a file includes, each with the line."""
    for number, line in enumerate((FOLDERS[part] / name).read_text().splitlines(), 1):
        if found := re.match(r'\s*#\s*include\s+"(.+)"', line):
            yield number, found[1]


@pytest.mark.parametrize("part", FOLDERS)
def test_every_file_has_its_place_and_one_line_on_the_page(part: str) -> None:
    files = listed(part)
    assert sorted((part, name) for name in files) == [file for file in FILES if file[0] == part]
    assert not [name for name, description in files.items() if not description or len(description) > LONGEST - 20]


@pytest.mark.parametrize(("part", "name"), FILES)
def test_a_file_includes_only_headers_that_stand_above_it(part: str, name: str) -> None:
    floor = {file: number for number, file in enumerate(listed(part))}
    if part == "entry":
        floor["phalanx.h"] = -2
    own = Path(name).with_suffix(".h").name if name.endswith(".c") else None
    wrong = [
        f"{name}:{line} includes {header}"
        for line, header in included(part, name)
        if header != own and floor.get(header, len(floor)) >= floor.get(name, -1)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_headers_are_included() -> None:
    wrong = [
        f"{name}:{line}" for part, name in FILES for line, header in included(part, name) if not header.endswith(".h")
    ]
    assert not wrong
