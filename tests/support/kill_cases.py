"""The kill matrix: which process falls, when, how and in what, and what is right in each case.

``test_kill_matrix.py`` draws the cases that are run.
"""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RANKS", "Case", "Right", "every_case", "what_is_right"]

OPERATIONS = ("all_reduce", "broadcast", "all_gather", "messages", "barrier", "objects", "init", "DDP step", "close")
MOMENTS = ("before", "first", "between", "after")
FAULTS = ("SIGKILL", "SIGSTOP", "SIGSEGV", "exception", "os._exit", "exit(0)")
RANKS = ("first", "middle", "last")
VICTIMS = (*RANKS, "launcher", "zygote")
WORLDS = (2, 3, 8)
MEETINGS = ("connected", "unconnected")
WITHOUT_CHUNKS = ("barrier", "init", "close")
CONNECTS_BEFORE = ("init", "DDP step")  # the first has no group to connect, and making a DDP module connects its ranks
EXIT_CODE = 3  # of os._exit (kill_program.py)
# A rank that is through with it has a group; on a busy machine some are, although the victim falls within it.
IN_INIT = ("InitializationError", "PeerLost")
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
        place: where they run: ``one host``, ``two hosts`` or ``mpi``.
        meeting: whether the ranks have connected with each other before, or the operation is the group's first one.
        seed: what else is drawn: the rank that comes late, the rank that strikes, the time within a moment.
    """

    operation: str
    moment: str
    fault: str
    victim: str
    world: int
    place: str
    meeting: str = "connected"
    seed: int = field(default=0, compare=False)

    def __str__(self) -> str:
        facts = (self.operation, self.moment, self.fault, self.victim, f"of {self.world}", self.place)
        return "-".join((*facts, *([] if self.is_connected else [self.meeting])))

    @property
    def is_valid(self) -> bool:
        """Whether there is such a case, and no other one is the same."""
        if self.moment == "between" and self.operation in WITHOUT_CHUNKS:
            return False
        if self.victim == "middle" and self.world == 2:
            return False  # it is the last one
        if not self.is_connected and self.place == "mpi":
            return False  # MPI connects its processes when it likes
        if not self.is_connected and (self.operation in CONNECTS_BEFORE or self.moment == "between"):
            return False
        # A script that is none of theirs cannot make the other processes raise or exit.
        return self.victim in RANKS or self.fault.startswith("SIG")

    @property
    def is_connected(self) -> bool:
        return self.meeting == "connected"

    @property
    def of_rank(self) -> bool:
        return self.victim in RANKS

    @property
    def is_in_init(self) -> bool:
        """Whether it falls before the ranks have their first group."""
        return self.operation == "init" and self.moment != "after"

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
            "connected": self.is_connected,
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
        errors: the classes of which every survivor raises one; empty if none may.
        words: what each survivor's error must say, as regular expressions.
        may_come_through: whether a survivor may end well, since it needs nothing of the one that falls.
        may_be_ended: whether the launcher, or MPI's, may end a survivor before it knows.
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
    may_be_ended: bool = False
    end: str = ""
    timeout_s: float = 300.0

    @property
    def speaks_of_survivors(self) -> bool:
        return bool(self.errors) or self.may_come_through

    @property
    def survivors_wait(self) -> bool:
        """Whether they go on when they are asked to end, so that they learn of it by themselves."""
        return self.speaks_of_survivors and not self.may_be_ended


def every_case(place: str) -> Iterator[Case]:
    for facts in itertools.product(OPERATIONS, MOMENTS, FAULTS, VICTIMS, WORLDS, (place,), MEETINGS):
        case = Case(*facts)
        if case.is_valid:
            yield case


def what_is_right(case: Case, *, waits_in_mpi: bool = False) -> Right:
    """What docs/launchers.md, diagnosis.md, clusters.md and mpi.md promise for it.

    Args:
        case: which one.
        waits_in_mpi: the MPI library may let all others wait inside MPI, where no timeout holds, also for a rank that
            is stopped between two calls; within a call any library may.
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
    of its host are stopped, else at the group's timeout. Where they may all wait in MPI itself it is one or the other.
    """
    rank = case.actor
    if case.operation == "close":
        return Right((128 + signal.SIGTERM,), may_come_through=True, may_be_ended=True, end="SIGTERM")
    line = rf"phalanx: rank {rank}( on h[01])?( \(local rank \d+\))? is stopped \(state T\)[,;] .*waits? for it"
    block, errors = _block(case.world, rank), ("CollectiveTimeout", "PeerLost")
    if case.place == "one host" or case.is_in_init:
        return Right((128 + signal.SIGTERM,), (line,), end="SIGTERM")
    if case.operation == "init":  # the ranks' lookouts may have found each other by then
        return Right((1, 128 + signal.SIGTERM), (line,), block, end="SIGTERM", timeout_s=GIVEN_UP_S)
    words: tuple[str, ...] = (rf"rank {rank} of the group",)
    if case.place == "two hosts" and case.is_alone:
        return Right((1,), block, errors=("PeerLost",), words=(*words, "stopped"))
    by_mpi = case.place == "mpi"  # there the first that fails ends the job
    if by_mpi and (waits_in_mpi or case.moment in ("first", "between")):
        codes = (1, 128 + signal.SIGTERM)
        return Right(codes, (line,), block, errors, words, may_be_ended=True, end="SIGTERM", timeout_s=GIVEN_UP_S)
    if not by_mpi:
        words = (*words, r"stopped \(state T\)")
    return Right((1,), block, errors=errors, words=words, may_be_ended=by_mpi, timeout_s=GIVEN_UP_S)


def _rank_exits_well(case: Case) -> Right:
    """It has left in order. That is a failure of those who still need it, and of nobody after the last call."""
    rank, by_mpi = case.actor, case.place == "mpi"  # there the first that fails ends the job
    if case.operation == "close":
        return Right((0,), may_come_through=True)
    if case.is_in_init:
        said = (rf"phalanx: rank \d+ of {case.world} failed: phalanx\.errors\.\w+: .*rank {rank}\b.* ended",)
        return Right((1,), said, (), IN_INIT, (rf"rank {rank}\b.* ended",), may_be_ended=by_mpi)
    # Whether it is within a call that it leaves the others alone, or between two, is for chance.
    words = (rf"rank {rank} of the group", r"has left|left the group in order|was interrupted (in|\(SystemExit\))")
    block = _block(case.world, rank)
    # Within a call MPI cannot end in order. Its abort may come before the others have their errors: then it is the
    # victim that failed, and its own output says of what.
    aborted = (
        rf"(?s)rank {rank}: MPI cannot end in order, [^;]* was interrupted by SystemExit\);.* rank {rank} of \d+ failed"
    )
    instead = (aborted,) if by_mpi else ()
    return Right((1,), block, instead, ("PeerLost",), words, may_be_ended=by_mpi)


def _rank_falls(case: Case) -> Right:
    """It is named by the launcher with its signal or exit code, or with its exception, and by every survivor.

    Survivors that only close need nothing of it. Those that are still in ``phalanx.init()`` are ended by the launcher,
    and others by MPI, perhaps before they learn of it.
    """
    rank, world = case.actor, case.world
    if case.fault == "exception":
        code, cause = 1, rf"rank {rank} of {world} failed: (\w+\.)?Fell: the victim fell"
    elif case.fault == "os._exit":
        code, cause = EXIT_CODE, rf"rank {rank} of {world} failed\n.*exit code {EXIT_CODE}"
    else:
        code = 128 + case.signal
        cause = rf"rank {rank} of {world} failed\n.*ended by signal {case.signal:d} \({case.fault}\)"
    said = (cause, rf"host h{case.host(rank)}, pid ") if case.place == "two hosts" else (cause,)
    if case.is_in_init:
        return Right((code,), said, (), IN_INIT, (rf"rank {rank}\b", _told_of_fall(case)), may_be_ended=True)
    closes = case.operation == "close"
    words = (rf"rank {rank} of the group", _told_of_fall(case))
    return Right((code,), said, (), ("PeerLost",), words, may_come_through=closes, may_be_ended=case.place == "mpi")


def _told_of_fall(case: Case) -> str:
    """The words, as a regular expression, in which a survivor's error says how the victim fell.

    On one host every survivor knows the signal. On another host a survivor waits for a moment to hear of it, and says
    only that the victim has ended if it hears nothing; it never names another signal. A victim that an exception
    interrupts within a call tells the others itself.
    """
    if case.fault == "exception":
        return (
            r"has failed \(Fell: the victim fell at \S*kill_program\.py:\d+\)|was interrupted in|interrupted \(Fell\)"
        )
    known = f"failed \\(exit code {EXIT_CODE}\\)|ended with exit code {EXIT_CODE}\\b"
    if case.fault.startswith("SIG"):
        known = rf"ended by signal {case.signal:d} \({case.fault}\)"
    if case.place == "one host" and not case.is_in_init:
        return f"has ({known})"
    return rf"has ({known}|ended(?! by | with ))"


def _block(world: int, lost: int) -> tuple[str, ...]:
    """A survivor's error is the job's failure."""
    return (rf"phalanx: rank \d+ of {world} failed: phalanx\.errors\.\w+: .*rank {lost} of the group",)
