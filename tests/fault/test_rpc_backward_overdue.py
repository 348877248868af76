"""A backward pass that does not end in time: who is to blame for it, where that worker is, and that nothing goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.rpc import workers
from tests.rpc.workers import with_workers
from tests.support.ranks import Member
from tests.support.waiting import stop

from phalanx import rpc
from phalanx.errors import CallTimeout, PhalanxError
from phalanx.rpc import inquiry
from phalanx.rpc.autograd import overdue
from phalanx.rpc.autograd.contexts import contexts
from phalanx.rpc.inquiry import Finding
from phalanx.rpc.members import Member as Worker

LONG_S = 200.0
ANSWER_S = 20.0
LATE_S = 8.0  # a pass comes as far as its last worker in that, also on a machine that lets one stand still
_gate = threading.Event()


class Waits(torch.autograd.Function):
    """The identity, whose backward waits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _gate.wait(LONG_S)  # in backward
        return gradient


def pass_on(way: list[str], x: torch.Tensor, *, waits: bool) -> torch.Tensor:
    """Goes along ``way``; the last worker may wait in backward."""
    if not way:
        waiting: torch.Tensor = Waits.apply(x) if waits else x * 2
        return waiting
    answer: torch.Tensor = rpc.call(way[0], pass_on, way[1:], x * 2, waits=waits)
    return answer * 2


def wait_for_answers() -> None:
    """Have this process give another the time to say what it does that a busy machine needs."""
    vars(overdue)["_PATIENCE_S"] = ANSWER_S
    vars(inquiry).update(_LEAST_S=ANSWER_S, _MOST_S=ANSWER_S)


@contextlib.contextmanager
def searching_until(has_come: Callable[[Worker, Finding], bool]) -> Iterator[None]:
    """Have this process search for who keeps a pass until that is who is awaited, in vain for ``LONG_S`` at most.

    A pass may be late because it has not come as far as that worker yet, on a machine that let one stand still.
    """
    search = vars(overdue)["_found"]

    def repeated(*asked: Any) -> tuple[Worker, Finding] | None:
        until = time.monotonic() + LONG_S
        while True:
            found: tuple[Worker, Finding] | None = search(*asked)
            if (found is not None and has_come(*found)) or time.monotonic() > until:
                return found
            time.sleep(0.05)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overdue, "_found", repeated)
        yield


def place_of_wait() -> int:
    with open(__file__) as file:
        return next(number for number, text in enumerate(file, 1) if text.endswith("# in backward\n"))


def open_gate() -> None:
    _gate.set()


def passes() -> int:
    return sum(len(context.passes) for context in contexts.all())


def test_the_worker_that_computes_is_named_with_its_function_and_line() -> None:
    size = 3

    def body(member: Member) -> Any:
        if member.rank:
            return None
        wait_for_answers()
        way = [f"worker{rank}" for rank in range(1, size)]
        with rpc.context() as context_id:
            loss = pass_on(way, torch.ones(3, requires_grad=True), waits=True).sum()
            with (
                searching_until(lambda _, found: f":{place_of_wait()})" in found.at),
                pytest.raises(CallTimeout) as caught,
            ):
                rpc.backward(context_id, [loss], timeout_s=LATE_S)
            error = caught.value
            for name in way:  # it has been given up everywhere, though one is still in a function
                while rpc.call(name, passes):
                    time.sleep(0.01)
            with pytest.raises(PhalanxError):
                rpc.backward(context_id + 1, [loss])
        rpc.call(way[-1], open_gate)
        return error.worker, error.rank, error.cause, error.at, error.line, str(error)

    worker, rank, cause, at, line, text = with_workers(body, size)[0]
    place = place_of_wait()
    assert (worker, rank, cause) == (f"worker{size - 1}", size - 1, "handler")
    assert at in (f"Waits.backward ({__file__}:{place})", f"backward ({__file__}:{place})")
    assert line.startswith(__file__)
    assert text.startswith(f"worker{size - 1} (rank {size - 1}, pid ")
    assert f"did not answer within {LATE_S:g} s: its part of backward() ({line}). It has computed that for" in text


def test_a_stopped_worker_is_named_and_another_pass_works_when_it_goes_on() -> None:
    size = 3

    def body(member: Member) -> Any:
        if member.rank:
            return None
        way = [f"worker{rank}" for rank in range(1, size)]
        pid = rpc.call(way[-1], workers.pid)
        leaf = torch.ones(3, requires_grad=True)
        with rpc.context() as context_id:
            loss = pass_on(way, leaf, waits=False).sum()
            stop(pid)
            try:
                rpc.session.agent().timeout_s = LATE_S  # the default is that of calls
                with searching_until(lambda _, found: found.cause == "stopped"), pytest.raises(CallTimeout) as caught:
                    rpc.backward(context_id, [loss])
                assert caught.value.timeout_s == LATE_S
            finally:
                rpc.session.agent().timeout_s = LONG_S
                os.kill(pid, signal.SIGCONT)
        with rpc.context() as context_id:
            loss = pass_on(way, leaf, waits=False).sum()
            rpc.backward(context_id, [loss])
            assert rpc.get_gradients(context_id)[leaf].tolist() == [2.0 * 4 ** (size - 1)] * 3
        return caught.value.worker, caught.value.cause, caught.value.pid == pid

    assert with_workers(body, size)[0] == (f"worker{size - 1}", "stopped", True)
