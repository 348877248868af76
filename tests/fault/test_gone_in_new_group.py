"""A rank that goes while the others make a group: they name it, and do not wait for the timeout.

No launcher tells anybody here. The ranks meet in a file, which remains, or in a store of rank 0's, which ends with it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from tests.support.islands import pretend_host
from tests.support.ports import held_port
from tests.support.ranks import Member, Outcome, run_ranks
from torch._C._distributed_c10d import TCPStore

import phalanx
from phalanx.c10d import create
from phalanx.errors import InitializationError
from phalanx.transports import meeting_store
from phalanx.transports.hosts.guard import Guard
from phalanx.transports.meeting_store import MeetingStore
from phalanx.transports.shm import segment

TIMEOUT_S = 200.0
LIMIT_S = 100.0  # a busy machine needs less, and a rank that waits for the timeout needs more
SIZE = 3

long = pytest.mark.long
WAYS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda: os._exit(0),
    "leaves": dist.destroy_process_group,
}


def join(member: Member, hosts: int, store: str = "file") -> None:
    """Make the world, and wait until all have it."""
    vars(meeting_store)["_LOOK_S"] = 0.05  # ranks that wait look for others that have gone, sooner than usual
    if hosts > 1:
        pretend_host(member.rank * hosts // member.size)
    timeout = timedelta(seconds=TIMEOUT_S)
    if store == "job":  # rank 0's own, of Phalanx
        where = f"tcp://127.0.0.1:{(member.folder / 'port').read_text()}"
        phalanx.init(init_method=where, rank=member.rank, world_size=member.size, timeout_s=TIMEOUT_S, quiet=True)
    elif store == "file":
        member.join(timeout_s=TIMEOUT_S)
    else:
        port = int((member.folder / "port").read_text())
        kept = TCPStore("127.0.0.1", port, member.size, is_master=member.rank == 0)
        dist.init_process_group("phalanx", store=kept, rank=member.rank, world_size=member.size, timeout=timeout)
    dist.barrier()


def made(ranks: Sequence[int]) -> str:
    """What a rank gets that makes a group of ranks; empty if it gets the group."""
    started, said = time.monotonic(), ""
    try:
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=TIMEOUT_S))
        if dist.get_rank() in ranks:
            dist.barrier(group=group)
    except InitializationError as error:
        said = f"{error.rank} {error}"
    assert time.monotonic() - started < LIMIT_S, said
    return said


def fall_at(place: Any, name: str, fall: Callable[[], object]) -> None:
    """Go in the middle of a step of making a group."""

    def falls(*_: Any, **__: Any) -> None:
        fall()

    pytest.MonkeyPatch().setattr(place, name, falls)


def told(
    victim: int,
    way: str,
    ranks: Sequence[int] = range(SIZE),
    size: int = SIZE,
    hosts: int = 1,
    store: str = "file",
    step: tuple[Any, str] | None = None,
) -> list[Outcome]:
    """What the ranks say of a new group of ``ranks``, with a victim that goes before it, or in a step of making it."""
    waiting = [f"made-{rank}" for rank in ranks if rank != victim]

    def body(member: Member) -> str:
        (member.folder / f"port-{member.rank}").write_text(str(port))
        (member.folder / f"port-{member.rank}").rename(member.folder / "port")
        join(member, hosts, store)
        member.meet("joined")
        if member.rank == victim:
            if step is not None:
                fall_at(*step, WAYS[way])
                made(ranks)
            WAYS[way]()
        text = made(ranks) if member.rank in ranks and member.rank != victim else ""
        member.say(f"made-{member.rank}")
        member.await_said(*waiting)  # that a rank which has raised ends says nothing to the others yet
        return text

    with held_port() as port:
        return run_ranks(body, size)


def check(outcomes: list[Outcome], victim: int, how: str, ranks: Sequence[int] = range(SIZE)) -> None:
    for outcome in outcomes:
        if outcome.rank in ranks and outcome.rank != victim:
            assert outcome.error is None, outcome.traceback
            assert outcome.value.startswith(f"{victim} rank {victim} (pid "), outcome.value
            assert f" {how}" in outcome.value, outcome.value


@pytest.mark.parametrize(
    ("hosts", "victim", "way"),
    [
        (1, 0, "killed"),
        (2, 1, "exits"),
        (2, 2, "leaves"),
        *(pytest.param(hosts, 1, way, marks=long) for hosts in (1, 2) for way in WAYS),
    ],
)
def test_gone_rank_is_named_by_all(hosts: int, victim: int, way: str) -> None:
    check(told(victim, way, hosts=hosts), victim, "has left in order" if way == "leaves" else "has ended")


@pytest.mark.parametrize(
    ("store", "victim", "hosts"),
    [("torch", 0, 1), ("job", 2, 1), *(pytest.param(*case, marks=long) for case in (("torch", 2, 2), ("job", 0, 2)))],
)
def test_gone_rank_is_named_whichever_store_they_meet_in(store: str, victim: int, hosts: int) -> None:
    check(told(victim, "killed", hosts=hosts, store=store), victim, "has ended")


INSIDE = [
    (1, 2, segment, "_reach"),
    (2, 0, create, "join_islands"),
    (2, 1, Guard, "_meet"),
    pytest.param(1, 2, segment, "_see_each_other", marks=long),
    pytest.param(1, 0, segment, "_collect_answers", marks=long),
    pytest.param(2, 2, create, "choose_engine", marks=long),
]


@pytest.mark.parametrize(("hosts", "victim", "place", "step"), INSIDE)
def test_rank_that_goes_in_the_middle_is_named(hosts: int, victim: int, place: Any, step: str) -> None:
    check(told(victim, "killed", hosts=hosts, step=(place, step)), victim, "has ended")


@pytest.mark.parametrize(
    ("hosts", "ranks", "victim"), [(2, [1, 2, 3], 2), pytest.param(1, [0, 4], 4, marks=pytest.mark.long)]
)
def test_gone_rank_is_named_in_a_group_of_some_ranks(hosts: int, ranks: list[int], victim: int) -> None:
    check(told(victim, "killed", ranks, 5, hosts), victim, "has ended", ranks)


@pytest.mark.parametrize(("hosts", "way"), [(2, "leaves"), pytest.param(1, "killed", marks=long)])
def test_rank_that_the_group_does_not_have_may_go(hosts: int, way: str) -> None:
    for outcome in told(1, way, [0, 2, 3], 4, hosts):
        if outcome.rank != 1:
            assert (outcome.value, outcome.traceback) == ("", "")


@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=long)])
def test_late_rank_that_has_left_another_group_is_waited_for(hosts: int) -> None:
    """It comes when the others have looked whether it has gone."""

    def body(member: Member) -> list[str]:
        join(member, hosts)
        kept = dist.group.WORLD, dist.new_group()
        if member.rank == 1:
            dist.destroy_process_group(kept[1])
        first = late(member, "first")
        member.meet("over")
        dist.destroy_process_group()
        member.join(timeout_s=TIMEOUT_S, name="again")
        return [first, late(member, "second")]

    def late(member: Member, name: str) -> str:
        own = MeetingStore.look

        def look(store: MeetingStore) -> None:
            own(store)
            member.say(f"{name}-{member.rank}")

        if member.rank == 1:
            member.await_said(*[f"{name}-{rank}" for rank in (0, 2)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MeetingStore, "look", look)
            return made(range(3))

    for outcome in run_ranks(body, 3):
        assert outcome.value == ["", ""], outcome.traceback


def fails() -> None:
    raise ValueError("this batch is empty")


@pytest.mark.parametrize(
    ("end", "how", "hosts"),
    [
        (fails, "has failed (ValueError: this batch is empty at ", 1),
        (lambda: sys.exit(3), "has failed (exit code 3)", 2),
        pytest.param(lambda: None, "has left in order", 1, marks=long),
        pytest.param(fails, "has failed (ValueError: this batch is empty at ", 2, marks=long),
    ],
)
def test_how_the_program_of_a_gone_rank_ended_is_told(end: Callable[[], None], how: str, hosts: int) -> None:
    """A process of multiprocessing's is a program that is forked."""

    def worker(member: Member) -> None:
        join(member, hosts)
        member.meet("joined")
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the traceback is expected
        end()

    def body(member: Member) -> str:
        if member.rank == 2:
            process = multiprocessing.get_context("fork").Process(target=worker, args=(member,))
            process.start()
            process.join()
            return ""
        join(member, hosts)
        member.meet("joined")
        text = made(range(3))
        member.say(f"made-{member.rank}")
        member.await_said("made-0", "made-1")
        return text

    check(run_ranks(body, 3), 2, how)
