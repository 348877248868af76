"""A rank or host is lost while all ranks compute, or a rank stops, stays away or raises: when the others know it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Collection
from typing import Any

from faults.job import BEGIN, PATIENCE_S, Job
from faults.outcome import Outcome
from faults.places import Place

__all__ = ["HOSTS", "lost", "raised", "silent"]

# The moment of the fault is drawn from so many seconds after all ranks have begun to compute.
LATEST_S = 0.3
HOSTS = ("cut", "stopped-host", "gone-host")
# A rank looks between two calls whether it is to stay away from the next, or to raise.
COMPUTE = """
    world = phalanx.init(backend, quiet=True)
    rank = world.rank
    stays_away, raises = folder / f"away-{rank}", folder / f"raise-{rank}"
    small, large = torch.zeros(1_000), torch.zeros(1_000_000)
    world.all_reduce(small)
    note(what="ready", pid=os.getpid(), host=os.uname().nodename)
    try:
        while True:
            if stays_away.exists():
                note(what="stays away", at=time.monotonic())
                time.sleep(1_000)
            if raises.exists():
                note(what="raises", at=time.monotonic())
                raise ValueError("bad thing")
            world.all_reduce(small)
            world.all_reduce(large)
    except phalanx.PhalanxError as error:
        knows(error)
        raise
"""
# A survivor that the launcher asks to end before it has its error goes on, so that it has one.
GO_ON = """
    signal.signal(signal.SIGTERM, lambda *_: asked.append(time.monotonic()))
"""


def lost(fault: str, where: Place, draw: random.Random, outcome: Outcome) -> None:
    """Kill a rank, or strike a host, and wait for the errors of all survivors."""
    world = where.world
    victim = draw.randrange(world.size)
    with where.job(BEGIN + GO_ON + COMPUTE) as job:
        began = job.began(world.size)
        process = where.process(victim, began[victim]["pid"])
        time.sleep(draw.uniform(0.0, LATEST_S))
        since = time.monotonic()
        if fault == "killed":
            os.kill(process, signal.SIGKILL)
        else:
            where.strike(fault, victim // world.ranks)
        gone = {victim}
        if fault in HOSTS:
            gone = {rank for rank in range(world.size) if rank // world.ranks == victim // world.ranks}
        add_errors(job, [began.pop(rank) for rank in gone], set(began), since, outcome)


def raised(fault: str, where: Place, draw: random.Random, outcome: Outcome) -> None:
    """Have a rank raise, and wait for the errors of all others."""
    victim = draw.randrange(where.world.size)
    with where.job(BEGIN + GO_ON + COMPUTE) as job:
        began = job.began(where.world.size)
        time.sleep(draw.uniform(0.0, LATEST_S))
        job.tell(f"raise-{victim}")
        since = job.await_note("raises")["at"]
        add_errors(job, [began.pop(victim)], set(began), since, outcome)


def silent(fault: str, where: Place, draw: random.Random, outcome: Outcome) -> None:
    """Stop a rank, or have it stay away from a call, and wait for the line that names it."""
    victim = draw.randrange(where.world.size)
    with where.job(BEGIN + GO_ON + COMPUTE) as job:
        began = job.began(where.world.size)
        process = where.process(victim, began[victim]["pid"])
        time.sleep(draw.uniform(0.0, LATEST_S))
        if fault == "stopped-rank":
            since, says = time.monotonic(), r"is stopped \(state T\)"
            os.kill(process, signal.SIGSTOP)
        else:
            job.tell(f"away-{victim}")
            since, says = job.await_note("stays away")["at"], r"is at .*, in no operation; .* for it in all_reduce #"
        outcome.expected += 1
        told = job.await_line(rf"^phalanx: rank {victim}( on \S+)? {says}", since + PATIENCE_S)
        if told is None:
            outcome.complain(f"rank {victim} is not named\n{job.err}")
        else:
            outcome.taken_s.append(told - since)


def add_errors(job: Job, gone: Collection[dict[str, Any]], waiting: set[int], since: float, outcome: Outcome) -> None:
    """Wait for the errors of all survivors, and add them; each may name any of the ranks that are gone."""
    outcome.expected += len(waiting)
    right = [{name: one[name] for name in ("rank", "pid", "host")} for one in gone]
    for said in job.noted(time.monotonic() + PATIENCE_S):
        if said["what"] != "knows" or said["rank"] not in waiting:
            continue
        waiting.remove(said["rank"])
        if said["error"] == "PeerLost" and said["of"] in right and said["at"] >= since:
            outcome.taken_s.append(said["at"] - since)
            outcome.signals += "SIGKILL" in said["text"]
            outcome.operations += said["last"].startswith("all_reduce #")
            outcome.asked += bool(said["asked"])
        else:
            outcome.complain(f"rank {said['rank']} should have lost {right}, but: {said}")
        if not waiting:
            return
    outcome.complain(f"rank(s) {sorted(waiting)} have no error\n{job.err}")
