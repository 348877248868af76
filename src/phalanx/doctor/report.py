"""Findings as text for people, and as JSON for machines."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from phalanx.doctor.finding import Finding, Level, worst
from phalanx.words import format_count

__all__ = ["as_json", "as_text"]

_WORDS = {Level.OK: "ok", Level.WARNING: "warning", Level.FAILURE: "failure"}
_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILURE: "bold red"}


def as_text(findings: Sequence[Finding], *, color: bool = False) -> str:
    """A line for each finding, with its hosts, and below one that is not OK its remedy; then a line that sums up.

    Lines are not wrapped, so that they can be searched and copied.

    Args:
        findings: at least one, in the order in which they are shown.
        color: whether to write ANSI colours, for a terminal.
    """
    from rich.console import Console
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
        legacy_windows=False,
    )
    lines = _merged(findings)
    subjects = max(len(finding.subject) for finding in lines)
    hosts = max(len(finding.host) for finding in lines)
    for finding in lines:
        where = f"{finding.host:<{hosts}}  " if hosts else ""
        line = Text(f"{_WORDS[finding.level]:<7}", style=_STYLES[finding.level])
        line.append(f"  {where}{finding.subject:<{subjects}}  {finding.said}", style="default")
        console.print(line)
        if finding.remedy:
            console.print(f"{'':<9}{'':<{len(where)}}{'':<{subjects}}  → {finding.remedy}")
    console.print(_sum(findings))
    return out.getvalue()


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """What was found on several hosts alike, as one finding with all their names, where the first of them stands."""
    hosts: dict[Finding, list[str]] = {}
    for finding in findings:
        hosts.setdefault(replace(finding, host=""), []).append(finding.host)
    everywhere = len({finding.host for finding in findings if finding.host})
    return [
        replace(finding, host="all" if len(names) == everywhere > 1 else " ".join(names))
        for finding, names in hosts.items()
    ]


def _sum(findings: Sequence[Finding]) -> str:
    counts = [
        format_count(sum(finding.level is level for finding in findings), _WORDS[level])
        for level in (Level.FAILURE, Level.WARNING)
    ]
    return "nothing stands in the way" if worst(findings) is Level.OK else " and ".join(counts)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The object that ``phalanx doctor --json`` prints: the worst level, and every finding."""
    return {
        "worst": _WORDS[worst(findings)],
        "findings": [
            {
                "level": _WORDS[finding.level],
                "host": finding.host,
                "subject": finding.subject,
                "said": finding.said,
                "remedy": finding.remedy,
            }
            for finding in findings
        ],
    }
