"""What the launcher says of ranks that wait for each other for long, and where it writes reports."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Diagnosis"]

_LONGEST_LOOK_S = 1.0
# How much earlier the launcher begins to find out what the line says, so that it stands there in time.
_LONGEST_LEAD_S = 0.25


@dataclass(frozen=True)
class Diagnosis:
    """When the launcher says that ranks wait, and for whom.

    Attributes:
        warn_after_s: when a rank has waited for so long, a line stands there that says so; 0 for never, and then there
            are no reports.
        report_after_s: after nobody has moved for so long, a report is written, if there is a folder for it.
        report_dir: the folder of the reports; empty for none.
        strict: ranks that call the same lines in different orders get an error, and not a warning.
    """

    warn_after_s: float = 5.0
    report_after_s: float = 30.0
    report_dir: str = ""
    strict: bool = False

    @property
    def ask_after_s(self) -> float:
        """After which wait the launcher begins to find out what the line has to say."""
        return self.warn_after_s - min(_LONGEST_LEAD_S, self.warn_after_s / 20)

    @property
    def look_every_s(self) -> float:
        """How often the launcher looks at the ranks, or has somebody look: a few times between two warnings."""
        return min(_LONGEST_LOOK_S, self.warn_after_s / 4)

    def look_again_in_s(self, *left_s: float) -> float:
        """When to look again: as often as always, and when something is due.

        Args:
            left_s: in how many seconds that is, if nothing changes; negative if it is over.
        """
        return min([self.look_every_s, *(due_in_s for due_in_s in left_s if due_in_s > 0)])

    def why_unwatched(self, *, is_python: bool, ranks: int) -> str:
        """Why the launcher does not watch the ranks of a job, as a clause; empty if it does.

        Args:
            is_python: the target is a script or a module of Python.
            ranks: how many there are.
        """
        if not is_python:
            return "only ranks of a Python script or module are watched"
        if ranks == 1:
            return "a single rank has no other to wait for"
        return "" if self.warn_after_s > 0 else "--warn-after 0 turns off reports as well"
