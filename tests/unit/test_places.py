"""What the user is told of where the ranks are, whoever has asked and in whichever order the answers are read."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from phalanx.launch.places import Places
from phalanx.launch.rank.trace import Trace

STACK = """Stack (most recent call first):
  File "{0}.py", line 1 in {0}
  File "<frozen runpy>", line 88 in _run_code
"""


class Written:
    """In the place of the file into which ranks write: each stack is read once."""

    def __init__(self) -> None:
        self.stacks: dict[int, str] = {}

    def write(self, place: str) -> None:
        for rank in range(2):
            self.stacks[rank] = self.stacks.get(rank, "") + STACK.format(place)

    def take(self, parts: Collection[int]) -> dict[int, str]:
        taken, self.stacks = self.stacks, {}
        return {part: taken[part] for part in parts if part in taken}


def places(written: Written, *, runs_python: bool = True) -> Places:
    return Places(cast(Trace, written), 2, runs_python=runs_python)


def test_what_was_read_for_a_report_is_shown_to_the_user_who_asked_as_well() -> None:
    written = Written()
    own = places(written)
    own.ask()
    written.write("train")
    assert "train.py" in own.take()[0]
    assert "train.py" in own.answer([])


def test_the_answers_to_two_questions_are_shown_once_each_or_together() -> None:
    written = Written()
    own = places(written)
    own.ask()
    own.ask()
    written.write("first")
    written.write("second")
    said = own.answer([])
    assert "second.py" in said
    assert own.answer([]) == ""
    own.ask()
    written.write("third")
    said = own.answer([])
    assert "third.py" in said
    assert "second.py" not in said


def test_stacks_that_nobody_waits_for_are_not_shown_later() -> None:
    written = Written()
    own = places(written)
    written.write("before")
    own.take()
    own.ask()
    written.write("now")
    said = own.answer([])
    assert "now.py" in said
    assert "before.py" not in said


def test_only_of_ranks_that_were_started_without_python_it_is_said_that_none_runs_python() -> None:
    for runs_python in (True, False):
        own = places(Written(), runs_python=runs_python)
        own.ask()
        assert ("no rank runs Python code" in own.answer([])) is not runs_python


def test_ranks_that_did_not_write_in_time_are_named() -> None:
    own = places(Written())
    own.ask()
    assert own.answer([1]).startswith("rank 1 did not say where")
