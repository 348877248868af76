"""Where a rank is that does not come, in the errors of those that waited for it, without a launcher.

Whatever keeps the rank, its main thread's line is told: also if it holds the interpreter in C, so that it can say
nothing itself, and if it waits for another rank in another group.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import pretend_host
from tests.support.ranks import Member, on_ranks
from tests.support.waiting import soon, stop

from phalanx.errors import CollectiveTimeout

SHORT_S = 1.0


def sleeps(member: Member) -> None:
    while not all_told(member):
        time.sleep(0.01)


def holds_the_interpreter(member: Member) -> None:
    """Only in one call of C after another, each of which is longer than the others take to look."""
    hold = ctypes.PyDLL(None).usleep
    while not all_told(member):
        hold(900_000)


def waits_in_another_group(member: Member) -> None:
    dist.recv(torch.ones(4), 0, group=pairs[0])


pairs: list[dist.ProcessGroup] = []  # of ranks 0 and 2, in which rank 0 sends when it has been told


def all_told(member: Member) -> bool:
    return all((member.folder / f"told-{rank}").exists() for rank in range(2))


@pytest.mark.parametrize("way", [sleeps, holds_the_interpreter, waits_in_another_group])
def test_line_of_a_rank_that_does_not_come_is_told(way: Callable[[Member], None]) -> None:
    def body(member: Member) -> str:
        member.join()
        group = dist.new_group([0, 2])
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_S))
        member.meet("joined")
        if member.rank == 2:
            pairs.append(group)
            way(member)
            return ""
        with pytest.raises(CollectiveTimeout) as caught:
            dist.all_reduce(torch.ones(4))
        assert caught.value.group_rank == 2
        member.say(f"told-{member.rank}")
        if member.rank == 0 and way is waits_in_another_group:
            assert soon(lambda: all_told(member))
            dist.send(torch.ones(4), 2, group=group)
        return str(caught.value)

    first = way.__code__.co_firstlineno
    for text in on_ranks(body, 3)[:-1]:
        place = re.search(
            rf"rank 2 of the group \(pid \d+ on \S+\), which is at (\S+) \({re.escape(__file__)}:(\d+)\),", text
        )
        assert place is not None, text
        assert place[1] in ("all_told", "<genexpr>") or (place[1] == way.__name__ and 0 < int(place[2]) - first < 8), (
            text
        )


@pytest.mark.parametrize("hosts", [1, 2])
def test_stopped_rank_is_told_as_stopped_and_not_asked(hosts: int) -> None:
    """Between hosts by the other rank of its host."""

    def body(member: Member) -> str:
        pretend_host(min(member.rank, hosts - 1))
        member.join_patiently(SHORT_S)
        (member.folder / f"pid-{member.rank}").write_text(str(os.getpid()))
        member.meet("pids")
        pid = int((member.folder / "pid-2").read_text())
        if member.rank == 2:
            assert soon(lambda: all_told(member))
            return ""
        if member.rank == 0:
            stop(pid)
        with pytest.raises(CollectiveTimeout) as caught:
            dist.all_reduce(torch.ones(4))
        member.say(f"told-{member.rank}")
        if member.rank == 0:
            assert soon(lambda: all_told(member))
            os.kill(pid, signal.SIGCONT)
        assert caught.value.group_rank == 2  # though rank 1, on the host of that, has not come either
        return str(caught.value)

    for text in on_ranks(body, 3)[:-1]:
        assert "stopped (state T), did not come" in text
