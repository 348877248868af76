"""Equal calls that do not belong together: a rank swaps two of them, or leaves one out. And programs that are right.

On one host, and in groups over several.
"""

from __future__ import annotations

import re

import pytest
from tests.launch_support import Launcher, launcher
from tests.support import call_programs
from tests.support.call_programs import (
    MISTAKES,
    RIGHT,
    first,
    outcomes,
    second,
    swapped_beside_rank_0,
    swapped_functions,
)
from tests.support.islands import ISLANDS, divide_by

__all__ = ["launcher"]  # a fixture

WAS_CALL = re.compile(r"call_programs\.py:\d+ was call #\d+ of rank \d and #\d+ of rank \d")
LONG = pytest.mark.long


@pytest.fixture(
    params=[
        ("", 3),
        ("halves", 3),
        pytest.param(("", 2), marks=LONG),
        pytest.param(("cyclic", 2), marks=LONG),
        pytest.param(("cyclic", 5), marks=LONG),
    ],
    ids=lambda world: f"{world[0]}-{world[1]}",
)
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """A number of ranks on a number of hosts."""
    islands, size = request.param
    if islands:
        divide_by(monkeypatch, ISLANDS[islands])
    return size, 2 if islands else 1


def test_a_mistake_is_warned_of_by_one_rank_of_a_host(world: tuple[int, int]) -> None:
    size, hosts = world
    for name, ranks in outcomes(MISTAKES, size, "warn").items():
        told = [rank.said for rank in ranks if rank.said]
        assert 1 <= len(told) <= hosts, (name, told)
        for warning in told:
            assert warning.startswith("phalanx: warning: ranks "), (name, warning)
            assert "one has left out a call" in warning
            assert warning.count("call_programs.py:") == 2
            assert warning.count("\n") <= 12


def test_a_mistake_is_an_error_on_all_ranks_if_the_user_wants_that(world: tuple[int, int]) -> None:
    for name, ranks in outcomes(MISTAKES, world[0], "error").items():
        for rank in ranks:
            assert rank.error.startswith("CollectiveMismatch: the ranks of a group called different operations"), name
            assert WAS_CALL.search(rank.error), (name, rank.error)
            assert rank.error.count("\n") <= 12


def test_a_program_that_is_right_passes_in_silence(world: tuple[int, int]) -> None:
    for name, ranks in outcomes(RIGHT, world[0], "error").items():
        assert [(rank.said, rank.error) for rank in ranks] == [("", "")] * world[0], name


def test_nothing_is_said_if_the_user_wants_that(world: tuple[int, int]) -> None:
    (ranks,) = outcomes([swapped_functions], world[0], "ignore").values()
    assert [(rank.said, rank.error) for rank in ranks] == [("", "")] * world[0]


@pytest.mark.parametrize("size", [3, pytest.param(5, marks=LONG)])
def test_mistake_of_two_ranks_at_lines_of_their_own_is_noticed(size: int) -> None:
    (warned,) = outcomes([swapped_beside_rank_0], size, "warn").values()
    (raised,) = outcomes([swapped_beside_rank_0], size, "error").values()
    assert len([rank for rank in warned if "one has left out a call" in rank.said]) == 1
    assert all(WAS_CALL.search(rank.error) for rank in raised), raised


def test_the_warning_says_which_call_was_which() -> None:
    (ranks,) = outcomes([swapped_functions], 2, "warn").values()
    text = "".join(rank.said for rank in ranks)
    lines = {function: function.__code__.co_firstlineno + 1 for function in (first, second)}
    for function, argument, of_rank_0, of_rank_1 in ((first, "a", 1, 2), (second, "b", 2, 1)):
        where = f"dist.all_reduce({argument}) at {call_programs.__file__}:{lines[function]}"
        assert f"{where} was call #{of_rank_0} of rank 0 and #{of_rank_1} of rank 1" in text, text


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("phalanx")
def first(x):
    dist.all_reduce(x)
def second(x):
    dist.all_reduce(x)
for task in (first, second) if dist.get_rank() else (second, first):
    task(torch.ones(2))
dist.barrier()
"""


@pytest.mark.parametrize("strict", [False, True])
def test_phalanx_run_strict_makes_it_an_error(launcher: Launcher, strict: bool) -> None:
    done = launcher.run(*(["--strict"] if strict else []), "-n", "2", launcher.script(SCRIPT))
    assert ("CollectiveMismatch: the ranks of a group called different operations" in done.err_text) is strict
    assert ("phalanx: warning: ranks 0 and 1 of a group" in done.err_text) is not strict
    assert (done.code != 0) is strict, done.err_text
