"""Many worlds in a row, with a kill in most of them: who lives on holds nothing of those that are gone.

``PHALANX_LEAK_COUNT`` sets how many; ``make fault`` does a thousand.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.inventory import held_by, more_than, shared_memory_files
from tests.support.ports import held_port
from tests.support.ranks import Member, fork_rank, values
from tests.support.ranks import _collect as collect
from tests.support.waiting import soon

import phalanx.world
from phalanx.errors import PhalanxError
from phalanx.membership import rendezvous_store

COUNT = int(os.environ.get("PHALANX_LEAK_COUNT", "1000"))
WARM_UP = 4  # worlds after which everything that a process opens once is open
SIZE, SURVIVORS = 4, (0, 1, 2)
LARGE = 600_000  # 2.4 MB: several chunks


def be_in_world(member: Member, number: int, port: int, victim_lives_s: float) -> str:
    """Join a world, do what is drawn alike on all ranks, and leave; what broke it, if something did."""
    vars(rendezvous_store)["_LOOK_S"] = (
        0.05  # ranks that make a group look for others that have gone, sooner than usual
    )
    try:
        if number % 2:
            # Ranks that meet have opened equally many worlds; here one is new, and the others have been in many.
            vars(phalanx.world)["_openings"] = number
            where = f"tcp://127.0.0.1:{port}"
            phalanx.init(timeout_s=300, quiet=True, init_method=where, rank=member.rank, world_size=SIZE)
        else:
            member.join(timeout_s=300, name=f"store-{number}")
        if member.rank not in SURVIVORS:
            threading.Timer(victim_lives_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for turn in range(10):
            operate(random.Random(f"{number} {turn}"), member.rank)
        return ""
    except PhalanxError as error:
        return type(error).__name__
    finally:
        if number % 2:
            phalanx.close()
        while dist.is_initialized():  # the first call may raise what broke the group
            with contextlib.suppress(PhalanxError):
                dist.destroy_process_group()


def operate(chance: random.Random, rank: int) -> None:
    """An operation, and what it must give."""
    count = chance.choice([4, LARGE])
    own = torch.full((count,), float(rank))
    match chance.randrange(3):
        case 0:
            work: Any = dist.all_reduce(own, async_op=True)
            work.wait()
            assert own.eq(sum(range(SIZE))).all()
        case 1:
            received = torch.empty(count)
            work = dist.isend(own, (rank + 1) % SIZE)
            dist.recv(received, (rank - 1) % SIZE)
            work.wait()
            assert received.eq((rank - 1) % SIZE).all()
        case 2:
            group = dist.new_group()
            dist.barrier(group=group)
            dist.destroy_process_group(group)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, of which none may be left; the processes of the test inherit it."""
    with tempfile.TemporaryDirectory(prefix="phalanx-test-") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@pytest.mark.parametrize("count", [12, pytest.param(COUNT, marks=pytest.mark.fault)])
def test_who_lives_on_holds_nothing_of_the_worlds_it_was_in(count: int, temporary: Path, tmp_path: Path) -> None:
    """Rank 3 is another process in every world, and is killed in an operation, while it leaves, or not at all."""
    chance = random.Random(17)
    lives_s = [chance.uniform(0.0, 0.04) if chance.random() < 0.7 else 300.0 for _ in range(count + WARM_UP)]
    files = shared_memory_files()

    def live(member: Member) -> tuple[dict[str, int], Counter[str]]:
        kinds: Counter[str] = Counter()
        before: Counter[str] = Counter()
        for number, each_s in enumerate(lives_s):
            if number == WARM_UP:
                before = held_by(os.getpid())
            kinds[be_in_world(member, number, port, each_s)] += 1
            gc.collect()  # an exception and its frames are a circle, with all that they refer to
            member.say(f"out-{number}-{member.rank}")
            member.await_said(*(f"out-{number}-{rank}" for rank in SURVIVORS))
        soon(lambda: not more_than(before, held_by(os.getpid())), 20.0)  # threads that are ending have ended
        return more_than(before, held_by(os.getpid())), kinds

    with held_port() as port:
        survivors = [fork_rank(live, Member(rank, SIZE, tmp_path)) for rank in SURVIVORS]
        try:
            for number, each_s in enumerate(lives_s):

                def be_victim(member: Member, number: int = number, each_s: float = each_s) -> None:
                    be_in_world(member, number, port, each_s)

                victim = fork_rank(be_victim, Member(3, SIZE, tmp_path))
                os.waitpid(victim, 0)
                here = Member(3, SIZE, tmp_path)
                here.await_said(*(f"out-{number}-{rank}" for rank in SURVIVORS))
        finally:
            found = values(collect(survivors, tmp_path, 300))
    assert [left for left, _ in found] == [{}] * 3
    kinds = sum((kinds for _, kinds in found), Counter[str]())
    assert kinds.keys() <= {"", "PeerLost", "InitializationError"}, kinds
    assert kinds["PeerLost"] > 0
    assert shared_memory_files() <= files
    assert [*temporary.iterdir()] == []
