"""Every block of every page runs, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages.page import ROOT, blocks, run_page

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.pages
@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_blocks_of_a_page_run_as_printed(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


@pytest.mark.pages
@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "learn" or page.stem == "start"])
def test_scripts_of_a_lesson_have_at_most_40_lines(page: Path) -> None:
    scripts = [block for block in blocks(page.read_text()) if block.kind == "python"]
    assert max((block.text.count("\n") for block in scripts), default=0) <= 40


@pytest.mark.parametrize(
    ("command", "expected", "printed", "right"),
    [
        ("run", "[rank 0] a\n[rank 1] b", "[rank 1] b\n[rank 0] a", True),
        ("run", "[rank 0] a\n[rank 0] b", "[rank 0] b\n[rank 0] a", False),
        ("run", "took 3.1 s, pid 17", "took 12 s, pid 8", True),
        ("run", "took 3.1 s", "took 3.1 ms", False),
        ("run", "a\n...\nd", "a\nb\nc\nd", True),
        ("run", "a\n...\nd", "a\nb\nc\ne", False),
        ("run", "loss ... at step 2", "loss 0.1 at step 2", True),
        ("run", "sum 3", "sum 4", False),
    ],
)
def test_output_of_a_block_is_compared(command: str, expected: str, printed: str, right: bool, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```console\n$ cat {command}\n{expected}\n```\n")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / command).write_text(printed + "\n")
    if right:
        run_page(page, tmp_path / "work")
    else:
        with pytest.raises(AssertionError, match=re.escape(f"page.md:1: $ cat {command}")):
            run_page(page, tmp_path / "work")
