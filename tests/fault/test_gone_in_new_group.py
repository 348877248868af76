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

import pytest
import torch.distributed as dist
from tests.fault.test_gone_in_first_init import LIMIT_S, TIMEOUT_S
from tests.support.islands import pretend_host
from tests.support.ports import held_port
from tests.support.ranks import Member, run_ranks, values
from torch._C._distributed_c10d import TCPStore

import phalanx
from phalanx.errors import InitializationError
from phalanx.membership import rendezvous_store
from phalanx.membership.rendezvous_store import RendezvousStore

long = pytest.mark.long
WAYS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda: os._exit(0),
    "leaves": dist.destroy_process_group,
}


def join(member: Member, hosts: int, store: str = "file", port: int = 0) -> None:
    """Make the world, and wait until all have it."""
    vars(rendezvous_store)["_LOOK_S"] = 0.05  # ranks that wait look for others that have gone, sooner than usual
    if hosts > 1:
        pretend_host(member.rank * hosts // member.size)
    timeout = timedelta(seconds=TIMEOUT_S)
    if store == "job":  # rank 0's own, of Phalanx
        where = f"tcp://127.0.0.1:{port}"
        phalanx.init(init_method=where, rank=member.rank, world_size=member.size, timeout_s=TIMEOUT_S, quiet=True)
    elif store == "file":
        member.join(timeout_s=TIMEOUT_S)
    else:
        kept = TCPStore("127.0.0.1", port, member.size, is_master=member.rank == 0)
        dist.init_process_group("phalanx", store=kept, rank=member.rank, world_size=member.size, timeout=timeout)
    dist.barrier()
    member.meet("joined")


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


def told(
    victim: int,
    way: str,
    ranks: Sequence[int] = range(3),
    *,
    size: int = 3,
    hosts: int = 1,
    store: str = "file",
) -> list[str]:
    """Return what ranks say of a new group, with a victim that goes before it."""
    others = [rank for rank in ranks if rank != victim]

    def body(member: Member) -> str:
        join(member, hosts, store, port)
        if member.rank == victim:
            WAYS[way]()
        text = made(ranks) if member.rank in others else ""
        member.say(f"made-{member.rank}")
        member.await_said(*(f"made-{rank}" for rank in others))  # one that ends says nothing to the others yet
        return text

    with held_port() as port:
        outcomes = run_ranks(body, size)
    return values([outcomes[rank] for rank in others])


def check(said: list[str], victim: int, how: str = "has ended") -> None:
    for text in said:
        assert text.startswith(f"{victim} rank {victim} (pid "), text
        assert f" {how}" in text, text


@pytest.mark.parametrize(
    ("hosts", "victim", "way"),
    [(1, 0, "killed"), (2, 1, "exits"), (2, 2, "leaves"), *(pytest.param(1, 1, way, marks=long) for way in WAYS)],
)
def test_gone_rank_is_named_by_all(hosts: int, victim: int, way: str) -> None:
    check(told(victim, way, hosts=hosts), victim, "has left in order" if way == "leaves" else "has ended")


@pytest.mark.parametrize(("store", "victim"), [("torch", 0), ("job", 2), pytest.param("job", 0, marks=long)])
def test_gone_rank_is_named_whichever_store_they_meet_in(store: str, victim: int) -> None:
    check(told(victim, "killed", store=store), victim)


def test_gone_rank_is_named_in_a_group_of_some_ranks() -> None:
    check(told(2, "killed", [1, 2, 3], size=5, hosts=2), 2)


def test_rank_that_the_group_does_not_have_may_go() -> None:
    assert told(1, "leaves", [0, 2, 3], size=4, hosts=2) == [""] * 3


@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=long)])
def test_late_rank_that_has_left_another_group_is_waited_for(hosts: int) -> None:
    """It comes when the others have looked whether it has gone."""
    own = RendezvousStore.look

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
        def look(store: RendezvousStore) -> None:
            own(store)
            member.say(f"{name}-{member.rank}")

        if member.rank == 1:
            member.await_said(f"{name}-0", f"{name}-2")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RendezvousStore, "look", look)
            return made(range(3))

    assert values(run_ranks(body, 3)) == [["", ""]] * 3


def fails() -> None:
    raise ValueError("this batch is empty")


@pytest.mark.parametrize(
    ("end", "how", "hosts"),
    [
        (fails, "has failed (ValueError: this batch is empty at ", 1),
        (lambda: sys.exit(3), "has failed (exit code 3)", 2),
    ],
)
def test_how_the_program_of_a_gone_rank_ended_is_told(end: Callable[[], None], how: str, hosts: int) -> None:
    """A process of multiprocessing's is a program that is forked."""

    def program(member: Member) -> None:
        join(member, hosts)
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the traceback is expected
        end()

    def body(member: Member) -> str:
        if member.rank == 2:
            process = multiprocessing.get_context("fork").Process(target=program, args=(member,))
            process.start()
            process.join()
            return ""
        join(member, hosts)
        text = made(range(3))
        member.say(f"made-{member.rank}")
        member.await_said("made-0", "made-1")
        return text

    check(values(run_ranks(body, 3))[:2], 2, how)
