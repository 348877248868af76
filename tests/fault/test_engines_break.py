"""UCX between hosts, by itself: transfers that nobody answers. Groups that use it break in ``test_hosts_break.py``."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
from tests.support.connecting import needs_ucx, ucx_engine
from tests.support.ranks import Member, run_ranks

from phalanx.transports.hosts.lane import TransferFailed, TransferLate

pytestmark = needs_ucx


def test_a_transfer_that_nobody_answers_ends_with_the_timeout_or_the_group() -> None:
    def body(member: Member) -> tuple[type, type]:
        engine = ucx_engine(member.store(), member.rank, 2, timedelta(seconds=60))
        peer, memory = 1 - member.rank, torch.zeros(1000)
        coming = engine.recv(memory, peer, 0)
        engine.send(torch.ones(1000), peer, 0).wait()
        coming.wait()
        assert memory.eq(1).all()
        engine.set_timeout(timedelta(seconds=0.2))
        with pytest.raises(TransferLate) as late:
            engine.recv(memory, peer, 5).wait()
        (member.folder / f"late{member.rank}").touch()
        while not (member.folder / f"late{peer}").exists():
            time.sleep(0.01)
        waits = engine.recv(memory, peer, 6)
        engine.abort()
        with pytest.raises(TransferFailed) as aborted:
            waits.wait()
        engine.close()
        return late.type, aborted.type

    for outcome in run_ranks(body, 2):
        assert outcome.error is None, outcome.traceback
        assert outcome.value == (TransferLate, TransferFailed)
