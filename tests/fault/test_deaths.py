"""A rank ends, leaves or stands still: before, in and after every operation, on one host and between hosts.

Each world has a group for every operation, and all of them are called at once, on threads. A case is what happens to
the victim, and where: the digits of a place are the hosts of its ranks.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import divide_by
from tests.support.ranks import Member, run_ranks, values
from tests.support.waiting import await_end, await_stop, soon, when_waiting
from torch.distributed.distributed_c10d import _set_pg_timeout

from phalanx.errors import CollectiveTimeout, PeerLost, PhalanxError
from phalanx.system.host import machine_name

COUNT = 800_000  # 3.2 MB: a dozen chunks
# From death to error it takes a moment. The rest is for busy machines; the timeout of the groups is far from it.
SOON_S = 40.0
TIMEOUT_S = 200.0
SHORT_S = 1.0
MESSAGES = ["send_to_victim", "receive_from_victim"]
# Who waits for nobody in one of the others may return from the call; the next one tells.
MUST_RAISE_AT_ONCE = [
    *("all_reduce", "small_all_reduce", "broadcast_by_victim", "all_gather", "reduce_scatter"),
    *("all_to_all", "barrier", *MESSAGES),
]
NAMES = [*MUST_RAISE_AT_ONCE, "reduce", "broadcast_to_victim", "gather", "scatter"]
long = pytest.mark.long


@dataclass
class Call:
    """One operation as a rank makes it: in which group, whether it is asynchronous, and who is the victim."""

    rank: int
    size: int
    victim: int
    group: Any = None
    asynchronous: bool = False
    count: int = COUNT

    @property
    def first(self) -> int:
        """A rank that lives."""
        return 0 if self.victim else 1


def run_to_the_end(name: str, call: Call) -> None:
    """The call and its wait; if it says that it was done, it was done."""
    rank, size, victim, first = call.rank, call.size, call.victim, call.first
    options: dict[str, Any] = {"group": call.group, "async_op": call.asynchronous}
    ones = torch.ones(4 if name == "small_all_reduce" else call.count)
    several = [torch.ones(call.count) for _ in range(size)]
    filled: list[torch.Tensor] = [ones]
    expected, work = 1, None
    match name:
        case "all_reduce" | "small_all_reduce":
            work, expected = dist.all_reduce(ones, **options), size
        case "reduce":
            work, expected = dist.reduce(ones, dst=first, **options), size if rank == first else 1
        case "broadcast_to_victim":
            work = dist.broadcast(ones, src=first, **options)
        case "broadcast_by_victim":
            ones.fill_(rank == victim)
            work = dist.broadcast(ones, src=victim, **options)
        case "all_gather":
            filled = [torch.zeros(call.count) for _ in range(size)]
            work = dist.all_gather(filled, ones, **options)
        case "gather":
            filled = [torch.zeros(call.count) for _ in range(size)] if rank == first else []
            work = dist.gather(ones, filled or None, dst=first, **options)
        case "scatter":
            filled = [torch.zeros(call.count)]
            work = dist.scatter(filled[0], several if rank == first else None, src=first, **options)
        case "reduce_scatter":
            filled, expected = [torch.zeros(call.count)], size
            work = dist.reduce_scatter(filled[0], several, **options)
        case "all_to_all":
            filled = [torch.zeros(call.count) for _ in range(size)]
            work = dist.all_to_all(filled, several, **options)
        case "barrier":
            work = dist.barrier(**options)
        case _:
            sends = (name == "send_to_victim") != (rank == victim)
            ones.fill_(sends)
            peer = first if rank == victim else victim
            if call.asynchronous:
                work = (dist.isend if sends else dist.irecv)(ones, peer, group=call.group)
            else:
                (dist.send if sends else dist.recv)(ones, peer, group=call.group)
    if work is not None:
        work.wait()
    if rank != victim:
        assert all(bool((tensor == expected).all()) for tensor in filled), f"{name} returned before it was done"


def hosts_of(place: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Have the ranks join as if there; how many they are."""
    if len(set(place)) > 1:
        divide_by(monkeypatch, lambda rank, size: int(place[rank]))
    return len(place)


def join(member: Member) -> list[int]:
    """Join; the process id of every rank."""
    (member.folder / f"pid-{member.rank}").write_text(str(os.getpid()))
    member.join(timeout_s=TIMEOUT_S)
    member.meet("joined")
    return [int((member.folder / f"pid-{rank}").read_text()) for rank in range(member.size)]


def groups_of(member: Member, count: int, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """So many groups of all ranks; every second one has been used, so that its ranks are connected."""
    groups = [dist.new_group(timeout=timedelta(seconds=timeout_s)) for _ in range(count)]
    for group in groups[::2]:
        dist.barrier(group=group)
    member.meet("made")  # one that is still making a group might raise there
    return groups


def over(member: Member, others: Iterable[int]) -> None:
    """Stay until all these ranks have come here: a rank that ends is lost to those that still wait."""
    member.say(f"over-{member.rank}")
    member.await_said(*(f"over-{rank}" for rank in others))


def at_once(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Run these calls, the first one on this thread and the others on threads of their own; what each returned."""
    first, *others = calls
    found: list[Any] = [None] * (len(others) + 1)

    def run(number: int, call: Callable[[], Any]) -> None:
        try:
            found[number] = call()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number, call)) for number, call in enumerate(others, 1)]
    for thread in threads:
        thread.start()
    run(0, first)
    for thread in threads:
        thread.join()
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def say_when_waiting(member: Member) -> None:
    """Say so as soon as this rank's first call waits for somebody."""
    when_waiting(lambda: member.say(f"waits-{member.rank}"))


def await_naps(pid: int | str) -> None:
    """Return when the main thread of a process has slept a few times: one that waits for others looks after each."""

    def naps() -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    before = naps()
    assert soon(lambda: naps() > before + 4)


def lost_in(name: str, call: Call, *, at_once: bool) -> tuple[PeerLost, float]:
    """The error of an operation, and after how many seconds it came. The group stays broken, for whatever is called."""
    began, returned = time.monotonic(), False
    with pytest.raises(PeerLost) as lost:
        run_to_the_end(name, call)
        returned = True
        for _ in range(2):  # the victim may have ended within its last call, when all had heard from it
            dist.barrier(group=call.group)
    elapsed_s = time.monotonic() - began
    assert not (returned and at_once and name in MUST_RAISE_AT_ONCE), f"{name} returned"
    again = replace(call, asynchronous=not call.asynchronous, count=1)
    for other in ("small_all_reduce", "barrier", *MESSAGES):
        with pytest.raises(PeerLost) as caught:
            run_to_the_end(other, again)
        assert caught.value.group_rank == lost.value.group_rank
    return lost.value, elapsed_s


def check(error: PeerLost, elapsed_s: float, victim: int, pid: int, place: str, *, alone: bool = False) -> None:
    """It names the victim; ``alone``: no other operation was under way, so it knows the world's rank and the time."""
    assert (error.group_rank, error.pid) == (victim, pid), str(error)
    assert error.rank == victim or (error.rank == -1 and not alone), str(error)
    assert 0 < error.elapsed_s < SOON_S or (error.elapsed_s == 0 and not alone), str(error)
    assert f"rank {victim} of the group (pid {pid} on " in str(error), str(error)
    assert any(name in str(error) for name in (machine_name(), f"h{place[victim]}")), str(error)
    assert elapsed_s < SOON_S, str(error)


def no_words_of_gloo(capfd: pytest.CaptureFixture[str]) -> None:
    written = capfd.readouterr().err
    assert "gloo" not in written.lower(), written


# -- the end of a rank -------------------------------------------------------------------------------------------------


def future_of_a_message(call: Call) -> None:
    work: Any = dist.irecv(torch.zeros(4), call.victim, group=call.group)
    future = work.get_future()
    assert soon(future.done)
    with pytest.raises(RuntimeError, match="PeerLost"):
        future.wait()
    with pytest.raises(PeerLost):
        work.wait()
    assert (work.is_completed(), work.is_success()) == (True, False)


def asking_whether_a_message_is_done(call: Call) -> None:
    work: Any = dist.irecv(torch.zeros(4), call.victim, group=call.group)
    assert soon(work.is_completed)
    assert isinstance(work.exception(), PeerLost)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exits() -> None:
    os._exit(3)


def execs() -> None:
    os.execvp("sleep", ["sleep", "600"])


WORDS = {killed: "has ended", exits: "has ended", execs: "has replaced itself by another program (exec)"}


@pytest.mark.parametrize(
    ("place", "victim", "end", "when"),
    [
        ("000", 2, killed, "before"),
        ("000", 0, execs, "meanwhile"),
        ("001", 2, killed, "meanwhile"),
        ("012", 2, exits, "before"),
        pytest.param("0101", 1, killed, "before", marks=long),
        pytest.param("00111", 3, killed, "meanwhile", marks=long),
    ],
)
def test_dead_rank_is_named_in_every_operation(
    place: str,
    victim: int,
    end: Callable[[], None],
    when: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Between hosts half of the groups have not been used, so that some of their ranks were not connected with it."""
    size = hosts_of(place, monkeypatch)
    survivors = [rank for rank in range(size) if rank != victim]

    def body(member: Member) -> list[str]:
        pids = join(member)
        groups = groups_of(member, 2 * len(NAMES) + 2)
        if member.rank == victim:
            if when == "meanwhile":
                member.await_said(*(f"waits-{rank}" for rank in survivors))
            end()
        if when == "before":
            await_end(pids[victim])
        try:
            calls = [
                Call(member.rank, size, victim, group, asynchronous=number % 2 != number // 2 % 2)
                for number, group in enumerate(groups)
            ]
            say_when_waiting(member)
            lost = [partial(lost_in, NAMES[number // 2], call, at_once=True) for number, call in enumerate(calls[:-2])]
            others = (future_of_a_message, asking_whether_a_message_is_done)
            asked = [partial(ask, call) for ask, call in zip(others, calls[-2:], strict=True)]
            found = at_once([*lost, *asked])[: len(lost)]
            for error, elapsed_s in found:
                check(error, elapsed_s, victim, pids[victim], place)
            return [str(error) for error, _ in found]
        finally:
            over(member, survivors)
            if end is execs and member.rank == survivors[0]:
                os.kill(pids[victim], signal.SIGKILL)

    outcomes = run_ranks(body, size)
    for told in values([outcome for outcome in outcomes if outcome.rank != victim]):
        assert len(told) == 2 * len(NAMES)
        assert all(WORDS[end] in text for text in told), told
    no_words_of_gloo(capfd)


@pytest.mark.parametrize(
    ("place", "victim"), [("001", 2), *(pytest.param(*more, marks=long) for more in (("000", 2), ("0011", 0)))]
)
def test_rank_killed_in_the_middle_of_many_calls_is_named(
    place: str, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed after a few of its first calls; how far it is in the others is for chance.

    Survivors end with PeerLost or whole results, never with garbage.
    """
    size = hosts_of(place, monkeypatch)
    cases = [(name, count) for name in NAMES for count in (8, COUNT)]

    def body(member: Member) -> None:
        pids = join(member)
        groups = groups_of(member, len(cases))

        def go_on(name: str, call: Call) -> None:
            alone = name in MESSAGES and member.rank not in (victim, call.first)  # nothing is sent to this rank
            for number in itertools.count():
                run_to_the_end("receive_from_victim" if alone else name, call)
                if member.rank == victim and call.group is groups[0] and number == 3:
                    killed()

        def ends(name: str, call: Call) -> None:
            began = time.monotonic()
            with pytest.raises(PeerLost) as lost:
                go_on(name, call)
            check(lost.value, time.monotonic() - began, victim, pids[victim], place)
            with pytest.raises(PeerLost):
                dist.barrier(group=call.group)

        at_once(
            partial(ends, name, Call(member.rank, size, victim, group, count=count))
            for (name, count), group in zip(cases, groups, strict=True)
        )
        over(member, [rank for rank in range(size) if rank != victim])

    outcomes = run_ranks(body, size)
    assert outcomes[victim].signal == signal.SIGKILL, outcomes[victim].traceback
    values([outcome for outcome in outcomes if outcome.rank != victim])


@pytest.mark.parametrize(
    ("name", "asynchronous"),
    [
        ("broadcast_by_victim", True),
        ("gather", False),
        *(pytest.param(name, asynchronous, marks=long) for name in NAMES for asynchronous in (False, True)),
    ],
)
def test_rank_that_dies_right_after_a_call_is_named(name: str, asynchronous: bool) -> None:
    def body(member: Member) -> None:
        pids = join(member)
        call = Call(member.rank, 3, 2, dist.group.WORLD, asynchronous)
        if member.rank == 2:
            run_to_the_end(name, call)
            killed()
        check(*lost_in(name, call, at_once=False), 2, pids[2], "000", alone=True)

    values(run_ranks(body, 3)[:-1])


def test_death_is_noticed_although_signals_cut_every_sleep_short() -> None:
    """As under a profiler that samples with a timer."""

    def body(member: Member) -> float:
        join(member)
        if member.rank == 1:
            killed()
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        try:
            return lost_in("all_reduce", Call(0, 2, 1, dist.group.WORLD), at_once=True)[1]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    assert values(run_ranks(body, 2)[:1])[0] < SOON_S


def test_rank_without_descriptors_does_not_take_a_late_one_for_dead() -> None:
    """The late one comes when the other has slept in its call, and looked for it, a few times."""

    def body(member: Member) -> float:
        pids = join(member)
        dist.barrier()
        tensor = torch.ones(1)
        if member.rank == 0:
            member.await_said("limited")
            await_naps(pids[1])
            dist.all_reduce(tensor)
        else:
            member.say("limited")
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            try:
                dist.all_reduce(tensor)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return tensor.item()

    assert values(run_ranks(body, 2)) == [2.0, 2.0]


# -- a rank that leaves, and one that stands still ---------------------------------------------------------------------


@pytest.mark.parametrize(("place", "leaver"), [("000", 2), ("001", 0), pytest.param("012", 2, marks=long)])
def test_rank_that_leaves_is_named_in_every_operation(
    place: str, leaver: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Between hosts some of them have not been connected with it, and who would have dialled whom is for chance."""
    size = hosts_of(place, monkeypatch)
    cases = [(name, when) for name in MUST_RAISE_AT_ONCE for when in ("before", "meanwhile")]
    cases += [("all_reduce", "before"), ("barrier", "meanwhile")] * 3 * (len(set(place)) > 1)

    def body(member: Member) -> None:
        pids = join(member)
        for number, (name, when) in enumerate(cases):
            group: Any = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
            others = [f"{number}-{rank}" for rank in range(size) if rank != leaver]
            if member.rank == leaver:
                if when == "meanwhile":
                    member.await_said(*others)
                dist.destroy_process_group(group)
                member.say(f"{number}-left")
                continue
            if when == "before":
                member.await_said(f"{number}-left")
            member.say(f"{number}-{member.rank}")
            began = time.monotonic()
            with pytest.raises(PeerLost, match="left") as lost:
                run_to_the_end(name, Call(member.rank, size, leaver, group))
            check(lost.value, time.monotonic() - began, leaver, pids[leaver], place)
            dist.destroy_process_group(group)
        member.meet("over")
        dist.destroy_process_group()

    values(run_ranks(body, size))
    no_words_of_gloo(capfd)


def test_stopped_rank_is_named_at_the_timeout_of_every_operation() -> None:
    """Of two ranks: a third one, which only waits for the first in a barrier, would rightly name that one."""
    cases = [(name, asynchronous) for name in NAMES for asynchronous in (False, True)]

    def body(member: Member) -> None:
        pids = join(member)
        groups = groups_of(member, len(cases), timeout_s=2 * SOON_S)
        for group in groups:
            _set_pg_timeout(timedelta(seconds=SHORT_S), group)
        if member.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        await_stop(pids[1])

        def ends(name: str, call: Call) -> None:
            began = time.monotonic()
            with pytest.raises(PhalanxError) as caught:
                run_to_the_end(name, call)
                dist.barrier(group=call.group)
            assert time.monotonic() - began < SHORT_S + SOON_S
            assert isinstance(caught.value, CollectiveTimeout), caught.value
            assert caught.value.group_rank == 1
            process = f"pid {pids[1]} on {machine_name()}"
            assert f"rank 1 of the group ({process}), which is stopped (state T), did not come" in str(caught.value)
            with pytest.raises(CollectiveTimeout):
                dist.barrier(group=call.group)

        try:
            at_once(
                partial(ends, name, Call(0, 2, 1, group, asynchronous))
                for (name, asynchronous), group in zip(cases, groups, strict=True)
            )
        finally:
            os.kill(pids[1], signal.SIGKILL)

    values(run_ranks(body, 2)[:1])


@pytest.mark.parametrize(("place", "late"), [("000", 0), ("0011", 3), pytest.param("0011", 1, marks=long)])
def test_rank_that_does_not_come_is_named_to_all_when_one_gives_up(
    place: str, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = hosts_of(place, monkeypatch)
    hurried = (late + 1) % size
    others = [rank for rank in range(size) if rank not in (late, hurried)]
    cases = ["small_all_reduce", "barrier", "all_gather", "broadcast_by_victim"]

    def body(member: Member) -> None:
        pids = join(member)
        groups = groups_of(member, len(cases))
        if member.rank == late:
            over(member, (*others, hurried))
            return
        if member.rank == hurried:  # it gives up, and comes when the others are there, or it would miss them too
            member.await_said(*(f"waits-{rank}" for rank in others))
            for group in groups:
                _set_pg_timeout(timedelta(seconds=SHORT_S), group)
        else:
            say_when_waiting(member)

        def ends(name: str, call: Call) -> None:
            with pytest.raises(CollectiveTimeout, match=rf"rank {late} of the group .*did not come within") as caught:
                run_to_the_end(name, call)
            if member.rank == hurried:
                assert (caught.value.group_rank, caught.value.pid) == (late, pids[late])

        at_once(
            partial(ends, name, Call(member.rank, size, late, group, count=8))
            for name, group in zip(cases, groups, strict=True)
        )
        over(member, (*others, hurried))

    values(run_ranks(body, size))
