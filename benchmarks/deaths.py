"""How soon those know of a fault whom it concerns: a rank or host is lost, calls differ, the launcher is killed.

A job is started for each fault, with default options. Its ranks call all_reduce one time after the other, of 4 kB and
4 MB in turns, until the fault comes at a random moment. All processes read the same clock. Of the first faults each
survivor is told; it notes when it has its error:

- killed: a random rank (SIGKILL);
- raised: a random rank raises an exception;
- cut: nothing passes between a random host and all else, the launcher included. The survivors are the ranks on the
  launcher's side; those on the other side are ended by their agent, which has lost the launcher;
- stopped-host: every process on a random host is stopped (SIGSTOP);
- gone-host: a random host is cut off, and every process on it is killed, as if it were switched off.

A survivor counts as right if its error is ``PeerLost`` with the rank, pid and host that were lost (of a lost host, any
rank there). If one is not, it is shown with its error, and the exit code is 1. ``+signal`` counts the errors that also
say by which signal the rank has ended, ``asked`` the survivors that the launcher had asked to end (SIGTERM) before they
had their error: they go on here, but a script without a handler would have ended then, and the launcher have named the
lost one.

Of the others the time is that

- mismatch: until each rank has ``CollectiveMismatch``, of a random rank that calls all_reduce with another size, shape,
  dtype or operation, or broadcast with another root or in place of an all_reduce. It counts for each rank from the
  moment at which both it and one that calls something else had called;
- stopped-rank: a random rank is stopped, which ends nothing: until the line is printed that says so;
- absent: a random rank sleeps in place of a call: until the line is printed that says where it is;
- launcher-killed: until each rank has ended, after SIGKILL of ``phalanx run``;
- raised-ends: until each process has ended, that which started the ranks included, since a random rank has raised an
  exception. Its traceback must have been shown once, and no other;
- twice: a second process comes with a random rank: until both sides are told who and where the other one is;
- sizes: a process comes with a world size larger by one: the same. In a store of torch's all processes raise. In that
  of Phalanx's rank 0 the refused process raises, and rank 0 prints a line.

A world is a number of ranks on this host under ``phalanx run``, or hosts x ranks on each. These hosts are network
namespaces of this machine (``tests/support/hosts.py``) that share its cores, so they need root and iproute2. ``mpi:3``
is one under ``phalanx run --mpi``, ``mpiexec:3`` under an MPI launcher alone: start this program for them by the Python
of an environment that has mpi4py and an MPI library. ``gloo:3`` is ``phalanx run`` with torch's Gloo. Ranks of
``hand:3`` have their places from variables set by hand, those of ``torchrun:3`` from torchrun's, with the store of its
agent. What cannot happen in a world is left out there.

    python benchmarks/deaths.py
    python benchmarks/deaths.py --worlds 8 --faults killed --rounds 100
    .venv-mpi/mpich/bin/python benchmarks/deaths.py --worlds mpi:3 mpiexec:3
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import job_ends, joining, losses, mismatch
from faults.job import World
from faults.outcome import Outcome, table
from faults.places import Place, place


class Fault(NamedTuple):
    """One kind of fault.

    Attributes:
        once: starts a job, strikes at a random moment, and adds what comes of that to an outcome.
        kinds: the kinds of worlds in which it can happen.
    """

    once: Callable[[str, Place, random.Random, Outcome], None]
    kinds: tuple[str, ...]


FAULTS = {
    "killed": Fault(losses.lost, ("run", "hosts", "hand")),
    "raised": Fault(losses.raised, ("run", "hosts", "hand")),
    **{name: Fault(losses.lost, ("hosts",)) for name in losses.HOSTS},
    "mismatch": Fault(mismatch.mismatch, ("run", "hosts", "mpi", "mpiexec", "hand")),
    "stopped-rank": Fault(losses.silent, ("run", "hosts", "mpi", "gloo", "hand")),
    "absent": Fault(losses.silent, ("run", "hosts", "mpi", "gloo", "hand")),
    "launcher-killed": Fault(job_ends.launcher_killed, ("run", "hosts", "mpi", "gloo")),
    "raised-ends": Fault(job_ends.raised, ("run", "hosts", "mpi", "mpiexec", "gloo")),
    "twice": Fault(joining.joining, ("hand", "torchrun")),
    "sizes": Fault(joining.joining, ("hand", "torchrun")),
}


def main() -> None:
    """Parse the command line, run the rounds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    worlds = ["3", "8", "2x2", "hand:3", "torchrun:3"]
    parser.add_argument("--worlds", nargs="+", default=worlds, help="ranks, or hosts x ranks on each [%(default)s]")
    parser.add_argument("--faults", choices=FAULTS, nargs="+", default=list(FAULTS), help="which [%(default)s]")
    parser.add_argument("--rounds", type=int, default=10, help="of each fault in each world [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the ranks and moments that are drawn [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON array with every sample, in seconds")
    options = parser.parse_args()
    outcomes: dict[tuple[str, str], Outcome] = {}
    for world in map(World.parse, options.worlds):
        with place(world) as where:
            for name in options.faults:
                fault = FAULTS[name]
                if world.kind not in fault.kinds or (name in losses.HOSTS and world.hosts < 2):
                    continue
                outcome = outcomes[name, str(world)] = Outcome()
                draw = random.Random(f"{options.seed} {name} {world}")
                for number in range(options.rounds):
                    fault.once(name, where, draw, outcome)
                    took_s = max(outcome.taken_s, default=0.0)
                    print(f"{name} {world}: {number + 1}, longest {took_s:.3f} s", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps([{"fault": of, "world": at, **vars(one)} for (of, at), one in outcomes.items()]))
    else:
        print(table(options.rounds, outcomes))
    if any(len(outcome.taken_s) < outcome.expected for outcome in outcomes.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
