"""Signal handlers that run while a rank waits: what they may do, and whose error becomes of what they raise."""

from __future__ import annotations

import gc
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from tests.support.waiting import when_waiting

from phalanx.errors import ClosedError, PhalanxError, ReentryError

WAIT_S = 30.0
long = pytest.mark.long


def interrupt_when_waiting(handler: object) -> None:
    signal.signal(signal.SIGALRM, handler)  # type: ignore[arg-type]
    when_waiting(lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM))


def join(member: Member) -> Any:
    member.join(timeout_s=WAIT_S)
    dist.barrier()
    return dist.group.WORLD


def test_handler_may_destroy_the_group_that_it_interrupts() -> None:
    """The interrupted call ends with an error on every rank, and the memory is given back behind it."""

    def body(member: Member) -> None:
        group = join(member)
        if member.rank:
            member.await_said("ended")
        else:
            interrupt_when_waiting(lambda *_: dist.destroy_process_group())
        with pytest.raises(PhalanxError):
            dist.all_reduce(torch.ones(4))
        if member.rank:
            return
        member.say("ended")
        assert not dist.is_initialized()
        for thread in threading.enumerate():
            if thread.name == "phalanx-closing":
                thread.join(WAIT_S)
        assert not group._communicator._comm
        with pytest.raises(ClosedError):
            group.sum_in_place(torch.ones(4))

    on_ranks(body, 3)


@pytest.mark.parametrize("call", ["all_reduce", "async", pytest.param("barrier", marks=long)])
def test_handler_that_calls_the_group_it_interrupts_is_told(call: str) -> None:
    """It gets the error, and the interrupted call goes on if the handler lets it."""

    def body(member: Member) -> None:
        join(member)
        told: list[str] = []
        work: list[Any] = []

        def handler(*_: object) -> None:
            with pytest.raises(ReentryError) as caught:
                if call == "all_reduce":
                    dist.all_reduce(torch.ones(1))
                elif call == "barrier":
                    dist.barrier()
                else:
                    work.append(dist.all_reduce(torch.ones(1), async_op=True))
                    work[0].wait()
            told.append(str(caught.value))
            member.say("told")

        tensor = torch.ones(4)
        if member.rank:
            member.await_said("told")
        else:
            interrupt_when_waiting(handler)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [3.0] * 4
        if call == "async":  # queued behind the interrupted one
            (work[0].wait() if work else dist.all_reduce(torch.ones(1)))
        dist.barrier()
        dist.destroy_process_group()
        assert member.rank or ["signal handler" in text for text in told] == [True]

    on_ranks(body, 3)


class Interrupted(Exception):
    """What the handler of a program's own alarm raises."""


@pytest.mark.parametrize("call", ["irecv", pytest.param("isend", marks=long)])
def test_interrupt_in_the_call_that_begins_a_message_breaks_the_group(call: str) -> None:
    """The transport has the message, and nobody could wait for it: its tensor stays, and no later call takes it."""
    large = 1 << 20

    def raises(*_: object) -> None:
        raise Interrupted

    def begin_message() -> int:
        tensor = torch.zeros(large)
        with pytest.raises(Interrupted):
            dist.irecv(tensor, src=1) if call == "irecv" else dist.isend(tensor, dst=1)
        return tensor.data_ptr()

    def body(member: Member) -> None:
        group = join(member)
        if member.rank:
            member.await_said("interrupted")
        if member.rank == 1:
            with pytest.raises(PhalanxError) as broken:
                dist.send(torch.ones(large), dst=0) if call == "irecv" else dist.recv(torch.ones(large), src=0)
            words = "recv from" if call == "irecv" else "send to"
            assert f"was interrupted in {words} rank 1, float32[{large}] at " in str(broken.value), broken.value
            assert "test_signals.py:" in str(broken.value)
        if member.rank:
            return
        signal.signal(signal.SIGALRM, raises)
        mailbox = group._communicator._mailbox
        name = f"phx_{call[1:]}"
        begin = getattr(mailbox.core, name)

        def begin_and_be_interrupted(*arguments: Any) -> Any:
            message = begin(*arguments)
            signal.raise_signal(signal.SIGALRM)  # as one that comes while the core copies
            return message

        mailbox.core = SimpleNamespace(**{**vars(mailbox.core), name: begin_and_be_interrupted})
        place = begin_message()
        gc.collect()
        assert torch.zeros(large).data_ptr() != place
        member.say("interrupted")
        with pytest.raises(PhalanxError):
            dist.all_reduce(torch.ones(4))

    on_ranks(body, 3)
