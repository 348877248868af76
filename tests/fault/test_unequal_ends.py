"""A rank sends something else than the other one receives: every rank reads which two lines these are."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import ISLANDS, divide_by
from tests.support.ranks import Member, run_ranks, values
from tests.support.waiting import soon

from phalanx.errors import CollectiveMismatch, PhalanxError
from phalanx.system.processes import state_of

SECOND_TAG = 7
sizes = pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 5))])


@pytest.fixture(autouse=True, params=[None, "cyclic", pytest.param("halves", marks=pytest.mark.long)])
def hosts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        divide_by(monkeypatch, ISLANDS[request.param])


def line_here() -> int:
    """The line that calls this."""
    return sys._getframe(1).f_lineno


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(PhalanxError) as caught:
        call()
    error = caught.value
    assert isinstance(error, CollectiveMismatch), error
    assert error.of_message
    assert error.calls
    for rank, calls in error.calls.items():
        assert all(f"rank {rank}: {call}" in str(error) for call in calls.split("; "))  # two of a message to oneself
    return str(error)


def expected(sender: int, sent: str, sent_at: int, receiver: int, received: str, received_at: int) -> str:
    here = re.escape(__file__.rsplit("/", 1)[1])
    return (
        rf"the two ends of a message differ:\n"
        rf"  rank {sender}: send to rank {receiver}, {re.escape(sent)} at \S*{here}:{sent_at}\n"
        rf"  rank {receiver}: recv from rank {sender}, {re.escape(received)} at \S*{here}:{received_at}\n"
        rf"Both ranks must give tensors of one size and dtype\."
    )


def neighbours(size: int) -> tuple[int, int]:
    """The last rank and the one before it: on two hosts if these are cyclic or two ranks, else on one."""
    return size - 1, size - 2


# What is sent, what is received, and both in words: in a frame of its own between hosts, staged there, and large.
CASES = [
    (torch.ones(8), torch.ones(4), "float32[8]", "float32[4]"),
    (torch.ones(1), torch.ones(1, dtype=torch.int32), "float32[1]", "int32[1]"),
    (torch.ones(5000), torch.ones(5001), "float32[5000]", "float32[5001]"),
    (torch.ones(200_000), torch.ones(4), "float32[200000]", "float32[4]"),
]


@sizes
@pytest.mark.parametrize(("sent", "received", "sending", "receiving"), CASES)
def test_all_ranks_read_both_lines_though_the_sender_has_gone_on(
    size: int, sent: torch.Tensor, received: torch.Tensor, sending: str, receiving: str
) -> None:
    sender, receiver = neighbours(size)

    def body(member: Member) -> tuple[str, int]:
        member.join()
        line = 0
        if member.rank == sender:
            work = dist.isend(sent, receiver)
            line = line_here() - 1
            member.say("sent")
        if member.rank != receiver:
            text = error_of(dist.barrier)
            if member.rank == sender:
                del work
            return text, line
        member.await_said("sent")
        text = error_of(lambda: dist.recv(received, sender))
        return text, line_here() - 1

    found = values(run_ranks(body, size))
    wanted = expected(sender, sending, found[sender][1], receiver, receiving, found[receiver][1])
    for text, _ in found:
        assert re.match(wanted, text), text


@sizes
@pytest.mark.parametrize("sender_is", ["gone", "in no call"])
def test_all_ranks_read_both_lines_of_a_sender_that_is_in_no_call(sender_is: str, size: int) -> None:
    sender, receiver = neighbours(size)

    def body(member: Member) -> tuple[str, int]:
        member.join()
        warm = torch.ones(1)  # between hosts a first message waits until it is received
        if member.rank == sender:
            dist.send(warm, receiver)
        elif member.rank == receiver:
            dist.recv(warm, sender)
        member.meet("warm")
        if member.rank == sender:
            dist.send(torch.ones(8), receiver)
            line = line_here() - 1
            if sender_is == "gone":
                dist.destroy_process_group()
            member.say("sent")
            member.await_said(*(f"told-{rank}" for rank in range(size) if rank != sender))
            return "", line
        member.await_said("sent")
        if member.rank == receiver:
            text = error_of(lambda: dist.recv(torch.ones(4), sender))
        else:
            text = error_of(lambda: dist.recv(torch.ones(4), receiver))
        line = line_here() - 3
        member.say(f"told-{member.rank}")
        return text, line

    found = values(run_ranks(body, size))
    wanted = expected(sender, "float32[8]", found[sender][1], receiver, "float32[4]", found[receiver][1])
    for rank, (text, _) in enumerate(found):
        assert rank == sender or re.match(wanted, text), text


@pytest.mark.parametrize("hosts", [None], indirect=True)
@sizes
def test_all_ranks_of_a_host_read_the_line_of_a_sender_that_has_ended(size: int) -> None:
    sender, receiver = neighbours(size)

    def body(member: Member) -> tuple[str, int]:
        member.join()
        process = member.folder / "process"
        if member.rank == sender:
            dist.send(torch.ones(8), receiver)
            process.write_text(f"{os.getpid()} {line_here() - 1}")
            member.say("sent")
            os._exit(0)
        member.await_said("sent")
        pid, line = map(int, process.read_text().split())
        assert soon(lambda: state_of(pid) in ("Z", ""))
        if member.rank != receiver:
            return error_of(lambda: dist.recv(torch.ones(4), receiver)), line
        text = error_of(lambda: dist.recv(torch.ones(4), sender))
        wanted = expected(sender, "float32[8]", line, receiver, "float32[4]", line_here() - 1)
        assert re.match(wanted, text), text
        return text, line

    *others, gone = run_ranks(body, size)
    assert gone.rank == sender
    assert len({text for text, _ in values(others)}) == 1


def test_receive_is_named_to_which_the_message_went() -> None:
    """The thread that waits for one message moves all of them, and it may find that another has unequal ends."""

    def body(member: Member) -> tuple[str, int]:
        member.join()
        if member.rank == 1:
            dist.send(torch.ones(3), 0)
            line = line_here() - 1
            member.say("sent")
            return error_of(lambda: dist.recv(torch.ones(1), 0, tag=SECOND_TAG)), line
        if member.rank == 2:
            return error_of(lambda: dist.recv(torch.ones(1), 0)), 0
        receive = dist.irecv(torch.ones(2, dtype=torch.float64), 1)
        line = line_here() - 1
        member.await_said("sent")
        text = error_of(lambda: dist.recv(torch.ones(1), 1, tag=SECOND_TAG))
        assert receive is not None
        assert error_of(receive.wait) == text
        return text, line

    found = values(run_ranks(body, 3))
    wanted = expected(1, "float32[3]", found[1][1], 0, "float64[2]", found[0][1])
    for text, _ in found:
        assert re.match(wanted, text), text


def test_a_message_to_oneself() -> None:
    def body(member: Member) -> tuple[str, int, int]:
        member.join()
        receive = dist.irecv(torch.ones(2), member.rank) if member.rank == 0 else None
        received = line_here() - 1
        if receive is None:
            return error_of(dist.barrier), 0, 0
        sending = dist.isend(torch.ones(3), 0)
        sent = line_here() - 1
        text = error_of(receive.wait)
        del sending
        return text, sent, received

    (text, sent, received), (other, _, _) = values(run_ranks(body, 2))
    wanted = expected(0, "float32[3]", sent, 0, "float32[2]", received)
    assert re.match(wanted, text), text
    assert other == text
