"""A rank's own account of its failure: what is in it, and how it is written and understood.

It is a JSON object in the rank's report file, in the form in which torch's ``@record`` writes one, with Phalanx's own
fields beside torch's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from phalanx.system.foreign_values import checked

__all__ = ["Report", "as_report"]


@dataclass(frozen=True)
class Report:
    """A rank's own account of its end.

    Attributes:
        type: the exception's qualified name, to be shown; empty if torch's ``@record`` wrote the report.
        message: the exception's text.
        traceback: the traceback, starting in the user's script; empty if the rank has printed it.
        shown: the traceback, or the text of ``sys.exit``, is in the rank's output already.
        time: when the exception left the script, on the monotonic clock; None if unknown.
        code: the exit code with which the rank ends because of the exception.
        exited: the script called ``sys.exit``; it raised nothing else.
        consequence: the exception is always caused by another rank's end (``PhalanxError.is_consequence``).
        hint: what the rank knows about the cause beyond the exception's text; empty if nothing.
    """

    type: str
    message: str
    traceback: str
    shown: bool
    time: float | None
    code: int
    exited: bool = False
    consequence: bool = False
    hint: str = ""

    @property
    def summary(self) -> str:
        """The last line of a traceback: the exception's name and the first line of its text."""
        name = self.type.removeprefix("builtins.").removeprefix("__main__.")
        first = self.message.partition("\n")[0]
        return f"{name}: {first}" if name and first else name or first

    def to_record(self) -> dict[str, Any]:
        """It as an object for JSON; programs that read torch's error files find their fields in it."""
        return {
            "message": {
                "message": self.summary,
                "extraInfo": {"py_callstack": self.traceback, "timestamp": str(int(time.time()))},
            },
            "phalanx": asdict(self),
        }


def as_report(content: dict[str, Any], own_time: Callable[[float], float]) -> Report | None:
    """The report of a rank whose agent has sent it; None if it is none.

    Args:
        content: what the rank, or torch's ``@record``, has written.
        own_time: converts a time of the agent's clock.
    """
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        own = content.get("phalanx")
        if own is not None:
            report = checked(Report, own)
            return replace(report, time=None if report.time is None else own_time(report.time))
        # Written by torch's @record, in a process that the rank started; that process has printed its traceback.
        message = content["message"]
        text = message if isinstance(message, str) else message["message"]
        said = Report("", text, "", True, None, 1)
        return said if isinstance(text, str) else None
    return None
