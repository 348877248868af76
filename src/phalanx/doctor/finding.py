"""What the doctor says: one finding for each thing that it has looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Finding", "Level", "worst"]


class Level(IntEnum):
    """How bad it is; the value orders the levels."""

    OK = 0
    WARNING = 1  # a job runs, slower or otherwise than the user may think
    FAILURE = 2  # a job does not run, or breaks

    @property
    def exit_code(self) -> int:
        """What ``phalanx doctor`` exits with if this is the worst; 2 means a wrong command line everywhere."""
        return (0, 1, 3)[self]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: how bad it is.
        subject: what was looked at, in a word or two: ``open files``, ``port 29500``.
        said: what was found, as a sentence without its full stop.
        remedy: what to do about it; empty if the level is OK.
        host: on which host; empty where only one was looked at.
    """

    level: Level
    subject: str
    said: str
    remedy: str = ""
    host: str = ""


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level among them; OK if there are none."""
    return max((finding.level for finding in findings), default=Level.OK)
