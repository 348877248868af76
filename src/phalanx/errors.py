"""Every exception that Phalanx raises on purpose, and the sentences that several modules print.

Each class says when it is raised and what to do about it. An instance carries, as attributes, the facts on which a
program can act, such as the lost rank or the elapsed seconds. All derive from :class:`PhalanxError`, so
``except phalanx.PhalanxError`` catches exactly what this package found wrong.

A sentence that several modules print is written here once: as a method of the exception that carries it, or as a hint
at the end of this file, which completes the errors of several classes.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "OUT_OF_MEMORY_HINT",
    "PROCESS_LIMIT_HINT",
    "ArgumentError",
    "BackendError",
    "CallTimeout",
    "CheckpointError",
    "ClosedError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "DeviceError",
    "DeviceMismatch",
    "EncodingError",
    "InitializationError",
    "LaunchError",
    "LauncherEnvironmentError",
    "ObjectLost",
    "PeerFailed",
    "PeerLost",
    "PhalanxError",
    "RankError",
    "ReentryError",
    "UnsupportedTensor",
    "WorkerLost",
]


class PhalanxError(RuntimeError):
    """Base of everything below. A ``RuntimeError``, because that is what torch raises and scripts catch.

    Attributes:
        is_consequence: errors of this class are always caused by another rank's end, so the launcher does not name the
            rank that raised one as the cause of the job's failure if another rank failed by itself.
    """

    is_consequence: ClassVar[bool] = False


class InitializationError(PhalanxError):
    """The world could not be joined, or was joined already.

    Raised by ``phalanx.init()`` when it is called twice, when the script has called
    ``torch.distributed.init_process_group`` itself, or when the ranks cannot meet. The message says which.
    """

    @classmethod
    def ranks_missing(cls, missing: str, timeout_s: float, *, at: str = "", before: str = "") -> InitializationError:
        """Some ranks did not come in time.

        Args:
            missing: the ranks, as ``ranks 1-2 of 3``.
            timeout_s: how long they were waited for, in seconds.
            at: the place at which they were expected, as ``rank 0 at h1 port 29500``; empty to leave it out.
            before: the last success of this rank, as ``rank 4 had joined, but``; empty if there was none.
        """
        start = f"{before} after" if before else "after"
        to = f" to {at}" if at else ""
        advice = "check whether they were started, and what they print"
        return cls(f"{start} {timeout_s:.0f} s {missing} had not come{to}; {advice}")

    @classmethod
    def rank_refused(cls, rank: int, reason: str) -> InitializationError:
        """Rank 0 refused a process that joined as this rank; the reason is rank 0's."""
        return cls(f"rank {rank} was refused: {reason}. Start each rank once, with one world size")


class LauncherEnvironmentError(InitializationError):
    """The environment describes a process that cannot exist.

    Raised when some of a launcher's variables are missing, hold something that is not a number, or contradict each
    other. The message names the variable and its value; correct the launcher's command, or unset the variable.
    """


class DeviceError(InitializationError):
    """The device of a rank is missing, busy, or another rank's.

    Raised by ``phalanx.init()`` when a host has more ranks than devices, when two ranks took the same device, or when
    the device that was asked for does not exist or cannot be opened. The message says which of these it is, and which
    variable hides a device if one does.
    """

    @staticmethod
    def not_a_device(given: str) -> str:
        """The text for a device that torch does not know; ``given`` is the user's own text, as ``--device 3``."""
        return f"{given} is not a device. Give cpu, cuda, cuda:1 or another of torch's names"


class ClosedError(PhalanxError):
    """A world, or one of its groups, was used after ``phalanx.close()``. Move the call before it."""

    @classmethod
    def of_message(cls) -> ClosedError:
        """The group of a message was destroyed before the message was done."""
        return cls("a message of a process group was used after the group had been destroyed")

    @classmethod
    def of_parent(cls, what: str, pid: int) -> ClosedError:
        """A forked child, of this pid, used what belongs to its parent."""
        return cls(f"{what} belongs to the process that this one (pid {pid}) was forked from; only that one can use it")


class ReentryError(PhalanxError):
    """A signal handler called a group whose operation it had interrupted.

    The group runs one operation at a time, and the interrupted one can only go on when the handler has returned. Let
    the handler raise an exception, or set a flag that the program checks. A handler may destroy the group: that ends
    the interrupted operation with an error.
    """


class RankError(PhalanxError, ValueError):
    """A rank outside the group was named as source, destination or member.

    Ranks given to a ``Group`` count within that group, from 0 to ``group.size - 1``.
    """

    @classmethod
    def not_in_group(cls, rank: int, size: int, members: tuple[int, ...] = ()) -> RankError:
        """A group of ``size`` ranks has no such rank. ``members`` are its world ranks, if they are known."""
        of_world = f" (world ranks {list(members)})" if members else ""
        return cls(f"rank {rank} is not in the group: its ranks count from 0 to {size - 1}{of_world}")


class DeviceMismatch(PhalanxError, ValueError):
    """A tensor lives on a device the group's backend does not serve. Move it, or choose another backend."""


class ArgumentError(PhalanxError, ValueError):
    """A function was called with tensors or options that cannot be right, or that no backend here serves.

    Raised on the rank that made the call, before it sends anything to the others. The message says what was given and
    what is needed.
    """

    @classmethod
    def too_few_left(cls, items: int, epoch: int, ranks: int) -> ArgumentError:
        """A loader was to resume an epoch of which so few items are left that some ranks would have no batch."""
        return cls(
            f"{items} items are left of epoch {epoch}, too few for a step of {ranks} ranks. Resume with at most "
            f"{items} ranks, or leave them out: loader.set_epoch({epoch + 1})"
        )


class UnsupportedTensor(ArgumentError, NotImplementedError):
    """A tensor whose elements do not lie in memory one by one: sparse, compressed, quantized.

    A ``NotImplementedError``, because that is what torch's dispatcher raises for the same call over Gloo. Convert the
    tensor (``to_dense()``, ``dequantize()``), or move its parts, which are plain tensors.
    """


class EncodingError(PhalanxError):
    """A value cannot be sent to another worker, or what has arrived is not a value.

    Raised on the sending side before anything is sent, with the part of the value that is to blame, and on the
    receiving side, where it says whether the message is damaged or this process lacks what the value is made of.
    """

    @classmethod
    def cannot_send(cls, part: str, kind: str, why: str, remedy: str) -> EncodingError:
        """A part of a value cannot be pickled.

        Args:
            part: the path to it, such as ``args[1].callback``.
            kind: its type.
            why: what pickle said.
            remedy: what to do.
        """
        return cls(f"{part} cannot be sent: it is a {kind}, and pickling it failed: {why}. {remedy}")

    @classmethod
    def freed(cls, shape: tuple[int, ...]) -> EncodingError:
        """A tensor has a shape and no memory for it."""
        return cls(
            f"a tensor of the shape {shape} cannot be sent: its storage is smaller than that. Was it freed by "
            f"storage.resize_(0), as FSDP does between uses? Send it while it has its memory"
        )

    @classmethod
    def damaged(cls, what: str) -> EncodingError:
        """A message describes something that there cannot be."""
        return cls(
            f"a message is damaged: it holds {what}. Do all workers run the same release of Phalanx and of torch? If "
            f"they do, this is a fault of Phalanx"
        )

    @classmethod
    def no_such_device(cls, device: str, why: str) -> EncodingError:
        """A tensor of a device has arrived in a process that has no such device."""
        return cls(
            f"a tensor of the device {device} has arrived, and this process cannot use that device ({why}). Send "
            f"tensor.cpu(), or start this worker where it has the device"
        )

    @classmethod
    def not_rebuilt(cls, error: BaseException) -> EncodingError:
        """Unpickling failed; ``error`` says how."""
        return cls(
            f"a value that has arrived cannot be rebuilt: {type(error).__name__}: {error}. What it is made of must be "
            f"importable here under the same name as where it was sent; otherwise the message is damaged"
        )


class BackendError(PhalanxError):
    """The native core could not be loaded, or met something it cannot work with on this machine."""


class CollectiveMismatch(PhalanxError):
    """Two ranks of a group called different collectives, or the same one with different arguments.

    Raised on every rank that notices. The group cannot be used afterwards: the ranks are out of step.
    """

    @classmethod
    def of_calls(cls, calls: str) -> CollectiveMismatch:
        """The ranks' calls differ; ``calls`` lists them, a line for each."""
        return cls(
            f"the ranks of a group called different operations:\n{calls}\n"
            f"Every rank of a group must make the same calls in the same order, with the same shapes. Look for an `if` "
            f"that depends on the rank, or data of different sizes"
        )


class PeerLost(PhalanxError):
    """Another rank of the group went while this one waited for it.

    A rank that closed the group, or whose script came to its end, has left in order. Then only the operation that needs
    it fails: a message, and the group remains usable for others; or a collective, which needs every rank.

    Attributes:
        group_rank: the lost rank, counted within the group.
        pid: its process id.
    """

    is_consequence = True

    def __init__(self, message: str, *, group_rank: int = -1, pid: int = 0) -> None:
        super().__init__(message)
        self.group_rank = group_rank
        self.pid = pid

    @classmethod
    def ended(cls, rank: int, pid: int, waiting: str) -> PeerLost:
        """A rank's process is gone; ``waiting`` says which rank needed it, and in which call."""
        return cls._of(rank, pid, f"has ended while {waiting}. Look at that rank's own output for the cause")

    @classmethod
    def failed(cls, rank: int, pid: int, cause: str, waiting: str) -> PeerLost:
        """An exception ended a rank's script, or it exited with a code other than 0; ``cause`` says what is known."""
        why = f" ({cause})" if cause else ""
        return cls._of(rank, pid, f"has failed{why} while {waiting}. Look at that rank's own output for the cause")

    @classmethod
    def replaced(cls, rank: int, pid: int, waiting: str) -> PeerLost:
        """A rank's process runs another program."""
        text = "has replaced itself by another program (exec)"
        return cls._of(rank, pid, f"{text} while {waiting}. Let it start the program as a child process")

    @classmethod
    def left(cls, rank: int, pid: int, waiting: str) -> PeerLost:
        """A rank has left the group in order, and a collective needs it."""
        text = "has left the group in order (it destroyed the group, or its script has come to its end)"
        remedy = "Every rank must make the same calls before it leaves"
        return cls._of(rank, pid, f"{text} while {waiting}. {remedy}")

    @classmethod
    def left_before_message(cls, who: str, waiting: str, *, group_rank: int = -1) -> PeerLost:
        """The ranks that could take part in a message have left the group in order; the group is whole."""
        text = "left the group in order (destroyed it, or came to the end of the script)"
        return cls(f"{who} {text}, so this cannot be done: {waiting}", group_rank=group_rank)

    @classmethod
    def _of(cls, rank: int, pid: int, what: str) -> PeerLost:
        return cls(f"rank {rank} of the group (pid {pid}) {what}", group_rank=rank, pid=pid)

    @classmethod
    def out_of_step(cls, cause: str, *, group_rank: int, pid: int = 0) -> PeerLost:
        """A rank left an operation that the others are in; ``cause`` says which rank, how and where."""
        return cls(f"{cause}; the ranks of the group are out of step", group_rank=group_rank, pid=pid)


class PeerFailed(PhalanxError):
    """Another rank raised an exception in something that it did for all ranks, or before them.

    Raised by ``main_first()``, ``save()`` and the like on the ranks that waited for it. Mend what that rank reports.

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


class CollectiveTimeout(PhalanxError):
    """A collective was not joined by every rank within the group's timeout.

    If a rank is merely slow, give a longer timeout: ``phalanx.init(timeout_s=…)``. If not, find out why the rank that
    the message names did not make the call.

    Attributes:
        group_rank: the first rank that had not come, counted within the group.
        elapsed_s: how long this rank waited, in seconds.
    """

    def __init__(self, message: str, *, group_rank: int = -1, elapsed_s: float = 0.0) -> None:
        super().__init__(message)
        self.group_rank = group_rank
        self.elapsed_s = elapsed_s

    @classmethod
    def did_not_come(
        cls, missing: str, waiting: str, timeout_s: float, *, group_rank: int, elapsed_s: float
    ) -> CollectiveTimeout:
        """Some ranks are missing in an operation.

        Args:
            missing: which ranks they are, and what is known of them.
            waiting: which rank waited for them, and in which call.
            timeout_s: how long.
            group_rank, elapsed_s: see the class.
        """
        return cls(
            f"{missing} did not come within {timeout_s:g} s while {waiting}. Is it in other code, or much slower? "
            f"{cls.remedy()}",
            group_rank=group_rank,
            elapsed_s=elapsed_s,
        )

    @staticmethod
    def remedy() -> str:
        """How to wait longer."""
        return "A longer timeout is set with phalanx.init(timeout_s=...) or init_process_group(timeout=...)"


class _OfWorker:
    """What the errors of calls know of the worker that was called; ``worker`` is its name."""

    worker, rank, pid, host, incarnation = "", -1, 0, "", 0
    asked, line = "", ""


class WorkerLost(_OfWorker, PeerLost):
    """Another worker went while this process waited for it, or was gone when it was called.

    What it was asked may have run, or not; it will not run twice. If it comes back under its name, that is a new
    worker, and calls to the name reach it. ``rpc.call(..., retry=True)`` does so by itself.

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
    """


class CallTimeout(_OfWorker, PhalanxError, TimeoutError):
    """Another worker did not answer a call in time.

    The call may still run there; it was told that nobody waits. The text says why there was no answer, as far as that
    can be found out.

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
        text = f"{who} did not answer within {timeout_s:g} s: {waiting}. {because} More time: timeout_s=..."
        return cls(text, timeout_s=timeout_s, **facts)


class CheckpointError(PhalanxError):
    """A checkpoint cannot be written, or cannot be read.

    Raised by ``world.save()`` and ``world.check_writable()`` on rank 0 (on the others as :class:`PeerFailed`), and by
    ``world.load()`` on every rank. The message says which file, and why: it is missing, cut short, of another program,
    or in a directory that cannot be written to.
    """


class LaunchError(PhalanxError):
    """``phalanx run`` was asked for something it cannot start. The message says what to change."""


# The next step after an error about a process that vanished.
OUT_OF_MEMORY_HINT = "look for an out-of-memory kill with: dmesg | grep -i oom"
# The remedy when the system refuses a process or a thread.
PROCESS_LIMIT_HINT = "raise the limit on processes (ulimit -u, or pids.max of the cgroup)"
