"""How soon every survivor knows which rank or host was lost: killed, cut off, stopped or gone while all ranks compute.

A job under ``phalanx run``, with its default options, is started for each fault. Its ranks call all_reduce one time
after the other, of 4 kB and 4 MB in turns, until the fault comes at a random moment. Each survivor notes when it has
its error; all processes read the same clock. The faults:

- killed: a random rank (SIGKILL);
- cut: nothing passes between a random host and all else, the launcher included. The survivors are the ranks on the
  launcher's side; those on the other side are ended by their agent, which has lost the launcher;
- stopped-host: every process on a random host is stopped (SIGSTOP);
- gone-host: a random host is cut off, and every process on it is killed, as if it were switched off;
- stopped-rank: a random rank is stopped (SIGSTOP). That ends nothing, so the time is that until the launcher's line
  says of the rank that it is stopped.

A survivor counts as right if its error is ``PeerLost`` with the rank, pid and host that were lost (of a lost host, any
rank there). If one is not, it is shown with its error, and the exit code is 1. ``+signal`` counts the errors that also
say by which signal the rank has ended, ``asked`` the survivors that the launcher had asked to end (SIGTERM) before they
had their error: they go on here, but a script without a handler would have ended then, and the launcher have named the
lost one.

A world is a number of ranks on this host, or hosts x ranks on each. These hosts are network namespaces of this machine
(``tests/support/hosts.py``) that share its cores, so they need root and iproute2.

    python benchmarks/deaths.py
    python benchmarks/deaths.py --worlds 8 --faults killed --rounds 100
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, reachable_hosts

# How long a job may take to start, and its survivors to have their errors, before they count as not told.
PATIENCE_S = 200.0
# The moment of the fault is drawn from so many seconds after all ranks have begun to compute.
LATEST_S = 0.3
FAULTS = ("killed", "cut", "stopped-host", "gone-host", "stopped-rank")
FAULTS_OF_HOSTS = ("cut", "stopped-host", "gone-host")
SCRIPT = """
    import json, os, signal, sys, time
    import torch, phalanx

    notes = os.open(sys.argv[1], os.O_WRONLY)
    rank = int(os.environ["RANK"])
    asked = []

    def note(**said):
        os.write(notes, json.dumps({"rank": rank, **said}).encode() + b"\\n")

    signal.signal(signal.SIGTERM, lambda *_: asked.append(time.monotonic()))
    world = phalanx.init(quiet=True)
    small, large = torch.zeros(1_000), torch.zeros(1_000_000)
    world.all_reduce(small)
    note(what="computes", pid=os.getpid(), host=os.uname().nodename)
    try:
        while True:
            world.all_reduce(small)
            world.all_reduce(large)
    except Exception as error:
        facts = {name: getattr(error, name, None) for name in ("rank", "pid", "host")}
        note(what="knows", at=time.monotonic(), asked=asked[:1], error=type(error).__name__, of=facts,
             text=str(error)[:2000])
        raise
"""


class World(NamedTuple):
    """How many hosts, with how many ranks on each; no hosts mean this one."""

    hosts: int
    ranks: int

    @classmethod
    def parse(cls, text: str) -> World:
        """Read ``8`` or ``2x2``."""
        hosts, _, ranks = text.rpartition("x")
        return cls(int(hosts or 0), int(ranks))

    def __str__(self) -> str:
        return f"{self.hosts}x{self.ranks}" if self.hosts else str(self.ranks)

    @property
    def size(self) -> int:
        """All ranks."""
        return max(1, self.hosts) * self.ranks


@dataclass
class Outcome:
    """What came of all faults of one kind in one world.

    Attributes:
        expected: how many survivors should have been told.
        taken_s: from the fault until each survivor that was told the right thing had its error.
        signals: how many of them were told the signal.
        asked: how many had been asked to end before.
    """

    expected: int = 0
    taken_s: list[float] = field(default_factory=list)
    signals: int = 0
    asked: int = 0


class Job:
    """One job whose ranks compute.

    Args:
        process: the launcher.
        err: the file to which it writes its standard error.
        notes: a pipe with what the ranks note.
        size: how many ranks there are.
    """

    def __init__(self, process: subprocess.Popen[bytes], err: Path, notes: int, size: int) -> None:
        self.process, self._err, self._notes, self._size = process, err, notes, size
        self._rest = b""

    @property
    def err(self) -> str:
        """What the launcher and the ranks have written to their standard errors."""
        return self._err.read_text()

    def began(self) -> dict[int, dict[str, Any]]:
        """For each rank what it notes when it begins to compute."""
        found: dict[int, dict[str, Any]] = {}
        for said in self.noted(time.monotonic() + PATIENCE_S):
            if said["what"] == "computes":
                found[said["rank"]] = said
            if len(found) == self._size:
                return found
        sys.exit(f"the job did not begin:\n{self.err}")

    def noted(self, until: float) -> Iterator[dict[str, Any]]:
        """What the ranks note, as it comes, until a time on the monotonic clock."""
        while (left_s := until - time.monotonic()) > 0:
            if select.select([self._notes], [], [], left_s)[0]:
                *lines, self._rest = (self._rest + os.read(self._notes, 1 << 16)).split(b"\n")
                yield from map(json.loads, lines)


class Here:
    """Jobs on this host."""

    def __init__(self, world: World, folder: Path) -> None:
        self._world, self._folder = world, folder
        self._script = folder / "script.py"
        self._script.write_text(dedent(SCRIPT))

    @contextlib.contextmanager
    def job(self) -> Iterator[Job]:
        """A job, of which nothing runs afterwards."""
        with _pipe(self._folder) as (name, notes), open(self._folder / "err", "wb") as err:
            command = [sys.executable, "-m", "phalanx", "run", "-n", str(self._world.size), str(self._script), name]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err)
            try:
                yield Job(process, self._folder / "err", notes, self._world.size)
            finally:
                process.kill()  # the kernel ends its ranks with it
                process.wait()

    def process(self, rank: int, pid: int) -> int:
        """The process of a rank, as this host numbers it."""
        return pid

    def strike(self, fault: str, host: int) -> None:
        """There is no other host to strike."""
        raise ValueError(f"{fault} needs hosts")


class Elsewhere:
    """Jobs over test hosts."""

    def __init__(self, world: World, folder: Path, launcher: RemoteLauncher) -> None:
        self._world, self._folder, self._launcher = world, folder, launcher
        self._script = launcher.script(SCRIPT)

    @contextlib.contextmanager
    def job(self) -> Iterator[Job]:
        """A job, of which nothing runs afterwards."""
        hosts = ",".join(f"h{host}:{self._world.ranks}" for host in range(self._world.hosts))
        with _pipe(self._folder) as (name, notes):
            started = self._launcher.start("-H", hosts, self._script, name)
            try:
                yield Job(started.process, started.folder / "err", notes, self._world.size)
            finally:
                self._launcher.clear()

    def process(self, rank: int, pid: int) -> int:
        """The process of a rank, as this machine numbers it; ``pid`` is how its host does."""
        for process in self._launcher.hosts.processes(rank // self._world.ranks):
            with contextlib.suppress(OSError):
                numbers = re.search(r"^NSpid:(.*)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
                if numbers and int(numbers[1].split()[-1]) == pid:
                    return process
        sys.exit(f"rank {rank} is not there any more")

    def strike(self, fault: str, host: int) -> None:
        """Do to a host what the fault says."""
        hosts = self._launcher.hosts
        if fault == "stopped-host":
            for pid in hosts.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            return
        hosts.cut(host)
        if fault == "gone-host":
            hosts.kill_all(host)


@contextlib.contextmanager
def _pipe(folder: Path) -> Iterator[tuple[str, int]]:
    """A named pipe, which ranks on test hosts reach too, also on those that are cut off."""
    path = folder / "notes"
    os.mkfifo(path)
    # For writing too: the pipe does not end while no rank has opened it.
    descriptor = os.open(path, os.O_RDWR)
    try:
        yield str(path), descriptor
    finally:
        os.close(descriptor)
        path.unlink()


@contextlib.contextmanager
def place(world: World) -> Iterator[Here | Elsewhere]:
    """Where the jobs of a world run."""
    with tempfile.TemporaryDirectory(prefix="deaths-") as name:
        folder = Path(name)
        if not world.hosts:
            yield Here(world, folder)
            return
        with reachable_hosts(world.hosts, folder) as hosts:
            yield Elsewhere(world, folder, RemoteLauncher(hosts, folder))


def one_fault(fault: str, world: World, where: Here | Elsewhere, draw: random.Random, outcome: Outcome) -> None:
    """Start a job, strike at a random moment, and add what the survivors say to an outcome."""
    victim = draw.randrange(world.size)
    with where.job() as job:
        began = job.began()
        process = where.process(victim, began[victim]["pid"])
        time.sleep(draw.uniform(0.0, LATEST_S))
        since = time.monotonic()
        if fault == "stopped-rank":
            os.kill(process, signal.SIGSTOP)
            add_line(job, victim, since, outcome)
            return
        if fault == "killed":
            os.kill(process, signal.SIGKILL)
        else:
            where.strike(fault, victim // world.ranks)
        lost = {victim}
        if fault in FAULTS_OF_HOSTS:
            lost = {rank for rank in range(world.size) if rank // world.ranks == victim // world.ranks}
        add_errors(job, {rank: began.pop(rank) for rank in lost}, set(began), since, outcome)


def add_errors(job: Job, lost: dict[int, dict[str, Any]], waiting: set[int], since: float, outcome: Outcome) -> None:
    """Wait for the errors of all survivors, and add them; each may name any of the lost ranks."""
    outcome.expected += len(waiting)
    right = [{name: one[name] for name in ("rank", "pid", "host")} for one in lost.values()]
    for said in job.noted(since + PATIENCE_S):
        if said["what"] != "knows" or said["rank"] not in waiting:
            continue
        waiting.remove(said["rank"])
        if said["error"] == "PeerLost" and said["of"] in right and said["at"] >= since:
            outcome.taken_s.append(said["at"] - since)
            outcome.signals += "SIGKILL" in said["text"]
            outcome.asked += bool(said["asked"])
        else:
            print(f"rank {said['rank']} should have lost {right}, but: {said}", file=sys.stderr)
        if not waiting:
            return
    print(f"rank(s) {sorted(waiting)} have no error\n{job.err}", file=sys.stderr)


def add_line(job: Job, victim: int, since: float, outcome: Outcome) -> None:
    """Wait until the launcher says of a rank that it is stopped, and add the time."""
    outcome.expected += 1
    line = re.compile(rf"^phalanx: rank {victim}( on \S+)? is stopped \(state T\)", re.MULTILINE)
    while time.monotonic() < since + PATIENCE_S:
        if line.search(job.err):
            outcome.taken_s.append(time.monotonic() - since)
            return
        time.sleep(0.002)
    print(f"rank {victim} is not said to be stopped\n{job.err}", file=sys.stderr)


def quantile(values: list[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def table(rounds: int, outcomes: dict[tuple[str, str], Outcome]) -> str:
    """The outcomes for people, in ms."""
    lines = [f"{'ms until known':<16}{'world':>7}{'faults':>8}{'told right':>14}{'+signal':>9}{'asked':>7}"]
    lines[0] += f"{'median':>10}{'99 %':>10}{'longest':>10}"
    for (fault, world), outcome in outcomes.items():
        told = f"{len(outcome.taken_s)} of {outcome.expected}"
        line = f"{fault:<16}{world:>7}{rounds:>8}{told:>14}{outcome.signals:>9}{outcome.asked:>7}"
        if outcome.taken_s:
            kinds: list[Callable[[list[float]], float]] = [statistics.median, lambda of: quantile(of, 0.99), max]
            line += "".join(f"{1e3 * kind(outcome.taken_s):10.1f}" for kind in kinds)
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, run the rounds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    worlds = ["3", "8", "2x2"]
    parser.add_argument("--worlds", nargs="+", default=worlds, help="ranks, or hosts x ranks on each [%(default)s]")
    parser.add_argument("--faults", choices=FAULTS, nargs="+", default=FAULTS, help="which [%(default)s]")
    parser.add_argument("--rounds", type=int, default=10, help="of each fault in each world [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the ranks and moments that are drawn [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every sample, in seconds")
    options = parser.parse_args()
    outcomes: dict[tuple[str, str], Outcome] = {}
    for world in map(World.parse, options.worlds):
        if world.hosts and (why := why_no_hosts()):
            sys.exit(f"no hosts can be made here: {why}")
        with place(world) as where:
            for fault in options.faults:
                if fault in FAULTS_OF_HOSTS and world.hosts < 2:
                    continue
                outcome = outcomes[fault, str(world)] = Outcome()
                draw = random.Random(f"{options.seed} {fault} {world}")
                for number in range(options.rounds):
                    one_fault(fault, world, where, draw, outcome)
                    took_s = max(outcome.taken_s, default=0.0)
                    print(f"{fault} {world}: {number + 1}, longest {took_s:.3f} s", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps([{"fault": of, "world": at, **vars(one)} for (of, at), one in outcomes.items()]))
    else:
        print(table(options.rounds, outcomes))
    if any(len(outcome.taken_s) < outcome.expected for outcome in outcomes.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
