"""Equal calls that do not belong together: a rank swaps two of them, or leaves one out. And programs that are right.

On one host, and in groups over several.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
from collections.abc import Sequence

import pytest
import torch.distributed as dist
from tests.support import call_programs
from tests.support.call_programs import (
    MISTAKES,
    RIGHT,
    Program,
    compiled_on_one_rank,
    first,
    second,
    swapped_functions,
)
from tests.support.ranks import Member
from tests.support.worlds import Ranks, in_worlds

WAS_CALL = re.compile(r"call_programs\.py:\d+ was call #\d+ of rank \d and #\d+ of rank \d")
WORLDS = in_worlds(place=["one host", "two hosts"])
Told = tuple[str, str]  # what a rank printed, and the error that it raised


def outcomes(world: Ranks, programs: Sequence[Program], call_sites: str) -> dict[str, list[Told]]:
    """Run each program on every rank, in a group of its own, with this ``PHALANX_CALL_SITES``."""

    def body(member: Member) -> list[Told]:
        os.environ["PHALANX_CALL_SITES"] = call_sites
        if world.backend == "mpi":
            importlib.import_module("mpi4py.MPI")  # the script owns MPI, so there may be many groups of all ranks
        told = []
        for number, program in enumerate(programs):
            member.join(world.backend, name=f"store-{number}")
            error = ""
            with contextlib.redirect_stderr(io.StringIO()) as said:
                try:
                    program(member)
                    dist.barrier()  # a rank that has no other call to come to
                except RuntimeError as caught:  # in the end the numbers of calls may differ
                    error = f"{type(caught).__name__}: {caught}"
                with contextlib.nullcontext() if not error else contextlib.suppress(RuntimeError):
                    dist.destroy_process_group()
            told.append((said.getvalue(), error))
            member.meet(f"after-{number}")
        return told

    by_rank = world.run(body, joins=False, leaves=False)
    return {program.__name__: [told[number] for told in by_rank] for number, program in enumerate(programs)}


@WORLDS
def test_a_mistake_is_warned_of_by_one_rank_of_a_host(world: Ranks) -> None:
    for name, ranks in outcomes(world, MISTAKES, "warn").items():
        told = [said for said, _ in ranks if said]
        assert 1 <= len(told) <= (1 if world.place == "one host" else 2), (name, told)
        for warning in told:
            assert warning.startswith("phalanx: warning: ranks "), (name, warning)
            assert "one has left out a call" in warning
            assert warning.count("call_programs.py:") == 2
            assert warning.count("\n") <= 12


@WORLDS
def test_a_mistake_is_an_error_on_all_ranks_if_the_user_wants_that(world: Ranks) -> None:
    for name, ranks in outcomes(world, MISTAKES, "error").items():
        for _, error in ranks:
            assert error.startswith("CollectiveMismatch: the ranks of a group called different operations"), name
            assert WAS_CALL.search(error), (name, error)
            assert error.count("\n") <= 12


@WORLDS
def test_programs_that_are_right_or_not_to_be_looked_at_pass_in_silence(world: Ranks) -> None:
    found = outcomes(world, RIGHT, "error") | outcomes(world, [swapped_functions], "ignore")
    assert {name: told for name, told in found.items() if told != [("", "")] * world.size} == {}


@pytest.mark.long
@in_worlds()
def test_a_function_compiled_on_one_rank_passes_in_silence(world: Ranks) -> None:
    assert outcomes(world, [compiled_on_one_rank], "error") == {"compiled_on_one_rank": [("", "")] * 3}


@in_worlds(2)
def test_the_warning_says_which_call_was_which(world: Ranks) -> None:
    (ranks,) = outcomes(world, [swapped_functions], "warn").values()
    text = "".join(said for said, _ in ranks)
    for function, argument, of_rank_0, of_rank_1 in ((first, "a", 1, 2), (second, "b", 2, 1)):
        where = f"dist.all_reduce({argument}) at {call_programs.__file__}:{function.__code__.co_firstlineno + 1}"
        assert f"{where} was call #{of_rank_0} of rank 0 and #{of_rank_1} of rank 1" in text, text
