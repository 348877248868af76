"""Hundreds of kills and hundreds of worlds in a row: what lives on holds nothing of those that are gone.

``PHALANX_LEAK_COUNT`` sets how many; ``make fault`` does a thousand of each.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch_support import Launcher, RunningJob, launcher, wait_for
from tests.support.inventory import held_by, more_than, shared_memory_files
from tests.support.ports import held_port
from tests.support.seats import Order, Seat, Seats
from tests.support.waiting import soon

__all__ = ["launcher"]

COUNT = int(os.environ.get("PHALANX_LEAK_COUNT", "1000"))
SEED = 17
PATIENCE_S = 300.0
WARM_UP = 6  # worlds after which everything that a process opens once is open
counts = pytest.mark.parametrize("count", [15, pytest.param(COUNT, marks=pytest.mark.fault)])


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, of which none may be left; the processes of the test inherit it."""
    assert tmp_path.exists()  # made before, elsewhere
    with tempfile.TemporaryDirectory(prefix="phalanx-test-") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


class Ledger:
    """What the processes of the seats hold, and files, compared between two moments at which no world is there."""

    def __init__(self, seats: Seats, temporary: Path) -> None:
        self._seats, self._temporary = seats, temporary
        self._before = self._held()
        self._files = shared_memory_files()
        self._keys = seats.keys()

    def _held(self) -> dict[int, Counter[str]]:
        return {pid: held_by(pid) for pid in (os.getpid(), *(seat.pid for seat in self._seats.seats))}

    def left(self) -> dict[str, object]:
        """What there is more of than at the start, once threads that are ending have ended."""
        found: dict[str, object] = {}

        def nothing() -> bool:
            found.clear()
            for pid, held in self._held().items():
                if more := more_than(self._before[pid], held):
                    found[f"process {pid}"] = more
            if files := shared_memory_files() - self._files:
                found["/dev/shm"] = files
            if files := {path.name for path in self._temporary.iterdir()}:
                found["temporary files"] = files
            if (keys := self._seats.keys()) != self._keys:
                found["keys"] = keys - self._keys
            return not found

        soon(nothing, 20.0)
        return found


@contextlib.contextmanager
def world(
    seats: Seats,
    number: int,
    size: int,
    lasting: bool,
    *,
    with_groups: bool = False,
    timeout_s: float = PATIENCE_S,
) -> Iterator[list[Order]]:
    """The orders of a world; in one that does not have the lasting store rank 0 has a port of its own meanwhile."""
    with contextlib.nullcontext(seats.port) if lasting else held_port() as port:
        yield [Order(number, rank, size, port, lasting, with_groups, timeout_s, operations=10) for rank in range(size)]


def order(seats: list[Seat], orders: list[Order]) -> None:
    for seat, each in zip(seats, orders, strict=True):
        seat.pipe.send(each)


@counts
def test_worlds_in_a_row_leave_nothing(count: int, temporary: Path, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    with Seats(5, tmp_path) as seats:
        ledger = None
        for number in range(count + WARM_UP):
            if number == WARM_UP:
                ledger = Ledger(seats, temporary)
            # Each process has been in worlds of both kinds before anything is counted.
            size = 5 if number < WARM_UP else chance.randrange(2, 6)
            members = chance.sample(seats.seats, size)
            with world(seats, number, size, number % 2 == 0, with_groups=True) as orders:
                order(members, orders)
                assert seats.await_(members) == ["joined"] * size
                assert seats.await_(members) == [""] * size
        assert ledger is not None
        assert ledger.left() == {}


@counts
def test_who_survives_kills_holds_nothing_of_them(count: int, temporary: Path, tmp_path: Path) -> None:
    """In each world a rank is killed: while it joins, in an operation, while it leaves, or when it has left.

    No further groups are made: ranks that make one with a rank that is gone wait for it as long as the timeout is.
    """
    chance = random.Random(SEED)
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    with Seats(4, tmp_path) as seats:
        usual_s = [undisturbed(seats, count + number) for number in range(WARM_UP)]
        ledger = Ledger(seats, temporary)
        longest_s = sorted(usual_s)[WARM_UP // 2]
        for number in range(count):
            size = chance.randrange(2, 6)
            victim = seats.add()
            members = chance.sample(seats.seats, size - 1)
            members.insert(chance.randrange(size), victim)
            survivors = [seat for seat in members if seat is not victim]
            joining = chance.random() < 0.15
            # A rank that dies before the others have heard of it is missed when their patience ends.
            lasting = not joining and chance.random() < 0.5
            with world(seats, number, size, lasting, timeout_s=2.0 if joining else PATIENCE_S) as orders:
                order(members, orders)
                if not joining:
                    said = seats.await_(members)
                    assert said == ["joined"] * size, (number, lasting, members.index(victim), said)
                time.sleep(chance.uniform(0, longest_s))
                victim.end()
                for seat in survivors:
                    (ended,) = seats.await_([seat])
                    if ended == "joined":
                        (ended,) = seats.await_([seat])
                    kind = str(ended).partition(":")[0]
                    outcomes[kind] += 1
                    # The short patience is for joining; a busy machine may hold a survivor up as long in an operation.
                    late = ("CollectiveTimeout",) if joining else ()
                    if kind not in ("", "PeerLost", "InitializationError", *late):
                        wrong.append(f"world {number}, of {size} ranks: {ended}")
        print(outcomes, "\n".join(wrong))
        assert ledger.left() == {}
        assert wrong == []
        assert outcomes["PeerLost"] > 0


def undisturbed(seats: Seats, number: int) -> float:
    """A world in which nobody is killed; how long it takes once all have joined, in seconds."""
    with world(seats, number, 4, number % 2 == 0) as orders:
        order(seats.seats, orders)
        assert seats.await_(seats.seats) == ["joined"] * len(orders)
        began = time.monotonic()
        assert seats.await_(seats.seats) == [""] * len(orders)
        return time.monotonic() - began


ATTEMPTS = """
    import os, pathlib, random, signal, sys, threading, time
    import torch, torch.distributed as dist
    import phalanx
    attempt, last, folder = int(os.environ["PHALANX_ATTEMPT"]), int(sys.argv[1]), pathlib.Path(sys.argv[2])
    chance = random.Random(attempt)
    victim, delay_s = chance.randrange(int(os.environ["WORLD_SIZE"])), chance.uniform(0, float(sys.argv[3]))
    counted = sys.argv[4].split(",")

    def die():
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    if int(os.environ["RANK"]) == victim and attempt < last and str(attempt) not in counted:
        threading.Thread(target=die, daemon=True).start()
    world = phalanx.init(quiet=True)
    total = torch.ones(300_000)
    if str(attempt) in counted:
        world.all_reduce(total)
        (folder / f"{attempt}-{world.rank}").touch()
        while not (folder / f"{attempt}-seen").exists():
            time.sleep(0.01)
        world.barrier()
        if world.rank == victim and attempt < last:
            os.kill(os.getpid(), signal.SIGKILL)
    while attempt < last:
        total.fill_(1)
        world.all_reduce(total)
        assert total.eq(world.size).all()
        dist.barrier(dist.new_group())
    phalanx.close()
"""


HOLDERS = ("launcher", "phalanx-zygote")


@pytest.mark.parametrize(
    ("ranks", "count"),
    [(3, 8), *(pytest.param(ranks, COUNT // 4, marks=pytest.mark.fault) for ranks in (2, 3, 4, 5))],
)
def test_a_launcher_holds_nothing_of_attempts_that_were_killed(launcher: Launcher, ranks: int, count: int) -> None:
    """A random rank of each attempt is killed at a random moment, and all ranks are started again."""
    seen = launcher.directory / "seen"
    seen.mkdir()
    # The second attempt is the first that begins like all that follow.
    counted = [2, count]
    arguments = [launcher.script(ATTEMPTS), str(count), str(seen), "0.15", ",".join(map(str, counted))]
    with open(launcher.directory / "err", "wb") as err:
        job = launcher.start("-n", str(ranks), "-q", "--restarts", str(count), *arguments, stderr=err)
    first = look(job, seen, counted[0], ranks)
    last = look(job, seen, counted[1], ranks, first)
    outcome = job.finish()
    said = (launcher.directory / "err").read_text()
    assert outcome.code == 0, said[-3000:]
    assert said.count("starts now") == count
    assert first == last


def look(
    job: RunningJob, seen: Path, attempt: int, ranks: int, expected: dict[str, object] | None = None
) -> dict[str, object]:
    """What the launcher, the zygote and the store hold while all ranks of an attempt are at rest, and all files.

    What an earlier attempt had may be going yet, so it looks until that does not change, or is what is expected.
    """
    wait_for(lambda: all((seen / f"{attempt}-{rank}").exists() for rank in range(ranks)), 1200.0)
    until = time.monotonic() + 60
    found = glance(job)
    while True:
        time.sleep(0.2)
        before, found = found, glance(job)
        settled = found is not None and found == (before if expected is None else expected)
        if settled or time.monotonic() > until:
            break
    (seen / f"{attempt}-seen").touch()
    assert found is not None
    return found


def glance(job: RunningJob) -> dict[str, object] | None:
    """One look; None if something has ended meanwhile."""
    try:
        names = Counter(Path(f"/proc/{pid}/comm").read_text().strip() for pid in job.processes())
        held = {name: held_by(job.pid if name == "launcher" else job.named(name)) for name in HOLDERS}
        return {
            **held, "processes": names, "/dev/shm": shared_memory_files(("phalanx",)),
            "temporary": sorted(path.name for path in job.temporary.rglob("*")),
        }  # fmt: skip
    except (FileNotFoundError, ProcessLookupError):
        return None
