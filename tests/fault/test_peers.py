"""What the surviving ranks see when a rank dies, stops coming, or calls something else."""

from __future__ import annotations

import json
import os
import platform
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks, run_ranks
from tests.support.waiting import when_waiting
from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.errors import CollectiveMismatch, CollectiveTimeout, InitializationError, PeerLost
from phalanx.transports.shm import communicator, explanation
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.segment import NotOneHost

OPERATIONS: dict[str, Callable[[Member], object]] = {
    "all_reduce small": lambda member: dist.all_reduce(torch.ones(4)),
    "all_reduce large": lambda member: dist.all_reduce(torch.ones(3_000_000)),
    "all_gather": lambda member: dist.all_gather([torch.empty(9) for _ in range(member.size)], torch.ones(9)),
    "broadcast": lambda member: dist.broadcast(torch.ones(2_000_000), src=member.size - 1),
    "barrier": lambda member: dist.barrier(),
    "all_reduce async": lambda member: dist.all_reduce(torch.ones(4), async_op=True).wait(),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_killed_rank_is_named_by_every_survivor(operation: str, size: int) -> None:
    """The last rank dies before the call; every other one raises within a second and names it and its pid."""

    def body(member: Member) -> tuple[int, float]:
        member.join()
        pids = [torch.zeros(1, dtype=torch.int64) for _ in range(member.size)]
        dist.all_gather(pids, torch.tensor([os.getpid()]))
        victim = member.size - 1
        if member.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            OPERATIONS[operation](member)
        elapsed_s = time.monotonic() - started
        assert caught.value.group_rank == victim
        assert caught.value.pid == pids[victim].item()
        process = f"pid {caught.value.pid} on {platform.node()}"
        assert f"rank {victim} of the group ({process}) has ended" in str(caught.value)
        with pytest.raises(PeerLost):  # the group stays broken
            dist.barrier()
        return victim, elapsed_s

    outcomes = run_ranks(body, size)
    assert outcomes[-1].signal == signal.SIGKILL
    for outcome in outcomes[:-1]:
        assert outcome.error is None, outcome.traceback
        assert outcome.value[1] < 20  # not the group's timeout, which is a minute


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_killed_in_the_middle_of_an_all_reduce(size: int) -> None:
    """At whatever point the kill falls, survivors end with PeerLost or whole results, never with garbage."""

    def body(member: Member) -> bool:
        member.join()
        victim = member.size - 1
        if member.rank == victim and os.fork() == 0:
            time.sleep(0.05)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        try:
            while True:
                tensor = torch.ones(500_000)
                dist.all_reduce(tensor)
                assert bool((tensor == member.size).all())
        except PeerLost as error:
            return error.group_rank == victim

    for outcome in run_ranks(body, size)[:-1]:
        assert outcome.error is None, outcome.traceback
        assert outcome.value is True


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (lambda: dist.all_reduce(torch.ones(4)), lambda: dist.all_reduce(torch.ones(8)), ("float32[4]", "float32[8]")),
        (
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32)),
            ("float32", "int32"),
        ),
        (lambda: dist.all_reduce(torch.ones(4)), lambda: dist.barrier(), ("all_reduce", "barrier")),
        (lambda: dist.broadcast(torch.ones(4), 0), lambda: dist.broadcast(torch.ones(4), 1), ("src=0", "src=1")),
    ],
    ids=["sizes", "dtypes", "kinds", "roots"],
)
def test_different_calls_raise_on_every_rank(
    size: int, mine: Callable[[], object], theirs: Callable[[], object], words: tuple[str, str]
) -> None:
    def body(member: Member) -> str:
        member.join()
        dist.barrier()
        with pytest.raises(CollectiveMismatch) as caught:
            # A broadcast's root does not wait for its readers: it learns of it at its next call at the latest.
            for _ in range(5):
                (mine if member.rank else theirs)()
        return str(caught.value)

    for text in on_ranks(body, size):
        assert words[0] in text
        assert words[1] in text


def test_ranks_that_are_slow_to_say_their_calls_are_waited_for() -> None:
    """They were in the call with the others, and a busy machine lets them find only later that the group broke."""

    def body(member: Member) -> str:
        member.join()
        vars(explanation)["NOTICED_PATIENCE_S"] = 60.0
        if member.rank:
            # One of them may be the first that notices, for which all wait in any case.
            explain = vars(communicator)["explain"]

            def explain_late(*of_call: Any) -> Any:
                time.sleep(0.8 * (member.rank - 1))
                return explain(*of_call)

            vars(communicator)["explain"] = explain_late
            when_waiting(lambda: member.say(f"waits-{member.rank}"))
        else:
            member.await_said("waits-1", "waits-2", "waits-3")
        with pytest.raises(CollectiveMismatch) as caught:
            dist.all_reduce(torch.ones(4 if member.rank else 8))
        return str(caught.value)

    for text in on_ranks(body, 4):
        assert "rank 0: all_reduce(float32[8], sum) at" in text
        assert "ranks 1-3: all_reduce(float32[4], sum) at" in text


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (lambda: dist.broadcast(torch.ones(4), 0), lambda: dist.broadcast(torch.ones(4), 1), ("src=0", "src=1")),
        (lambda: dist.broadcast(torch.ones(4), 0), lambda: dist.gather(torch.ones(4), dst=0), ("src=0", "gather")),
    ],
    ids=["two roots", "root against sender"],
)
def test_calls_that_wait_for_nobody_are_compared_by_the_next(
    size: int, mine: Callable[[], object], theirs: Callable[[], object], words: tuple[str, str]
) -> None:
    """Rank 0 is the root of its own broadcast, rank 1 waits for nobody either: both return. The next call tells."""

    def body(member: Member) -> str:
        member.join()
        with pytest.raises(CollectiveMismatch) as caught:
            (mine if member.rank == 0 else theirs)()
            dist.barrier()
        return str(caught.value)

    for text in on_ranks(body, size):
        assert words[0] in text
        assert words[1] in text
        assert "test_peers.py:" in text


def test_a_rank_that_comes_back_to_a_broken_group_tells_the_call_that_differed() -> None:
    """Ranks 1 and 2 made one broadcast, rank 0 another; ranks 0 and 2 notice before rank 1 calls anything more."""

    def body(member: Member) -> str:
        member.join()
        noticed = member.folder / "noticed"
        dist.broadcast(torch.ones(4), 0 if member.rank == 0 else 1)
        while member.rank == 1 and not noticed.exists():
            time.sleep(0.005)
        with pytest.raises(CollectiveMismatch) as caught:
            dist.barrier()
        if member.rank == 2:
            noticed.touch()
        return str(caught.value)

    late = on_ranks(body, 3)[1]
    assert "rank 0: broadcast(float32[4], src=0) at" in late
    assert "ranks 1-2: broadcast(float32[4], src=1) at" in late


@pytest.mark.parametrize("size", [2, 3])
def test_an_all_to_all_whose_sizes_only_the_receiver_can_compare_is_told_by_all(size: int) -> None:
    """Rank 0 sends rank 1 more than that expects, gets what it expects itself, and learns of it at its next call."""

    def body(member: Member) -> str:
        member.join()
        inputs, outputs = ([torch.ones(2) for _ in range(size)] for _ in range(2))
        if member.rank == 0:
            inputs[1] = torch.ones(3)
        dist.broadcast(torch.ones(1), src=0)
        with pytest.raises(CollectiveMismatch) as caught:
            dist.all_to_all(outputs, inputs)
            dist.barrier()
        return str(caught.value)

    twos, others = [2] * size, "rank 1" if size == 2 else "ranks 1-2"
    for text in on_ranks(body, size):
        assert f"rank 0: all_to_all(float32, sends {[2, 3, 2][:size]}, expects {twos} elements) at" in text
        assert f"{others}: all_to_all(float32, sends {twos}, expects {twos} elements) at" in text
        assert "barrier" not in text


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_rank_that_is_behind_finishes_what_the_others_have_finished(size: int) -> None:
    def body(member: Member) -> tuple[float, str]:
        member.join()
        tensor = torch.full((1000,), float(member.rank == 0))
        if member.rank == size - 1:
            time.sleep(0.5)
        dist.broadcast(tensor, src=0)
        with pytest.raises(CollectiveMismatch) as caught:
            if member.rank == 0:
                dist.broadcast(torch.ones(3), src=0)
                dist.barrier()
            else:
                dist.all_reduce(torch.ones(3))
        return float(tensor.sum()), str(caught.value)

    everybody = "rank 1" if size == 2 else f"ranks 1-{size - 1}"
    results = on_ranks(body, size)
    assert [total for total, _ in results] == [1000] * size
    assert f"  {everybody}: all_reduce(float32[3], sum) at" in results[-1][1]  # the others do not wait to hear of it


def test_a_rank_that_does_not_come_is_named_at_the_timeout() -> None:
    def body(member: Member) -> bool:
        member.join_patiently(1)
        if member.rank == 1:
            with pytest.raises(CollectiveTimeout, match="rank 0 of the group"):
                dist.all_reduce(torch.ones(1))
            member.say("raised")
        else:
            member.await_said("raised")
            with pytest.raises(CollectiveTimeout):
                dist.all_reduce(torch.ones(1))
        return True

    assert on_ranks(body, 2) == [True, True]


@pytest.mark.parametrize("size", [2, 3])
def test_torchs_new_timeout_for_a_group_holds(size: int) -> None:
    def body(member: Member) -> float:
        member.join(timeout_s=60)
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
        member.meet("set")
        started = time.monotonic()
        if member.rank:
            with pytest.raises(CollectiveTimeout, match=r"rank 0 of the group .* within 3 s"):
                dist.all_reduce(torch.ones(1))
            took_s = time.monotonic() - started
            member.say(f"raised-{member.rank}")
            return took_s
        member.await_said(*[f"raised-{rank}" for rank in range(1, size)])
        return 0.0

    assert max(on_ranks(body, size)) < 55  # and not the first one


def test_joining_names_a_rank_that_does_not_come() -> None:
    def body(member: Member) -> bool:
        member.meet("here")  # rank 1 has to come before rank 0 has given up
        if member.rank < 2:
            with pytest.raises(InitializationError, match="rank 2 did not come"):
                SharedMemoryCommunicator(member.store(), member.rank, 3, timedelta(seconds=10))
        return True

    assert on_ranks(body, 3) == [True] * 3


def test_a_rank_that_cannot_reach_the_segment_is_named_on_every_rank() -> None:
    """As when it runs in another pid namespace: the offered pid is somebody else's, or nobody's."""

    def body(member: Member) -> str:
        if member.rank == 1:
            store = member.store()

            class Elsewhere(PrefixStore):
                def compare_set(self, key: str, expected: str, desired: str) -> bytes:  # how an offer is read
                    value = super().compare_set(key, expected, desired)
                    return json.dumps([os.getpid(), 9999, json.loads(value)[2]]).encode() if key == "offer" else value

            place_store: Store = Elsewhere("x", store)
        else:
            place_store = PrefixStore("x", member.store())
        with pytest.raises(NotOneHost) as caught:
            SharedMemoryCommunicator(place_store, member.rank, 3, timedelta(seconds=20))
        return str(caught.value)

    texts = on_ranks(body, 3)
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 1: No such file or directory")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_interrupt_ends_a_collective_that_waits(asynchronous: bool) -> None:
    def body(member: Member) -> bool:
        member.join()
        dist.barrier()
        interrupted = member.folder / "interrupted"
        if member.rank == 0:
            while not interrupted.exists():
                time.sleep(0.01)
            with pytest.raises(PeerLost, match="was interrupted"):
                dist.all_reduce(torch.ones(1))
            return True
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            when_waiting(lambda: os.kill(os.getpid(), signal.SIGINT))
            if asynchronous:
                dist.all_reduce(torch.ones(1), async_op=True).wait()
            else:
                dist.all_reduce(torch.ones(1))
        assert time.monotonic() - started < 20  # not the group's timeout
        interrupted.touch()
        return True

    assert on_ranks(body, 2) == [True, True]
