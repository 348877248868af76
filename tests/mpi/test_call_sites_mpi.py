"""Equal calls over MPI that do not belong together, because a rank swaps two or leaves one out. And right programs."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist
from tests.fault.test_call_sites import WAS_CALL, outcomes
from tests.support.call_programs import MISTAKES, RIGHT, swapped_functions
from tests.support.ranks import Member
from tests.support.worlds import Ranks, every_rank, in_worlds

from phalanx.errors import CollectiveMismatch


@in_worlds(backend="mpi")
def test_a_mistake_is_warned_of_once(world: Ranks) -> None:
    for name, ranks in outcomes(world, MISTAKES, "warn").items():
        (warning,) = (said for said, _ in ranks if said)
        assert warning.startswith("phalanx: warning: ranks 0 and "), name
        assert "one has left out a call" in warning
        assert warning.count("call_programs.py:") == 2


@in_worlds(backend="mpi")
def test_a_mistake_is_an_error_on_all_ranks_if_the_user_wants_that(world: Ranks) -> None:
    for name, ranks in outcomes(world, MISTAKES, "error").items():
        assert len(set(ranks)) == 1, (name, ranks)
        said, error = ranks[0]
        assert said == ""
        assert error.startswith("CollectiveMismatch: the ranks of a group called different operations")
        assert WAS_CALL.search(error), error


@in_worlds(backend="mpi")
def test_programs_that_are_right_or_not_to_be_looked_at_pass_in_silence(world: Ranks) -> None:
    found = outcomes(world, RIGHT, "error") | outcomes(world, [swapped_functions], "ignore")
    assert {name: told for name, told in found.items() if told != [("", "")] * 3} == {}


@every_rank(backend="mpi", joins=False, leaves=False)
def test_the_setting_of_rank_0_holds(member: Member) -> None:
    """One that would warn beside one that raises would wait for it without end."""
    os.environ["PHALANX_CALL_SITES"] = ("error", "ignore", "warn")[member.rank]
    member.join("mpi")
    with pytest.raises(CollectiveMismatch):
        swapped_functions(member)
        dist.barrier()
