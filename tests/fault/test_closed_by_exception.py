"""A rank that closes its groups because an exception is on its way has not left in order: the others read why."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import ISLANDS, divide_by
from tests.support.ranks import Member, on_ranks

from phalanx.errors import PeerLost

FAILED = r"has failed \(ValueError: this batch is empty at \S*test_closed_by_exception\.py:\d+\)"


class Training:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


def fail_in_with() -> None:
    with Training():
        raise ValueError("this batch is empty")


def give_up_on_an_error() -> None:
    try:
        raise ValueError("this batch is empty")
    except ValueError:
        dist.destroy_process_group()


def exit_badly() -> None:
    try:
        sys.exit(3)
    finally:
        dist.destroy_process_group()


def exit_well() -> None:
    with Training():
        sys.exit()


@pytest.mark.parametrize(
    ("go", "words", "call", "hosts"),
    [
        (fail_in_with, FAILED, "recv", None),
        (give_up_on_an_error, FAILED, "recv", "halves"),
        (exit_badly, r"has failed \(exit code 3\)", "all_reduce", "cyclic"),
        (exit_well, "left the group in order", "all_reduce", None),
    ],
)
def test_others_are_told_the_exception(
    go: Callable[[], None], words: str, call: str, hosts: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hosts is not None:
        divide_by(monkeypatch, ISLANDS[hosts])

    def body(member: Member) -> None:
        member.join()
        dist.barrier()
        member.meet("joined")  # without it a rank that is still in the barrier would be told there
        if member.rank == 2:
            with contextlib.suppress(ValueError, SystemExit):
                go()
            member.say("gone")  # and its process goes on: nothing of its end has told it
            member.await_said("told-0", "told-1")
            return
        member.await_said("gone")
        with pytest.raises(PeerLost, match=words) as caught:
            if call == "all_reduce":
                dist.all_reduce(torch.ones(4))
            else:
                dist.recv(torch.ones(4), 2)
        member.say(f"told-{member.rank}")
        assert caught.value.group_rank == 2

    on_ranks(body, 3)


def test_group_that_a_rank_makes_afterwards_is_whole() -> None:
    """The exception was of the earlier group: nothing is told in the next one, which ends in order."""

    def body(member: Member) -> float:
        member.join()
        give_up_on_an_error()
        member.meet("again")
        member.join(name="next")
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return float(tensor)

    assert on_ranks(body, 3) == [3.0] * 3
