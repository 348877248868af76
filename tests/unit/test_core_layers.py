"""The floors of the C core: ``docs/architecture.md`` lists every file, and each includes only headers listed above it.

The list is one order of all files, so there can be no circle. A source may include the header of its own name wherever
that is listed. Lengths of files are tested in ``test_layers.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "src" / "phalanx" / "native" / "csrc"
PAGE = ROOT / "docs" / "architecture.md"
FILES = sorted(path.name for path in CORE.iterdir())
LONGEST = 120  # characters in a line of the page


def listed() -> dict[str, str]:
    """The files of the code block after the heading "The floors of the core", in its order, with their descriptions."""
    block = re.search(r"^## The floors of the core$.*?^```\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block, "docs/architecture.md has no list of the core's files"
    lines = [line.split(maxsplit=1) for line in block[1].splitlines()]
    assert len({name for name, *_ in lines}) == len(lines), "a file is listed twice"
    return {name: "".join(description) for name, *description in lines}


def included(name: str) -> Iterator[tuple[int, str]]:
    """The headers of the core that a file includes, each with the line."""
    for number, line in enumerate((CORE / name).read_text().splitlines(), 1):
        if found := re.match(r'\s*#\s*include\s+"(.+)"', line):
            yield number, found[1]


def test_every_file_has_its_place_and_one_line_on_the_page() -> None:
    files = listed()
    assert sorted(files) == FILES
    assert not [name for name, description in files.items() if not description or len(description) > LONGEST - 20]


@pytest.mark.parametrize("name", FILES)
def test_a_file_includes_only_headers_that_stand_above_it(name: str) -> None:
    floor = {file: number for number, file in enumerate(listed())}
    own = Path(name).with_suffix(".h").name if name.endswith(".c") else None
    wrong = [
        f"{name}:{line} includes {header}"
        for line, header in included(name)
        if header != own and floor.get(header, len(floor)) >= floor.get(name, -1)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_headers_are_included() -> None:
    wrong = [f"{name}:{line}" for name in FILES for line, header in included(name) if not header.endswith(".h")]
    assert not wrong
