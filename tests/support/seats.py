"""Processes that join one world after another: those of the seats live on, whatever becomes of the others of a world.

A test orders a world from the processes that are to be in it. Each answers ``joined`` when it is in, and at the end
with the name of what it raised, or an empty text. What they do in between is drawn from the world's number, alike on
all ranks.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import select
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

import phalanx.world
from phalanx.errors import PhalanxError
from tests.support.ranks import Member, fork_rank, stacks_of

__all__ = ["Order", "Seat", "Seats"]

PATIENCE_S = 300.0  # no busy machine needs as long
LARGE = 600_000  # 2.4 MB: several chunks


@dataclass(frozen=True)
class Order:
    """A world, as one of its processes is to join it.

    Attributes:
        number: which world it is; it decides what is done in it.
        rank, size: the place of the process.
        port: of rank 0's store, or of torch's own if ``lasting``.
        lasting: the store is the test's, and outlives the world.
        with_groups: further groups are made and destroyed.
        timeout_s: for the others to come.
        operations: how many are done.
    """

    number: int
    rank: int
    size: int
    port: int
    lasting: bool
    with_groups: bool
    timeout_s: float
    operations: int


class Seat:
    """One process."""

    def __init__(
        self, number: int, folder: Path, others: Sequence[Seat], be: Callable[[Connection[Any, Any]], None]
    ) -> None:
        ours, theirs = Pipe()
        inherited: list[Connection[Any, Any]] = [seat.pipe for seat in others] + [ours]

        def serve(member: Member) -> None:
            for pipe in inherited:
                pipe.close()  # or the others would not notice when the test ends
            be(theirs)

        self.number = number
        self.pipe: Connection[Any, Any] = ours
        self.pid = fork_rank(serve, Member(number, number + 1, folder))
        theirs.close()

    def hear(self, until: float) -> str | None:
        """The next answer; None if the process has ended. Raises TimeoutError if it says nothing."""
        ready, _, _ = select.select([self.pipe], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            raise TimeoutError
        try:
            said: str = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return None
        return said

    def end(self) -> None:
        """Kill it, if it has not ended, and wait for it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pipe.close()


class Seats:
    """``count`` processes that live on, and others that are added for one world.

    Attributes:
        port: of a store that outlives every world, torch's own.
        seats: the processes that live on.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self._folder = folder
        self._made = 0
        self.seats: list[Seat] = []
        # A process of its own has the store: torch leaves a pipe of its first one open as long as a process lives.
        self._store = Seat(0, folder, (), _keep_store)
        self.port = int(self._store.hear(time.monotonic() + PATIENCE_S) or 0)
        for _ in range(count):
            self.seats.append(self.add())

    def __enter__(self) -> Seats:
        return self

    def __exit__(self, *_: object) -> None:
        for seat in (*self.seats, self._store):
            seat.end()

    def keys(self) -> int:
        """How many keys there are in the store that outlives the worlds."""
        self._store.pipe.send(None)
        return int(self._store.hear(time.monotonic() + PATIENCE_S) or 0)

    def add(self) -> Seat:
        """Another process, which the caller ends."""
        self._made += 1
        return Seat(self._made, self._folder, [*self.seats, self._store], _serve)

    def await_(self, seats: Sequence[Seat], timeout_s: float = PATIENCE_S) -> list[str | None]:
        """The next answer of each; fails with the stacks of those that do not answer."""
        until = time.monotonic() + timeout_s
        said: list[str | None] = []
        for seat in seats:
            try:
                said.append(seat.hear(until))
            except TimeoutError:
                pids = [0] * (self._made + 1)
                pids[seat.number] = seat.pid
                raise AssertionError(stacks_of(pids, [seat.number], self._folder, timeout_s)) from None
        return said


def _keep_store(pipe: Connection[Any, Any]) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=PATIENCE_S), wait_for_workers=False)
    pipe.send(str(store.port))
    with contextlib.suppress(EOFError):
        while True:
            pipe.recv()
            pipe.send(str(store.num_keys()))


def _serve(pipe: Connection[Any, Any]) -> None:
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        try:
            _be_in(order, pipe)
            pipe.send("")
        except PhalanxError as error:
            pipe.send(f"{type(error).__name__}: {error}")
        except BaseException:
            pipe.send(traceback.format_exc())
        gc.collect()  # an exception and its frames are a circle, with all that they refer to


def _be_in(order: Order, pipe: Connection[Any, Any]) -> None:
    timeout = timedelta(seconds=order.timeout_s)
    if order.lasting:
        store = TCPStore("127.0.0.1", order.port, None, False, timeout)
        own = PrefixStore(f"world-{order.number}", store)
        dist.init_process_group("phalanx", store=own, rank=order.rank, world_size=order.size, timeout=timeout)
    else:
        where = f"tcp://127.0.0.1:{order.port}"
        # Ranks that meet have opened equally many worlds; here one is new, and the others have been in many.
        phalanx.world._openings = order.number
        phalanx.init(timeout_s=order.timeout_s, quiet=True, init_method=where, rank=order.rank, world_size=order.size)
    try:
        pipe.send("joined")
        _work(order)
    finally:
        if order.lasting:
            _destroy()
        else:
            phalanx.close()


def _destroy() -> None:
    try:
        dist.destroy_process_group()
    except PhalanxError:
        dist.destroy_process_group()  # the groups that are left
        raise


def _work(order: Order) -> None:
    """A few operations, and what they must give."""
    chance = random.Random(order.number)
    rank, size = order.rank, order.size
    for turn in range(order.operations):
        what = chance.randrange(5)
        count = chance.choice([4, LARGE])
        if what == 0:
            totals = [torch.full((count,), float(rank + each)) for each in range(3)]
            works = [dist.all_reduce(each, async_op=True) for each in totals]
            for each, work in enumerate(works):
                assert work is not None
                work.wait()
                assert totals[each].eq(sum(range(size)) + each * size).all()
        elif what == 1:
            received = torch.empty(count)
            sent = dist.isend(torch.full((count,), float(rank)), (rank + 1) % size)
            dist.recv(received, (rank - 1) % size)
            assert sent is not None
            sent.wait()
            assert received.eq((rank - 1) % size).all()
        elif what == 2:
            value = torch.full((count,), float(rank))
            dist.broadcast(value, turn % size)
            assert value.eq(turn % size).all()
        elif what == 3:
            objects: list[Any] = [None] * size
            dist.all_gather_object(objects, {"of": rank})
            assert objects == [{"of": each} for each in range(size)]
        elif order.with_groups:
            group = dist.new_group()
            dist.barrier(group=group)
            dist.destroy_process_group(group)
