"""One rank makes another call than the others: when every rank has its error."""

from __future__ import annotations

import random
import time
from typing import Any

from faults.job import BEGIN, PATIENCE_S
from faults.losses import GO_ON, LATEST_S
from faults.outcome import Outcome
from faults.places import Place

__all__ = ["mismatch"]

KINDS = ("size", "shape", "dtype", "operation", "root", "kind")
SCRIPT = """
    world = phalanx.init(backend, quiet=True)
    rank, size = world.rank, world.world_size
    odd = folder / f"odd-{rank}"
    small, large = torch.zeros(20, 50), torch.zeros(1_000_000)
    calls = {
        "size": lambda: world.all_reduce(small[:10]),
        "shape": lambda: world.all_reduce(small.view(50, 20)),
        "dtype": lambda: world.all_reduce(small.int()),
        "operation": lambda: world.all_reduce(small, dist.ReduceOp.MAX),
        "root": lambda: world.broadcast(small, src=1),
        "kind": lambda: world.broadcast(small, src=0),
    }
    world.all_reduce(small)
    note(what="ready")
    try:
        while True:
            kind = odd.read_text() if odd.exists() else ""
            called = time.monotonic()
            world.broadcast(small, src=0) if kind != "root" else calls[kind]()
            called = time.monotonic()
            world.all_reduce(small) if not kind else calls[kind]()
            called = time.monotonic()
            world.all_reduce(large)
    except phalanx.PhalanxError as error:
        knows(error, called=called)
        raise
"""


def mismatch(fault: str, where: Place, draw: random.Random, outcome: Outcome) -> None:
    """Have a rank make another call, and wait for the errors of all."""
    size = where.world.size
    victim, kind = draw.randrange(size), draw.choice(KINDS)
    outcome.expected += size
    with where.job(BEGIN + GO_ON + SCRIPT) as job:
        job.began(size)
        time.sleep(draw.uniform(0.0, LATEST_S))
        job.tell(f"odd-{victim}", kind)
        told: dict[int, dict[str, Any]] = {}
        for said in job.noted(time.monotonic() + PATIENCE_S):
            if said["what"] == "knows":
                told[said["rank"]] = said
            if len(told) == size:
                break
        else:
            outcome.complain(f"only rank(s) {sorted(told)} have an error ({kind}, rank {victim})\n{job.err}")
            return
        first_other = min(said["called"] for rank, said in told.items() if rank != victim)
        for rank, said in told.items():
            # Nobody can know it before this rank and one that calls something else have called.
            due = max(said["called"], first_other if rank == victim else told[victim]["called"])
            if said["error"] == "CollectiveMismatch":
                outcome.taken_s.append(said["at"] - due)
                outcome.asked += bool(said["asked"])
            else:
                outcome.complain(f"rank {rank} should know of another {kind} of rank {victim}, but: {said}")
