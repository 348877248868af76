"""Where a rank is that does not come, in the errors of those that waited for it, without a launcher.

Whatever keeps the rank, its main thread's line is told: also if it holds the interpreter in C, so that it can say
nothing itself, and if it waits for another rank in another group.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from tests.support.waiting import soon, stop

from phalanx.errors import CollectiveTimeout, PeerLost

SHORT_S = 1.5


def sleeps(member: Member) -> None:
    while not all_told(member):
        time.sleep(0.01)


def computes(member: Member) -> None:
    while not all_told(member):
        sum(range(1000))


def holds_the_interpreter(member: Member) -> None:
    """Only in one call of C after another, each of which is longer than the others take to look."""
    hold = ctypes.PyDLL(None).usleep
    while not all_told(member):
        hold(900_000)


WAYS = {"sleeps": sleeps, "computes": computes, "holds": holds_the_interpreter}


def all_told(member: Member) -> bool:
    return len(list(member.folder.glob("told-*"))) == member.size - 1


def told(member: Member) -> None:
    (member.folder / f"told-{member.rank}").touch()


def lines_of(function: Callable[[Member], None]) -> range:
    lines, first = inspect.getsourcelines(function)
    return range(first, first + len(lines))


@pytest.mark.parametrize("way", WAYS)
def test_line_of_a_rank_that_does_not_come_is_told(way: str) -> None:
    function = WAYS[way]

    def body(member: Member) -> str:
        member.join()
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_S))
        if member.rank == 2:
            function(member)
            return ""
        with pytest.raises(CollectiveTimeout) as caught:
            dist.all_reduce(torch.ones(4))
        told(member)
        assert caught.value.group_rank == 2
        return str(caught.value)

    for text in on_ranks(body, 3)[:-1]:
        who = r"rank 2 of the group \(pid \d+ on \S+\)"
        place = re.search(rf"{who}, which is at (\S+) \((\S+):(\d+)\),", text)
        assert place is not None, text
        assert Path(place[2]).name == Path(__file__).name
        assert int(place[3]) in lines_of(function) or int(place[3]) in lines_of(all_told)  # type: ignore[arg-type]


def test_rank_that_waits_in_another_group_is_told_with_its_line() -> None:
    def body(member: Member) -> tuple[str, int]:
        member.join()
        pair = dist.new_group([1, 2])
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_S))
        if member.rank == 2:
            member.await_said("told-0")
        if member.rank:
            # Rank 2 comes when rank 0 has been told.
            dist.all_reduce(torch.ones(4), group=pair)
            return "", inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
        with pytest.raises(CollectiveTimeout) as caught:
            dist.all_reduce(torch.ones(4))
        told(member)
        return str(caught.value), 0

    (text, _), (_, waits), _ = on_ranks(body, 3)
    at_1 = re.search(rf"rank 1 of the group .* which is at body \({re.escape(__file__)}:{waits}\),", text)
    at_2 = re.search(r"rank 2 of the group .* which is at ", text)
    assert at_1 or at_2, text  # the first that had not come is named


def test_stopped_rank_is_told_as_stopped_and_not_asked() -> None:
    def body(member: Member) -> str:
        member.join()
        pids: list[int] = [0] * 3
        dist.all_gather_object(pids, os.getpid())
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_S))
        if member.rank == 2:
            assert soon(lambda: all_told(member))
            return ""
        if member.rank == 0:
            stop(pids[-1])
        with pytest.raises((CollectiveTimeout, PeerLost)) as caught:
            dist.all_reduce(torch.ones(4))
        told(member)
        if member.rank == 0:
            assert soon(lambda: all_told(member))
            os.kill(pids[-1], signal.SIGCONT)
        return str(caught.value)

    for text in on_ranks(body, 3)[:-1]:
        assert "which is stopped (state T), did not come" in text
