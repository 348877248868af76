"""The error about a rank that is lost, or late, says what that rank did last, from its flight recorder."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
from collections.abc import Callable
from ctypes import addressof
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, run_ranks
from tests.support.waiting import await_end, when_waiting
from torch.distributed.distributed_c10d import _set_pg_timeout

import phalanx
from phalanx.errors import CollectiveTimeout, PeerLost
from phalanx.native.core import RECORDER_BYTES
from phalanx.system.host import machine_name
from phalanx.watch import recorder
from phalanx.watch.records import KINDS

BROADCAST = next(number for number, kind in KINDS.items() if kind == "broadcast")


def killed_after_a_call() -> None:
    dist.broadcast(torch.ones(4), 0)
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_a_call() -> None:
    when_waiting(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with phalanx.label("evaluation"):
        dist.all_reduce(torch.ones(8))


def line_of(function: Callable[[], None], text: str) -> int:
    lines = open(__file__).read().splitlines()  # noqa: SIM115
    first = function.__code__.co_firstlineno
    return next(number for number, line in enumerate(lines[first:], first + 1) if text in line)


@pytest.mark.parametrize(
    ("end", "call", "did"),
    [
        (killed_after_a_call, "broadcast", r"Its last operation was broadcast #2 \(float32, 16 B, src=0\) at PLACE"),
        (killed_in_a_call, "all_reduce", r'It was in all_reduce #2 \(float32, 32 B, sum\) at PLACE in "evaluation"'),
    ],
)
def test_a_lost_rank_is_said_with_its_last_operation(end: Callable[[], None], call: str, did: str) -> None:
    def body(member: Member) -> PeerLost:
        member.join()
        dist.all_reduce(torch.ones(3))
        if member.rank == 1:
            (member.folder / "pid.part").write_text(str(os.getpid()))
            (member.folder / "pid.part").rename(member.folder / "pid")
            end()
        if end is killed_after_a_call:
            dist.broadcast(torch.ones(4), 0)
        else:
            member.await_said("pid")
            await_end(int((member.folder / "pid").read_text()))  # in its call, into which it had put its part
            dist.all_reduce(torch.ones(8))
        with pytest.raises(PeerLost) as caught:
            dist.all_reduce(torch.ones(8))
        return caught.value

    place = f"{__file__}:{line_of(end, f'dist.{call}(')}"
    for rank, outcome in enumerate(run_ranks(body, 3)):
        if rank == 1:
            continue
        error = outcome.value
        assert isinstance(error, PeerLost), outcome.traceback
        assert re.search(did.replace("PLACE", re.escape(place)) + r"\. Look at that rank's own output", str(error))
        assert (error.group_rank, error.rank, error.host) == (1, 1, machine_name())
        assert error.last_line == place
        assert error.last_operation.startswith(f"{call} #2")
        assert str(error).count("\n") < 12
        assert (error.group, 0 < error.elapsed_s < 60) == ("0", True)
        assert (error.sequence, error.signal) == (3, 0)  # nobody says by which signal: there is no launcher


def test_a_file_that_took_the_place_of_a_recorder_is_not_read() -> None:
    """A program may close descriptors that it does not know, as daemons do, and its own files get their numbers."""

    def body(member: Member) -> PeerLost:
        if member.rank == 1:
            recorder.open_recorder()
            number = next(int(n) for n in os.listdir("/proc/self/fd") if recorder.MEMORY_NAME in name_of_file(n))
            group = recorder.group("0", "phalanx", [0, 1], 1)
            assert group is not None
            recorder.end(recorder.begin(addressof(group), BROADCAST, 16, 0), False)
            looks_like_one = os.memfd_create("of the program")
            with open(looks_like_one, "wb", closefd=False) as file:
                file.write(ctypes.string_at(recorder.own_memory(), RECORDER_BYTES))
            os.dup2(looks_like_one, number)
            os.close(looks_like_one)
        member.join()
        if member.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost) as caught:
            dist.all_reduce(torch.ones(8))
        return caught.value

    error = run_ranks(body, 2)[0].value
    assert isinstance(error, PeerLost)
    assert (error.rank, error.last_operation, error.last_line) == (1, "", ""), error


def name_of_file(number: str) -> str:
    with contextlib.suppress(OSError):  # the descriptor of the listing itself
        return os.readlink(f"/proc/self/fd/{number}")
    return ""


def test_a_late_rank_is_said_with_its_last_operation() -> None:
    def body(member: Member) -> CollectiveTimeout | None:
        member.join()
        dist.broadcast(torch.ones(4), 0)
        member.meet("done")  # rank 0 waits for nobody in the broadcast
        _set_pg_timeout(timedelta(seconds=0.5))
        if member.rank == 1:
            member.await_said("raised")
            return None
        with pytest.raises(CollectiveTimeout) as caught:
            dist.all_reduce(torch.ones(8))
        member.say("raised")
        return caught.value

    error = run_ranks(body, 2)[0].value
    assert isinstance(error, CollectiveTimeout)
    assert re.search(
        r"Its last operation was broadcast #1 \(float32, 16 B, src=0\) at .*test_last_op\w*\.py:\d+\. Is it", str(error)
    )
    assert error.rank == 1
    assert error.pid > 0
    assert error.elapsed_s == 0.5
    assert error.sequence == 2


def test_the_rank_of_a_smaller_group_is_named_by_its_rank_in_the_world_too() -> None:
    def body(member: Member) -> PeerLost | None:
        member.join()
        group = dist.new_group([1, 2])
        if member.rank == 0:
            return None
        dist.barrier(group=group)
        if member.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost) as caught:
            dist.barrier(group=group)
        return caught.value

    error = run_ranks(body, 3)[1].value
    assert isinstance(error, PeerLost)
    assert (error.group_rank, error.rank) == (1, 2)
    assert (error.group, error.sequence, error.elapsed_s > 0) == ("1", 2, True)
