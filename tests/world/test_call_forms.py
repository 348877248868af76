"""Timeouts of single calls. Every form of a call is in ``tests/differential``."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member
from tests.support.worlds import every_rank

from phalanx.errors import CollectiveTimeout, PhalanxError

MAX = dist.ReduceOp.MAX
SHORT = timedelta(seconds=0.1)


def late_by_options(pg: Any) -> None:
    options: Any = dist.AllreduceOptions()
    options.timeout = SHORT
    pg.allreduce([torch.ones(4)], options).wait()


def late_by_setting(pg: Any, call: Callable[[], Any]) -> None:
    pg.set_timeout(SHORT)
    call()


LATE: dict[str, Callable[[Any], Any]] = {
    "options": late_by_options,
    "argument": lambda pg: pg.allreduce(torch.ones(4), MAX, SHORT).wait(),
    "barrier": lambda pg: pg.barrier(timeout=SHORT).wait(),
    "wait": lambda pg: pg.allreduce([torch.ones(4)]).wait(SHORT),
    "set": lambda pg: late_by_setting(pg, lambda: dist.all_reduce(torch.ones(4), group=pg)),
    "set, message": lambda pg: late_by_setting(pg, lambda: dist.recv(torch.ones(4), src=1, group=pg)),
}


@pytest.mark.parametrize("calls", [("options", "argument", "set"), pytest.param(tuple(LATE), marks=pytest.mark.long)])
@every_rank(2, ["one host", "two hosts"], joins=False, timeout_s=120)
def test_a_timeout_of_one_call_holds(member: Member, calls: tuple[str, ...]) -> None:
    """Rank 1 does not come; the groups' own timeout is far longer than the test may take."""
    member.join(timeout_s=3600)
    groups = {name: dist.new_group() for name in calls}
    for name, group in groups.items():
        if member.rank == 0:
            with pytest.raises((CollectiveTimeout, RuntimeError), match=r"under way|did not come"):
                LATE[name](group)
    dist.barrier()


@every_rank(2, leaves=False)
def test_a_timeout_of_one_call_is_that_calls_only(member: Member) -> None:
    """The call's is the long one: a busy machine may be late for the short one of the group, which must run out."""
    world: Any = dist.group.WORLD
    dist.barrier()
    world.set_timeout(SHORT)
    member.meet("short")
    if member.rank == 1:
        time.sleep(3 * SHORT.total_seconds())
    world.allreduce(torch.ones(4), MAX, timedelta(seconds=60)).wait()
    member.meet("called")
    if member.rank == 0:
        with pytest.raises(CollectiveTimeout):
            dist.all_reduce(torch.ones(4))
    member.meet("told")


@every_rank(2, ["one host", "two hosts"], leaves=False)
def test_timeout_of_one_call_is_not_that_of_messages(member: Member) -> None:
    """A message that another thread waits for ends at the group's timeout, and the group with it."""
    world: Any = dist.group.WORLD
    dist.barrier()
    world.set_timeout(SHORT)
    member.meet("short")
    if member.rank == 0:
        message = world.recv([torch.ones(4)], 1, 0)
        with ThreadPoolExecutor(1) as threads:
            waited = threads.submit(message.wait)
            with pytest.raises(PhalanxError):
                world.allreduce(torch.ones(4), MAX, timedelta(seconds=3600)).wait()
            assert isinstance(waited.exception(), CollectiveTimeout)
    member.meet("told")
