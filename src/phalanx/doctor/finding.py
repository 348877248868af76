"""The doctor's findings, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import click

from phalanx.words import format_count


class Level(IntEnum):
    """The severity of a finding, in ascending order."""

    OK = 0
    WARNING = 1
    FAILURE = 2

    @property
    def exit_code(self) -> int:
        """The exit code of ``phalanx doctor`` if this is the worst level; 2 means a wrong command line everywhere."""
        return (0, 1, 3)[self]

    @property
    def word(self) -> str:
        """The name in lower case."""
        return self.name.lower()


@dataclass(frozen=True)
class Finding:
    """The result of one check; ``said`` and ``remedy`` are sentences without a full stop.

    ``remedy`` is empty if the level is OK, and ``host`` where only one host is examined.
    """

    level: Level
    subject: str
    said: str
    remedy: str = ""
    host: str = ""


def ok(subject: str, said: str) -> Finding:
    """Make a finding without a remedy."""
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
    """Format a coloured line for each finding, its remedy below it, and a summary.

    Lines are not wrapped, so that they can be searched and copied.
    """
    styles: tuple[dict[str, Any], ...] = ({"fg": "green"}, {"fg": "yellow"}, {"fg": "red", "bold": True})
    lines = _merged(findings)
    subjects, hosts = max(len(one.subject) for one in lines), max(len(one.host) for one in lines)
    text = []
    for one in lines:
        level = click.style(f"{one.level.word:<7}", **styles[one.level])
        where = f"{one.host:<{hosts}}  " if hosts else ""
        text.append(f"{level}  {where}{one.subject:<{subjects}}  {one.said}")
        if one.remedy:
            text.append(f"{'':<{9 + len(where) + subjects}}  → {one.remedy}")
    levels = [finding.level for finding in findings]
    counts = [format_count(levels.count(level), level.word) for level in (Level.FAILURE, Level.WARNING)]
    text.append("nothing stands in the way" if worst(findings) is Level.OK else " and ".join(counts))
    return "\n".join(text) + "\n"


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Merge equal findings of several hosts into one with all their names."""
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
    listed = [{"level": one.level.word, **{name: getattr(one, name) for name in fields}} for one in findings]
    return {"worst": worst(findings).word, "findings": listed}
