"""Every operation against the death or the standstill of one rank: before the call, in its middle, right after it.

The death in the middle falls on an exact byte: the victim's tensor has a page that may not be touched, so the copy
into or out of the shared segment ends the process there, as suddenly as SIGKILL does.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import platform
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, Outcome, run_ranks
from tests.support.waiting import await_stop
from torch.distributed.distributed_c10d import _set_pg_timeout

from phalanx.errors import CollectiveTimeout, PeerLost, PhalanxError

COUNT = 800_000  # 3.2 MB: a dozen chunks
PROT_NONE = 0
# From death to error it takes a slice of 50 ms, and a moment for the words of the rank that noticed. The rest is for
# busy machines; without the notice it would be the group's timeout, which is a minute.
LIMIT_S = 20.0
TIMEOUT_S = 1.0

Check = tuple[torch.Tensor, float]


@dataclass
class Call:
    """One operation as a rank makes it: the handle if it is asynchronous, and what must then be in which tensors."""

    member: Member
    asynchronous: bool
    trapped: bool

    @property
    def victim(self) -> int:
        return self.member.size - 1

    def data(self) -> torch.Tensor:
        """Ones; with a page in the middle that ends the process, on a victim that is to die there."""
        if not (self.trapped and self.member.rank == self.victim):
            return torch.ones(COUNT)
        memory = mmap.mmap(-1, COUNT * 4)
        tensor = torch.frombuffer(memory, dtype=torch.float32)
        tensor.fill_(1)
        middle = tensor.data_ptr() + COUNT * 2 // mmap.PAGESIZE * mmap.PAGESIZE
        assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(middle), mmap.PAGESIZE, PROT_NONE) == 0
        faulthandler.disable()  # pytest's would write the victim's stacks
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        return tensor

    def blocks(self) -> list[torch.Tensor]:
        return [self.data() for _ in range(self.member.size)]


Started = tuple["dist.Work | None", list[Check]]


def all_reduce(call: Call) -> Started:
    tensor = call.data()
    return dist.all_reduce(tensor, async_op=call.asynchronous), [(tensor, call.member.size)]


def small_all_reduce(call: Call) -> Started:
    tensor = torch.ones(4)
    return dist.all_reduce(tensor, async_op=call.asynchronous), [(tensor, call.member.size)]


def reduce(call: Call) -> Started:
    tensor = call.data()
    work = dist.reduce(tensor, dst=0, async_op=call.asynchronous)
    return work, [(tensor, call.member.size if call.member.rank == 0 else 1)]


def broadcast_to_victim(call: Call) -> Started:
    tensor = call.data()
    return dist.broadcast(tensor, src=0, async_op=call.asynchronous), [(tensor, 1)]


def broadcast_by_victim(call: Call) -> Started:
    tensor = call.data() if call.member.rank == call.victim else torch.zeros(COUNT)
    return dist.broadcast(tensor, src=call.victim, async_op=call.asynchronous), [(tensor, 1)]


def all_gather(call: Call) -> Started:
    outputs = [torch.zeros(COUNT) for _ in range(call.member.size)]
    work = dist.all_gather(outputs, call.data(), async_op=call.asynchronous)
    return work, [(output, 1) for output in outputs]


def gather(call: Call) -> Started:
    outputs = [torch.zeros(COUNT) for _ in range(call.member.size)] if call.member.rank == 0 else None
    work = dist.gather(call.data(), outputs, dst=0, async_op=call.asynchronous)
    return work, [(output, 1) for output in outputs or []]


def scatter(call: Call) -> Started:
    output = call.data()
    inputs = [torch.ones(COUNT) for _ in range(call.member.size)] if call.member.rank == 0 else None
    return dist.scatter(output, inputs, src=0, async_op=call.asynchronous), [(output, 1)]


def reduce_scatter(call: Call) -> Started:
    output = torch.zeros(COUNT)
    return dist.reduce_scatter(output, call.blocks(), async_op=call.asynchronous), [(output, call.member.size)]


def all_to_all(call: Call) -> Started:
    outputs = [torch.zeros(COUNT) for _ in range(call.member.size)]
    work = dist.all_to_all(outputs, call.blocks(), async_op=call.asynchronous)
    return work, [(output, 1) for output in outputs]


def barrier(call: Call) -> Started:
    return dist.barrier(async_op=call.asynchronous), []


def message(call: Call, sends: bool, tensor: torch.Tensor, peer: int) -> dist.Work | None:
    if call.asynchronous:
        return dist.isend(tensor, peer) if sends else dist.irecv(tensor, peer)
    if sends:
        dist.send(tensor, peer)
    else:
        dist.recv(tensor, peer)
    return None


def send_to_victim(call: Call) -> Started:
    if call.member.rank == 0:
        return message(call, True, torch.ones(COUNT), call.victim), []
    if call.member.rank == call.victim:
        tensor = call.data()
        return message(call, False, tensor, 0), [(tensor, 1)]
    return None, []


def receive_from_victim(call: Call) -> Started:
    if call.member.rank == call.victim:
        return message(call, True, call.data(), 0), []
    if call.member.rank == 0:
        tensor = torch.zeros(COUNT)
        return message(call, False, tensor, call.victim), [(tensor, 1)]
    return None, []


CALLS: tuple[Callable[[Call], Started], ...] = (
    all_reduce,
    small_all_reduce,
    reduce,
    broadcast_to_victim,
    broadcast_by_victim,
    all_gather,
    gather,
    scatter,
    reduce_scatter,
    all_to_all,
    barrier,
    send_to_victim,
    receive_from_victim,
)
NAMES = [call.__name__ for call in CALLS]
WITH_A_MIDDLE = [call for call in CALLS if call not in (small_all_reduce, barrier)]
# Who waits for nobody may return from the call; the next one tells.
MUST_RAISE_AT_ONCE = (
    all_reduce,
    small_all_reduce,
    broadcast_by_victim,
    all_gather,
    reduce_scatter,
    all_to_all,
    barrier,
)


def exchange_pids(member: Member) -> list[int]:
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(member.size)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    dist.barrier()
    return [int(pid.item()) for pid in pids]


def wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def run_to_the_end(operation: Callable[[Call], Started], call: Call) -> None:
    """The call and its wait; if it says that it was done, it was done."""
    work, checks = operation(call)
    wait(work)
    if call.member.rank != call.victim:
        for tensor, expected in checks:
            assert bool((tensor == expected).all()), "the call returned, but its result is not whole"


def survive(operation: Callable[[Call], Started], size: int, moment: str, asynchronous: bool) -> list[Outcome]:
    def body(member: Member) -> float:
        member.join()
        pids = exchange_pids(member)
        victim = member.size - 1
        call = Call(member, asynchronous, trapped=moment == "middle")
        if member.rank == victim:
            if moment != "before":
                run_to_the_end(operation, call)
            if moment != "middle":
                os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("the victim came through")
        started = time.monotonic()
        returned = False
        with pytest.raises(PeerLost) as caught:
            run_to_the_end(operation, call)
            returned = True
            dist.barrier()
            dist.barrier()  # the victim may have ended within its last call, when all had heard from it
        elapsed_s = time.monotonic() - started
        assert not (returned and moment == "before" and operation in MUST_RAISE_AT_ONCE)
        assert caught.value.group_rank == victim
        assert caught.value.pid == pids[victim]
        assert f"rank {victim} of the group (pid {pids[victim]} on {platform.node()}) has ended" in str(caught.value)
        later: list[Callable[[], object]] = [
            lambda: dist.all_reduce(torch.ones(1)),
            lambda: dist.broadcast(torch.ones(1), src=member.rank),
            lambda: wait(dist.barrier(async_op=True)),
            lambda: dist.send(torch.ones(1), victim),
            lambda: wait(dist.irecv(torch.ones(1), (member.rank + 1) % member.size)),
        ]
        for again in later:
            with pytest.raises(PeerLost) as caught:
                again()
            assert (caught.value.group_rank, caught.value.pid) == (victim, pids[victim])
        return elapsed_s

    outcomes = run_ranks(body, size)
    assert outcomes[-1].signal == (signal.SIGSEGV if moment == "middle" else signal.SIGKILL), outcomes[-1].traceback
    for outcome in outcomes[:-1]:
        assert outcome.error is None, outcome.traceback
        assert outcome.value < LIMIT_S
    return outcomes


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("operation", CALLS, ids=NAMES)
def test_a_death_around_a_call(operation: Callable[[Call], Started], moment: str, asynchronous: bool) -> None:
    survive(operation, 3, moment, asynchronous)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("operation", WITH_A_MIDDLE, ids=[call.__name__ for call in WITH_A_MIDDLE])
def test_a_death_in_the_middle_of_a_call(operation: Callable[[Call], Started], asynchronous: bool) -> None:
    survive(operation, 3, "middle", asynchronous)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("operation", WITH_A_MIDDLE, ids=[call.__name__ for call in WITH_A_MIDDLE])
def test_a_death_in_the_middle_in_other_worlds(operation: Callable[[Call], Started], size: int) -> None:
    survive(operation, size, "middle", asynchronous=False)


@pytest.mark.parametrize(
    ("operation", "asynchronous"),
    [*((call, False) for call in CALLS), (all_reduce, True), (receive_from_victim, True)],
    ids=[*NAMES, "all_reduce async", "receive_from_victim async"],
)
def test_a_rank_that_stands_still_is_named_at_the_timeout(
    operation: Callable[[Call], Started], asynchronous: bool
) -> None:
    def body(member: Member) -> float:
        member.join()
        pids = exchange_pids(member)
        _set_pg_timeout(timedelta(seconds=TIMEOUT_S))
        victim = member.size - 1
        if member.rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
            raise AssertionError("the victim went on")
        await_stop(pids[victim])
        member.say(f"ready-{member.rank}")
        member.await_said(*[f"ready-{survivor}" for survivor in range(victim)])
        started = time.monotonic()
        try:
            with pytest.raises(PhalanxError) as caught:
                run_to_the_end(operation, Call(member, asynchronous, trapped=False))
                dist.barrier()
            elapsed_s = time.monotonic() - started
            assert isinstance(caught.value, CollectiveTimeout)
            assert caught.value.group_rank == victim
            process = f"pid {pids[victim]} on {platform.node()}"
            said = f"rank {victim} of the group ({process}), which is stopped (state T), did not come"
            assert said in str(caught.value)
            with pytest.raises(CollectiveTimeout):
                dist.barrier()
            return elapsed_s
        finally:
            # Only when nobody looks at it any more: a rank that is still writing its error says how the victim is.
            member.say(f"done-{member.rank}")
            if member.rank == 0:
                member.await_said(*[f"done-{survivor}" for survivor in range(victim)])
                os.kill(pids[victim], signal.SIGKILL)

    # A third rank, which only waits for the first in a barrier, would rightly name that one.
    outcomes = run_ranks(body, 2 if operation in (send_to_victim, receive_from_victim) else 3)
    assert outcomes[-1].signal == signal.SIGKILL
    for outcome in outcomes[:-1]:
        assert outcome.error is None, outcome.traceback
        assert outcome.value < TIMEOUT_S + LIMIT_S


@pytest.mark.parametrize("operation", [all_reduce, receive_from_victim])
def test_a_death_is_noticed_although_signals_cut_every_sleep_short(operation: Callable[[Call], Started]) -> None:
    """As under a profiler that samples with a timer."""

    def body(member: Member) -> float:
        member.join()
        exchange_pids(member)
        if member.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        started = time.monotonic()
        with pytest.raises(PeerLost):
            run_to_the_end(operation, Call(member, False, trapped=False))
        signal.setitimer(signal.ITIMER_REAL, 0)
        return time.monotonic() - started

    survivor = run_ranks(body, 2)[0]
    assert survivor.error is None, survivor.traceback
    assert survivor.value < LIMIT_S


def test_a_rank_without_descriptors_does_not_take_a_late_one_for_dead() -> None:
    def body(member: Member) -> float:
        member.join()
        dist.barrier()
        tensor = torch.ones(1)
        if member.rank == 0:
            time.sleep(0.3)
            dist.all_reduce(tensor)
        else:
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            try:
                dist.all_reduce(tensor)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return tensor.item()

    outcomes = run_ranks(body, 2)
    assert [outcome.value for outcome in outcomes] == [2.0, 2.0], [outcome.traceback for outcome in outcomes]
