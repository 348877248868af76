"""The draw of the kill matrix: its size, and that every fault meets every operation, everywhere."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import pytest
from tests.support.kill_cases import Case
from tests.support.kill_draw import drawn, quick

COUNTS = {"one host": 450, "two hosts": 300, "mpi": 150}  # which the tests draw
VALUES: dict[str, tuple[object, ...]] = {
    "operation": (
        *("all_reduce", "broadcast", "all_gather", "messages", "barrier"),
        *("objects", "init", "DDP step", "close"),
    ),
    "moment": ("before", "first", "between", "after"),
    "fault": ("SIGKILL", "SIGSTOP", "SIGSEGV", "exception", "os._exit", "exit(0)"),
    "victim": ("first", "middle", "last", "launcher", "zygote"),
    "world": (2, 3, 8),
    "meeting": ("connected", "unconnected"),
}
PAIRS = list(itertools.combinations(VALUES, 2))
TRIPLES = [("operation", "moment", "fault"), ("operation", "fault", "victim")]


@functools.lru_cache
def cases_of(place: str) -> list[Case]:
    return drawn(place, COUNTS[place])


def can_be(place: str, facts: dict[str, object]) -> bool:
    """Whether there is a case with these facts, as long as the others are not against it."""

    def are(**values: tuple[object, ...]) -> bool:
        return all(facts.get(name) in options for name, options in values.items())

    return not (
        are(moment=("between",), operation=("barrier", "init", "close"))
        or are(victim=("middle",), world=(2,))
        or are(victim=("launcher", "zygote"), fault=("exception", "os._exit", "exit(0)"))
        or are(meeting=("unconnected",), operation=("init", "DDP step"))
        or are(meeting=("unconnected",), moment=("between",))
        or (place == "mpi" and are(meeting=("unconnected",)))
    )


def expected(place: str, names: Sequence[str]) -> Iterator[tuple[object, ...]]:
    for values in itertools.product(*(VALUES[name] for name in names)):
        if can_be(place, dict(zip(names, values, strict=True))):
            yield values


@pytest.mark.parametrize(
    ("place", "names"),
    [(place, names) for place in COUNTS for names in (*PAIRS, *(TRIPLES if place != "mpi" else ()))],
)
def test_all_values_meet(place: str, names: Sequence[str]) -> None:
    found = {tuple(getattr(case, name) for name in names) for case in cases_of(place)}
    assert not set(expected(place, names)) - found


@pytest.mark.parametrize("place", COUNTS)
def test_no_case_is_drawn_twice_or_in_vain(place: str) -> None:
    cases = cases_of(place)
    assert len(set(cases)) == len(cases) == COUNTS[place]
    for case in cases:
        assert case.place == place
        assert can_be(place, {name: getattr(case, name) for name in VALUES}), case


def test_the_same_cases_are_drawn_each_time() -> None:
    once, again = (drawn("mpi", COUNTS["mpi"]) for _ in range(2))
    assert [(case, case.seed) for case in once] == [(case, case.seed) for case in again]


@pytest.mark.parametrize("place", ["one host", "two hosts"])
def test_the_few_quick_ones_differ_and_wait_for_nothing(place: str) -> None:
    few: list[Case] = quick(cases_of(place), 5)
    assert len(set(few)) == 5
    assert {case.victim for case in few} >= {"launcher", "zygote"}
    assert {case.operation for case in few} >= {"init", "close"}
    assert any(case.fault == "SIGKILL" and case.victim in ("first", "middle", "last") for case in few)
    assert all(case.fault != "SIGSTOP" and case.world < 8 for case in few)
