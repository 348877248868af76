"""torch.distributed.rpc over Phalanx when a worker is killed, and how rpc.shutdown() ends then and otherwise."""

from __future__ import annotations

import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx.rpc.autograd.engine  # noqa: F401 - once, and not on every forked rank
from phalanx.rpc import inquiry, session
from phalanx.words import tell
from tests.rpc.torch_workers import WAIT_S, Counter, forks, owned_values, started, until
from tests.support.ranks import Member, run_ranks, values

held: list[Any] = []


def hold(reference: Any) -> int:
    held.append(reference)
    return os.getpid()


def holder_is_killed(member: Member) -> Any:
    rpc = started(member)
    if member.rank == 1:
        signal.pause()
    if member.rank == 2:
        until((member.folder / "over").exists)
        rpc.shutdown(graceful=False)
        return None
    reference = rpc.RRef(torch.ones(3))
    pid = rpc.rpc_sync("worker1", hold, args=(reference,))
    rpc.rpc_sync("worker2", hold, args=(reference,))
    before = forks()
    os.kill(pid, signal.SIGKILL)
    until(lambda: forks() == 1)
    rpc.rpc_sync("worker2", let_go)
    until(lambda: owned_values() == 0)
    (member.folder / "over").touch()
    rpc.shutdown(graceful=False)
    return before


def let_go() -> None:
    held.clear()


def test_a_holder_that_is_killed_frees_what_it_held() -> None:
    first, second, third = run_ranks(holder_is_killed, 3)
    assert values([first, third]) == [2, None]
    assert second.signal == signal.SIGKILL


def owner_is_killed(member: Member) -> str:
    rpc = started(member)
    if member.rank == 1:
        signal.pause()
    reference = rpc.remote("worker1", Counter, args=(1,))
    pid = rpc.rpc_sync("worker1", os.getpid)
    assert reference.rpc_sync().add(1) == 2
    waiting = reference.rpc_async().add(wait_s := 1)
    assert waiting.wait() == 2 + wait_s
    started_call = rpc.rpc_async("worker1", time.sleep, args=(WAIT_S,))
    os.kill(pid, signal.SIGKILL)
    try:
        started_call.wait()
    except RuntimeError as error:
        text = str(error)
    with pytest.raises(RuntimeError, match="worker1"):
        reference.to_here()
    with pytest.raises(RuntimeError, match="worker1"):
        rpc.shutdown()
    return text


def test_who_waits_for_a_killed_worker_is_told_and_shutdown_ends() -> None:
    first, second = run_ranks(owner_is_killed, 2)
    text = values([first])[0]
    assert "worker1 (rank 1, pid" in text
    assert second.signal == signal.SIGKILL


def shutdown_without_one(member: Member, victim: int) -> str:
    rpc = started(member)
    if member.rank == victim:
        (member.folder / "pid").write_text(str(os.getpid()))
        (member.folder / "pid_written").touch()
        signal.pause()
    until((member.folder / "pid_written").exists)
    if member.rank == (victim + 1) % member.size:
        os.kill(int((member.folder / "pid").read_text()), signal.SIGKILL)
    try:
        rpc.shutdown()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("victim", [0, 1])
def test_shutdown_ends_on_all_that_are_left_when_a_worker_is_killed(victim: int) -> None:
    outcomes = run_ranks(partial(shutdown_without_one, victim=victim), 3)
    assert outcomes[victim].signal == signal.SIGKILL
    texts = values([outcome for outcome in outcomes if outcome.rank != victim])
    assert any(f"worker{victim}" in text for text in texts)


@pytest.mark.parametrize("late", [0, 1])
def test_a_shutdown_whose_time_is_over_says_for_whom_it_waited_and_what_they_do(late: int, tmp_path: Path) -> None:
    size = 3

    def stays_until_over() -> None:
        while len(os.listdir(tmp_path)) < 2 * (size - 1):  # it calls no Python, whose line would be said
            time.sleep(0.01)

    def body(member: Member) -> Any:
        rpc = started(member)
        if member.rank == late:
            stays_until_over()
            rpc.shutdown(graceful=False)
            return f"rank {late}. worker{late} (rank {late}, pid {os.getpid()} on "
        vars(inquiry)["_LEAST_S"] = WAIT_S / 2  # the late one is asked what it does, and may have to wait for a core
        (tmp_path / f"comes-{member.rank}").touch()
        until(lambda: len(list(tmp_path.glob("comes-*"))) == size - 1)
        began = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            rpc.shutdown(timeout=3)
        assert time.monotonic() - began < WAIT_S
        (tmp_path / f"over-{member.rank}").touch()
        return str(caught.value)

    said = values(run_ranks(body, size))
    for rank in set(range(size)) - {late}:
        assert said[rank].startswith(f"waited 3 s for rpc.shutdown() of {said[late]}")
        assert re.search(r"its main thread is at \S*stays_until_over \(", said[rank]), said[rank]


def test_a_shutdown_without_a_limit_says_now_and_then_for_whom_it_waits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    size = 3

    def body(member: Member) -> None:
        rpc = started(member)
        vars(session)["_TELL_S"] = 0.5
        if member.rank:

            def tell_and_note(text: str) -> None:
                tell(text)
                (tmp_path / str(member.rank)).touch()

            vars(session)["tell"] = tell_and_note
        else:
            until(lambda: len(list(tmp_path.iterdir())) == size - 1)
        rpc.shutdown()

    assert values(run_ranks(body, size)) == [None] * size
    said = capfd.readouterr().err
    assert said.count("waiting for rpc.shutdown() of rank 0. worker0 (rank 0, ") >= size - 1
