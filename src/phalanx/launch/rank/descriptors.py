"""The descriptors by which a rank and its agent are joined."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["RankEnds", "guard_standard_streams", "release_input", "report_name"]


@dataclass
class RankEnds:
    """The descriptors that a rank itself uses.

    Attributes:
        out_write: its standard output.
        err_write: its standard error.
        report: a memfd into which it writes why it failed. It has no name on disk, so no file is left behind.
        trace: the memfd that all ranks of an agent share (``trace.py``).
    """

    out_write: int
    err_write: int
    report: int
    trace: int


def report_name(run_id: str, rank: int) -> str:
    """The name of a rank's report file, as ``/proc/<pid>/fd`` shows it."""
    return f"{run_id}-rank-{rank}"


def guard_standard_streams() -> None:
    """Fill closed standard descriptors with /dev/null, so that no pipe is mistaken for one of them."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


def release_input() -> None:
    """Close this process's standard input, so that its writer notices when no other process reads it any more."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
