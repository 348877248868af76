"""DDP and functional collectives raise Phalanx's own errors over several hosts too, which these ranks pretend to be."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch._dynamo  # before the ranks are forked: it takes each of them seconds
import torch._functorch.aot_autograd
import torch.distributed as dist
from tests.fault.test_backward import replica, step
from tests.fault.test_functional_errors import MISTAKES, all_gather, all_reduce
from tests.fault.test_unused_parameters import TwoHeads
from tests.support.islands import ISLANDS, divide_by
from tests.support.ranks import Member, on_ranks, run_ranks
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import CollectiveMismatch, PeerLost, UnusedParameters

SIZE = 3


@pytest.fixture(autouse=True, params=["halves", pytest.param("cyclic", marks=pytest.mark.long)])
def several_hosts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    divide_by(monkeypatch, ISLANDS[request.param])


def test_backward_raises_that_a_rank_was_lost() -> None:
    def body(member: Member) -> tuple[type, int]:
        member.join()
        model = replica()
        step(model)
        member.meet("stepped")  # one that is still in the step would raise there
        if member.rank == SIZE - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError) as caught:
            step(model)
        return type(caught.value), getattr(caught.value, "group_rank", -1)

    for outcome in run_ranks(body, SIZE)[:-1]:
        assert outcome.value == (PeerLost, SIZE - 1), outcome.traceback


def test_backward_raises_that_the_calls_differ() -> None:
    def body(member: Member) -> tuple[type, str]:
        member.join()
        model = replica()
        member.meet("made")  # one that is still making it would raise there
        with pytest.raises(RuntimeError) as caught:
            if member.rank == 1:
                dist.all_reduce(torch.ones(3))
            else:
                step(model)
        return type(caught.value), str(caught.value)

    for kind, text in on_ranks(body, SIZE):
        assert kind is CollectiveMismatch, text
        assert "rank 1: all_reduce(float32[3], sum)" in text


def test_the_next_forward_names_unused_parameters() -> None:
    def body(member: Member) -> tuple[str, ...]:
        member.join()
        model = DistributedDataParallel(TwoHeads())
        model(torch.ones(2, 4), True).backward()
        model(torch.ones(2, 4), False).backward()
        with pytest.raises(UnusedParameters) as caught:
            model(torch.ones(2, 4), False)
        member.meet("raised")  # a rank that ends is lost to those that are still in an earlier step
        return caught.value.names

    assert on_ranks(body, SIZE) == [("other_head.weight", "other_head.bias")] * SIZE


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_functional_calls_that_differ_are_phalanxs_error_with_lines_of_the_script() -> None:
    def body(member: Member) -> dict[str, tuple[type, str]]:
        member.join()
        errors: dict[str, tuple[type, str]] = {}
        for mistake in MISTAKES:
            group = dist.new_group()
            with pytest.raises(RuntimeError) as caught:
                mistake(group, member.rank == 1, SIZE)
            errors[mistake.__name__] = type(caught.value), str(caught.value)
            dist.barrier()
        member.meet("done")  # a rank that ends is lost to those that are still in the barrier
        return errors

    at = f" at {Path(__file__).with_name('test_functional_errors.py')}:"
    for errors in on_ranks(body, SIZE):
        assert len(errors) == len(MISTAKES)
        for name, (kind, text) in errors.items():
            assert kind is CollectiveMismatch, (name, text)
            assert "running the callback" not in text
            assert all(at in call for call in text.splitlines()[1:-1]), (name, text)


@pytest.mark.parametrize("waits", [all_reduce, all_gather])
def test_a_rank_that_is_killed_is_phalanxs_error_in_a_functional_call(waits: object) -> None:
    call = all_gather if waits is all_gather else all_reduce

    def body(member: Member) -> tuple[type, str]:
        member.join()
        dist.barrier()
        member.meet("joined")  # one that is still in the barrier would raise there
        if member.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError) as caught:
            call(dist.group.WORLD, False, SIZE)
        return type(caught.value), str(caught.value)

    for outcome in run_ranks(body, SIZE):
        if outcome.rank != 1:
            kind, text = outcome.value
            assert kind is PeerLost, outcome.traceback
            assert "rank 1 of the group" in text
            assert f"in all_{'gather' if call is all_gather else 'reduce'}(" in text
