"""Worlds in a row, and kills in many of them: a process that lives on holds nothing of those that are gone.

``PHALANX_LEAK_COUNT`` sets how many; ``make fault`` does a thousand of each.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import select
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.inventory import held_by, more_than, shared_memory_files
from tests.support.ports import held_port
from tests.support.ranks import Member, fork_rank
from tests.support.waiting import soon
from torch._C._distributed_c10d import PrefixStore, TCPStore

import phalanx.world
from phalanx.errors import PhalanxError

COUNT = int(os.environ.get("PHALANX_LEAK_COUNT", "1000"))
SEED = 17
PATIENCE_S = 300.0
WARM_UP = 4  # worlds after which everything that a process opens once is open
LARGE = 600_000  # 2.4 MB: several chunks
counts = pytest.mark.parametrize("count", [12, pytest.param(COUNT, marks=pytest.mark.fault)])


class Seat:
    """A process that joins one world after another, or does what ``serve`` says."""

    def __init__(
        self, folder: Path, others: Sequence[Seat], serve: Callable[[Connection[Any, Any]], None] | None = None
    ) -> None:
        ours, theirs = Pipe()
        inherited = [seat.pipe for seat in others] + [ours]

        def run(_: Member) -> None:
            for pipe in inherited:
                pipe.close()  # or the others would not notice when the test ends
            (serve or join_worlds)(theirs)

        self.pipe = ours
        self.pid = fork_rank(run, Member(0, 1, folder))
        theirs.close()

    def hear(self) -> Any:
        """The next answer; None if the process has ended."""
        assert select.select([self.pipe], [], [], PATIENCE_S)[0], f"process {self.pid} does not answer"
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return None

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pipe.close()


def keep_store(pipe: Connection[Any, Any]) -> None:
    """Keep a store that outlives every world, and say how many keys it has."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=PATIENCE_S), wait_for_workers=False)
    pipe.send(store.port)
    with contextlib.suppress(EOFError):
        while True:
            pipe.recv()
            pipe.send(store.num_keys())


def join_worlds(pipe: Connection[Any, Any]) -> None:
    """Join the worlds that are ordered: answer ``joined``, and at the end the error, or an empty text."""
    with contextlib.suppress(EOFError):
        while True:
            order = pipe.recv()
            try:
                be_in_world(pipe, **order)
                pipe.send("")
            except PhalanxError as error:
                pipe.send(f"{type(error).__name__}: {error}")
            except BaseException:
                pipe.send(traceback.format_exc())
            gc.collect()  # an exception and its frames are a circle, with all that they refer to


def be_in_world(
    pipe: Connection[Any, Any], number: int, rank: int, size: int, port: int, lasting: bool, timeout_s: float
) -> None:
    timeout = timedelta(seconds=timeout_s)
    if lasting:
        store = PrefixStore(f"world-{number}", TCPStore("127.0.0.1", port, None, False, timeout))
        dist.init_process_group("phalanx", store=store, rank=rank, world_size=size, timeout=timeout)
    else:
        # Ranks that meet have opened equally many worlds; here one may be new, and the others have been in many.
        vars(phalanx.world)["_openings"] = number
        where = f"tcp://127.0.0.1:{port}"
        phalanx.init(timeout_s=timeout_s, quiet=True, init_method=where, rank=rank, world_size=size)
    try:
        pipe.send("joined")
        for turn in range(10):
            work(random.Random(f"{number} {turn}"), rank, size)
    finally:
        if not lasting:
            phalanx.close()
        while dist.is_initialized():  # the first call may raise what broke the group
            with contextlib.suppress(PhalanxError):
                dist.destroy_process_group()


def work(chance: random.Random, rank: int, size: int) -> None:
    """An operation that all ranks draw alike, and what it must give."""
    count = chance.choice([4, LARGE])
    match chance.randrange(4):
        case 0:
            totals = [torch.full((count,), float(rank + each)) for each in range(3)]
            works = [dist.all_reduce(each, async_op=True) for each in totals]
            for each, one in enumerate(works):
                assert one is not None
                one.wait()
                assert totals[each].eq(sum(range(size)) + each * size).all()
        case 1:
            received = torch.empty(count)
            sent = dist.isend(torch.full((count,), float(rank)), (rank + 1) % size)
            dist.recv(received, (rank - 1) % size)
            assert sent is not None
            sent.wait()
            assert received.eq((rank - 1) % size).all()
        case 2:
            objects: list[Any] = [None] * size
            dist.all_gather_object(objects, {"of": rank})
            assert objects == [{"of": each} for each in range(size)]
        case 3:
            group = dist.new_group()
            dist.barrier(group=group)
            dist.destroy_process_group(group)


class Seats:
    """The processes that live on, the store that outlives the worlds, and what all of them hold."""

    def __init__(self, count: int, folder: Path, temporary: Path) -> None:
        self._folder, self._temporary = folder, temporary
        self._store = Seat(folder, (), keep_store)
        self.port = self._store.hear()
        self.seats: list[Seat] = []
        for _ in range(count):
            self.seats.append(self.add())

    def add(self) -> Seat:
        """Another process, which the caller ends."""
        return Seat(self._folder, [*self.seats, self._store])

    def __enter__(self) -> Seats:
        return self

    def __exit__(self, *_: object) -> None:
        for seat in (*self.seats, self._store):
            seat.end()

    @contextlib.contextmanager
    def world(self, number: int, members: Sequence[Seat], timeout_s: float = PATIENCE_S) -> Iterator[None]:
        """Have these processes join a world, each second one by rank 0's own port."""
        lasting = number % 2 == 0
        with contextlib.nullcontext(self.port) if lasting else held_port() as port:
            common = {"number": number, "size": len(members), "port": port, "lasting": lasting, "timeout_s": timeout_s}
            for rank, seat in enumerate(members):
                seat.pipe.send({"rank": rank, **common})
            yield

    def count(self) -> None:
        """Note what all have now."""
        self._before = self._held()

    def left(self) -> dict[str, object]:
        """What there is more of than was noted, once threads that are ending have ended."""
        found: dict[str, object] = {}

        def nothing() -> bool:
            found.clear()
            for name, held in self._held().items():
                if more := more_than(self._before[name], held):
                    found[name] = more
            return not found

        soon(nothing, 20.0)
        return found

    def _held(self) -> dict[str, Counter[str]]:
        self._store.pipe.send(None)
        files = [*shared_memory_files(), *(path.name for path in self._temporary.iterdir())]
        others = {"files": Counter(files), "keys": Counter(keys=self._store.hear())}
        return {str(pid): held_by(pid) for pid in (os.getpid(), *(seat.pid for seat in self.seats))} | others


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, of which none may be left; the processes of the test inherit it."""
    with tempfile.TemporaryDirectory(prefix="phalanx-test-") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@counts
def test_worlds_in_a_row_leave_nothing(count: int, temporary: Path, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    with Seats(5, tmp_path, temporary) as seats:
        for number in range(count + WARM_UP):
            if number == WARM_UP:
                seats.count()
            # Each process has been in worlds of both kinds before anything is counted.
            members = chance.sample(seats.seats, 5 if number < WARM_UP else chance.randrange(2, 6))
            with seats.world(number, members):
                assert [seat.hear() for seat in members] == ["joined"] * len(members)
                assert [seat.hear() for seat in members] == [""] * len(members)
        assert seats.left() == {}


@counts
def test_who_survives_kills_holds_nothing_of_them(count: int, temporary: Path, tmp_path: Path) -> None:
    """In each world a rank is killed: while it joins, in an operation, while it leaves, or when it has left."""
    chance = random.Random(SEED)
    kinds: Counter[str] = Counter()
    with Seats(4, tmp_path, temporary) as seats:
        for number in range(count + WARM_UP):
            if number == WARM_UP:
                seats.count()
            victim = seats.add()
            survivors = chance.sample(seats.seats, 4 if number < WARM_UP else chance.randrange(1, 5))
            members = [*survivors]
            members.insert(chance.randrange(len(members) + 1), victim)
            # A rank that dies before the others have heard of it is missed when their patience ends.
            joining = number >= WARM_UP and chance.random() < 0.15
            with seats.world(number, members, 2.0 if joining else PATIENCE_S):
                if not joining:
                    assert [seat.hear() for seat in members] == ["joined"] * len(members)
                time.sleep(chance.uniform(0, 0.03))  # at any moment of a world, which takes about as long
                victim.end()
                for seat in survivors:
                    ended = seat.hear()
                    if ended == "joined":
                        ended = seat.hear()
                    kind = str(ended).partition(":")[0]
                    kinds[kind] += 1
                    # The short patience is for joining; a busy machine may hold a survivor up as long in an operation.
                    late = ("CollectiveTimeout",) if joining else ()
                    assert kind in ("", "PeerLost", "InitializationError", *late), ended
        assert seats.left() == {}
        assert kinds["PeerLost"] > 0
