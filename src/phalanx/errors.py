"""Every exception Phalanx raises on purpose, and the sentences that several transports say.

Each class says when it is raised and what to do about it, and each instance carries, as attributes, what a
person or a program needs to act: the ranks, the group, the operation, the elapsed seconds. All derive from
:class:`PhalanxError`, so ``except phalanx.PhalanxError`` catches exactly what this package found wrong.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "BackendError",
    "ClosedError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "DeviceError",
    "DeviceMismatch",
    "InitializationError",
    "LaunchError",
    "LauncherEnvironmentError",
    "PeerLost",
    "PhalanxError",
    "RankError",
    "ReentryError",
]


class PhalanxError(RuntimeError):
    """Base of everything below. A ``RuntimeError``, because that is what torch raises and scripts catch."""


class InitializationError(PhalanxError):
    """The world could not be joined, or was joined already.

    Raised by ``phalanx.init()`` when it is called twice, when the script has called
    ``torch.distributed.init_process_group`` itself, or when the ranks cannot meet. The message says which.
    """


class LauncherEnvironmentError(InitializationError):
    """The environment describes a process that cannot exist.

    Raised when a launcher's variables are half set, are no numbers, or contradict each other. The message
    names the variable and its value; fix the launcher's command, or unset the variable.
    """


class DeviceError(InitializationError):
    """The device of a rank is missing, busy, or another rank's.

    Raised by ``phalanx.init()``: a host has more ranks than devices, two ranks took one device, the one that was asked
    for is not there or cannot be opened. The message says which, and what hides a device if something does.
    """


class ClosedError(PhalanxError):
    """A world, or one of its groups, was used after ``phalanx.close()``. Move the call before it."""

    @classmethod
    def of_message(cls) -> ClosedError:
        """The group of a message was destroyed before the message was done."""
        return cls("a message of a process group was used after the group had been destroyed")


class ReentryError(PhalanxError):
    """A signal handler called a group whose operation it had interrupted.

    The group runs one operation at a time, and the interrupted one can only go on when the handler has returned. Let
    the handler raise, or set a flag that the program looks at. Destroying the group in a handler is possible: that
    ends the interrupted operation with an error.
    """


class RankError(PhalanxError, ValueError):
    """A rank outside the group was named as source, destination or member.

    Ranks given to a ``Group`` count within that group, from 0 to ``group.size - 1``.
    """


class DeviceMismatch(PhalanxError, ValueError):
    """A tensor lives on a device the group's backend does not serve. Move it, or choose another backend."""


class ArgumentError(PhalanxError, ValueError):
    """A collective was called with tensors or options that cannot be right, or that no backend here serves.

    Raised on the rank that made the call, before the other ranks hear of it. The message says what was given and
    what is needed.
    """


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
    """Another rank of the group ended while this one waited for it.

    Attributes:
        group_rank: the lost rank, counted within the group.
        pid: its process id.
    """

    def __init__(self, message: str, *, group_rank: int = -1, pid: int = 0) -> None:
        super().__init__(message)
        self.group_rank = group_rank
        self.pid = pid

    @classmethod
    def out_of_step(cls, cause: str, *, group_rank: int, pid: int = 0) -> PeerLost:
        """A rank left an operation that the others are in; ``cause`` says which rank, how and where."""
        return cls(f"{cause}; the ranks of the group are out of step", group_rank=group_rank, pid=pid)


class CollectiveTimeout(PhalanxError):
    """A collective was not joined by every rank within the group's timeout.

    Raise the timeout with ``phalanx.init(timeout_s=…)`` if a rank is merely slow; look at the rank the
    message names if it is not.

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
            missing: who they are, and what is known of them.
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


class LaunchError(PhalanxError):
    """``phalanx run`` was asked for something it cannot start. The message says what to change."""
