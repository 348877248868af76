"""Equal calls that do not belong together, in groups over several hosts. And programs that are right."""

from __future__ import annotations

import pytest
from tests.support.call_programs import (
    MISTAKES,
    RIGHT,
    Program,
    is_an_error,
    is_warned_of,
    name_of,
    passes_in_silence,
    swapped_functions,
)
from tests.support.islands import ISLANDS, divide_by

PLACES = pytest.mark.parametrize(("where", "size"), [("cyclic", 2), ("halves", 3), ("cyclic", 5)])
HOSTS = 2


@PLACES
@pytest.mark.parametrize("program", MISTAKES, ids=name_of)
def test_a_mistake_is_warned_of_by_a_rank_or_two(
    monkeypatch: pytest.MonkeyPatch, program: Program, where: str, size: int
) -> None:
    divide_by(monkeypatch, ISLANDS[where])
    is_warned_of(program, size, most=HOSTS)


@PLACES
@pytest.mark.parametrize("program", RIGHT, ids=name_of)
def test_a_program_that_is_right_is_not_warned_of(
    monkeypatch: pytest.MonkeyPatch, program: Program, where: str, size: int
) -> None:
    divide_by(monkeypatch, ISLANDS[where])
    passes_in_silence(program, size)


@PLACES
@pytest.mark.parametrize("program", MISTAKES, ids=name_of)
def test_a_mistake_is_an_error_if_the_user_wants_that(
    monkeypatch: pytest.MonkeyPatch, program: Program, where: str, size: int
) -> None:
    divide_by(monkeypatch, ISLANDS[where])
    is_an_error(program, size)


@pytest.mark.parametrize("size", [2, 3])
def test_nothing_is_said_if_the_user_wants_that(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    divide_by(monkeypatch, ISLANDS["cyclic"])
    passes_in_silence(swapped_functions, size, "ignore")
