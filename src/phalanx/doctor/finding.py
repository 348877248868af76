"""The doctor's findings: one for each thing that it has looked at, and all of them as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import click

from phalanx.words import format_count

__all__ = ["Finding", "Level", "as_json", "as_text", "failure", "ok", "warning", "worst"]


class Level(IntEnum):
    """How bad it is; the value orders the levels."""

    OK = 0
    WARNING = 1  # a job runs, slower or otherwise than the user may think
    FAILURE = 2  # a job does not run, or breaks

    @property
    def exit_code(self) -> int:
        """What ``phalanx doctor`` exits with if this is the worst; 2 means a wrong command line everywhere."""
        return (0, 1, 3)[self]

    @property
    def word(self) -> str:
        """Its name in lower case."""
        return self.name.lower()


_STYLES: dict[Level, dict[str, Any]] = {
    Level.OK: {"fg": "green"},
    Level.WARNING: {"fg": "yellow"},
    Level.FAILURE: {"fg": "red", "bold": True},
}


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


def ok(subject: str, said: str) -> Finding:
    """Make a finding that needs no remedy."""
    return Finding(Level.OK, subject, said)


def warning(subject: str, said: str, remedy: str, host: str = "") -> Finding:
    """Make a finding with which a job runs, slower or otherwise than the user may think."""
    return Finding(Level.WARNING, subject, said, remedy, host)


def failure(subject: str, said: str, remedy: str, host: str = "") -> Finding:
    """Make a finding with which a job does not run, or breaks."""
    return Finding(Level.FAILURE, subject, said, remedy, host)


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level among them; OK if there are none."""
    return max((finding.level for finding in findings), default=Level.OK)


def as_text(findings: Sequence[Finding]) -> str:
    """Format a line for each finding, with its hosts, and below it the remedy; then a line that sums up.

    Lines are not wrapped, so that they can be searched and copied. They have colours, which ``click.echo`` removes
    where no terminal shows them.
    """
    lines = _merged(findings)
    subjects, hosts = max(len(one.subject) for one in lines), max(len(one.host) for one in lines)
    text = []
    for one in lines:
        level = click.style(f"{one.level.word:<7}", **_STYLES[one.level])
        where = f"{one.host:<{hosts}}  " if hosts else ""
        text.append(f"{level}  {where}{one.subject:<{subjects}}  {one.said}")
        if one.remedy:
            text.append(f"{'':<{9 + len(where) + subjects}}  → {one.remedy}")
    counts = [
        format_count(sum(one.level is level for one in findings), level.word)
        for level in (Level.FAILURE, Level.WARNING)
    ]
    text.append("nothing stands in the way" if worst(findings) is Level.OK else " and ".join(counts))
    return "\n".join(text) + "\n"


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Merge what was found on several hosts alike, into one finding with all their names."""
    hosts: dict[Finding, list[str]] = {}
    for finding in findings:
        hosts.setdefault(replace(finding, host=""), []).append(finding.host)
    everywhere = len({finding.host for finding in findings if finding.host})
    return [
        replace(finding, host="all" if len(names) == everywhere > 1 else " ".join(names))
        for finding, names in hosts.items()
    ]


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the object of ``--json``: the worst level, and every finding."""
    fields = ("host", "subject", "said", "remedy")
    return {
        "worst": worst(findings).word,
        "findings": [{"level": one.level.word, **{name: getattr(one, name) for name in fields}} for one in findings],
    }
