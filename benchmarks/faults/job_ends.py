"""The launcher is killed, or a rank raises: when every process of the job has ended."""

from __future__ import annotations

import os
import random
import signal
import time

from faults.ends import Ends, watched
from faults.job import BEGIN, PATIENCE_S
from faults.losses import COMPUTE, LATEST_S
from faults.outcome import Outcome
from faults.places import Place

__all__ = ["launcher_killed", "raised"]


def launcher_killed(fault: str, where: Place, draw: random.Random, outcome: Outcome) -> None:
    """Kill the launcher, and wait for the end of each rank."""
    size = where.world.size
    with where.job(BEGIN + COMPUTE) as job:
        began = job.began(size)
        ranks = {f"rank {rank}": where.process(rank, began[rank]["pid"]) for rank in range(size)}
        with watched(ranks) as ends:
            time.sleep(draw.uniform(0.0, LATEST_S))
            since = time.monotonic()
            os.kill(job.processes[0].pid, signal.SIGKILL)
            add_ends(ends, size, since, outcome)


def raised(fault: str, where: Place, draw: random.Random, outcome: Outcome) -> None:
    """Have a rank raise, and wait for the end of each rank and of what has started them; that traceback is the only."""
    size = where.world.size
    victim = draw.randrange(size)
    with where.job(BEGIN + COMPUTE) as job:
        began = job.began(size)
        processes = {f"rank {rank}": where.process(rank, began[rank]["pid"]) for rank in range(size)}
        with watched({**processes, "what started them": job.processes[0].pid}) as ends:
            time.sleep(draw.uniform(0.0, LATEST_S))
            job.tell(f"raise-{victim}")
            since = job.await_note("raises")["at"]
            taken_s = len(outcome.taken_s)
            add_ends(ends, size + 1, since, outcome)
        if job.err.count("Traceback (") != 1 or "ValueError: bad thing" not in job.err:
            outcome.complain(f"the traceback of rank {victim} should have been shown once:\n{job.err}")
            del outcome.taken_s[taken_s:]


def add_ends(ends: Ends, count: int, since: float, outcome: Outcome) -> None:
    """Wait until all of these processes have ended, and add when each did."""
    outcome.expected += count
    outcome.taken_s += [at - since for at in ends.each(since + PATIENCE_S)]
    if ends.left:
        outcome.complain(f"{', '.join(ends.left)} did not end")
