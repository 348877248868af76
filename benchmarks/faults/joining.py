"""A second process claims a rank, or one has another world size than the others: when both sides are told."""

from __future__ import annotations

import os
import random
import re
import time

from faults.job import BEGIN, PATIENCE_S, Job
from faults.losses import LATEST_S
from faults.outcome import Outcome
from faults.places import ByHand, Place

__all__ = ["joining"]

# In its notes each process is called by its number, since two of them may have one rank. Each makes a world of one
# before, so that what the first call imports is not measured.
SCRIPT = """
    rank = int(sys.argv[4])
    of_torchs = "TORCHELASTIC_RUN_ID" in os.environ
    if of_torchs:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
    else:
        own = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
        phalanx.init(backend, quiet=True)
        phalanx.close()
        os.environ.update(own)
    note(what="ready", pid=os.getpid())
    while not (folder / f"join-{rank}").exists():
        time.sleep(0.001)
    note(what="joins", at=time.monotonic())
    try:
        dist.init_process_group(backend) if of_torchs else phalanx.init(backend)
    except phalanx.PhalanxError as error:
        knows(error)
        raise
"""


def joining(fault: str, where: Place, draw: random.Random, outcome: Outcome) -> None:
    """Have one process come a moment after the others that is not of their world, and wait until it is said.

    In a store of torch's every process raises. In that of Phalanx's rank 0 the process that comes last raises, and
    rank 0, which has come before, prints a line.
    """
    assert isinstance(where, ByHand)
    size, has_store = where.world.size, where.world.by == "hand"
    victim = draw.randrange(1 if has_store else 0, size)
    others = [rank for rank in range(size) if rank != victim]
    if fault == "twice":
        # One of the others stays away, so that the ranks have not met before the second process comes.
        others = [victim, *others[: size - 2]]
    others.sort()
    seats = [*((rank, size) for rank in others), (victim, size if fault == "twice" else size + 1)]
    with where.job(BEGIN + SCRIPT, seats) as job:
        ready = job.began(size)
        pids = [ready[number]["pid"] for number in range(size)]
        for number in range(size - 1):
            job.tell(f"join-{number}")
        for _ in range(size - 1):
            job.await_note("joins")
        time.sleep(draw.uniform(0.0, LATEST_S))
        job.tell(f"join-{size - 1}")
        since = job.await_note("joins")["at"]
        # Of the pids that are named one is that of the process that came last.
        sides = [pids[others.index(victim)]] if fault == "twice" else pids[:-1]
        right = Right(pids[-1], sides, {size, seats[-1][1]})
        if has_store:
            add_line(job, right, since, outcome)
        add_errors(job, {size - 1} if has_store else set(range(size)), right, since, outcome)


class Right:
    """What a text has to name.

    Args:
        last: the process that came last.
        sides: the processes of which it has to name one beside that.
        sizes: the world sizes, all of which it has to name if they differ.
    """

    def __init__(self, last: int, sides: list[int], sizes: set[int]) -> None:
        self._last, self._sides, self._sizes = last, sides, sizes

    def is_in(self, text: str) -> bool:
        """Whether a text names all that, and the host of both."""
        pids = {int(pid) for pid in re.findall(rf"pid (\d+) on {re.escape(os.uname().nodename)}", text)}
        sizes = {int(size) for size in re.findall(r"(?:world of|WORLD_SIZE|for|has) (\d+)", text)}
        return self._last in pids and bool(pids & set(self._sides)) and (len(self._sizes) == 1 or self._sizes <= sizes)


def add_line(job: Job, right: Right, since: float, outcome: Outcome) -> None:
    """Wait for rank 0's line, and add when it came."""
    outcome.expected += 1
    told = job.await_line(r"^phalanx: refused a process: .*\n", since + PATIENCE_S)
    (line,) = re.findall(r"^phalanx: refused a process: .*", job.err, re.MULTILINE) or [""]
    if told is None or not right.is_in(line):
        outcome.complain(f"rank 0 should have told whom it refused, but: {line or job.err}")
    else:
        outcome.taken_s.append(told - since)


def add_errors(job: Job, waiting: set[int], right: Right, since: float, outcome: Outcome) -> None:
    """Wait for the errors of these processes, and add when each came."""
    outcome.expected += len(waiting)
    for said in job.noted(time.monotonic() + PATIENCE_S):
        if said["what"] != "knows":
            continue
        waiting.discard(said["rank"])
        if said["error"] == "InitializationError" and right.is_in(said["text"]) and said["at"] >= since:
            outcome.taken_s.append(said["at"] - since)
        else:
            outcome.complain(f"process {said['rank']} should have been told of both, but: {said}")
        if not waiting:
            return
    outcome.complain(f"process(es) {sorted(waiting)} have no error\n{job.err}")
