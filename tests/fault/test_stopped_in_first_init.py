"""A rank that is stopped while the first world is made: the user is told soon, and the others at the timeout."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import time
from typing import Any

import pytest
from tests.fault.test_gone_in_first_init import Fault, fall_at, join, under_launcher
from tests.support.ranks import Member

from phalanx.errors import InitializationError
from phalanx.topology import device
from phalanx.transports.shm import segment

GIVEN_UP_S = 12.0  # several times what it takes to be told, since the others wait for it
ALL_STEPS_S = 2.9 * GIVEN_UP_S  # a rank that waits in several steps, each as long, needs more

WORLD = importlib.import_module("phalanx.world")


def stopped(member: Member, by: str, size: int, victim: int, place: Any, step: str) -> tuple[str, float, str]:
    """What this rank raises, after how long, and what it prints."""
    if member.rank == victim:

        def fall() -> None:
            (member.folder / "pid.part").write_text(str(os.getpid()))
            (member.folder / "pid.part").rename(member.folder / "pid")
            os.kill(os.getpid(), signal.SIGSTOP)
            raise Fault("continued")

        fall_at(place, step, fall)
        with pytest.raises(Fault):
            join(by)
        return "", 0.0, ""
    said, printed = "", io.StringIO()
    began = time.monotonic()
    with contextlib.redirect_stderr(printed):
        try:
            join(by, GIVEN_UP_S)
        except InitializationError as error:
            said = str(error)
    took_s = time.monotonic() - began
    member.say(f"told-{member.rank}")
    others = [rank for rank in range(size) if rank != victim]
    if member.rank == others[0]:
        member.await_said(*(f"told-{rank}" for rank in others), "pid")
        os.kill(int((member.folder / "pid").read_text()), signal.SIGCONT)
    return said, took_s, printed.getvalue()


def check(by: str, size: int, victim: int, place: Any, step: str, *, torchrun: bool) -> None:
    outcomes = under_launcher(size, lambda member: stopped(member, by, size, victim, place, step), torchrun=torchrun)
    printed = ""
    for outcome in outcomes[:size]:
        if outcome.rank == victim:
            continue
        assert outcome.error is None, outcome.traceback
        said, took_s, lines = outcome.value
        assert said.startswith(f"rank {victim} (pid "), said
        assert "is stopped (state T)" in said, said
        assert took_s < ALL_STEPS_S, said
        printed += lines
    assert printed.count(f"rank {victim} (pid ") == 1, printed
    assert "is stopped (state T)" in printed


@pytest.mark.parametrize("step", ["_reach", "_see_each_other"])
@pytest.mark.parametrize(("by", "torchrun"), [("init", True), ("torch", True), ("torch", False), ("init", False)])
def test_a_rank_that_is_stopped_is_told_soon_and_named_at_the_timeout(by: str, step: str, torchrun: bool) -> None:
    check(by, 3, 1, segment, step, torchrun=torchrun)


@pytest.mark.parametrize(
    ("place", "step"),
    [(WORLD, "gather"), (device, "open_device"), (segment, "_make_segment"), (segment, "_see_each_other")],
)
@pytest.mark.parametrize("torchrun", [True, False])
def test_rank_0_that_is_stopped_is_told_soon_and_named_at_the_timeout(place: Any, step: str, torchrun: bool) -> None:
    check("init", 3, 0, place, step, torchrun=torchrun)


@pytest.mark.parametrize("victim", [2, 4])
def test_of_five_ranks_one_tells_and_all_name_it(victim: int) -> None:
    check("init", 5, victim, WORLD, "gather", torchrun=False)
