"""The last call of a world over several hosts, which no later call compares: the ranks learn of it when they leave."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import divide_by
from tests.support.ranks import Member, on_ranks, run_ranks, values
from tests.support.waiting import soon

from phalanx.c10d import base
from phalanx.errors import CollectiveMismatch, PeerLost, PhalanxError

ROOT = Path(__file__).parents[2]
LAST_CALLS_S = 100.0  # as in test_leaving.py
PROMPT_S = 20.0  # far below that
HOSTS = {"2+1": [0, 0, 1], "1+2": [0, 1, 1], "2+2": [0, 0, 1, 1], "2+1+2": [0, 0, 1, 2, 2]}
LARGE = 600_000  # float32: in chunks


def broadcast(src: int) -> Callable[[int, int], object]:
    return lambda rank, count: dist.broadcast(torch.ones(count), src)


def scatter(src: int) -> Callable[[int, int], object]:
    def call(rank: int, count: int) -> object:
        parts = [torch.ones(count) for _ in range(dist.get_world_size())] if rank == src else None
        return dist.scatter(torch.ones(count), parts, src)

    return call


def divide(monkeypatch: pytest.MonkeyPatch, world: str) -> int:
    host_of = HOSTS[world]
    divide_by(monkeypatch, lambda rank, size: host_of[rank])
    return len(host_of)


def join(member: Member) -> None:
    member.join()
    vars(base)["LAST_CALLS_S"] = LAST_CALLS_S


@pytest.mark.parametrize(
    ("world", "odd", "name", "src", "count"),
    [
        ("2+1", 1, "broadcast", 0, 4),
        ("2+1", 1, "broadcast", 2, 4),
        ("1+2", 2, "scatter", 0, 4),
        ("1+2", 2, "broadcast", 2, LARGE),
        ("2+1+2", 4, "broadcast", 1, 4),
        pytest.param("2+1", 1, "scatter", 0, 4, marks=pytest.mark.long),
        pytest.param("2+2", 1, "broadcast", 3, LARGE, marks=pytest.mark.long),
        pytest.param("2+2", 3, "broadcast", 1, 4, marks=pytest.mark.long),
        pytest.param("2+1+2", 1, "scatter", 0, LARGE, marks=pytest.mark.long),
    ],
)
def test_a_mismatch_in_the_last_call_is_raised_by_every_rank(
    world: str, odd: int, name: str, src: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = divide(monkeypatch, world)
    call = {"broadcast": broadcast, "scatter": scatter}[name](src)

    def body(member: Member) -> str:
        join(member)
        with pytest.raises(CollectiveMismatch) as caught:
            call(member.rank, count + (member.rank == odd))
            dist.destroy_process_group()
        dist.destroy_process_group()  # nothing is left to tell
        return str(caught.value)

    for text in on_ranks(body, size):
        assert f"rank {odd}: {name}(float32[{count + 1}], src={src}) at" in text
        assert f"{name}(float32[{count}], src={src}) at" in text.replace(f"rank {odd}: ", "")


@pytest.mark.parametrize(
    ("world", "leaver"), [("2+1", 1), ("1+2", 2), pytest.param("2+1+2", 4, marks=pytest.mark.long)]
)
def test_a_rank_that_leaves_without_the_last_call_is_named_by_every_other(
    world: str, leaver: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = divide(monkeypatch, world)

    def body(member: Member) -> str:
        join(member)
        if member.rank == leaver:
            dist.destroy_process_group()
            return ""
        with pytest.raises(PeerLost) as caught:
            dist.broadcast(torch.ones(4), 0)
            dist.destroy_process_group()
        assert caught.value.group_rank == leaver
        return str(caught.value)

    for rank, text in enumerate(on_ranks(body, size)):
        if rank != leaver:
            assert f"rank {leaver} of the group" in text
            assert "has left the group in order" in text
            assert "broadcast(float32[4], src=0) at" in text


def test_a_script_that_ends_right_after_a_mismatch_prints_it(tmp_path: Path) -> None:
    """Of the ranks of the first host one makes another call; the one of the second host hears of it."""
    script = tmp_path / "ends.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist, phalanx\n"
        "from phalanx.c10d import leaving\n"
        "from tests.support.islands import pretend_host\n"
        f"leaving.LAST_CALLS_S = {LAST_CALLS_S}\n"
        "rank = int(sys.argv[1])\n"
        "pretend_host(rank // 2)\n"
        "store = dist.FileStore(sys.argv[2], 3)\n"
        "dist.init_process_group('phalanx', rank=rank, world_size=3, store=store)\n"
        "dist.broadcast(torch.ones(5 if rank == 1 else 4), 2)\n"
    )
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for rank in range(3)
    ]
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=LAST_CALLS_S)
            assert "CollectiveMismatch: the ranks of a group called different operations" in said
            assert "rank 1: broadcast(float32[5], src=2) at" in said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize("call", ["broadcast", "barrier"])
def test_leaving_does_not_wait_for_ranks_that_have_made_the_last_call(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a broadcast one rank of each host leaves; after a barrier none of the second host need have left."""
    size = divide(monkeypatch, "2+2")
    late = {1, 3} if call == "broadcast" else {2, 3}

    def body(member: Member) -> float:
        join(member)
        if call == "broadcast":
            dist.broadcast(torch.ones(4), 0)
        else:
            dist.barrier()
        if member.rank in late:
            for rank in set(range(size)) - late:
                assert soon((member.folder / f"left {rank}").exists)
        started = time.monotonic()
        dist.destroy_process_group()
        took_s = time.monotonic() - started
        (member.folder / f"left {member.rank}").touch()
        return took_s

    assert max(on_ranks(body, size)) < PROMPT_S


def test_leaving_does_not_wait_for_a_rank_that_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    size = divide(monkeypatch, "2+2")

    def body(member: Member) -> float:
        join(member)
        dist.barrier()
        member.meet("joined")  # one that is still in the barrier would raise there
        if member.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        failed = False
        try:
            dist.broadcast(torch.ones(4), 0)
        except PhalanxError:
            failed = True
        started = time.monotonic()
        with contextlib.suppress(PhalanxError) if failed else contextlib.nullcontext():  # it need not be said twice
            dist.destroy_process_group()
        return time.monotonic() - started

    assert max(values(run_ranks(body, size)[:3])) < PROMPT_S
