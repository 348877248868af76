"""Every exception Phalanx raises on purpose.

Each class says when it is raised and what to do about it, and each instance carries, as attributes, what a
person or a program needs to act: the ranks, the group, the operation, the elapsed seconds. All derive from
:class:`PhalanxError`, so ``except phalanx.PhalanxError`` catches exactly what this package found wrong.
"""

from __future__ import annotations

from typing import ClassVar

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


class PeerLost(PhalanxError):
    """Another rank of the group ended while this one waited for it.

    Attributes:
        group_rank: the lost rank, counted within the group.
        pid: its process id.
    """

    is_consequence = True

    def __init__(self, message: str, *, group_rank: int = -1, pid: int = 0) -> None:
        super().__init__(message)
        self.group_rank = group_rank
        self.pid = pid


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


class LaunchError(PhalanxError):
    """``phalanx run`` was asked for something it cannot start. The message says what to change."""
