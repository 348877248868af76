"""Where the ways of ranks part, from plain texts of programs: it is right, or nothing is said."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from textwrap import dedent

import pytest

from phalanx.watch.parting import parting
from phalanx.watch.records import Group, Record, Recording
from phalanx.watch.stack_text import Frame
from phalanx.watch.verdict import Seen, judge

# Each: the program, of which the line with the comment HERE is to be named; without one, nothing. ``# A`` marks the
# lines of the awaited rank's stack and ``# W`` those of a rank that waits for it, in the order of the calls: by default
# that of the lines, and ``# A2`` comes before ``# A10``.
PROGRAMS = {
    "the arms of an if": """
        if rank == 0:  # HERE
            work()  # A
        else:
            all_reduce()  # W
        """,
    "an arm and what follows": """
        if rank == 0:  # HERE
            work()  # A
        all_reduce()  # W
        """,
    "one after the other": """
        work()  # A
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
    "a case and what follows": """
        match rank:  # HERE
            case 0:
                work()  # A
        all_reduce()  # W
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
    "a text that cannot be parsed": """
        if rank == 0:
            work()  # A
        else
            all_reduce()  # W
        """,
}

WORLD = Group("0", "phalanx", (0, 1, 2))


def ways(text: str, mark: str) -> list[int]:
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


def record(number: int, site: str, *, done: bool = False) -> Record:
    return Record(number, WORLD, number, "all_reduce", 4, "", "", -1, site, "", -1, 10, 20 if done else 0, False, -1)


def seen(rank: int, path: Path, lines: list[int], records: list[Record]) -> Seen:
    stack = [Frame(str(path), line, "f") for line in reversed(lines)]
    inner = [Frame("<frozen importlib>", 1, "g")] if not any(r.under_way for r in records) else []
    return Seen(rank, Recording(1, rank, 3, -1, "", 2, tuple(records)), frames=(*inner, *stack))


def hint(
    path: Path,
    text: str,
    *,
    since: float | None = None,
) -> str:
    """What is said of the program; the awaited rank is 0."""
    path.write_text(text)
    at, waiting_at = ways(text, "A"), ways(text, "W")
    before = record(1, "other.py:1", done=True)
    ranks = [seen(0, path, at, [before])]
    waits = [before, record(2, f"{path.name}:{waiting_at[-1]}")]
    ranks += [seen(rank, path, waiting_at, waits) for rank in (1, 2)]
    verdict = judge(ranks)
    assert verdict is not None
    return parting(verdict, ranks, str(path.parent), time.time() + 60 if since is None else since)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_statement_at_which_ways_part_is_named_or_none(name: str, tmp_path: Path) -> None:
    text = dedent(PROGRAMS[name])
    assert hint(tmp_path / "train.py", text) == expected(text)


def test_a_file_that_has_changed_since_or_is_missing_is_not_read(tmp_path: Path) -> None:
    path, text = tmp_path / "train.py", dedent(PROGRAMS["an arm and what follows"])
    begun = time.time()
    assert hint(path, text, since=begun - 1) == ""
    os.utime(path, (1, 1))  # its time of change is set back, as by `cp -p`
    assert hint(path, text, since=begun - 1) == ""
    path.unlink()
    os.mkfifo(path)
    (tmp_path / "other").mkdir()
    ranks = [seen(0, path, [3], []), seen(1, path, [4], [record(1, "train.py:4")])]
    verdict = judge(ranks)
    assert verdict is not None
    assert parting(verdict, ranks, str(tmp_path), begun + 60) == ""
    path.unlink()
    assert parting(verdict, ranks, str(tmp_path), begun + 60) == ""


def test_a_statement_of_another_file_is_named_with_it(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text("if ready:\n    step()\nwork()\n")
    (tmp_path / "model.py").write_text("def step():\n    all_reduce()\n")
    outer, inner = str(tmp_path / "loop.py"), str(tmp_path / "model.py")
    ahead = Seen(0, Recording(1, 0, 3, -1, "", 0, ()), frames=(Frame(outer, 3, "<module>"),))
    waits = Recording(1, 1, 3, -1, "", 1, (record(1, "model.py:2"),))
    behind = Seen(1, waits, frames=(Frame(inner, 2, "step"), Frame(outer, 2, "<module>")))
    verdict = judge([ahead, behind])
    assert verdict is not None
    assert parting(verdict, [ahead, behind], str(tmp_path), time.time() + 60) == "the `if` in line 1 of loop.py"


def test_a_rank_that_has_ended_well_has_left_out_what_one_branch_decides(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import sys\nif rank == 3:\n    sys.exit()\nall_reduce()\n")
    waits = seen(1, path, [4], [record(1, "train.py:4")])
    for well, expects in ((True, "the `if` in line 2"), (False, "")):
        ranks = [Seen(0, Recording(1, 0, 3, -1, "", 0, ()), ended="exit code", ended_well=well), waits]
        verdict = judge(ranks)
        assert verdict is not None
        assert parting(verdict, ranks, str(tmp_path), time.time() + 60) == expects
