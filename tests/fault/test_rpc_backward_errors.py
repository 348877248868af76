"""Backward passes that fail: who is told, what it says, and that nothing waits or stays."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support import autograd_workers as workers
from tests.support.ranks import Member, on_ranks, run_ranks, values
from tests.support.waiting import soon

from phalanx import rpc
from phalanx.errors import ArgumentError, PhalanxError, WorkerLost
from phalanx.rpc.autograd.contexts import contexts
from phalanx.rpc.autograd.passes import BackwardError, Pass

Do = Callable[..., Any]


def fail_in_backward(how: str) -> None:
    """What the backward of the last worker does."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise ValueError("out of order")


def passes_through(do: Do, way: list[int], x: torch.Tensor, how: str) -> torch.Tensor:
    """Goes along ``way`` and fails, in backward, on the last worker; those before wait for it."""
    y = x * workers.parameter("w", 3)
    if not way:
        return workers.acts(y, lambda _: fail_in_backward(how))
    answer: torch.Tensor = do(way[0], passes_through, do, way[1:], y * 2, how)
    return y + answer


def alive() -> tuple[int, int]:
    """How many contexts and passes this worker has."""
    found = contexts.all()
    return len(found), sum(len(context.passes) for context in found)


def passes_left() -> int:
    """How many passes this worker still has in memory."""
    gc.collect()
    return sum(type(each) is Pass for each in gc.get_objects())


def test_a_failure_names_where_and_ends_the_pass_everywhere() -> None:
    def rank(member: Member) -> None:
        workers.start_worker(member)
        if not member.rank:
            x = torch.ones(3, requires_grad=True)
            way = [*range(2, member.size), 0, 1]
            with rpc.context() as context_id:
                y = rpc.call(1, passes_through, rpc.call, way, x, "raises")
                with pytest.raises(BackwardError, match="Error on Node 1: out of order") as caught:
                    rpc.backward(context_id, [y.sum()])
                error = caught.value
                assert (error.worker, error.rank, error.type_name) == ("worker1", 1, "ValueError")
                assert error.function.endswith("backward")
                assert __file__ in error.line
                assert error.host in str(error)
                assert error.line in str(error)
                assert "passes_through" in str(error)
                assert soon(lambda: all(rpc.call(other, alive)[1] == 0 for other in range(member.size)))
                assert not rpc.get_gradients(context_id)
            del x, y, caught, error
            assert soon(lambda: all(rpc.call(other, passes_left) == 0 for other in range(member.size)))
            x = torch.ones(3, requires_grad=True)
            with rpc.context() as context_id:
                y = rpc.call(1, passes_through, rpc.call, way, x, "works")
                rpc.backward(context_id, [y.sum()])
                assert x in rpc.get_gradients(context_id)
            assert soon(lambda: all(rpc.call(other, alive) == (0, 0) for other in range(member.size)))
        rpc.shutdown()

    on_ranks(rank, 3)


def test_a_worker_that_dies_in_backward_is_named() -> None:
    def rank(member: Member) -> None:
        workers.start_worker(member)
        if not member.rank:
            x = torch.ones(3, requires_grad=True)
            with rpc.context() as context_id:
                y = rpc.call(1, passes_through, rpc.call, [3, 2], x, "killed")
                with pytest.raises(WorkerLost, match="worker2") as caught:
                    rpc.backward(context_id, [y.sum()])
                assert caught.value.rank == 2
            assert soon(lambda: all(rpc.call(other, alive) == (0, 0) for other in (0, 1, 3)))
        rpc.shutdown()

    outcomes = run_ranks(rank, 4)
    assert outcomes.pop(2).signal == signal.SIGKILL
    values(outcomes)


def test_others_forget_the_contexts_of_a_worker_that_dies() -> None:
    def rank(member: Member) -> None:
        workers.start_worker(member)
        if not member.rank:
            with rpc.context():
                rpc.call(1, passes_through, rpc.call, [2], torch.ones(3, requires_grad=True), "works")
                assert rpc.call(1, alive) == (1, 0)
                assert rpc.call(2, alive) == (1, 0)
                member.await_said("begun-1", "begun-2")
                os.kill(os.getpid(), signal.SIGKILL)
        else:
            assert soon(lambda: bool(contexts.all()))
            member.say(f"begun-{member.rank}")
            assert soon(lambda: not contexts.all())
        rpc.shutdown()

    outcomes = run_ranks(rank, 3)
    assert outcomes[0].signal == signal.SIGKILL
    values(outcomes[1:])


def test_what_cannot_be_is_said_in_words() -> None:
    def rank(member: Member) -> None:
        workers.start_worker(member)
        if not member.rank:
            x = torch.ones(3, requires_grad=True)
            with pytest.raises(PhalanxError, match="Could not find autograd context with id: 100"):
                rpc.backward(100, [x.sum()])
            with rpc.context() as first:
                y = rpc.call(1, passes_through, rpc.call, [], x, "works")
                with pytest.raises(PhalanxError, match="local backward"):
                    y.sum().backward()
                with pytest.raises(PhalanxError, match="Already have an autograd context id for this thread"):
                    contexts.new()
                for roots, words in (
                    ([], "No tensors provided"),
                    ([torch.ones(1)], "requires_grad not set on"),
                    ([x * 2], "is not a scalar"),
                    ([torch.ones(1, requires_grad=True)], "does not have a valid gradient function"),
                ):
                    with pytest.raises(ArgumentError, match=words):
                        rpc.backward(first, roots)
                with pytest.raises(TypeError, match="incompatible function arguments"):
                    rpc.backward(first, None)  # type: ignore[arg-type]
                found = []
                thread = threading.Thread(target=lambda: found.append(contexts.current()))
                thread.start()
                thread.join()
                assert found == [None]  # threads of the process are in no context
            with rpc.context() as second, pytest.raises(PhalanxError, match=f"context {first}"):
                rpc.backward(second, [y.sum()])
        rpc.shutdown()

    on_ranks(rank, 2)
