"""What the ranks say when they cannot meet."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Mapping

import pytest
from tests.support.golden import check_facts
from tests.support.ranks import Member, on_ranks

import phalanx
from phalanx.errors import InitializationError
from phalanx.membership import rendezvous

PATIENCE_S = 100.0  # of a rank that another one is to answer
GIVEN_UP_S = 3.0  # the timeout of a rank 0 that waits in vain; the others must have been heard a second before
Told = tuple[str, str]  # an error, and what was printed


def by_slurm(rank: int) -> dict[str, object]:
    """How srun tells three ranks their places, from which follows that of one that does not come."""
    return {
        "SLURM_JOB_ID": 7,
        "SLURM_STEP_ID": 0,
        "SLURM_PROCID": rank,
        "SLURM_STEP_NUM_TASKS": 3,
        "SLURM_LOCALID": 0,
        "SLURM_NODEID": rank,
        "SLURM_STEP_NUM_NODES": 3,
        "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
        "SLURM_STEP_NODELIST": "h[0-2]",
        "PHALANX_HOST": f"h{rank}",
    }


def joining(place: Mapping[str, object], at_port: int, timeout_s: float) -> Told:
    """Join as a launcher that sets these variables has it; what the user reads if that fails."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as printed:
        for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": at_port}.items():
            patch.setenv(name, str(value))
        try:
            phalanx.init(timeout_s=timeout_s, device="cpu")
        except InitializationError as error:
            return f"{type(error).__module__}.{type(error).__qualname__}: {error}", printed.getvalue()
    return "", printed.getvalue()


def test_rank_that_does_not_come_is_named_meanwhile_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "REMIND_S", GIVEN_UP_S - 1)
    at_port = 14_000 + os.getpid() % 8_000  # below those that the kernel gives out

    def body(member: Member) -> Told:
        if member.rank == 0:
            member.await_said("searches")
            return joining(by_slurm(0), at_port, GIVEN_UP_S)
        if member.rank == 1:
            member.say("searches")
            return joining(by_slurm(1), at_port, PATIENCE_S)
        return "", ""

    (of_rank_0, printed), (of_rank_1, _), _ = on_ranks(body, 3)
    who = "rank 2 of 3; no rank has come from node 2 (h2)"
    missing = rf"after [\d.]+ s {re.escape(who)} had not come to rank 0 on h0; check whether they were started"
    check_facts(of_rank_0, rf"^phalanx\.errors\.InitializationError: {missing}")
    check_facts(of_rank_1, rf"^phalanx\.errors\.InitializationError: rank 1 had joined, but {missing}")
    assert re.fullmatch(rf"phalanx: waiting for {re.escape(who)}, [\d.]+ s so far\n", printed), printed
