"""A host that is cut off, stopped or dead, while ranks of two hosts wait for each other: every survivor names it.

Each rank has a group for every operation, and all of them are under way at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.fault.test_deaths import Call, at_once, no_words_of_gloo, run_to_the_end
from tests.support.hosts import NET, TestHosts, why_no_hosts
from tests.support.ranks import Member, Outcome, fork_rank, values
from tests.support.ranks import _collect as collect
from tests.support.waiting import soon
from torch.distributed.distributed_c10d import _set_pg_timeout

import phalanx
from phalanx.errors import CollectiveTimeout, PeerLost, PhalanxError

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

SIZE = 4  # two on each host
PATIENCE_S = 200.0
SOON_S = 30.0  # a few seconds on a quiet machine; the timeout of the groups is far from it
MENDED_S = 2.0  # after a cut that was longer, TCP may send again only when the host counts as silent
SMALL, LARGE = 8, 2_000_000
OPERATIONS = [("all_reduce", LARGE), ("barrier", SMALL), ("broadcast_by_victim", SMALL), ("all_to_all", 50_000)]
Body = Callable[[Member], Any]


@pytest.fixture
def hosts(workers_hosts: TestHosts) -> Iterator[TestHosts]:
    yield workers_hosts
    workers_hosts.mend()


def outcomes(hosts: TestHosts, folder: Path, body: Body, act: Callable[[list[int]], None]) -> list[Outcome]:
    """How four ranks end, given their process ids to act on when all of them have said that they are ready."""
    children = [fork_rank(body, Member(rank, SIZE, folder), hosts.inside[rank // 2]) for rank in range(SIZE)]
    try:
        ready = [folder / f"ready-{rank}" for rank in range(SIZE)]
        assert soon(lambda: all(path.exists() for path in ready), PATIENCE_S)
        act(children)
    except BaseException:
        for child in children:
            os.kill(child, signal.SIGKILL)
        raise
    finally:
        found = collect(children, folder, PATIENCE_S)
    return found


def join(member: Member) -> None:
    """Join, with the store and the registrar on h0."""
    where = f"tcp://{NET}.1:29563"
    phalanx.init(timeout_s=300, quiet=True, init_method=where, rank=member.rank, world_size=SIZE)


def facts(error: PeerLost) -> dict[str, Any]:
    """What an error says, and when it came."""
    names = ("group_rank", "rank", "pid", "host", "elapsed_s")
    return {"text": str(error), "at": time.time(), **{name: getattr(error, name) for name in names}}


def go_on(member: Member) -> list[dict[str, Any]]:
    """Join, and go on with all operations until they break; what this rank is told."""
    join(member)
    groups = [dist.new_group(timeout=timedelta(seconds=300)) for _ in OPERATIONS]
    for (name, count), group in zip(OPERATIONS, groups, strict=True):
        run_to_the_end(name, Call(member.rank, SIZE, 3, group, count=count))  # which connects whom it has to
        dist.barrier(group=group)
    member.say(f"ready-{member.rank}")

    def told(name: str, call: Call) -> dict[str, Any]:
        with pytest.raises(PeerLost) as caught:
            while True:
                run_to_the_end(name, call)
        found = facts(caught.value)
        with pytest.raises(PeerLost):  # it stays broken
            dist.barrier(group=call.group)
        return found

    pairs = zip(OPERATIONS, groups, strict=True)
    found = at_once(
        partial(told, name, Call(member.rank, SIZE, 3, group, count=count)) for (name, count), group in pairs
    )
    for group in groups:
        dist.destroy_process_group(group)
    return found


def check(outcomes: Sequence[Outcome], since: float, lost: Sequence[int], host: str, *, alone: bool = False) -> None:
    """Every one of these ranks has raised the same, which names the host and a rank there.

    If no other operation was under way, it also knows which rank of the world that was, and after how long.
    """
    for told in (each for outcome in values([*outcomes]) for each in outcome):
        assert told["group_rank"] in lost, told
        assert told["rank"] == told["group_rank"] or not alone, told
        assert f"rank {told['group_rank']} of the group" in told["text"], told
        assert 0 < told["elapsed_s"] < SOON_S or not alone, told
        assert told["pid"] > 0
        assert told["host"] == host
        assert host in told["text"]
        assert told["at"] - since < SOON_S
        assert "gloo" not in told["text"].lower()
        assert ".cc:" not in told["text"]


def test_both_sides_of_a_cut_name_the_other_host(
    hosts: TestHosts, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    since = time.time()
    found = outcomes(hosts, tmp_path, go_on, lambda _: hosts.cut(0))
    check(found[:2], since, (2, 3), "h1")
    check(found[2:], since, (0, 1), "h0")
    texts = [told["text"] for outcome in found for told in outcome.value]
    assert all("is cut" in text for text in texts), texts
    no_words_of_gloo(capfd)


def test_groups_are_closed_without_the_host_of_the_store(hosts: TestHosts, tmp_path: Path) -> None:
    """Nothing raises on the ranks of the other host, although addresses of theirs are in the store."""

    def body(member: Member) -> None:
        join(member)
        group: Any = dist.new_group()
        group.attach()
        group._gloo.get().allreduce([torch.ones(4)]).wait()
        dist.barrier()
        member.say(f"ready-{member.rank}")
        member.await_said("cut")
        with contextlib.nullcontext() if member.rank > 1 else contextlib.suppress(PhalanxError):
            dist.destroy_process_group(group)
            dist.destroy_process_group()

    def cut(_: list[int]) -> None:
        hosts.cut(0)
        (tmp_path / "cut").touch()

    values(outcomes(hosts, tmp_path, body, cut)[2:])


def test_host_that_is_cut_off_while_ranks_wait_for_another_is_named(hosts: TestHosts, tmp_path: Path) -> None:
    late, others = 1, (0, 2, 3)

    def body(member: Member) -> list[dict[str, Any]]:
        join(member)
        member.meet("joined")
        if member.rank == late:
            member.say(f"ready-{late}")
            member.await_said(*(f"told-{rank}" for rank in others))
            with pytest.raises(PeerLost):
                dist.barrier()
            return []
        member.say(f"ready-{member.rank}")
        with pytest.raises(PeerLost) as caught:
            dist.all_reduce(torch.ones(SMALL))
        found = facts(caught.value)
        member.say(f"told-{member.rank}")
        member.await_said(*(f"told-{rank}" for rank in others))  # one that ends is lost to those that still wait
        return [found]

    since = time.time()
    found = outcomes(hosts, tmp_path, body, lambda _: hosts.cut(1))
    for rank in others:
        check(found[rank : rank + 1], since, (2, 3) if rank < 2 else (0, 1), "h1" if rank < 2 else "h0", alone=True)
    values(found)


def sum_until(member: Member, name: str) -> set[bool]:
    """Sum large tensors until somebody has said this; whether the sums were right."""
    right, sums, over = set(), 0, torch.zeros(1)
    while not over.item():
        tensor = torch.arange(4_000_000, dtype=torch.float32).fmod_(1000) + member.rank
        dist.all_reduce(tensor)
        expected = torch.arange(4_000_000, dtype=torch.float32).fmod_(1000) * SIZE + sum(range(SIZE))
        right.add(bool((tensor == expected).all()))
        sums += 1
        member.say(f"sums-{sums}")
        over.fill_((member.folder / name).exists())
        dist.broadcast(over, 0)
    return right


def test_cable_that_is_out_for_a_second_ends_nothing(hosts: TestHosts, tmp_path: Path) -> None:
    out_s: list[float] = []

    def body(member: Member) -> set[bool]:
        join(member)
        member.say(f"ready-{member.rank}")
        return sum_until(member, "over")

    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()

        def cut_for_a_second(_: list[int], folder: Path = folder) -> None:
            began = time.monotonic()
            hosts.cut(1)
            time.sleep(1.0)
            hosts.mend()
            out_s.append(time.monotonic() - began)
            done = len([*folder.glob("sums-*")])
            soon(lambda: len([*folder.glob("sums-*")]) > done + 2, SOON_S)
            (folder / "over").touch()

        found = outcomes(hosts, folder, body, cut_for_a_second)
        if out_s[-1] < MENDED_S:  # else a busy machine has mended it so late that this is a cut
            break
    assert values(found) == [{True}] * SIZE


def test_ranks_whose_interpreters_are_held_for_long_are_waited_for(hosts: TestHosts, tmp_path: Path) -> None:
    """Something in C holds the interpreter, so that no thread of Python runs, longer than a rank may be still."""
    (tmp_path / "over").touch()

    def body(member: Member) -> set[bool]:
        join(member)
        member.meet("ready")
        if member.rank > 1:
            ctypes.PyDLL(None).usleep(2_500_000)
        return sum_until(member, "over")

    assert values(outcomes(hosts, tmp_path, body, lambda _: None)) == [{True}] * SIZE


def test_rank_that_does_not_come_is_named_with_its_host_and_place(hosts: TestHosts, tmp_path: Path) -> None:
    late, others = 2, (0, 1, 3)

    def body(member: Member) -> str:
        join(member)
        dist.barrier()
        _set_pg_timeout(timedelta(seconds=0.7))
        (tmp_path / f"pid-{member.rank}").write_text(str(os.getpid()))
        member.meet("ready")
        if member.rank == late:
            member.await_said(*(f"told-{rank}" for rank in others))
        with pytest.raises(CollectiveTimeout) as caught:
            dist.all_reduce(torch.ones(SMALL))
        member.say(f"told-{member.rank}")
        assert member.rank == late or caught.value.group_rank == late
        return str(caught.value)

    found = values(outcomes(hosts, tmp_path, body, lambda _: None))
    process = f"rank {late} of the group (pid {(tmp_path / f'pid-{late}').read_text()} on h{late // 2})"
    for rank in others:
        assert process in found[rank]
        assert ", which was at soon (" in found[rank]  # of await_said
        assert f"rank {rank} was in all_reduce(float32[{SMALL}], sum)" in found[rank]


@pytest.mark.parametrize("lost", [(2, 3), (1,)])
def test_ranks_that_are_killed_are_named(
    hosts: TestHosts, tmp_path: Path, lost: tuple[int, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    """All of a host, or one of two, whether it carries what its host sends or leaves that to the other."""

    def kill(children: list[int]) -> None:
        for rank in lost:
            os.kill(children[rank], signal.SIGKILL)

    since = time.time()
    found = outcomes(hosts, tmp_path, go_on, kill)
    check([outcome for outcome in found if outcome.rank not in lost], since, lost, f"h{lost[0] // 2}")
    no_words_of_gloo(capfd)
