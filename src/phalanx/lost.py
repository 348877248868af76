"""The exceptions about ranks and workers that are lost, or late. ``errors.py`` has them too, with all others."""

from __future__ import annotations

from typing import Any

from phalanx.exception import PhalanxError

__all__ = [
    "CallTimeout",
    "CollectiveTimeout",
    "ObjectLost",
    "PeerFailed",
    "PeerLost",
    "WorkerLost",
    "did_last",
    "let_continue",
    "rank_of_group",
]


def rank_of_group(rank: int, pid: int, host: str = "") -> str:
    """``rank 1 of the group (pid 70 on h1)``; without the host if that is not known."""
    return f"rank {rank} of the group (pid {pid}{f' on {host}' if host else ''})"


def did_last(operation: str, *, within: bool) -> str:
    """A sentence on the last operation of a rank, as it follows another one; empty if that is not known."""
    return "" if not operation else f". It was in {operation}" if within else f". Its last operation was {operation}"


def let_continue(pid: int) -> str:
    """Return what to do about a process that is stopped."""
    return f"Let it continue (kill -CONT {pid}), or end it"


class _OfRank:
    """Facts of an error about the rank that is to blame, besides its number in the group."""

    rank, pid, host, signal = -1, 0, "", 0
    last_operation, last_line = "", ""
    group, sequence, elapsed_s = "", -1, 0.0

    def _blame(self, of_rank: dict[str, Any]) -> None:
        unknown = of_rank.keys() - {"rank", "pid", "host", "signal", "last_operation", "last_line"}
        if unknown:
            raise TypeError(f"an error of a rank does not know {', '.join(sorted(unknown))}")
        vars(self).update(of_rank)


class PeerLost(_OfRank, PhalanxError):
    """Another rank of the group went while this one waited for it.

    A rank that closed the group, or whose script came to its end, has left in order. Then only the operation that needs
    it fails: a message, and the group remains usable for others; or a collective, which needs every rank.

    Example:
        rank 1 of the group (pid 26212 on vm) has ended by signal 9 (SIGKILL) while rank 0 was in all_reduce(float32[2],
        sum) at killed.py:6. Its last operation was all_reduce #1 (float32, 8 B, sum) at killed.py:3. Look at that
        rank's own output for the cause

    What to do:
        1. This rank is not the cause. Read the output of the rank that the message names.
        2. It failed by an exception: mend that one. ``phalanx run`` prints it first.
        3. It was killed by SIGKILL: it may have needed too much memory. ``dmesg | grep -i oom`` says so.
        4. It left in order: it made fewer calls than this rank. Look for an ``if`` or a loop that depends on the rank.
        5. A host may fail again: ``phalanx run --restarts 3`` starts all ranks anew, and ``world.load()`` goes on.

    Attributes:
        group_rank: the lost rank, counted within the group; -1 if it is not known.
        rank: the same in the world; -1 if it is not known.
        pid, host: its process id and the name of its host; 0 and empty if they are not known.
        signal: the signal that ended its process, as 9 for SIGKILL; 0 if none did, or if it is not known. It is known
            under ``phalanx run``, to the ranks of its host, and to others that hear it from these or from the launcher.
        last_operation: what its flight recorder has last, as ``all_reduce #118 (float32, 4.0 KiB, sum) at
            train.py:42``; empty if it cannot be read. It can on one host, in a group of at most 128 ranks, and over MPI
            if the rank is on this host and its process is still there.
        last_line: where it called that, as ``/home/user/train.py:42``.
        group: torch's name of the group; empty if it is not known.
        sequence: the number in that group of the operation in which this rank was, as 118 for ``all_reduce #118``:
            collectives are counted from 1 and have the same number on every rank, messages are counted by each rank;
            -1 if it was in none, or if it is not known.
        elapsed_s: how long this rank had been in the operation, in seconds; 0 if it was in none, or if it is not known.
    """

    is_consequence = True

    def __init__(self, message: str, *, group_rank: int = -1, **of_rank: Any) -> None:
        super().__init__(message)
        self.group_rank = group_rank
        self._blame(of_rank)

    @classmethod
    def gone(cls, way: str, rank: int, pid: int, waiting: str, text: str = "", /, **known: Any) -> PeerLost:
        """Make the error for a rank that has gone; ``waiting`` says which rank needed it, and in which call.

        Args:
            way: one of ``Way`` (``membership/protocol.py``).
            rank, pid: in the group, and its process.
            waiting: as ``rank 0 was in barrier``.
            text: how it has ended, why it has failed, or by which call it has left, if that is known.
            known: further attributes, and whether the rank ``was_in_it``, in its last operation.
        """
        because = f" ({text})" if text else ""
        left = because or " in order (it destroyed the group, or its script has come to its end)"
        output = "Look at that rank's own output for the cause"
        what, remedy = {
            "ended": (f"has ended {text}" if text else "has ended", output),
            "failed": (f"has failed{because}", output),
            "interrupted": (f"was interrupted{because}", output),
            "replaced": (
                "has replaced itself by another program (exec)",
                "Let it start the program as a child process",
            ),
            "left": (f"has left the group{left}", "Every rank must make the same calls before it leaves"),
        }[way]
        did = did_last(known.get("last_operation", ""), within=known.pop("was_in_it", False))
        who = rank_of_group(rank, pid, known.get("host", ""))
        return cls(f"{who} {what} while {waiting}{did}. {remedy}", group_rank=rank, pid=pid, **known)

    @classmethod
    def left_before_message(cls, waiting: str, *, group_rank: int = -1, pid: int = 0, host: str = "") -> PeerLost:
        """The ranks that could take part in a message have left the group in order; the group is whole.

        ``group_rank`` is the other end of the message; -1 if any rank could be, and all have left.
        """
        who = "all other ranks of the group" if group_rank < 0 else rank_of_group(group_rank, pid, host)
        text = "left the group in order (destroyed it, or came to the end of the script)"
        return cls(f"{who} {text}, so this cannot be done: {waiting}", group_rank=group_rank, pid=pid, host=host)

    @classmethod
    def out_of_step(cls, cause: str, *, group_rank: int, **known: Any) -> PeerLost:
        """A rank left an operation that the others are in; ``cause`` says which rank, how and where.

        ``known`` has further attributes, and whether the rank ``was_in_it``, in its last operation.
        """
        known.pop("was_in_it", None)
        text = f"{cause}; the ranks of the group are out of step. Look at that rank's own output for the cause"
        return cls(text, group_rank=group_rank, **known)


class PeerFailed(PhalanxError):
    """Another rank raised an exception in something that it did for all ranks, or before them.

    Raised by ``main_first()``, ``save()`` and the like on the ranks that waited for it. Mend what that rank reports.

    Example:
        rank 0 of the group failed in main_first(): OSError: no space left

    What to do:
        Mend what the named rank reports. This rank only waited for it.

    Attributes:
        group_rank: the rank that failed, counted within the group.
    """

    is_consequence = True

    def __init__(self, message: str, *, group_rank: int = -1) -> None:
        super().__init__(message)
        self.group_rank = group_rank

    @classmethod
    def in_its_turn(cls, group_rank: int, call: str, error: str) -> PeerFailed:
        """A rank failed in ``call``; ``error`` is its exception in words."""
        return cls(f"rank {group_rank} of the group failed in {call}: {error}", group_rank=group_rank)


class CollectiveTimeout(_OfRank, PhalanxError):
    """A collective was not joined by every rank within the group's timeout.

    If a rank is merely slow, give a longer timeout: ``phalanx.init(timeout_s=…)``. If not, find out why the rank that
    the message names did not make the call.

    Example:
        rank 1 of the group (pid 27545 on vm), which is at <module> (train.py:4), did not come within 2 s while rank 0
        was in all_reduce(int64[2], max) at train.py:5. Is it in other code, or much slower? A longer timeout is set
        with phalanx.init(timeout_s=...) or init_process_group(timeout=...)

    What to do:
        1. See where the named rank is: ``phalanx top --once``, or ``phalanx report DIR`` with ``--log-dir DIR``.
        2. It is in other code: it left the call out. Look for an ``if`` or a loop that depends on the rank.
        3. It is only slow, as while it writes a checkpoint: give more time by ``phalanx.init(timeout_s=...)``.
        4. It is stopped: ``kill -CONT PID`` lets it continue.

    Attributes:
        group_rank: the first rank that had not come, counted within the group.
        rank, pid, host, signal, last_operation, last_line, group, sequence: as in :class:`PeerLost`.
        elapsed_s: how long this rank waited, in seconds.
    """

    def __init__(self, message: str, *, group_rank: int = -1, elapsed_s: float = 0.0, **of_rank: Any) -> None:
        super().__init__(message)
        self.group_rank = group_rank
        self.elapsed_s = elapsed_s
        self._blame(of_rank)

    @classmethod
    def did_not_come(
        cls,
        missing: str,
        waiting: str,
        timeout_s: float,
        *,
        group_rank: int,
        elapsed_s: float,
        several: bool = False,
        stopped_pid: int = 0,
        **known: Any,
    ) -> CollectiveTimeout:
        """Ranks are missing in an operation; ``waiting`` says which rank waited for them, and in which call.

        ``several`` of them are missing. ``stopped_pid`` is the process of one that is stopped, 0 if none is known to
        be. ``known`` is as in :class:`PeerLost`'s methods.
        """
        within = known.pop("was_in_it", False)
        last = known.get("last_operation", "")
        where = "" if not last else f" It is in {last}." if within else f" Its last operation was {last}."
        if stopped_pid:
            advice = let_continue(stopped_pid)
        else:
            advice = f"{'Are they' if several else 'Is it'} in other code, or much slower? {cls.remedy()}"
        return cls(
            f"{missing} did not come within {timeout_s:g} s while {waiting}.{where} {advice}",
            group_rank=group_rank,
            elapsed_s=elapsed_s,
            **known,
        )

    @classmethod
    def of_message(
        cls, message: str, other: str, timeout_s: float, *, group_rank: int, elapsed_s: float, **known: Any
    ) -> CollectiveTimeout:
        """A message was not done in time; ``other`` is its other end, which ``known`` is about, see above."""
        within, last = known.pop("was_in_it", False), known.get("last_operation", "")
        where = "" if not last else f" It is in {last}." if within else f" Its last operation was {last}."
        text = f"{message} was not done within {timeout_s:g} s. Does {other} make the matching call, with the same tag?"
        return cls(f"{text}{where}", group_rank=group_rank, elapsed_s=elapsed_s, **known)

    @classmethod
    def came_late(
        cls, waited: str, their_call: str, rank: int, call: str, timeout_s: float, /, **known: Any
    ) -> CollectiveTimeout:
        """This rank came to a call in which the rank ``waited`` had given up; ``known`` is about this rank."""
        known.pop("was_in_it", None)
        return cls(
            f"{waited} had waited {timeout_s:g} s in {their_call} and given up when rank {rank} came to {call}. Was "
            f"rank {rank} in other code, or is it much slower? {cls.remedy()}",
            group_rank=rank,
            elapsed_s=timeout_s,
            **known,
        )

    @staticmethod
    def remedy() -> str:
        """Return how to wait longer."""
        return "A longer timeout is set with phalanx.init(timeout_s=...) or init_process_group(timeout=...)"


class _OfWorker:
    """Facts of the errors of calls about the worker that was called; ``worker`` is its name."""

    worker, rank, pid, host, incarnation = "", -1, 0, "", 0
    asked, line = "", ""


class WorkerLost(_OfWorker, PeerLost):
    """Another worker went while this process waited for it, or was gone when it was called.

    What it was asked may have run, or not; it will not run twice. If it comes back under its name, that is a new
    worker, and calls to the name reach it. ``rpc.call(..., retry=True)`` does so by itself.

    Example:
        worker1 (rank 1, pid 28621 on vm) is gone (its process has ended) while this worker waited for train_step
        (train.py:20), 0.0 s ago. Look at that worker's own output for the cause

    What to do:
        1. Read the output of the worker that the message names.
        2. If the call may run twice, ``rpc.call(..., retry=True)`` makes it again when the worker is back.
        3. ``rpc.watch()`` tells a program when workers come and go.

    Attributes:
        worker, rank, pid, host, incarnation: which worker; the rank is -1 if it had none.
        asked, line: what it was asked, for people, and at which ``file:line`` of this process's program; the line is
            empty if Phalanx asked by itself.
        why: how its end was noticed, for people.
        elapsed_s: for how long this process had waited, in seconds.
    """

    def __init__(self, message: str, *, why: str = "", elapsed_s: float = 0.0, **of_worker: Any) -> None:
        super().__init__(message, group_rank=of_worker.get("rank", -1), pid=of_worker.get("pid", 0))
        self.why, self.elapsed_s = why, elapsed_s
        vars(self).update(of_worker)

    @classmethod
    def while_waiting(cls, who: str, why: str, waiting: str, **facts: Any) -> WorkerLost:
        """``who`` is gone while this process waited for what ``waiting`` says; ``why`` says how that was noticed."""
        remedy = "Look at that worker's own output for the cause"
        return cls(f"{who} is gone ({why}) while this worker waited for {waiting}. {remedy}", why=why, **facts)


class ObjectLost(WorkerLost):
    """A remote object is gone with the worker that had it, or was let go of.

    A worker that comes back under the same name is a new one and has none of the old one's objects: make it again.

    Example:
        <Model 1 on worker1 (rank 1, pid 28621 on vm)> is gone with its worker: worker1 (rank 1, pid 28621 on vm) is
        gone (its process has ended) while this worker waited for Model.run (train.py:21), 0.0 s ago. Look at that
        worker's own output for the cause. Make it again

    What to do:
        1. Make the object again, by ``rpc.make()`` on a worker that is there.
        2. Keep its state in a checkpoint if it must outlive its worker.
    """


class CallTimeout(_OfWorker, PhalanxError, TimeoutError):
    """Another worker did not answer a call in time.

    The call may still run there; it was told that nobody waits. The text says why there was no answer, as far as that
    can be found out.

    Example:
        worker1 (rank 1, pid 28621 on vm) did not answer within 1 s: slow (train.py:15), 1.0 s ago. It has worked on
        this for 1.0 s and is at slow (train.py:3). For more time: timeout_s=...

    What to do:
        1. The function runs (``handler``): give more time by ``timeout_s=...``, or look at the place that is named.
        2. Calls wait before it (``queued``): call less at once, or use more workers.
        3. The process is stopped, or something holds the interpreter: ``phalanx top --once`` shows it.
        4. Nothing comes from the host (``cut``): ``phalanx doctor -H h1:1,h2:1`` tests the way.

    Attributes:
        worker, rank, pid, host, incarnation: which worker; the rank is -1 if it has none.
        asked, line: what it was asked, for people, and at which ``file:line`` of this process's program.
        timeout_s: how long the call could take, in seconds.
        cause: why there was no answer, in a word: ``handler`` (its function runs), ``queued`` (other calls are before
            it), ``stopped`` (the process is, by SIGSTOP or a debugger), ``interpreter`` (something in the process holds
            the interpreter's lock), ``silent`` (one of the last two, on another host), ``cut`` (nothing comes from its
            host), ``on the way`` (the call or its answer is), ``gone`` (the process has just ended); empty if that
            could not be found out.
        at: the function, file and line at which the worker was; empty if that is not known.
    """

    def __init__(
        self, message: str, *, timeout_s: float = 0.0, cause: str = "", at: str = "", **of_worker: Any
    ) -> None:
        super().__init__(message)
        self.timeout_s, self.cause, self.at = timeout_s, cause, at
        vars(self).update(of_worker)

    @classmethod
    def not_answered(cls, who: str, waiting: str, timeout_s: float, why: str, **facts: Any) -> CallTimeout:
        """``who`` has not answered what ``waiting`` says; ``why`` is a sentence about what keeps it, if known."""
        because = why or "Is it slow, stopped, or waiting for this worker?"
        text = f"{who} did not answer within {timeout_s:g} s: {waiting}. {because} For more time: timeout_s=..."
        return cls(text, timeout_s=timeout_s, **facts)
