"""The kill matrix: which process falls, when, how and in what, drawn by a seed; and what is right in each case."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RANKS", "Case", "Right", "drawn", "every_case", "what_is_right"]

OPERATIONS = ("all_reduce", "broadcast", "all_gather", "messages", "barrier", "objects", "init", "DDP step", "close")
MOMENTS = ("before", "first", "between", "after")
FAULTS = ("SIGKILL", "SIGSTOP", "SIGSEGV", "exception", "os._exit", "exit(0)")
RANKS = ("first", "middle", "last")
VICTIMS = (*RANKS, "launcher", "zygote")
WORLDS = (2, 3, 8)
PLACES = ("one host", "two hosts", "mpi")
WITHOUT_CHUNKS = ("barrier", "init", "close")
SEED = 16
EXIT_CODE = 3  # of os._exit (kill_program.py)
# After it a rank that is stopped is given up where nobody can look at its process: on another host, and over MPI.
GIVEN_UP_S = 5.0


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        operation, moment: what the ranks do, and how far they are; ``kill_program.py`` says what each moment is.
        fault: how the victim falls.
        victim: which process it is; of the ranks the first, the middle or the last one.
        world: how many ranks there are.
        place: where they run.
        seed: what else is drawn: the rank that comes late, the rank that strikes, the time within a moment.
    """

    operation: str
    moment: str
    fault: str
    victim: str
    world: int
    place: str
    seed: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return "-".join((self.operation, self.moment, self.fault, self.victim, f"of {self.world}", self.place))

    @property
    def is_valid(self) -> bool:
        """Whether there is such a case, and no other one is the same."""
        if self.moment == "between" and self.operation in WITHOUT_CHUNKS:
            return False
        if self.victim == "middle" and self.world == 2:
            return False  # it is the last one
        # A script that is none of theirs cannot make the other processes raise or exit.
        return self.victim in RANKS or self.fault.startswith("SIG")

    @property
    def of_rank(self) -> bool:
        return self.victim in RANKS

    @property
    def actor(self) -> int:
        """The rank that falls; for another victim the rank whose progress is waited for."""
        return {"first": 0, "middle": self.world // 2, "last": self.world - 1}.get(self.victim, self.seed % self.world)

    @property
    def late(self) -> int:
        """The rank for which the actor waits in its first chunk: of messages the one that it receives from."""
        if self.operation == "messages":
            return (self.actor - 1) % self.world
        return (self.actor + 1 + self.seed // 8 % (self.world - 1)) % self.world

    @property
    def split(self) -> int:
        """How many of the ranks are on the first of two hosts."""
        return (self.world + 1) // 2

    def host(self, rank: int) -> int:
        return int(rank >= self.split)

    @property
    def is_alone(self) -> bool:
        """Whether the victim is the only rank of its host."""
        host = self.host(self.actor)
        return sum(self.host(rank) == host for rank in range(self.world)) == 1

    @property
    def signal(self) -> signal.Signals:
        return signal.Signals[self.fault]

    def for_program(self, right: Right) -> dict[str, Any]:
        """What the ranks have to know."""
        return {
            "operation": self.operation,
            "moment": self.moment,
            "fault": self.fault,
            "of_rank": self.of_rank,
            "actor": self.actor,
            "late": self.late,
            "chance": random.Random(self.seed).random(),
            "backend": "mpi" if self.place == "mpi" else "phalanx",
            "timeout_s": right.timeout_s,
            "survivors_wait": right.survivors_wait,
        }


@dataclass(frozen=True)
class Right:
    """What has to come of a case.

    Attributes:
        codes: the exit codes that ``phalanx run`` may have.
        said: what it must say on standard error, as regular expressions.
        instead: what it may say in place of that; then the job ends by itself.
        errors: the classes of which every survivor raises one; empty if they need not raise.
        words: what each survivor's error must say, as regular expressions.
        may_come_through: whether a survivor may end well, since the fault can come too late for it.
        end: how the job has to be ended, when what must be said has been: a signal to ``phalanx run``, or ``stop`` for
            ``phalanx stop``; empty if it ends by itself.
        timeout_s: that of the group, once all ranks have met.
    """

    codes: tuple[int, ...]
    said: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    may_come_through: bool = False
    end: str = ""
    timeout_s: float = 300.0

    @property
    def survivors_wait(self) -> bool:
        return bool(self.errors)


def every_case() -> Iterator[Case]:
    for facts in itertools.product(OPERATIONS, MOMENTS, FAULTS, VICTIMS, WORLDS, PLACES):
        case = Case(*facts)
        if case.is_valid:
            yield case


def drawn(place: str, count: int) -> list[Case]:
    """``count`` different cases of a place, always the same ones."""
    chance = random.Random(SEED)
    cases = [case for case in every_case() if case.place == place]
    return [
        Case(c.operation, c.moment, c.fault, c.victim, c.world, c.place, chance.randrange(10**6))
        for c in chance.sample(cases, count)
    ]


def what_is_right(case: Case, *, waits_in_mpi: bool = False) -> Right:
    """What docs/launchers.md, diagnosis.md, clusters.md and mpi.md promise for it.

    Args:
        case: which one.
        waits_in_mpi: the MPI library may let all others wait for a stopped rank inside MPI, where no timeout holds.
    """
    if case.victim == "launcher":
        return _launcher_falls(case)
    if case.victim == "zygote":
        return _zygote_falls(case)
    if case.fault == "SIGSTOP":
        return _rank_stops(case, waits_in_mpi=waits_in_mpi)
    if case.fault == "exit(0)":
        return _rank_exits_well(case)
    return _rank_falls(case)


def _launcher_falls(case: Case) -> Right:
    """All ranks end with it. One that is stopped is continued by ``phalanx stop``, which says so."""
    if case.fault == "SIGSTOP":
        return Right((128 + signal.SIGTERM,), end="stop")
    return Right((-case.signal,))


def _zygote_falls(case: Case) -> Right:
    """The job ends with it and says of what. While it is stopped the job goes on, and can be ended as always."""
    if case.fault == "SIGSTOP":
        return Right((128 + signal.SIGTERM,), end="SIGTERM")
    whose, host = (" of a host", "h[01]") if case.place == "two hosts" else ("", r"\S+")
    how = rf"the process that starts and watches the ranks{whose} was ended by signal {case.signal:d} \({case.fault}\)"
    return Right((128 + case.signal,), (rf"{how}; the job ended with it\n  host {host}, pid \d+",))


def _rank_stops(case: Case, *, waits_in_mpi: bool) -> Right:
    """On one host nothing ends; a line says within 5 s that it is stopped, if a rank waits for it.

    Where the others cannot look at its process they give up, and name it: on two hosts within five seconds if all ranks
    of its host are stopped, else at the group's timeout. Where they may wait in MPI itself it is one or the other.
    """
    rank = case.actor
    if case.operation == "close" or case.operation == "init":
        return Right((128 + signal.SIGTERM,), end="SIGTERM")
    line = rf"phalanx: rank {rank} is stopped \(state T\), .*waits? for it"
    if case.place == "one host":
        return Right((128 + signal.SIGTERM,), (line,), end="SIGTERM")
    words = (rf"rank {rank} of the group",)
    if case.place == "two hosts" and case.is_alone:
        return Right((1,), _block(case.world, rank), errors=("PeerLost",), words=(*words, "stopped"))
    if case.place == "mpi":  # the first that fails ends the job
        block = _block(case.world, rank)
        if waits_in_mpi:
            codes = (1, 128 + signal.SIGTERM)
            return Right(codes, (line,), instead=block, timeout_s=GIVEN_UP_S, end="SIGTERM")
        return Right((1,), block, timeout_s=GIVEN_UP_S)
    errors = ("CollectiveTimeout", "PeerLost")
    return Right((1,), _block(case.world, rank), errors=errors, words=words, timeout_s=GIVEN_UP_S)


def _rank_exits_well(case: Case) -> Right:
    """It has left in order. That is a failure of those who still need it, and of nobody after the last call."""
    rank = case.actor
    if case.operation == "close":
        return Right((0,))
    if case.operation == "init" and case.moment != "after":
        said = (rf"phalanx: rank \d+ of {case.world} failed: phalanx\.errors\.\w+: .*rank {rank}\b.* ended",)
        if case.place == "mpi":
            return Right((1,), said)
        return Right((1,), said, errors=("InitializationError", "PeerLost"), words=(rf"rank {rank}\b.* ended",))
    if case.place == "mpi":
        return Right((1,), _block(case.world, rank))  # the first that fails ends the job
    # Whether it is within a call that it leaves the others alone, or between two, is for chance.
    words = (rf"rank {rank} of the group", "left|interrupted|has ended")
    return Right((1,), _block(case.world, rank), errors=("PeerLost",), words=words)


def _rank_falls(case: Case) -> Right:
    """It is named by the launcher with its signal or exit code, or with its exception, and by every survivor."""
    rank, world = case.actor, case.world
    if case.fault == "exception":
        code, cause = 1, rf"rank {rank} of {world} failed: (\w+\.)?Fell: the victim fell"
    elif case.fault == "os._exit":
        code, cause = EXIT_CODE, rf"rank {rank} of {world} failed\n.*exit code {EXIT_CODE}"
    else:
        code = 128 + case.signal
        cause = rf"rank {rank} of {world} failed\n.*ended by signal {case.signal:d} \({case.fault}\)"
    said = (cause, rf"host h{case.host(rank)}, pid ") if case.place == "two hosts" else (cause,)
    words = (rf"rank {rank} of the group", "has ended|has failed|interrupted|stopped|is gone|lost")
    if case.operation == "close":
        return Right((code,), said)
    if case.operation == "init" and case.moment != "after":
        return Right((code,), said)  # they have no group yet
    if case.place == "mpi":
        return Right((code,), said)  # MPI ends the others before they learn of it
    return Right((code,), said, errors=("PeerLost",), words=words)


def _block(world: int, lost: int) -> tuple[str, ...]:
    """A survivor's error is the job's failure."""
    return (rf"phalanx: rank \d+ of {world} failed: phalanx\.errors\.\w+: .*rank {lost} of the group",)
