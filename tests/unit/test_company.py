"""Which ranks a rank looks at while it waits in Phalanx's own store, and who tells of one that is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from tests.support.stores import Job, claim
from torch._C._distributed_c10d import HashStore
from torch.distributed import DistError

from phalanx.errors import InitializationError
from phalanx.store.claim import Claim
from phalanx.store.company import NEIGHBOURS, Company, neighbours
from phalanx.system.awake import AwakeClock
from phalanx.system.process_use import start_of
from phalanx.system.sight import own_sight
from phalanx.transports.meeting_store import MeetingStore, meeting_within, time_left

LIMIT_S = 60.0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as started:
        yield started
        started.kill()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 9, 20])
def test_a_rank_looks_at_the_nearest_ranks_of_its_host_in_a_ring(size: int, hosts: int) -> None:
    claims = [claim(rank, size, sight=f"host {rank % hosts}") for rank in range(size)]
    for own in range(size):
        seen = neighbours(claims, own)
        here = [rank for rank in range(size) if rank % hosts == own % hosts]
        at = here.index(own)
        wanted = {here[(at + step) % len(here)] for step in range(-NEIGHBOURS, NEIGHBOURS + 1)} - {own}
        assert sorted(each.rank for each in seen) == sorted(wanted)


def test_a_rank_without_a_sight_of_others_looks_at_nobody() -> None:
    claims = [claim(rank, 3) for rank in range(3)]
    assert neighbours(claims, 1) == []


def test_of_the_ranks_that_see_a_stopped_one_one_tells(process: subprocess.Popen[bytes]) -> None:
    size, victim = 6, 2
    claims = []
    for rank in range(size):
        pid = process.pid if rank == victim else os.getpid()
        claims.append(claim(rank, size, pid=pid, start=start_of(pid), sight=own_sight()))
    told: list[str] = []
    companies = [Company(told.append) for rank in range(size) if rank != victim]
    for rank, company in zip((0, 1, 3, 4, 5), companies, strict=True):
        company.meet(neighbours(claims, rank))
        company.look()
    assert all(company.find_stopped() is None for company in companies)
    stop(process)
    until = time.monotonic() + LIMIT_S
    while not told and time.monotonic() < until:
        for company in companies:
            company.look()
        time.sleep(0.1)
    for company in companies:
        company.look()
    assert [line.split(" is stopped")[0] for line in told] == [f"rank {victim} (pid {process.pid} on h{victim})"]
    for company in companies:
        found = company.find_stopped()
        assert found is not None
        assert (found.rank, found.pid, found.host) == (victim, process.pid, f"h{victim}")
        company.part()
        assert company.find_stopped() is None


def test_another_process_that_has_the_id_now_is_not_taken_for_the_rank(process: subprocess.Popen[bytes]) -> None:
    stop(process)
    company = Company()
    company.meet([claim(1, 2, pid=process.pid, start=start_of(process.pid) + 1, sight=own_sight())])
    assert company.find_stopped() is None


def test_the_store_names_to_each_rank_those_that_it_may_look_at() -> None:
    def of() -> dict[str, Any]:
        return {"sight": own_sight(), "start": start_of(os.getpid()), "pid": os.getpid()}

    with Job(3, **of()) as job:
        stores = [job.join(rank, **of()) for rank in (1, 2)]
        for store in stores:
            assert store.wait_for_all(LIMIT_S) == ""
        for rank, store in enumerate([job.ranks[0], *stores]):
            seen = {(each.rank, each.pid, each.token) for each in store.company._all}
            assert seen == {(other, os.getpid(), "") for other in range(3) if other != rank}


def test_a_rank_that_gives_up_because_of_another_names_that_one_to_the_rest() -> None:
    reason = InitializationError.rank_stopped(2, 77, "h2", "stopped (state T)", "ranks 0-2")
    with Job(3) as job:
        first, second, third = job.everybody()
        for store in (first, second, third):
            store.meeting(begins=True)
        second.give_up(reason)
        second.end()
        for store in (first, third):
            with pytest.raises(InitializationError) as caught:
                store.wait(["never"], timedelta(seconds=LIMIT_S))
            assert (str(caught.value), caught.value.rank, caught.value.pid, caught.value.host) == (
                str(reason),
                2,
                77,
                "h2",
            )


def test_all_steps_of_a_meeting_have_the_timeout_together() -> None:
    store = MeetingStore("part", HashStore(), range(2), world=True)
    clock, long = AwakeClock(), timedelta(seconds=1000)
    began = time.monotonic()
    assert time_left(long) == long
    with meeting_within(clock, 0.5):
        assert time_left(long) <= timedelta(seconds=0.5)
        assert time_left(timedelta(seconds=0.01)) == timedelta(seconds=0.01)
        with pytest.raises(DistError):
            store.wait(["never"], long)
        assert time_left(long) > timedelta(0)
    assert time.monotonic() - began < 500


def test_a_claim_that_is_shown_to_other_ranks_has_no_token() -> None:
    own = claim(1, 3, token="a secret", sight="x")
    assert Claim.decode(own.without_token().encode()).token == ""
