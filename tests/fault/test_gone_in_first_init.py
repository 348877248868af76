"""A rank that goes, or is stopped, while the first world is made, under a launcher that tells nobody.

The store is torchrun's, which does not know its clients; or rank 0's, of torch, which ends with it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import pretend_host
from tests.support.ports import held_port
from tests.support.ranks import Member, Outcome, run_ranks, values
from tests.support.waiting import soon
from torch._C._distributed_c10d import TCPStore

import phalanx
from phalanx.c10d import create, quick
from phalanx.errors import InitializationError
from phalanx.membership import rendezvous_store, store_protocol
from phalanx.membership.abort import GroupAbort
from phalanx.membership.rendezvous_store import RendezvousStore
from phalanx.system.processes import own_sight
from phalanx.topology import device
from phalanx.transports.shm import segment

TIMEOUT_S = 200.0
LIMIT_S = 100.0  # a busy machine needs less, and a rank that waits for the timeout needs more
GIVEN_UP_S = 2.5  # many times what it takes to be told, since the others wait for it
long = pytest.mark.long


class Fault(Exception):
    """What the script of a rank raises."""


def fail() -> None:
    raise Fault("this batch is empty")


WAYS: dict[str, tuple[Callable[[], object], str]] = {
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "has ended while"),
    "exits at once": (lambda: os._exit(3), "has ended while"),
    "exits": (lambda: sys.exit(0), "has ended with exit code 0 while"),
    "raises": (fail, "has failed (Fault: this batch is empty) while"),
}
Step = tuple[Any, str]
REACH, SEGMENT = (segment, "_reach"), (segment, "_make_segment")
OPEN, GATHER, ISLANDS = (device, "open_device"), (importlib.import_module("phalanx.world"), "gather"), "find_hosts"


def as_launched(member: Member, size: int, port: int, torchrun: bool) -> None:
    """The variables of a launcher."""
    place = {"RANK": member.rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if torchrun:
        place |= {"LOCAL_RANK": member.rank, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
        place |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        place |= {"TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in place.items()})


def join(by: str, timeout_s: float = TIMEOUT_S) -> None:
    if by == "init":
        phalanx.init(timeout_s=timeout_s, quiet=True, device="cpu")
    else:
        dist.init_process_group("phalanx", timeout=timedelta(seconds=timeout_s))


def leave(by: str) -> None:
    (phalanx.close if by == "init" else dist.destroy_process_group)()


def fall_at(place: Any, name: str, fall: Callable[[], object]) -> None:
    """Go in a step of making the world."""

    def falls(*_: Any, **__: Any) -> None:
        fall()

    pytest.MonkeyPatch().setattr(place, name, falls)


def under_launcher(
    places: Sequence[tuple[int, int]], body: Callable[[Member], Any], *, torchrun: bool = True
) -> list[Outcome]:
    """Run a function on processes with these ranks and world sizes in their environments; a member's rank is its place.

    Under ``torchrun`` a further process keeps their store, as its agent does.
    """
    numbers = range(len(places))

    def started(member: Member) -> Any:
        if member.rank == len(places):
            store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            member.say("kept")
            soon(lambda: all(has_gone(member, number) for number in numbers), TIMEOUT_S)
            del store
            return None
        if torchrun:
            member.await_said("kept")
        rank, size = places[member.rank]
        as_launched(Member(rank, size, member.folder), size, port, torchrun)
        try:
            return body(member)
        finally:
            member.say(f"over-{member.rank}")

    def has_gone(member: Member, number: int) -> bool:
        return any((member.folder / f"{how}-{number}").exists() for how in ("over", "goes"))

    with held_port() as port:
        return run_ranks(started, len(places) + torchrun)[: len(places)]


def ranks_of(size: int) -> list[tuple[int, int]]:
    return [(rank, size) for rank in range(size)]


def told(by: str, victim: int, way: str, step: Step, *, hosts: int = 1, torchrun: bool = True) -> None:
    """Check what the others say, and that they say it long before the timeout."""
    go, how = WAYS[way]

    def body(member: Member) -> str:
        if hosts > 1:
            host = member.rank * hosts // 3
            pretend_host(host)
            pytest.MonkeyPatch().setattr(store_protocol, "own_sight", lambda: f"{own_sight()}-{host}")
        if by == "init" and not torchrun:  # a rank that has lost the store looks for that long why
            pytest.MonkeyPatch().setattr(rendezvous_store, "_ENDING_S", 1.0)
        if member.rank == victim:

            def fall() -> None:
                member.say(f"goes-{victim}")
                go()

            fall_at(*step, fall)
        started, said = time.monotonic(), ""
        try:
            join(by)
        except InitializationError as error:
            said = f"{error.rank} {error}"
        assert time.monotonic() - started < LIMIT_S, said
        return said

    outcomes = under_launcher(ranks_of(3), body, torchrun=torchrun)
    for said in values([outcome for outcome in outcomes if outcome.rank != victim]):
        assert said.startswith(f"{victim} rank {victim} (pid "), said
        # A store that sees the connection end, or ends itself, says that as well.
        for more in (" or given up", ", and the store with it,"):
            said = said.replace(more, "")
        assert how in said, said


@pytest.mark.parametrize(
    ("by", "victim", "way", "step"),
    [
        ("torch", 2, "exits at once", REACH),
        ("init", 1, "exits", REACH),
        ("init", 0, "raises", SEGMENT),
        pytest.param("torch", 0, "killed", SEGMENT, marks=long),
        pytest.param("init", 2, "raises", OPEN, marks=long),
    ],
)
def test_gone_rank_is_named_under_torchrun(by: str, victim: int, way: str, step: Step) -> None:
    told(by, victim, way, step)


@pytest.mark.parametrize(
    ("by", "victim", "way", "step"),
    [
        ("torch", 2, "raises", REACH),
        ("init", 0, "killed", OPEN),
        ("init", 2, "killed", OPEN),
        pytest.param("init", 0, "raises", OPEN, marks=long),
    ],
)
def test_gone_rank_is_named_where_rank_0_has_the_store(by: str, victim: int, way: str, step: Step) -> None:
    told(by, victim, way, step, torchrun=False)


@pytest.mark.parametrize(
    ("by", "victim", "way", "step"),
    [
        ("torch", 1, "killed", (GroupAbort, "join")),
        ("torch", 2, "raises", (create, ISLANDS)),  # alone on its host
        pytest.param("init", 0, "killed", (create, ISLANDS), marks=long),
    ],
)
def test_gone_rank_is_told_to_other_hosts(by: str, victim: int, way: str, step: Step) -> None:
    told(by, victim, way, step, hosts=2)


@pytest.mark.parametrize("by", ["torch", pytest.param("init", marks=long)])
def test_failed_meeting_does_not_end_the_next_one(by: str) -> None:
    """A rank comes to the next one when the others have looked whether it has gone."""
    own = RendezvousStore.look

    def body(member: Member) -> str:
        def look(store: RendezvousStore) -> None:
            own(store)
            member.say(f"looked-{member.rank}")

        said = ""
        with pytest.MonkeyPatch.context() as patch:
            if member.rank == 1:  # at another step than those at which the others fail
                patch.setattr(*(OPEN if by == "init" else REACH), lambda *_: fail())
            try:
                join(by)
            except (InitializationError, Fault) as error:
                said = str(error)
        member.say(f"failed-{member.rank}")
        member.await_said("failed-0", "failed-1", "failed-2")
        if member.rank == 1:
            member.await_said("looked-0", "looked-2")
        pytest.MonkeyPatch().setattr(RendezvousStore, "look", look)
        join(by)
        dist.all_reduce(torch.ones(4))
        leave(by)
        return said

    for said in values(under_launcher(ranks_of(3), body)):
        assert "this batch is empty" in said


def test_rank_that_ends_as_soon_as_it_is_in_disturbs_nobody() -> None:
    """The others come to their end of the meeting when that rank has ended."""
    own: Callable[..., None] = quick.quicken

    def body(member: Member) -> None:
        def late(*arguments: Any) -> None:
            member.await_said("goes-1")
            own(*arguments)

        if member.rank != 1:
            pytest.MonkeyPatch().setattr(create, "quicken", late)
        join("torch")
        if member.rank == 1:
            member.say("goes-1")
            os._exit(0)

    values([outcome for outcome in under_launcher(ranks_of(3), body) if outcome.rank != 1])


@pytest.mark.parametrize(
    ("by", "victim", "step", "torchrun"),
    [
        ("init", 1, REACH, True),
        ("init", 0, GATHER, False),
        pytest.param("torch", 1, REACH, True, marks=long),
        pytest.param("init", 0, OPEN, False, marks=long),
    ],
)
def test_stopped_rank_is_named_at_the_timeout(by: str, victim: int, step: Step, torchrun: bool) -> None:
    others = [rank for rank in range(3) if rank != victim]

    def body(member: Member) -> str:
        if member.rank == victim:

            def fall() -> None:
                (member.folder / "pid.part").write_text(str(os.getpid()))
                (member.folder / "pid.part").rename(member.folder / "pid")
                os.kill(os.getpid(), signal.SIGSTOP)
                raise Fault("continued")

            fall_at(*step, fall)
            with pytest.raises(Fault):
                join(by)
            return ""
        began = time.monotonic()
        with pytest.raises(InitializationError) as caught:
            join(by, GIVEN_UP_S)
        assert time.monotonic() - began < 2.9 * GIVEN_UP_S  # one that waits in several steps, each as long, needs more
        member.say(f"told-{member.rank}")
        if member.rank == others[0]:
            member.await_said(*(f"told-{rank}" for rank in others), "pid")
            os.kill(int((member.folder / "pid").read_text()), signal.SIGCONT)
        return str(caught.value)

    found = values(under_launcher(ranks_of(3), body, torchrun=torchrun))
    for rank in others:
        assert found[rank].startswith(f"rank {victim} (pid "), found
        assert "is stopped (state T)" in found[rank]
