"""``--log-dir``, ``--tee`` and ``--only``: which ranks' output goes to files, and which is shown.

As with torchrun's ``--redirects`` and ``--tee``, output that goes to files is not shown too unless that is asked for.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from phalanx.errors import LaunchError
from phalanx.words import format_count

__all__ = ["FAILURE_FILE", "PLAIN_OUTPUT", "OutputOptions", "decide_output"]

#: Where ``--log-dir`` has what was printed when its job failed last.
FAILURE_FILE = "failure.txt"


@dataclass(frozen=True)
class OutputOptions:
    """Where the ranks' output goes.

    Attributes:
        log_dir: the folder with a file for each rank; empty for no files.
        shown: the ranks whose output is shown, as ranges with both ends; None for all.
        only: ``shown``, as the user wrote it; empty if the user did not.
        part: the folder within ``log_dir`` that has the files of one attempt; empty for none.
    """

    log_dir: str = ""
    shown: tuple[tuple[int, int], ...] | None = None
    only: str = ""
    part: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether all output is shown, and nothing else happens to it."""
        return not self.log_dir and self.shown is None

    def shows(self, rank: int) -> bool:
        """Whether the output of a rank is shown."""
        return self.shown is None or any(first <= rank <= last for first, last in self.shown)

    def log_of(self, rank: int) -> str:
        """The path of a rank's file; empty if there is none."""
        return os.path.join(self.log_dir, self.part, f"rank-{rank}.log") if self.log_dir else ""

    def check(self, ranks: int) -> None:
        """Compare with the number of ranks.

        Raises:
            LaunchError: ``--only`` names a rank that the job does not have.
        """
        for _, last in self.shown or ():
            if last >= ranks:
                raise LaunchError(
                    f"--only {self.only}: there is no rank {last}; the job has {format_count(ranks, 'rank')}, which "
                    "count from 0"
                )

    def note(self, ranks: int) -> str:
        """What the user is told before the ranks run, if their output is not shown; else empty."""
        if not self.log_dir or self.shown != ():
            return ""
        files = f"{self.log_of(0)} to {os.path.basename(self.log_of(ranks - 1))}" if ranks > 1 else self.log_of(0)
        return f"output goes to {files}; --tee shows it here too"


#: All output is shown, and there are no files.
PLAIN_OUTPUT = OutputOptions()


def decide_output(log_dir: str | None, *, tee: bool, only: str | None) -> OutputOptions:
    """Decide from the options where output goes.

    Args:
        log_dir: ``--log-dir``: the folder for the files; None for no files.
        tee: ``--tee``: show what goes to the files too.
        only: ``--only``: the ranks whose output is shown, as ``0,2-3``; None for all, or for none if it goes to files.

    Raises:
        LaunchError: the ranks are not a list of ranks, or the options contradict each other.
    """
    if tee and not log_dir:
        raise LaunchError("--tee shows what goes to the files of --log-dir; add --log-dir DIR, or leave --tee out")
    if tee and only is not None:
        raise LaunchError(f"--tee shows all ranks and --only {only} some; leave one of them out")
    if log_dir is not None and not log_dir:
        raise LaunchError("--log-dir: the name of the folder is empty")
    if only is not None:
        return OutputOptions(log_dir or "", _ranges(only), only)
    return OutputOptions(log_dir or "", () if log_dir and not tee else None)


def _ranges(text: str) -> tuple[tuple[int, int], ...]:
    ranges = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise LaunchError(f"--only {text}: {part!r} is not a rank, or a range such as 2-3; write them as 0,2-3")
        ranges.append((first, last))
    return tuple(ranges)
