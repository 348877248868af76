"""References that are handed on between workers in any order: objects live as long as somebody holds them.

When all is quiet, the objects on each owner are those that somebody who lives has in its pocket.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx import rpc
from phalanx.errors import CallTimeout, ObjectLost, WorkerLost
from phalanx.rpc import session
from phalanx.rpc.future import Cancelled
from tests.rpc import workers
from tests.rpc.test_objects import holders
from tests.rpc.workers import Account, with_workers
from tests.support.leaks import Holdings
from tests.support.ranks import Member, run_ranks
from tests.support.waiting import soon, stop

PATIENCE_S = 60.0
THREADS = 3
STEPS = 40
MOST = 12  # references in a pocket

Reference = Any
Key = tuple[int, Any]  # the owner's incarnation and the object's number there


class Token:
    """An object with a name, which may hold references to older ones."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.inner: list[Reference] = []
        tokens.add(self)

    def identify(self) -> int:
        return self.name

    def put(self, references: list[Reference]) -> None:
        self.inner.extend(references)


class Carrier(Exception):
    """An error that brings references."""

    def __init__(self, references: list[Reference]) -> None:
        super().__init__(references)
        self.references = references


# Of this process. A reference is with the name of its object, and the rank that it came from.
tokens: weakref.WeakSet[Token] = weakref.WeakSet()
pocket: list[tuple[Reference, int, int]] = []
lock = threading.Lock()


def take_in(sender: int, content: Any) -> int:
    """Put references into this worker's pocket; they come in a container."""
    found = content["references"] if isinstance(content, dict) else content[0]
    with lock:
        pocket.extend((reference, name, sender) for reference, name in found)
        del pocket[: max(0, len(pocket) - MOST)]
    return len(found)


def choose(chance: random.Random, *, remove: bool) -> list[tuple[Reference, int]]:
    with lock:
        chosen = chance.sample(pocket, min(len(pocket), chance.randrange(1, 4)))
        if remove:
            pocket[:] = [entry for entry in pocket if not any(entry is other for other in chosen)]
    return [(reference, name) for reference, name, _ in chosen]


def hand_out(seed: int, how: str) -> Any:
    """Give some of this worker's references to the caller, in one way or another."""
    chance = random.Random(seed)
    chosen = choose(chance, remove=chance.random() < 0.5)
    if how == "raised":
        raise Carrier(chosen)
    if how == "large":
        return [chosen, torch.ones(50_000)]
    return {"references": chosen}


def stream_out(seed: int) -> Iterator[Any]:
    for number in range(3):
        yield hand_out(seed + number, "")


def relay(to: int, sender: int, content: Any) -> int:
    """Hand on what another has sent, and keep nothing."""
    return int(rpc.call(to, take_in, sender, content))


def wrap(chance: random.Random, chosen: list[tuple[Reference, int]]) -> Any:
    return {"references": chosen} if chance.random() < 0.5 else (chosen, torch.ones(chance.choice([1, 50_000])))


class Player:
    """One thread's moves."""

    def __init__(self, member: Member, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rank, self.size = member.rank, member.size
        self.names = seed * 1_000_000
        self.moves = [self.make, self.give, self.give, self.relay, self.each]
        self.moves += [self.fetch, self.stream, self.put, self.drop]

    def play(self) -> None:
        for move in [*self.chance.choices(self.moves, k=STEPS), self.make]:
            with contextlib.suppress(Cancelled, CallTimeout, WorkerLost, ObjectLost):  # seen at the end
                move()

    def other(self) -> int:
        return self.chance.randrange(self.size)

    def make(self) -> None:
        self.names += 1
        take_in(self.rank, [[(rpc.make(self.other(), Token, self.names), self.names)]])

    def finish(self, future: Any) -> Any:
        """Wait for a call, or give it up: at once, soon, or by its timeout."""
        how = self.chance.randrange(4)
        if how == 0:
            future.cancel()
        elif how == 1:
            with contextlib.suppress(TimeoutError):
                future.wait(self.chance.random() * 0.002)
            future.cancel()
        return future.wait()

    def patience_s(self) -> float:
        return 0.002 * self.chance.random() if self.chance.random() < 0.2 else PATIENCE_S

    def give(self) -> None:
        chosen = choose(self.chance, remove=self.chance.random() < 0.7)
        content = wrap(self.chance, chosen)
        future = rpc.start(self.other(), take_in, self.rank, content, timeout_s=self.patience_s())
        del chosen, content
        self.finish(future)

    def relay(self) -> None:
        content = wrap(self.chance, choose(self.chance, remove=True))
        future = rpc.start(self.other(), relay, self.other(), self.rank, content, timeout_s=self.patience_s())
        del content
        self.finish(future)

    def each(self) -> None:
        content = wrap(self.chance, choose(self.chance, remove=True))
        others = self.chance.sample(range(self.size), min(self.size, 2))
        futures = rpc.each(others, take_in, self.rank, content)
        del content
        for future in futures:
            self.finish(future)

    def fetch(self) -> None:
        to, seed, how = self.other(), self.chance.randrange(1 << 30), self.chance.choice(["", "large", "raised"])
        try:
            got = self.finish(rpc.start(to, hand_out, seed, how, timeout_s=self.patience_s()))
        except Carrier as error:
            got = [error.references]
        take_in(to, got)

    def stream(self) -> None:
        to = self.other()
        coming = rpc.call(to, stream_out, self.chance.randrange(1 << 30))
        for _ in range(self.chance.randrange(4)):
            take_in(to, next(coming))

    def put(self) -> None:
        """Into an object, only references to older ones, so that nothing holds itself."""
        chosen = choose(self.chance, remove=True)
        _, newest = max(chosen, key=lambda entry: entry[1], default=(None, 0))
        for reference, name in chosen:
            if name == newest:
                reference.put([other for other, older in chosen if older < newest and other is not reference])
                break

    def drop(self) -> None:
        choose(self.chance, remove=True)


def key(reference: Reference) -> Key:
    return reference._owner.incarnation, reference._number


def report() -> tuple[set[Key], set[Key]]:
    """The objects that this worker has references to, in its pocket and in objects; and those that live here."""
    gc.collect()
    me = session.worker().me.incarnation
    with lock:
        held = {key(reference) for reference, *_ in pocket}
    held |= {key(reference) for token in list(tokens) for reference in token.inner}
    return held, {(me, info.number) for info in rpc.objects()}


def check_mine(gone: int) -> tuple[int, list[str]]:
    """Use what is in the pocket: how many are there, and which objects are not."""
    wrong = []
    with lock:
        mine = list(pocket)
    for reference, name, sender in mine:
        try:
            if reference.identify() != name:
                wrong.append(f"{reference!r} is another")
        except (ObjectLost, WorkerLost) as error:
            # The worker that was killed had it, or had just handed it on and was the only one that held it.
            if gone < 0 or (reference._owner.rank != gone and sender != gone):
                wrong.append(f"{reference!r} from rank {sender}: {error}")
    return len(mine), wrong


def empty() -> None:
    with lock:
        pocket.clear()


def compare(living: list[int]) -> str:
    """Empty if what lives is what is held; the difference in words."""
    reports = [rpc.call(rank, report) for rank in living]
    owners = {session.worker().directory.find(rank).incarnation for rank in living}
    held = {each for has, _ in reports for each in has if each[0] in owners}
    alive = {each for _, owns in reports for each in owns}
    leaked, lost = sorted(alive - held), sorted(held - alive)
    return f"nobody holds {leaked}; gone are {lost}" if leaked or lost else ""


def play_all(member: Member, seed: int, gone: int) -> None:
    players = [Player(member, (seed * member.size + member.rank) * THREADS + n + 1) for n in range(THREADS)]
    threads = [threading.Thread(target=player.play) for player in players]
    for thread in threads:
        thread.start()
    if member.rank == gone:
        time.sleep(random.Random(seed).random() * 0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    for thread in threads:
        thread.join(2 * PATIENCE_S)
        assert not thread.is_alive()
    member.say(f"played-{member.rank}")


def a_game(seed: int, size: int, *, dies: bool, tcp: bool = False) -> list[Any]:
    """Play it; what each worker that lives found wrong, and how many references it had."""
    gone = random.Random(seed).randrange(1, size) if dies else -1
    living = [rank for rank in range(size) if rank != gone]

    def run(member: Member) -> Any:
        if tcp:
            workers.use_tcp()
        member.join()
        holdings = Holdings.now()
        rpc.init(timeout_s=PATIENCE_S)
        play_all(member, seed, gone)
        member.await_said(*[f"played-{rank}" for rank in living])
        found: list[Any] = []
        if member.rank == 0:
            different = [""]

            def same() -> bool:
                different[0] = compare(living)
                return not different[0]

            if gone < 0:
                assert soon(same), different[0]
            found = [rpc.call(rank, check_mine, gone) for rank in living]

            def nothing() -> bool:
                for rank in living:
                    rpc.call(rank, empty)  # again, because a call of the dead may only just have put something there
                different[0] = str([rpc.call(rank, report) for rank in living])
                return all(rpc.call(rank, report) == (set(), set()) for rank in living)

            assert soon(nothing), different[0]
        rpc.shutdown()
        assert soon(lambda: gc.collect() >= 0 and not holdings.left_by(Holdings.now()))
        dist.destroy_process_group()
        return found

    outcomes = run_ranks(run, size)
    for rank in living:
        assert outcomes[rank].error is None, f"rank {rank}:\n{outcomes[rank].traceback}"
    found: list[Any] = outcomes[0].value
    for _, wrong in found:
        assert not wrong
    return found


GAMES = [0, 1, 3, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, *range(4, 40)))]


@pytest.mark.parametrize("seed", GAMES)
def test_objects_live_as_long_as_somebody_holds_them(seed: int) -> None:
    found = a_game(seed, 2 + seed % 3, dies=False, tcp=seed % 4 == 3)
    assert sum(count for count, _ in found) > 0


@pytest.mark.parametrize("seed", GAMES)
def test_objects_whose_holder_dies_are_freed_and_no_others(seed: int) -> None:
    a_game(seed, 2 + seed % 3, dies=True, tcp=seed % 4 == 3)


def raise_with_a_thing(owner: int, caller: int, folder: Path) -> None:
    """Stop the caller, so that the answer waits there for longer than an owner waits for what holders say."""
    error = Carrier([(rpc.make(owner, Account, 5), 5)])
    stop(caller)
    (folder / "stopped").touch()
    threading.Timer(0.1, gc.collect).start()  # the error and its traceback are a circle
    raise error


def items_and_a_thing(owner: int, caller: int, folder: Path) -> Iterator[int]:
    yield 1
    raise_with_a_thing(owner, caller, folder)


@pytest.mark.parametrize("how", ["function", "generator"])
def test_what_comes_with_an_error_is_whole(how: str) -> None:
    def body(member: Member) -> None:
        if member.rank == 2:
            member.await_said("stopped")
            time.sleep(0.8)  # longer than an owner waits for what holders say
            os.kill(int((member.folder / "caller").read_text()), signal.SIGCONT)
        if member.rank:
            return
        (member.folder / "caller").write_text(str(os.getpid()))
        with pytest.raises(Carrier) as caught:
            if how == "function":
                rpc.call("worker1", raise_with_a_thing, 2, os.getpid(), member.folder)
            for item in rpc.call("worker1", items_and_a_thing, 2, os.getpid(), member.folder):
                assert item == 1
        assert caught.value.references[0][0].pay(2) == 7

    with_workers(body, 3)


def keep_it_sent(references: list[Reference], tensor: torch.Tensor) -> None:
    workers.keep(references[0])


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
def test_what_comes_with_a_call_that_was_given_up_is_whole(how: str) -> None:
    """The callee has not received the call when its caller gives it up and drops what it had sent."""

    def body(member: Member) -> None:
        if member.rank:
            return
        account = rpc.make("worker1", Account, 5)
        pid = rpc.call("worker2", workers.pid)
        stop(pid)
        try:
            large = torch.ones(1 << 20)  # which a cancellation overtakes
            future = rpc.start("worker2", keep_it_sent, [account], large, timeout_s=0.3 if how == "timed out" else None)
            if how == "cancelled":
                future.cancel()
            with pytest.raises((Cancelled, CallTimeout)):
                future.wait()
            del account, future
            gc.collect()
            time.sleep(0.6)  # as long as an owner is told later
            assert holders("worker1") == [("worker0",)]
        finally:
            os.kill(pid, signal.SIGCONT)
        assert soon(lambda: holders("worker1") != [("worker0",)])  # either it runs, or it has learnt in time
        assert [account.pay(2) for account in rpc.call("worker2", workers.give_all)] in ([], [7])
        rpc.call("worker2", workers.let_go)
        gc.collect()
        assert soon(lambda: holders("worker1") == [])

    with_workers(body, 3)
