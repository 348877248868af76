"""How a group comes about, or does not, when a rank cannot do its part of it; and what is left then."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from tests.support.islands import pretend_host
from tests.support.leaks import descriptors
from tests.support.ranks import Member, on_ranks
from tests.support.waiting import soon
from torch._C._distributed_c10d import Store

from phalanx.c10d import create
from phalanx.c10d.create import create_process_group
from phalanx.errors import InitializationError
from phalanx.membership.abort import GroupAbort
from phalanx.transports.hierarchical import communicator
from phalanx.transports.hierarchical.messages import HierarchicalMessages
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.segment import NotOneHost

SOON = timedelta(seconds=20)
long = pytest.mark.long


def mapped() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:phalanx (" in line for line in maps)  # segments, and no recorder


def leave_no_room() -> None:
    with open("/proc/self/statm") as sizes:
        used = int(sizes.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 20), resource.RLIM_INFINITY))


def forbid_memfds() -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    pytest.MonkeyPatch().setattr(os, "memfd_create", refuse)


@pytest.mark.parametrize(
    ("hinder", "words"),
    [
        (leave_no_room, "rank 0: Cannot allocate memory"),
        (forbid_memfds, "rank 0: Operation not permitted (memfd_create)"),
    ],
)
def test_all_ranks_learn_that_rank_0_has_no_segment(hinder: Callable[[], None], words: str) -> None:
    def body(member: Member) -> tuple[str, int]:
        store = member.store()
        if member.rank == 0:
            hinder()
        with pytest.raises(NotOneHost) as caught:
            SharedMemoryCommunicator(store, member.rank, member.size, SOON)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return str(caught.value), mapped()

    assert on_ranks(body, 3) == [(words, 0)] * 3


def test_all_ranks_together_have_the_timeout_to_come() -> None:
    """Rank 1 comes when the time runs already, and waits until that is over, not for a time of its own."""

    def body(member: Member) -> float:
        store, timeout_s = member.store(), 1.0 if member.rank == 0 else 250.0
        if member.rank == 1:
            store.wait(["offer"], timedelta(seconds=200))
        started = time.monotonic()
        if member.rank < 2:
            with pytest.raises(InitializationError, match="rank 2 did not come"):
                SharedMemoryCommunicator(store, member.rank, 3, timedelta(seconds=timeout_s))
        return time.monotonic() - started

    assert max(on_ranks(body, 3)) < 125


def test_every_rank_that_did_not_come_is_named() -> None:
    def body(member: Member) -> None:
        with pytest.raises(InitializationError, match="ranks 1-2 did not come"):
            SharedMemoryCommunicator(member.store(), 0, 3, timedelta(seconds=0.2))

    on_ranks(body, 1)


def attempt(member: Member, store: Store, timeout_s: float) -> float:
    group = create_process_group(store, member.rank, member.size, timedelta(seconds=timeout_s), "group", [])
    tensor = torch.ones(1)
    group.allreduce([tensor])
    group.shutdown()
    return tensor.item()


@pytest.mark.parametrize(("late", "failures"), [(2, 2), pytest.param(0, 1, marks=long)])
def test_rank_that_missed_failed_attempts_joins_the_next(late: int, failures: int) -> None:
    def body(member: Member) -> list[float]:
        store = member.store()
        if member.rank != late:
            for _ in range(failures):
                # On a busy machine the other one may be late as well.
                with pytest.raises(InitializationError, match="did not come"):
                    attempt(member, store, 0.3)
            member.say(f"failed-{member.rank}")
        # All do: a rank that is ahead would come to an attempt of rank 0 that fails.
        member.await_said(*(f"failed-{rank}" for rank in {0, 1, 2} - {late}))
        return [attempt(member, store, 20) for _ in range(3)]

    assert on_ranks(body, 3) == [[3.0, 3.0, 3.0]] * 3


@pytest.mark.parametrize(
    ("where", "step"),
    [
        (communicator, "HierarchicalMessages"),
        (GroupAbort, "join"),
        pytest.param(create, "quicken_messages", marks=long),
    ],
)
def test_nothing_stays_of_a_group_over_hosts_that_cannot_be_made(where: object, step: str) -> None:
    """Its error may be kept, and with it whatever its frames hold."""

    def body(member: Member) -> tuple[int, list[str], bool]:
        pretend_host(member.rank // 2)
        first = create_process_group(member.store(), member.rank, member.size, SOON, "first", [])
        first.shutdown()
        make = getattr(where, step)

        def fail(*arguments: Any, **options: Any) -> None:
            if isinstance(made := make(*arguments, **options), HierarchicalMessages):
                made.give_up()
            raise InitializationError("a rank has gone")

        before, threads = descriptors(), set(threading.enumerate())
        with pytest.MonkeyPatch().context() as patch:
            patch.setattr(where, step, fail)
            with pytest.raises(InitializationError, match="a rank has gone") as kept:
                create_process_group(member.store(), member.rank, member.size, SOON, "second", [])
        ended = soon(lambda: not set(threading.enumerate()) - threads)  # those that have heard that they end
        assert kept.value
        return mapped(), sorted(set(descriptors()) - set(before)), ended

    assert on_ranks(body, 4) == [(0, [], True)] * 4
