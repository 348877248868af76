"""DDP and functional collectives raise Phalanx's own errors over several hosts too, which these ranks pretend to be."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch._dynamo  # before the ranks are forked: it takes each of them seconds
import torch._functorch.aot_autograd  # noqa: F401 - too
import torch.distributed as dist
from tests.fault.test_backward import replica, step
from tests.fault.test_functional_errors import MISTAKES
from tests.support.islands import ISLANDS, divide_by
from tests.support.ranks import Member, on_ranks, run_ranks

from phalanx.errors import CollectiveMismatch, PeerLost

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


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_functional_calls_that_differ_are_told_with_lines_of_the_script() -> None:
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
