"""A worker is killed at a random moment, whatever it and the others are doing: nobody waits, and nothing is left.

A case is a number: it says what goes on, which part the worker has in it that is killed, how many workers there are,
and when. Afterwards every worker that lives has ended all its waits, with the name of the lost one; has no object, no
call, no stream, no context, no thread, no descriptor and no memory of it; and no call has run twice. For that, each
call has a number, which the callee appends to a file.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rpc import workers
from tests.support.leaks import Holdings
from tests.support.ranks import Member, run_ranks
from tests.support.stores import tcp_store
from tests.support.waiting import soon
from torch._C._distributed_c10d import PrefixStore

from phalanx import rpc
from phalanx.errors import PeerLost
from phalanx.rpc import session

PATIENCE_S = 60.0
LARGE = 500_000  # numbers in a large tensor
Act = Callable[[str, random.Random], None]
# What goes on, and the part that the killed worker has in it.
PARTS = ("callee", "caller", "middle", "store")
ACTIONS = ("call", "start", "stream", "chain", "backward", "large", "each", "hand on")
CASES = [*((action, part) for action in ACTIONS for part in PARTS), ("shutdown", "callee"), ("shutdown", "store")]


@dataclass(frozen=True)
class Case:
    """What a number means."""

    seed: int
    action: str
    part: str
    size: int
    tcp: bool
    after_s: float

    @staticmethod
    def of(seed: int) -> Case:
        chance = random.Random(seed)
        action, part = CASES[seed % len(CASES)]
        size = chance.choice([2, 2, 3, 3, 8])
        return Case(seed, action, part, size, chance.random() < 0.25, chance.random() ** 2 * 0.3)

    @property
    def victim(self) -> int:
        """The rank that is killed."""
        return 0 if self.part == "store" else self.size - 1


def note(path: str, number: str) -> str:
    """Say that this call runs."""
    with open(path, "ab", buffering=0) as file:
        file.write(number.encode() + b"\n")
    return number


def note_items(path: str, number: str) -> Iterator[int]:
    note(path, number)
    yield from range(20)


def note_and_call(path: str, number: str, way: list[int]) -> str:
    note(path, f"{number}/{len(way)}")
    return str(rpc.call(way[0], note_and_call, path, number, way[1:])) if way else number


def note_and_scale(path: str, number: str, x: torch.Tensor, way: list[int]) -> torch.Tensor:
    note(path, f"{number}/{len(way)}")
    scaled = x * 2
    if way:
        onward: torch.Tensor = rpc.call(way[0], note_and_scale, path, number, scaled, way[1:])
        scaled = scaled + onward
    return scaled


def note_and_double(path: str, number: str, tensor: torch.Tensor) -> torch.Tensor:
    note(path, number)
    return tensor * 2


def note_and_hold(path: str, number: str, things: list[Any]) -> int:
    note(path, number)
    workers.kept.extend(things)
    del workers.kept[: max(0, len(workers.kept) - 5)]
    return len(things)


class Noter:
    """An object whose method says that it runs."""

    def note(self, path: str, number: str) -> str:
        return note(path, number)


def do(action: str, path: str, number: str, to: int, others: list[int]) -> None:
    """One action of a worker with another, and perhaps with more of them."""
    if action == "call":
        assert rpc.call(to, note, path, number) == number
    elif action == "start":
        futures = [rpc.start(to, note, path, f"{number}.{n}") for n in range(10)]
        assert [future.wait() for future in futures] == [f"{number}.{n}" for n in range(10)]
    elif action == "stream":
        assert list(rpc.call(to, note_items, path, number)) == list(range(20))
    elif action == "chain":
        assert rpc.call(to, note_and_call, path, number, others[:2]) == number
    elif action == "backward":
        x = torch.ones(3, requires_grad=True)
        with rpc.context() as context_id:
            y = rpc.call(to, note_and_scale, path, number, x, others[:1])
            rpc.backward(context_id, [y.sum()])
            assert rpc.get_gradients(context_id)[x].tolist() == [6 if others[:1] else 2] * 3
    elif action == "large":
        assert rpc.call(to, note_and_double, path, number, torch.ones(LARGE)).sum() == 2 * LARGE
    elif action == "each":
        futures = [rpc.each([other], note, path, f"{number}.{other}")[0] for other in {to, *others}]
        futures += rpc.each([to], note, path, f"{number}.again")
        for future in futures:
            future.wait()
    elif action == "hand on":
        things = [rpc.make(other, Noter) for other in [to, *others[:2]]]
        assert rpc.call(to, note_and_hold, path, number, things) == len(things)
        things[-1].note(path, f"{number}.after")
    else:
        raise ValueError(action)


class Worker:
    """One rank in one case."""

    def __init__(self, member: Member, case: Case, path: str) -> None:
        self.member, self.case, self.path = member, case, path
        self.ranks = [rank for rank in range(case.size) if rank != member.rank]
        self.over = threading.Event()
        self.wrong: list[str] = []

    def run(self) -> None:
        """Act until the victim is gone."""
        case, me = self.case, self.member.rank
        acts = {
            "callee": None if me == case.victim else lambda number, chance: self.do(number, case.victim, chance),
            "caller": self.do_any if me == case.victim else None,
            "middle": None if me == case.victim else self.do_beyond,
            "store": self.do_any,
        }
        act: Act | None = acts[case.part]
        threads = [threading.Thread(target=self.repeat, args=(act, n)) for n in range(1 if case.size > 3 else 2) if act]
        for thread in threads:
            thread.start()
        if me == case.victim:
            time.sleep(2 * PATIENCE_S)
        self.member.await_said("killed")
        time.sleep(0.05)
        self.over.set()
        for thread in threads:
            thread.join(PATIENCE_S)
            if thread.is_alive():
                self.wrong.append("a thread still waits")

    def repeat(self, act: Act, thread: int) -> None:
        chance = random.Random((self.case.seed, self.member.rank, thread).__repr__())
        for count in itertools.count():
            if self.over.is_set():
                return
            try:
                act(f"{self.member.rank}-{thread}-{count}", chance)
            except PeerLost as error:
                if getattr(error, "rank", None) != self.case.victim:
                    self.wrong.append(f"{error!r} is about another")
                return
            except Exception as error:
                self.wrong.append(f"{error!r}")
                return

    def do(self, number: str, to: int, chance: random.Random) -> None:
        others = [rank for rank in self.ranks if rank != to] or [self.member.rank]
        chance.shuffle(others)
        do(self.case.action, self.path, number, to, others)

    def do_any(self, number: str, chance: random.Random) -> None:
        self.do(number, chance.choice(self.ranks), chance)

    def do_beyond(self, number: str, chance: random.Random) -> None:
        """Have the victim do it."""
        to = chance.choice([rank for rank in range(self.case.size) if rank != self.case.victim])
        others = [rank for rank in self.ranks if rank != self.case.victim]
        rpc.call(self.case.victim, do, self.case.action, self.path, number, to, others)


def kill_me(member: Member, case: Case) -> None:
    """Have a process kill this one, at any of its instructions."""
    pid = os.getpid()
    if os.fork() == 0:
        with contextlib.suppress(BaseException):
            member.await_said("go")
            time.sleep(case.after_s)
            os.kill(pid, signal.SIGKILL)
            member.say("killed")
        os._exit(0)


def play(case: Case, path: str) -> None:
    """Play one case, and check what is left of it."""
    survivors = [rank for rank in range(case.size) if rank != case.victim]

    def run(member: Member) -> None:
        if case.tcp:
            workers.use_tcp()
        if member.rank == case.victim:
            kill_me(member, case)
        store = PrefixStore("rpc", tcp_store(member))
        before = Holdings.now()
        session.begin(store, f"worker{member.rank}", member.rank, "127.0.0.1", PATIENCE_S)
        assert soon(
            lambda: len(rpc.workers()) == case.size
        )  # whom they do not know they could not call without a store
        member.meet("joined")
        member.say("go")
        wrong: list[str] = []

        def meet(what: str) -> None:
            member.say(f"{what}-{member.rank}")
            member.await_said(*[f"{what}-{rank}" for rank in survivors])

        if case.action != "shutdown":
            worker = Worker(member, case, path)
            worker.run()
            wrong = worker.wrong
            meet("quiet")
            if not soon(lambda: not workers.left()):
                wrong += workers.left()
            meet("empty")
        else:
            chance = random.Random(f"{case.seed} {member.rank}")
            if chance.random() < 0.5:
                with contextlib.suppress(PeerLost):
                    rpc.call(chance.randrange(case.size), note, path, f"{member.rank}")
            time.sleep(chance.random() * 0.3)
        began = time.monotonic()
        rpc.shutdown(timeout_s=PATIENCE_S)
        if time.monotonic() - began > PATIENCE_S / 2:
            wrong.append("shutdown waited for the dead")
        if member.rank == case.victim:
            time.sleep(2 * PATIENCE_S)  # it has left before it is killed
        meet("over")  # who may still ask the store

        def clean() -> bool:
            gc.collect()  # the worker is a circle, and the last thread that knew it may just have ended
            return not before.left_by(Holdings.now())

        if not soon(clean):
            wrong += before.left_by(Holdings.now())
        if not soon(lambda: not workers.mappings()):
            wrong.append(f"{workers.mappings()} mappings")
        assert not wrong, wrong

    outcomes = run_ranks(run, case.size)
    text = "\n".join(f"rank {outcome.rank}:\n{outcome.traceback}" for outcome in outcomes if outcome.error is not None)
    assert not text, f"{case}\n{text}"
    assert [one.signal for one in outcomes] == [signal.SIGKILL * (one.rank == case.victim) for one in outcomes]
    ran = collections.Counter(Path(path).read_text().splitlines()) if os.path.exists(path) else {}
    assert [number for number, times in ran.items() if times > 1] == []


@pytest.mark.parametrize("seed", range(12))
def test_a_worker_that_is_killed_leaves_nothing_and_holds_nobody(seed: int, tmp_path: Path) -> None:
    play(Case.of(1000 + seed * 7), str(tmp_path / "ran"))


@pytest.mark.fault
@pytest.mark.parametrize("seed", range(500))
def test_one_of_five_hundred_deaths(seed: int, tmp_path: Path) -> None:
    play(Case.of(seed), str(tmp_path / "ran"))
