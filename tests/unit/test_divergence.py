"""Where the ways of ranks part, from plain texts of programs: it is right, or nothing is said."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

import pytest

from phalanx.diagnosis.diagnose import diagnose
from phalanx.diagnosis.divergence import divergence
from phalanx.diagnosis.snapshot import Group, RankSnapshot, Record, Recording
from phalanx.diagnosis.stacks import Frame

# Each: the program, of which the line with the comment HERE is to be named; without one, nothing. ``# A`` marks the
# lines of the awaited rank's stack and ``# W`` those of a rank that waits for it, in the order of the calls: by default
# that of the lines.
PROGRAMS = {
    "the arms of an if": """
        if rank == 0:  # HERE
            work()  # A
        else:
            all_reduce()  # W
        """,
    "a return in front of the call": """
        def step():
            if rank == 3:  # HERE
                return
            all_reduce()  # W2
        step()  # W1
        work()  # A
        """,
    "a call in a branch": """
        def step():
            all_reduce()  # W2
        if ready:  # HERE
            step()  # W1
        work()  # A
        """,
    "a loop that ends early": """
        for batch in batches:  # HERE
            all_reduce()  # W
        work()  # A
        """,
    "a loop in which one may be slow": """
        while pending():
            work()  # A
        all_reduce()  # W
        """,
    "a slow rank in the pass before": """
        for batch in batches:
            all_reduce()  # W
            work()  # A
        """,
    "two functions, called at different lines": """
        def evaluate():
            work()  # A2
        def step():
            all_reduce()  # W2
        if rank == 0:  # HERE
            evaluate()  # A1
        else:
            step()  # W1
        """,
}

WORLD = Group("0", "phalanx", (0, 1, 2))


def marked(text: str, mark: str) -> list[int]:
    """The lines of a mark, the outermost call first."""
    found = [
        (int(match[1] or 0), number)
        for number, line in enumerate(text.splitlines(), 1)
        for match in re.finditer(rf"\b{mark}(\d*)\b", line.partition("#")[2])
    ]
    return [number for _, number in sorted(found)]


def expected(text: str) -> str:
    for number, line in enumerate(text.splitlines(), 1):
        if "HERE" in line:
            return f"the `{re.split(r'[ :]', line.strip())[0]}` in line {number}"
    return ""


def ahead(path: Path, lines: Sequence[int], **more: object) -> RankSnapshot:
    """Rank 0, which is in no operation; its calls, the outermost first."""
    stack = [Frame(str(path), line, "f") for line in reversed(lines)]
    return RankSnapshot(0, Recording(1, 0, 3, -1, "", 0, ()), frames=tuple(stack), **more)  # type: ignore[arg-type]


def waits(rank: int, path: Path, lines: Sequence[int]) -> RankSnapshot:
    site = f"{path.name}:{lines[-1]}"
    record = Record(1, WORLD, 1, "all_reduce", 4, "", "", -1, site, "", -1, 10, 0, False, -1)
    stack = [Frame(str(path), line, "f") for line in reversed(lines)]
    return RankSnapshot(rank, Recording(1, rank, 3, -1, "", 1, (record,)), frames=tuple(stack))


def hint(folder: Path, ranks: Sequence[RankSnapshot], since: float | None = None) -> str:
    verdict = diagnose(ranks)
    assert verdict is not None
    return divergence(verdict, ranks, str(folder), time.time() + 60 if since is None else since)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_statement_at_which_ways_part_is_named_or_none(name: str, tmp_path: Path) -> None:
    text, path = dedent(PROGRAMS[name]), tmp_path / "train.py"
    path.write_text(text)
    others = [waits(rank, path, marked(text, "W")) for rank in (1, 2)]
    assert hint(tmp_path, [ahead(path, marked(text, "A")), *others]) == expected(text)


def test_a_file_that_has_changed_since_or_is_missing_is_not_read(tmp_path: Path) -> None:
    path, begun = tmp_path / "train.py", time.time()
    path.write_text("if rank == 0:\n    work()\nall_reduce()\n")
    ranks = [ahead(path, [2]), waits(1, path, [3])]
    assert hint(tmp_path, ranks) == "the `if` in line 1"
    assert hint(tmp_path, ranks, begun - 1) == ""
    os.utime(path, (1, 1))  # its time of change is set back, as by `cp -p`
    assert hint(tmp_path, ranks, begun - 1) == ""
    path.write_text("if rank == 0:\n    work()\nelse\nall_reduce()\n")
    assert hint(tmp_path, ranks) == ""
    path.unlink()
    assert hint(tmp_path, ranks) == ""
    os.mkfifo(path)  # as a file system that does not answer
    assert hint(tmp_path, ranks) == hint(tmp_path, ranks) == ""
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # the second call did not open it: one thread reads


def test_a_statement_of_another_file_is_named_with_it(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text("if ready:\n    step()\nwork()\n")
    (tmp_path / "model.py").write_text("def step():\n    all_reduce()\n")
    frames = (Frame(str(tmp_path / "model.py"), 2, "step"), Frame(str(tmp_path / "loop.py"), 2, "<module>"))
    behind = RankSnapshot(1, waits(1, tmp_path / "model.py", [2]).recording, frames=frames)
    assert hint(tmp_path, [ahead(tmp_path / "loop.py", [3]), behind]) == "the `if` in line 1 of loop.py"


def test_a_rank_that_has_ended_well_has_left_out_what_one_branch_decides(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import sys\nif rank == 3:\n    sys.exit()\nall_reduce()\n")
    for well, expects in ((True, "the `if` in line 2"), (False, "")):
        ended = ahead(path, [], ended="exit code", ended_well=well)
        assert hint(tmp_path, [ended, waits(1, path, [4])]) == expects
