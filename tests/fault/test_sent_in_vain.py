"""A rank that has sent something short, over Gloo, to one that does not read it any more: no wait for that lasts.

The way between the two is full, so that Gloo has what follows in its own queue, as it has in moments in which a
connection breaks. It does not end the waits for what is in there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from tests.support.connecting import gloo_engine
from tests.support.ranks import Member, run_ranks, values
from tests.support.waiting import await_stop, soon

from phalanx.transports.hosts.crossing import Lines
from phalanx.transports.hosts.frames import Frames
from phalanx.transports.hosts.lane import SHORT_BYTES, Engine, Transfer, TransferFailed

LIMIT = timedelta(seconds=120)
LONG_S = LIMIT.total_seconds() / 2
PIECES = 600  # 24 MB, for which the kernel has no room
TAG, LAST_TAG = 9, 10


def receive_all(engine: Engine, peer: int) -> list[tuple[torch.Tensor, Transfer]]:
    """Memory for all that ``peer`` sends."""
    tensors = [torch.empty(SHORT_BYTES, dtype=torch.uint8) for _ in range(PIECES)]
    return [(tensor, engine.recv(tensor, peer, TAG)) for tensor in tensors]


def fill(engine: Engine, peer: int) -> None:
    """Send ``peer`` more than the way there holds, each piece with its own number in it, from one memory."""
    piece = torch.empty(SHORT_BYTES, dtype=torch.uint8)
    for number in range(PIECES):
        piece.fill_(number % 251)
        engine.send(piece, peer, TAG).wait()


def connect(engine: Engine, peer: int) -> None:
    byte = torch.zeros(1, dtype=torch.uint8)
    coming = engine.recv(torch.empty_like(byte), peer, LAST_TAG)
    engine.send(byte, peer, LAST_TAG)
    coming.wait()


def stop_here(folder: Path) -> None:
    (folder / "pid").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def pid_of_stopped(folder: Path) -> int:
    assert soon(lambda: (folder / "pid").exists() and bool((folder / "pid").read_text()))
    pid = int((folder / "pid").read_text())
    await_stop(pid)
    return pid


def check_that_nobody_is_kept(run: Callable[[Member], float]) -> None:
    """Rank 1 is killed, and rank 0 returns soon after."""
    survivor, victim = run_ranks(run, 2)
    assert victim.signal == signal.SIGKILL
    assert survivor.error is None, survivor.traceback
    assert survivor.value < LONG_S


def test_a_rank_that_is_killed_before_it_has_read_keeps_nobody() -> None:
    def run(member: Member) -> float:
        engine = gloo_engine(member.store(), member.rank, 2, LIMIT)
        connect(engine, 1 - member.rank)
        if member.rank == 1:
            coming = receive_all(engine, 0)
            stop_here(member.folder)
            return len(coming)
        pid = pid_of_stopped(member.folder)
        began = time.monotonic()
        fill(engine, 1)
        os.kill(pid, signal.SIGKILL)
        engine.abort()
        engine.close()
        return time.monotonic() - began

    check_that_nobody_is_kept(run)


def test_a_leader_that_is_killed_between_its_frame_and_the_others_keeps_nobody() -> None:
    def run(member: Member) -> float:
        rank = member.rank
        engine = gloo_engine(member.store(), rank, 2, LIMIT)
        frames = Frames(engine, [[0], [1]], rank, 64, Lines(rank, {}, lambda: True))
        same, _ = frames.exchange(1, {})
        assert same
        if rank == 1:
            coming = receive_all(engine, 0)
            frames.begin(2, {})
            stop_here(member.folder)
            return len(coming)
        pid = pid_of_stopped(member.folder)
        fill(engine, 1)
        began = time.monotonic()
        same, _ = frames.exchange(2, {})  # the other's frame has come
        assert same
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(TransferFailed):
            frames.exchange(3, {})
        engine.abort()
        frames.release()
        engine.close()
        return time.monotonic() - began

    check_that_nobody_is_kept(run)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_a_rank_has_sent_arrives_though_it_leaves(size: int) -> None:
    def run(member: Member) -> int:
        engine = gloo_engine(member.store(), member.rank, size, LIMIT)
        last = size - 1
        if member.rank == last:
            for peer in range(last):
                connect(engine, peer)
            coming = receive_all(engine, 0)
            stop_here(member.folder)
            for number, (tensor, transfer) in enumerate(coming):
                transfer.wait()
                assert bool((tensor == number % 251).all()), number
            return len(coming)
        connect(engine, last)
        if member.rank == 0:
            pid = pid_of_stopped(member.folder)
            fill(engine, last)
            threading.Timer(0.3, os.kill, [pid, signal.SIGCONT]).start()  # in the middle of what follows
            engine.close()
        return PIECES

    assert values(run_ranks(run, size)) == [PIECES] * size
