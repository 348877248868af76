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

SHORT_S = 3.0


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


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("way", WAYS)
def test_the_line_where_the_main_thread_is_of_a_rank_that_does_not_come_is_told(way: str, size: int) -> None:
    function = WAYS[way]

    def body(member: Member) -> str:
        member.join()
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_S))
        if member.rank == size - 1:
            function(member)
            return ""
        with pytest.raises(CollectiveTimeout) as caught:
            dist.all_reduce(torch.ones(4))
        told(member)
        assert caught.value.group_rank == size - 1
        return str(caught.value)

    for text in on_ranks(body, size)[:-1]:
        who = rf"rank {size - 1} of the group \(pid \d+ on \S+\)"
        place = re.search(rf"{who}, which is at (\S+) \((\S+):(\d+)\),", text)
        assert place is not None, text
        assert Path(place[2]).name == Path(__file__).name
        assert int(place[3]) in lines_of(function) or int(place[3]) in lines_of(all_told)  # type: ignore[arg-type]


def test_a_rank_that_waits_in_another_group_is_told_with_the_line_of_that_call() -> None:
    def body(member: Member) -> str:
        member.join()
        pair = dist.new_group([1, 2])
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_S))
        if member.rank == 1:
            dist.all_reduce(torch.ones(4), group=pair)  # where rank 2 comes when rank 0 has been told
            return ""
        if member.rank == 2:
            assert soon(lambda: (member.folder / "told-0").exists())
            dist.all_reduce(torch.ones(4), group=pair)
            return ""
        with pytest.raises(CollectiveTimeout) as caught:
            dist.all_reduce(torch.ones(4))
        told(member)
        return str(caught.value)

    text = on_ranks(body, 3)[0]
    lines, first = inspect.getsourcelines(test_a_rank_that_waits_in_another_group_is_told_with_the_line_of_that_call)
    waits = first + next(number for number, line in enumerate(lines) if "group=pair)  # where" in line)
    here = re.escape(str(Path(__file__)))
    at_1 = re.search(rf"rank 1 of the group .* which is at body \({here}:{waits}\),", text)
    at_2 = re.search(r"rank 2 of the group .* which is at ", text)
    assert at_1 or at_2, text  # the first that had not come is named


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_is_stopped_is_told_as_stopped_and_not_asked(size: int) -> None:
    def body(member: Member) -> str:
        member.join()
        pids: list[int] = [0] * size
        dist.all_gather_object(pids, os.getpid())
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_S))
        if member.rank == size - 1:
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

    for text in on_ranks(body, size)[:-1]:
        assert "which is stopped (state T), did not come" in text
