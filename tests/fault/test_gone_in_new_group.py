"""A rank that goes while the others make a group: they name it, and do not wait for the timeout.

No launcher tells anybody here. The ranks meet in a file, which remains, or in a store of rank 0's, which ends with it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch.distributed as dist
from tests.support.hosts import TestHosts, running_hosts, why_no_hosts
from tests.support.islands import pretend_host
from tests.support.ports import held_port
from tests.support.ranks import Member, Outcome, run_ranks
from torch._C._distributed_c10d import TCPStore

import phalanx
from phalanx.c10d import create
from phalanx.errors import InitializationError
from phalanx.transports.hosts.guard import Guard
from phalanx.transports.shm import segment

TIMEOUT_S = 200.0
LIMIT_S = 100.0  # a busy machine needs less, and a rank that waits for the timeout needs more

WAYS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda: os._exit(0),
    "leaves": dist.destroy_process_group,
}


def join(member: Member, store: str) -> None:
    """Make the world, and wait until all have it."""
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
    size: int,
    victim: int,
    way: str,
    ranks: Sequence[int],
    store: str = "file",
    hosts: int = 1,
    step: tuple[Any, str] | None = None,
) -> list[Outcome]:
    """What the ranks say of a new group of ``ranks``, with a victim that goes before it, or in a step of making it."""
    waiting = [f"made-{rank}" for rank in ranks if rank != victim]

    def body(member: Member) -> str:
        (member.folder / f"port-{member.rank}").write_text(str(port))
        (member.folder / f"port-{member.rank}").rename(member.folder / "port")
        if hosts > 1:
            pretend_host(member.rank * hosts // size)
        join(member, store)
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


def check(outcomes: list[Outcome], victim: int, way: str, ranks: Sequence[int]) -> None:
    for outcome in outcomes:
        if outcome.rank == victim or outcome.rank not in ranks:
            continue
        assert outcome.error is None, outcome.traceback
        how = "has left in order" if way == "leaves" else "has ended"
        assert outcome.value.startswith(f"{victim} rank {victim} (pid "), outcome.value
        assert f" {how}" in outcome.value


@pytest.mark.parametrize(("hosts", "victim"), [(1, 0), (2, 1), (2, 2)])
@pytest.mark.parametrize("way", WAYS)
def test_gone_rank_is_named_by_all(hosts: int, victim: int, way: str) -> None:
    check(told(3, victim, way, range(3), hosts=hosts), victim, way, range(3))


@pytest.mark.parametrize(("store", "victim", "hosts"), [("torch", 0, 1), ("torch", 2, 2), ("job", 0, 2), ("job", 2, 1)])
def test_gone_rank_is_named_whichever_store_they_meet_in(store: str, victim: int, hosts: int) -> None:
    check(told(3, victim, "killed", range(3), store, hosts), victim, "killed", range(3))


INSIDE = [
    (1, 2, segment, "_reach"),
    (1, 2, segment, "_see_each_other"),
    (1, 0, segment, "_collect_answers"),
    (2, 0, create, "join_islands"),
    (2, 2, create, "choose_engine"),
    (2, 1, Guard, "_meet"),
]


@pytest.mark.parametrize(("hosts", "victim", "place", "step"), INSIDE, ids=[case[3] for case in INSIDE])
def test_rank_that_goes_in_the_middle_is_named(hosts: int, victim: int, place: Any, step: str) -> None:
    outcomes = told(3, victim, "killed", range(3), hosts=hosts, step=(place, step))
    check(outcomes, victim, "killed", range(3))


@pytest.mark.parametrize(("hosts", "ranks", "victim"), [(1, [0, 4], 4), (2, [1, 2, 3], 2)])
def test_gone_rank_is_named_in_a_group_of_some_ranks(hosts: int, ranks: list[int], victim: int) -> None:
    check(told(5, victim, "killed", ranks, hosts=hosts), victim, "killed", ranks)


@pytest.mark.parametrize(("hosts", "way"), [(1, "killed"), (2, "leaves")])
def test_rank_that_the_group_does_not_have_may_go(hosts: int, way: str) -> None:
    for outcome in told(4, 1, way, [0, 2, 3], hosts=hosts):
        if outcome.rank != 1:
            assert (outcome.value, outcome.traceback) == ("", "")


@pytest.mark.parametrize("hosts", [1, 2])
def test_late_rank_that_has_left_another_group_is_waited_for(hosts: int) -> None:
    def body(member: Member) -> list[str]:
        if hosts > 1:
            pretend_host(member.rank * hosts // 3)
        join(member, "file")
        kept = dist.group.WORLD, dist.new_group()
        if member.rank == 1:
            dist.destroy_process_group(kept[1])
        first = late(member, "first")
        member.meet("over")
        dist.destroy_process_group()
        member.join(timeout_s=TIMEOUT_S, name="again")
        return [first, late(member, "second")]

    def late(member: Member, name: str) -> str:
        if member.rank == 1:
            member.await_said(*[f"{name}-{rank}" for rank in (0, 2)])
            time.sleep(1.2)  # the others look for it
        member.say(f"{name}-{member.rank}")
        return made(range(3))

    for outcome in run_ranks(body, 3):
        assert outcome.value == ["", ""], outcome.traceback


SCRIPT = """
    import os, signal, sys, time
    from datetime import timedelta
    from pathlib import Path
    import torch.distributed as dist
    import phalanx
    from phalanx.errors import InitializationError

    folder, victim, way = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    world = phalanx.init(quiet=True, timeout_s=200)

    def meet(name, ranks):
        (folder / f"{name}-{world.rank}").touch()
        while any(not (folder / f"{name}-{rank}").exists() for rank in ranks):
            time.sleep(0.01)

    meet("joined", range(world.size))
    if world.rank == victim:
        if way == "raises":
            raise ValueError("this batch is empty")
        if way == "exits with 3":
            sys.exit(3)
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(0)
    started = time.monotonic()
    try:
        dist.new_group(timeout=timedelta(seconds=200))
    except InitializationError as error:
        print(time.monotonic() - started < 100, error, flush=True)
    meet("made", [rank for rank in range(world.size) if rank != victim])
"""
SAID = {
    "raises": "has failed (ValueError: this batch is empty at ",
    "exits with 3": "has failed (exit code 3)",
    "killed": "has ended",
    "ends": "has left in order",
}


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with running_hosts(2, tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


CASES = [(1, 1, "raises"), (1, 1, "ends"), (2, 0, "killed"), (2, 2, "exits with 3"), (2, 2, "raises")]


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
@pytest.mark.parametrize(("hosts", "victim", "way"), CASES)
def test_how_the_script_of_a_gone_rank_ended_is_told(
    two_hosts: TestHosts, hosts: int, victim: int, way: str, tmp_path: Path
) -> None:
    values = {"sys.argv[1]": repr(str(tmp_path)), "sys.argv[2]": str(victim), "sys.argv[3]": repr(way)}
    text = dedent(SCRIPT)
    for name, value in values.items():
        text = text.replace(name, value)
    script = tmp_path / "script.py"
    script.write_text(text)
    where = {"MASTER_ADDR": two_hosts.address(0), "MASTER_PORT": "29561", "WORLD_SIZE": "3"}
    outs = [tmp_path / f"out-{rank}" for rank in range(3)]
    zygotes = [two_hosts.zygotes[rank // 2 if hosts > 1 else 0] for rank in range(3)]
    numbers = [
        zygote.fork(script, {**where, "RANK": str(rank)}, outs[rank], tmp_path / f"err-{rank}")
        for rank, zygote in enumerate(zygotes)
    ]
    until = time.monotonic() + 300
    while any(zygote.code(number) is None for zygote, number in zip(zygotes, numbers, strict=True)):
        assert time.monotonic() < until, [out.read_text() for out in outs]
        time.sleep(0.02)
    for rank, out in enumerate(outs):
        if rank != victim:
            text = out.read_text()
            if victim == 0 and "lost the store of rank 0" in text:
                continue  # whose process takes very long to end
            assert text.startswith(f"True rank {victim} (pid "), text
            assert SAID[way] in text, text
