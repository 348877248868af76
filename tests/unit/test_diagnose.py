"""Who keeps a job from going on, from what its ranks' recorders say."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from phalanx.diagnosis.diagnose import diagnose
from phalanx.diagnosis.snapshot import Group, RankSnapshot, Record, Recording

WORLD = Group("0", "phalanx", (0, 1, 2, 3))
PAIR = Group("pair", "phalanx", (1, 2))


def record(kind: str, number: int, site: str, group: Group = WORLD, *, done: bool = False, peer: int = -1) -> Record:
    times = 10 * number, 10 * number + 5 if done else 0
    return Record(number, group, number, kind, 4, "float32", "", peer, site, "", -1, *times, False, -1)


def rank(number: int, *records: Record, **said: str) -> RankSnapshot:
    recording = Recording(100 + number, number, 4, -1, "", len(records), tuple(records)) if records else None
    return RankSnapshot(number, recording, said.get("state", "S"), said.get("ended", ""), said.get("place", ""))


def sentence(*ranks: RankSnapshot) -> str:
    verdict = diagnose(ranks)
    assert verdict is not None
    return verdict.sentence


BEFORE, WAITS = record("all_reduce", 1, "a.py:5", done=True), record("all_reduce", 2, "a.py:9")


def test_a_rank_in_another_operation_of_the_group_is_named_with_that() -> None:
    """As where two programs call different collectives, on a backend that does not compare them."""
    others = [rank(r, record("broadcast", 118, "train.py:57")) for r in (0, 1, 2)]
    assert sentence(*others, rank(3, record("all_reduce", 118, "train.py:42"), state="T")) == (
        "rank 3 is stopped (state T), in all_reduce #118 at train.py:42; "
        "ranks 0-2 wait for it in broadcast #118 at train.py:57"
    )


def test_a_rank_that_is_ahead_does_not_count_as_missing() -> None:
    """A broadcast's root goes on without the others."""
    ahead = [record("broadcast", 1, "a.py:3", done=True), record("barrier", 2, "a.py:4")]
    late = rank(2, record("all_reduce", 0, "a.py:2", done=True), place="a.py:8 load()")
    found = sentence(rank(0, *ahead), rank(1, *ahead), late, rank(3, *ahead))
    assert found == "rank 2 is at a.py:8 load(), in no operation; ranks 0-1, 3 wait for it in barrier #2 at a.py:4"


def test_several_that_are_missing_are_told_apart_by_what_they_do() -> None:
    waits = record("all_reduce", 1, "a.py:9")
    missing = rank(1, state="T"), rank(2, place="a.py:2 x()"), rank(3, place="a.py:2 x()", state="R")
    assert sentence(rank(0, waits), *missing) == (
        "rank 1 is stopped (state T) and ranks 2-3 are at a.py:2 x(), in no operation yet; "
        "rank 0 waits for them in all_reduce #1 at a.py:9"
    )


def test_the_operation_itself_says_whom_it_awaits_where_all_have_come() -> None:
    waits = replace(WAITS, awaits=2)
    past = rank(2, replace(WAITS, left_ns=25), place="b.py:1 y()")
    assert sentence(rank(0, waits), rank(1, waits), past, replace(past, rank=3)) == (
        "rank 2 is at b.py:1 y(), in no operation; ranks 0-1 wait for it in all_reduce #2 at a.py:9"
    )


@pytest.mark.parametrize(
    ("said", "does"),
    [
        ({"state": "T"}, "is stopped (state T), after all_reduce #1 at a.py:5"),
        ({"state": "t"}, "is held by a debugger (state t), after all_reduce #1 at a.py:5"),
        ({"state": "D"}, "is waiting for a disk or a driver (state D), after all_reduce #1 at a.py:5"),
        ({"ended": "exit code 0"}, "has ended (exit code 0)"),
    ],
)
def test_a_rank_that_cannot_come_is_told_with_what_keeps_it(said: dict[str, str], does: str) -> None:
    found = sentence(rank(0, BEFORE, **said), *(rank(r, BEFORE, WAITS) for r in (1, 2, 3)))
    assert found == f"rank 0 {does}; ranks 1-3 wait for it in all_reduce #2 at a.py:9"


def test_a_join_that_has_failed_is_not_the_one_that_the_others_wait_in() -> None:
    join = record("init", 1, "train.py:3")
    failed = replace(join, left_ns=15, failed=True)
    said = sentence(rank(1, failed, place="train.py:9"), *(rank(number, join) for number in (0, 2, 3)))
    assert said.startswith("rank 1 is at train.py:9, in no operation"), said
    assert "ranks 0, 2-3 wait for it in init" in said


@pytest.mark.parametrize(
    ("done", "said"), [((-1, -1), "it is not over"), ((37, -1), "37 % of it is done"), ((0, 0), "0 % of it is done")]
)
def test_a_wait_in_which_all_have_come_has_how_far_it_is(done: tuple[int, int], said: str) -> None:
    waits = record("all_reduce", 1, "a.py:9", Group("0", "phalanx", (0, 1)))
    seen = [RankSnapshot(r, Recording(1, r, 2, -1, "", 1, (waits,), done=far), "S") for r, far in enumerate(done)]
    assert sentence(*seen) == f"ranks 0-1 are in all_reduce #1 at a.py:9: all have come, and {said}"
