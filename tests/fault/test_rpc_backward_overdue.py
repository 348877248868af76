"""A backward pass that does not end in time: who is to blame for it, where that worker is, and that nothing goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.rpc import workers
from tests.rpc.workers import with_workers
from tests.support.ranks import Member
from tests.support.waiting import soon, stop

from phalanx import rpc
from phalanx.errors import CallTimeout
from phalanx.rpc.autograd.contexts import contexts

LONG_S = 200.0
LATE_S = 0.5
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


def open_gate() -> None:
    _gate.set()


def passes() -> int:
    return sum(len(context.passes) for context in contexts.all())


def overdue(way: list[str], prepare: Callable[[], object], enough: Callable[[CallTimeout], bool]) -> CallTimeout:
    """The first timeout of a pass that says enough: an earlier one may not have come to the last worker yet."""
    until = time.monotonic() + LONG_S
    while True:
        with rpc.context() as context_id:
            loss = pass_on(way, torch.ones(3, requires_grad=True), waits=True).sum()
            prepare()
            with pytest.raises(CallTimeout) as caught:
                rpc.backward(context_id, [loss], timeout_s=LATE_S)
            done = enough(caught.value) or time.monotonic() > until
            for name in way:  # it has been given up everywhere, though the last one is still in a function
                assert soon(lambda name=name: rpc.call(name, passes) == 0)  # type: ignore[misc]
        if done:
            return caught.value


def test_overdue_pass_names_who_keeps_it_and_a_later_one_works() -> None:
    size, last = 3, "worker2"
    with open(__file__) as file:
        line = next(number for number, text in enumerate(file, 1) if text.endswith("# in backward\n"))

    def body(member: Member) -> None:
        if member.rank:
            return
        way = [f"worker{rank}" for rank in range(1, size)]
        pid = rpc.call(last, workers.pid)
        late = overdue(way, int, lambda error: f"{__file__}:{line})" in error.at)
        assert (late.worker, late.rank, late.pid, late.cause) == (last, 2, pid, "handler")
        assert f"backward ({__file__}:{line})" in late.at
        assert late.line.startswith(__file__)
        assert str(late).startswith(f"{last} (rank 2, pid {pid}")
        assert f"did not answer within {LATE_S:g} s: its part of backward() ({late.line}), " in str(late)
        assert "It has worked on this for" in str(late)

        def go_on() -> None:
            os.kill(pid, signal.SIGCONT)

        def enough(error: CallTimeout) -> bool:
            go_on()
            return error.cause == "stopped"

        try:
            late = overdue(way, lambda: stop(pid), enough)
        finally:
            go_on()
        assert (late.worker, late.cause, late.pid) == (last, "stopped", pid)
        rpc.call(last, open_gate)
        with rpc.context() as context_id:
            leaf = torch.ones(3, requires_grad=True)
            rpc.backward(context_id, [pass_on(way, leaf, waits=False).sum()])
            assert rpc.get_gradients(context_id)[leaf].tolist() == [2.0 * 4 ** (size - 1)] * 3

    with_workers(body, size)
