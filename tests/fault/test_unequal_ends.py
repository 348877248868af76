"""A rank sends something else than the other one receives: every rank reads which two lines these are."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import ISLANDS, divide_by
from tests.support.ranks import Member, on_ranks, run_ranks, values
from tests.support.waiting import await_end

from phalanx.errors import CollectiveMismatch, PhalanxError

SECOND_TAG = 7
SIZE, SENDER, RECEIVER = 3, 2, 1  # on two hosts if these are cyclic, else on one


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


def check(text: str, sender: int, sent: str, sent_at: int, receiver: int, received: str, received_at: int) -> None:
    here = re.escape(__file__.rsplit("/", 1)[1])
    expected = (
        rf"the two ends of a message differ:\n"
        rf"  rank {sender}: send to rank {receiver}, {re.escape(sent)} at \S*{here}:{sent_at}\n"
        rf"  rank {receiver}: recv from rank {sender}, {re.escape(received)} at \S*{here}:{received_at}\n"
        rf"Both ranks must give tensors of one size and dtype\."
    )
    assert re.match(expected, text), text


# What is sent, what is received, and both in words: in a frame of its own between hosts, staged there, and large.
CASES = [
    (torch.ones(8), torch.ones(4), "float32[8]", "float32[4]"),
    (torch.ones(1), torch.ones(1, dtype=torch.int32), "float32[1]", "int32[1]"),
    (torch.ones(5000), torch.ones(5001), "float32[5000]", "float32[5001]"),
    (torch.ones(200_000), torch.ones(4), "float32[200000]", "float32[4]"),
]


def test_all_ranks_read_both_lines_though_the_sender_has_gone_on() -> None:
    def body(member: Member) -> list[tuple[str, int]]:
        member.join()
        return [differ(member, number, dist.new_group()) for number in range(len(CASES))]

    def differ(member: Member, number: int, group: Any) -> tuple[str, int]:
        sent, received, _, _ = CASES[number]
        if member.rank == RECEIVER:
            member.await_said(f"sent {number}")
            text = error_of(lambda: dist.recv(received, SENDER, group=group))
            return text, line_here() - 1
        work = dist.isend(sent, RECEIVER, group=group) if member.rank == SENDER else None
        line = line_here() - 1
        if work is not None:
            member.say(f"sent {number}")
        text = error_of(lambda: dist.barrier(group=group))
        del work
        return text, line

    found = on_ranks(body, SIZE)
    for number, (_, _, sent, received) in enumerate(CASES):
        lines = [found[rank][number][1] for rank in range(SIZE)]
        for rank in range(SIZE):
            check(found[rank][number][0], SENDER, sent, lines[SENDER], RECEIVER, received, lines[RECEIVER])


@pytest.mark.parametrize(
    ("hosts", "sender_is"),
    [(None, "ended"), (None, "in no call"), ("cyclic", "gone"), ("cyclic", "in no call")],
    indirect=["hosts"],
)
def test_all_ranks_read_both_lines_of_a_sender_that_is_in_no_call(sender_is: str) -> None:
    """Only on its own host can others read the recorder of one that has ended."""
    others = [rank for rank in range(SIZE) if rank != SENDER]

    def body(member: Member) -> tuple[str, int]:
        member.join()
        warm = torch.ones(1)  # between hosts a first message waits until it is received
        if member.rank == SENDER:
            dist.send(warm, RECEIVER)
        elif member.rank == RECEIVER:
            dist.recv(warm, SENDER)
        member.meet("warm")
        if member.rank == SENDER:
            dist.send(torch.ones(8), RECEIVER)
            (member.folder / "process").write_text(f"{os.getpid()} {line_here() - 1}")
            member.say("sent")
            if sender_is == "ended":
                os._exit(0)
            if sender_is == "gone":
                dist.destroy_process_group()
            member.say("gone")
            member.await_said(*(f"told-{rank}" for rank in others))
            return "", 0
        member.await_said("sent" if sender_is == "ended" else "gone")
        pid, line = map(int, (member.folder / "process").read_text().split())
        if sender_is == "ended":
            await_end(pid)
        source = SENDER if member.rank == RECEIVER else RECEIVER
        text = error_of(lambda: dist.recv(torch.ones(4), source))
        if member.rank == RECEIVER:
            check(text, SENDER, "float32[8]", line, RECEIVER, "float32[4]", line_here() - 2)
        member.say(f"told-{member.rank}")
        return text, line

    found = run_ranks(body, SIZE)
    assert len({text for text, _ in values([found[rank] for rank in others])}) == 1


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

    found = on_ranks(body, 3)
    for text, _ in found:
        check(text, 1, "float32[3]", found[1][1], 0, "float64[2]", found[0][1])
