"""What hosts send of their ranks' operations to the launcher: little, in time, and on its clock."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import pytest

from phalanx.launch.relay.observer import within
from phalanx.launch.relay.survey import Survey
from phalanx.watch.records import Group, Record, Recording

WORLD, PAIR = Group("0", "phalanx", (0, 1), 0), Group("pair", "phalanx", (0, 1), 0)


def record(number: int, group: Group = WORLD, site: str = "a.py:1", *, done: bool = True) -> Record:
    left_ns = 10 * number + 5 if done else 0
    return Record(
        number, group, number, "all_reduce", 4, "float32", "sum", -1, site, "", -1, 10 * number, left_ns, False, -1
    )


def recording(*records: Record) -> Recording:
    return Recording(100, 0, 2, -1, "", len(records), records)


def numbers(values: dict[str, Any] | None) -> list[int]:
    assert values is not None
    return [kept.number for kept in Recording.from_json(json.loads(json.dumps(values))).records]


def test_the_last_operations_are_sent_with_those_that_a_verdict_needs() -> None:
    made = [record(0, PAIR), record(1, done=False), *(record(number) for number in range(2, 100))]
    assert numbers(within(1 << 20, recording(*made), 3)) == [0, 1, 97, 98, 99]


@pytest.mark.parametrize("nbytes", [100_000, 10_000, 3_000])
def test_no_more_bytes_are_sent_than_there_is_room_for(nbytes: int) -> None:
    long = recording(*(record(number, site="x" * 1000 + f".py:{number}") for number in range(4096)))
    values = within(nbytes, long, 512)
    assert len(json.dumps(values)) <= nbytes
    kept = numbers(values)
    assert kept == list(range(4096 - len(kept), 4096))
    assert within(500, long, 512) is None


class Parents:
    """Two parents of two ranks each, and the supervisor, which keep what they are sent."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, dict[str, Any]]] = []
        self.answers: list[dict[str, Any]] = []
        self.survey = Survey(
            lambda parent, order: self.asked.append((parent, order)), lambda **message: self.answers.append(message)
        )

    def begin(self, within_s: float = 60.0, skip: tuple[int, ...] = ()) -> int:
        order = {"of": [], "records": 4, "within_s": within_s, "skip": list(skip)}
        self.survey.begin(order, {0: [0, 1], 1: [2, 3]})
        number: int = self.asked[-1][1]["number"]
        return number

    def answer(self, parent: int, number: int, now_ns: int, still_s: float = 9.0) -> None:
        seen = {str(2 * parent): {"state": "S", "asked": "", "recording": recording(record(7, done=False)).to_json()}}
        self.survey.hear(
            parent,
            {"number": number, "now_ns": now_ns, "ranks": seen, "stacks": {}, "waited_s": 8.0, "still_s": still_s},
        )


def test_all_answers_come_in_one_message_with_times_of_the_launchers_clock() -> None:
    parents = Parents()
    number = parents.begin()
    offset_ns = 3_600_000_000_000
    parents.answer(0, number, time.monotonic_ns())
    assert parents.answers == []
    before_ns = time.monotonic_ns()
    parents.answer(1, number, before_ns - offset_ns, still_s=2.0)
    (found,) = parents.answers
    assert sorted(found["ranks"]) == ["0", "2"]
    assert (found["silent"], found["waited_s"], found["still_s"]) == ([], 8.0, 2.0)
    assert 0 <= found["ranks"]["0"]["later_ns"] < offset_ns
    later_ns = found["ranks"]["2"]["later_ns"]
    assert offset_ns <= later_ns <= offset_ns + time.monotonic_ns() - before_ns
    moved = recording(record(7, done=False), record(8)).later(later_ns).records
    assert [(one.entered_ns, one.left_ns) for one in moved] == [(70 + later_ns, 0), (80 + later_ns, 85 + later_ns)]
    assert dataclasses.replace(moved[0], entered_ns=70) == record(7, done=False)


def test_who_does_not_answer_in_time_is_named_and_not_asked_again() -> None:
    parents = Parents()
    number = parents.begin(within_s=0.0)
    parents.answer(0, number, time.monotonic_ns())
    assert parents.survey.due_at is not None
    parents.survey.act(parents.survey.due_at)
    assert parents.answers[-1]["silent"] == [2, 3]
    assert parents.survey.due_at is None
    parents.answer(1, number, time.monotonic_ns())  # too late
    assert len(parents.answers) == 1
    again = parents.begin(skip=(2, 3))
    assert [parent for parent, _ in parents.asked] == [0, 1, 0]
    parents.answer(1, number, time.monotonic_ns())
    parents.answer(0, again, time.monotonic_ns())
    assert parents.answers[-1]["silent"] == [2, 3]


def test_a_parent_whose_ranks_have_ended_is_not_waited_for() -> None:
    parents = Parents()
    number = parents.begin()
    parents.survey.lose(1)
    parents.answer(0, number, time.monotonic_ns())
    assert parents.answers[-1]["silent"] == []
