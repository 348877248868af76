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
from tests.fault.test_gone_in_first_init import Fault, fall_at, join, ranks_of, under_launcher
from tests.support.ranks import Member

from phalanx.errors import InitializationError
from phalanx.store import company
from phalanx.topology import device
from phalanx.transports import meeting_store
from phalanx.transports.shm import segment

SOON_S = 0.3  # in place of the seconds for which a rank is stopped before the user is told
GIVEN_UP_S = 2.0  # many times what it takes to be told, since the others wait for it
ALL_STEPS_S = 2.9 * GIVEN_UP_S  # a rank that waits in several steps, each as long, needs more

WORLD = importlib.import_module("phalanx.world")


def stopped(member: Member, by: str, victim: int, place: Any, step: str) -> tuple[str, float, str]:
    """What this rank raises, after how long, and what it prints."""
    for one in (company, meeting_store):
        pytest.MonkeyPatch().setattr(one, "_STOPPED_S", SOON_S)
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
    others = [rank for rank in range(3) if rank != victim]
    if member.rank == others[0]:
        member.await_said(*(f"told-{rank}" for rank in others), "pid")
        os.kill(int((member.folder / "pid").read_text()), signal.SIGCONT)
    return said, took_s, printed.getvalue()


@pytest.mark.parametrize(
    ("by", "victim", "place", "step", "torchrun"),
    [
        ("init", 1, segment, "_see_each_other", True),
        ("init", 0, WORLD, "gather", False),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("torch", 1, segment, "_reach", True),
                ("torch", 2, segment, "_see_each_other", False),
                ("init", 0, WORLD, "gather", True),
                ("init", 0, device, "open_device", False),
                ("init", 0, segment, "_make_segment", False),
            )
        ),
    ],
)
def test_a_stopped_rank_is_told_once_and_named_at_the_timeout(
    by: str, victim: int, place: Any, step: str, torchrun: bool
) -> None:
    outcomes = under_launcher(ranks_of(3), lambda member: stopped(member, by, victim, place, step), torchrun=torchrun)
    printed = ""
    for outcome in outcomes:
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
