"""Where the ways of ranks part, from plain texts of programs: it is right, or nothing is said."""

from __future__ import annotations

import os
import time
from pathlib import Path
from textwrap import dedent

import pytest
from tests.support.parting_programs import PROGRAMS, expected, ways

from phalanx.watch.parting import parting
from phalanx.watch.records import Group, Record, Recording
from phalanx.watch.stack_text import Frame
from phalanx.watch.verdict import Seen, Verdict, judge

WORLD = Group("0", "phalanx", (0, 1, 2))


def record(number: int, site: str, *, done: bool = False, kind: str = "all_reduce") -> Record:
    return Record(number, WORLD, number, kind, 4, "", "", -1, site, "", -1, 10, 20 if done else 0, False, -1)


def seen(rank: int, path: Path, lines: list[int], records: list[Record], *, step: int = -1, asked: bool = True) -> Seen:
    stack = [Frame(str(path), line, "f") for line in reversed(lines)]
    inner = [Frame("<frozen importlib>", 1, "g")] if not any(r.under_way for r in records) else []
    frames = (*inner, *stack) if asked else ()
    return Seen(rank, Recording(1, rank, 3, step, "", 2, tuple(records)), frames=frames)


def hint(
    path: Path,
    text: str,
    *,
    steps: tuple[int, int] = (-1, -1),
    asked: bool = True,
    both_wait: bool = False,
    since: float | None = None,
) -> str:
    """What is said of the program; the awaited rank is 0."""
    path.write_text(text)
    at, waiting_at = ways(text, "A"), ways(text, "W")
    before = record(1, "other.py:1", done=True)
    own = [before, *([record(2, f"{path.name}:{at[-1]}", kind="broadcast")] if both_wait else [])]
    ranks = [seen(0, path, at, own, step=steps[0])]
    waits = [before, record(2, f"{path.name}:{waiting_at[-1]}")]
    ranks += [seen(rank, path, waiting_at, waits, step=steps[1], asked=asked) for rank in (1, 2)]
    verdict = judge(ranks)
    assert verdict is not None
    return parting(verdict, ranks, str(path.parent), time.time() + 60 if since is None else since)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_statement_at_which_ways_part_is_named_or_none(name: str, tmp_path: Path) -> None:
    text = dedent(PROGRAMS[name])
    assert hint(tmp_path / "train.py", text) == expected(text)


IN_LOOP = """
for step in range(9):
    work()  # A
    if step % 4 == 0:
        all_reduce()  # W
"""
BEHIND = """
for step in range(9):
    if step % 4 == 0:
        all_reduce()  # W
    work()  # A
"""


@pytest.mark.parametrize(
    ("text", "steps", "line"),
    [
        (IN_LOOP, (3, 4), 0),  # it is slow
        (IN_LOOP, (4, 4), 0),
        (IN_LOOP, (5, 4), 4),  # it has left out the call
        (BEHIND, (3, 4), 0),
        (BEHIND, (4, 4), 3),
        (BEHIND, (5, 4), 3),
    ],
)
def test_the_scripts_own_steps_tell_a_slow_rank_from_one_that_has_left_out_a_call(
    text: str, steps: tuple[int, int], line: int, tmp_path: Path
) -> None:
    assert hint(tmp_path / "train.py", text, steps=steps) == (f"the `if` in line {line}" if line else "")


def test_a_continue_is_named_that_the_awaited_rank_has_taken_to_its_next_pass(tmp_path: Path) -> None:
    text = "for batch in batches:\n    work()  # A\n    if bad:\n        continue\n    all_reduce()  # W\n"
    assert hint(tmp_path / "train.py", text, steps=(6, 5)) == "the `if` in line 3"
    assert hint(tmp_path / "train.py", text, steps=(5, 5)) == ""
    assert hint(tmp_path / "train.py", text) == ""


def test_a_rank_in_another_collective_is_not_taken_for_a_slow_one(tmp_path: Path) -> None:
    branch = "if ready:\n    broadcast()  # A\nall_reduce()  # W\n"
    assert hint(tmp_path / "train.py", branch, both_wait=True) == "the `if` in line 1"
    assert hint(tmp_path / "train.py", branch) == ""
    text = "for batch in batches:\n    reduce()  # A\n    if bad:\n        continue\n    all_reduce()  # W\n"
    assert hint(tmp_path / "train.py", text, both_wait=True) == "the `if` in line 3"
    arms = "if rank == 0:\n    broadcast()  # A\nelse:\n    all_reduce()  # W\n"
    assert hint(tmp_path / "train.py", arms, both_wait=True) == "the `if` in line 1"


def test_without_the_stack_of_those_that_wait_only_what_runs_once_is_compared(tmp_path: Path) -> None:
    text = dedent(PROGRAMS["an arm and what follows"])
    assert hint(tmp_path / "train.py", text, asked=False) == "the `if` in line 2"
    inside = "def f():\n    if rank == 0:\n        work()  # A2\n    all_reduce()  # W2\nf()  # A1 W1\nf()\n"
    assert hint(tmp_path / "train.py", inside) == "the `if` in line 2"
    assert hint(tmp_path / "train.py", inside, asked=False) == ""


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


def test_ranks_that_parted_before_are_not_compared_where_they_are_now(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("if rank == 0:\n    work()\nall_reduce()\n")
    # The awaited rank has left out the call in line 1, so each later one meets another's; in the arms of `if rank == 0`
    # ranks call different lines as well, but not each other's.
    for called, others, expects in (((2, 3), (1, 2), ""), ((8, 3), (9, 3), "the `if` in line 1")):
        own = [record(number, f"other.py:{line}", done=True) for number, line in enumerate(called, 1)]
        theirs = [record(number, f"other.py:{line}", done=True) for number, line in enumerate(others, 1)]
        ranks = [seen(0, path, [2], own), seen(1, path, [3], [*theirs, record(3, "train.py:3")])]
        verdict = judge(ranks)
        assert verdict is not None
        assert parting(verdict, ranks, str(tmp_path), time.time() + 60) == expects


def test_a_rank_that_has_ended_well_has_left_out_what_one_branch_decides(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import sys\nif rank == 3:\n    sys.exit()\nall_reduce()\n")
    waits = seen(1, path, [4], [record(1, "train.py:4")])
    for well, expects in ((True, "the `if` in line 2"), (False, "")):
        ranks = [Seen(0, Recording(1, 0, 3, -1, "", 0, ()), ended="exit code", ended_well=well), waits]
        verdict = judge(ranks)
        assert verdict is not None
        assert parting(verdict, ranks, str(tmp_path), time.time() + 60) == expects


def test_many_ranks_are_compared_at_the_cost_of_the_different_ways_among_them(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("if rank < 500:\n    work()\nall_reduce()\n")
    done = [record(number, "other.py:1", done=True) for number in range(1, 200)]
    ranks = [seen(rank, path, [2], done) for rank in range(500)]
    ranks += [seen(rank, path, [3], [*done, record(200, "train.py:3")], asked=rank == 500) for rank in range(500, 1000)]
    verdict = Verdict("the first half is late", tuple(range(500)), tuple(range(500, 1000)), 0)
    begun = time.process_time()
    assert parting(verdict, ranks, str(tmp_path), time.time() + 60) == "the `if` in line 1"
    assert time.process_time() - begun < 20  # 250,000 pairs of ranks would take minutes


def test_a_stopped_rank_is_where_it_is_for_another_reason(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("if rank == 0:\n    work()\nall_reduce()\n")
    waits = seen(1, path, [3], [record(1, "train.py:3")])
    for state, expects in (("S", "the `if` in line 1"), ("T", "")):
        frames = (Frame(str(path), 2, "<module>"),)
        ranks = [Seen(0, Recording(1, 0, 3, -1, "", 0, ()), state=state, frames=frames), waits]
        verdict = judge(ranks)
        assert verdict is not None
        assert parting(verdict, ranks, str(tmp_path), time.time() + 60) == expects


def test_ranks_that_wait_for_each_other_part_where_two_lines_do(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("if rank == 0:\n    a()\nelse:\n    b()\n")
    sides = [Group("one", "phalanx", (0, 1)), Group("two", "phalanx", (0, 1))]
    ranks = []
    for rank, (group, line) in enumerate(zip(sides, (2, 4), strict=True)):
        own = Record(1, group, 1, "barrier", 4, "", "", -1, f"train.py:{line}", "", -1, 10, 0, False, -1)
        ranks.append(seen(rank, path, [line], [own]))
    verdict = judge(ranks)
    assert verdict is not None
    assert verdict.awaited == (0, 1)
    assert parting(verdict, ranks, str(tmp_path), time.time() + 60) == "the `if` in line 1"
