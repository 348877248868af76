"""Render reports as text and as pages of HTML that need nothing else, and timelines as pages and pictures (SVG).

The templates are in ``templates/``. Everything that comes from the job is foreign text: whatever a page prints has
passed :func:`shown`, unless it is marked as markup, and whatever a text prints :func:`printable_line`. A policy within
a page forbids every script but its own, and everything that would have to be loaded, should that ever fail. The size is
bounded, however many ranks and operations there are.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.diagnosis.snapshot import KINDS, RankSnapshot, Record
from phalanx.system.processes import state_text
from phalanx.words import format_bytes, format_named

if TYPE_CHECKING:
    from phalanx.diagnosis.report import HangReport
    from phalanx.diagnosis.timeline import Lane, Timeline

_TEMPLATES = Path(__file__).with_name("templates")
_MOST_STACKS = 64
# All rows have one axis. A job that hangs has done its last operations within milliseconds and has waited for half a
# minute since: four fifths are linear up to the last moment at which a rank began or ended an operation, and the last
# fifth is the wait since then.
_WIDTH, _WAIT_AT, _HEIGHT = 1000, 800, 24
_LANES = 3  # operations that a rank has under way at a time; more are drawn over each other
_NARROWEST = 1.5
_CLASSES = {kind: f"k{number}" for number, kind in KINDS.items()}

_MOST_DRAWN = 64  # lanes of a picture; of more ranks those for which the others waited most
# What a rank did begins so far from the top of its lane, and is so high, which tells them apart without colours.
_COLUMNS, _PARTS = 1000, {"computes": (0, 24), "communicates": (4, 16), "waits": (10, 4)}
_PICTURE, _GAP, _LETTER = 360, 5, 6.4  # widths in pixels: of a picture on a phone, of its margin, and of a letter


def shown(value: object, longest: int = 200, *, keep_end: bool = False) -> str:
    """A value as text of a page, safe also within the quotes of an attribute, cut after so many characters.

    Characters that are not visible are replaced: some would change the order in which the rest is shown, and others
    cannot be encoded. ``keep_end`` cuts the beginning, as of a path.
    """
    text = str(value)
    if len(text) > longest:
        text = f"…{text[-longest:]}" if keep_end else f"{text[:longest]}…"
    return html.escape(printable_line(text))


def duration(nanoseconds: float) -> str:
    """A span of time: ``12.3 µs``, ``4.56 ms``, ``31.2 s``, ``1.5 h``; below zero it is 0."""
    seconds = max(0.0, nanoseconds / 1e9)
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds:.0f} s"
    return f"{seconds * 1e6:.3g} µs"


def printable_line(line: object) -> str:
    """A line for a terminal: what the job has written must not move its cursor, or do worse."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in str(line))


@lru_cache(maxsize=2)
def _environment(*, pages: bool) -> Any:
    import jinja2  # it takes a tenth of a second, and most commands need no page
    from markupsafe import Markup

    def foreign(value: object, longest: int = 200, keep_end: bool = False) -> Markup:
        return value if isinstance(value, Markup) else Markup(shown(value, longest, keep_end=keep_end))

    style, script = ((_TEMPLATES / f"page.{kind}").read_text() for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=pages,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        finalize=foreign if pages else printable_line,
    )
    made.filters |= {
        "shown": foreign,
        "code": lambda text: Markup(re.sub(r"`(\w+)`", r"<code>\1</code>", str(text))),
        "duration": duration,
        # So finely that operations after each other can be told apart.
        "ago": lambda nanoseconds: f"{max(0.0, nanoseconds / 1e9):,.4f} s",
        "bytes": format_bytes,
        "state": state_text,
        "ranks": lambda ranks: format_named("rank", ranks),
    }
    made.globals |= {"style": style, "script": script, "script_digest": digest, "parts": list(_PARTS)}
    return made


def _render(template: str, **values: Any) -> str:
    environment = _environment(pages=not template.endswith(".txt"))
    rendered: str = environment.get_template(template).render(**values)
    return rendered


def report_text(report: HangReport) -> str:
    """The report for a terminal: the diagnosis, then each rank's operation, stacks, and the last operations."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, stack in sorted(report.stacks.items()):
        alike.setdefault(tuple(stack), []).append(rank)
    return _render("report.txt", report=report, stacks=alike.items(), now_ns=report.now_ns)


def report_page(report: HangReport) -> str:
    """The report on a job that hangs, as a page."""
    awaited = report.diagnosis.awaited
    ranks = max(1, len(report.ranks))
    most_bars, most_rows = min(256, max(4, 8192 // ranks)), min(32, max(2, 2048 // ranks))
    drawn = {seen.rank: _latest(seen, most_bars) for seen in report.ranks}
    records = [record for of_rank in drawn.values() for record in of_rank]
    at, labels = _axis(records, report.now_ns)
    called = {record.kind for record in records}
    kinds = [(classes, kind) for kind, classes in _CLASSES.items() if kind in called]
    kinds += [("k0", kind) for kind in sorted(called - _CLASSES.keys())]
    kinds += [("k0 open", "under way")] if any(record.under_way for record in records) else []
    kinds += [("k0 failed", "failed")] if any(record.failed for record in records) else []
    alike: dict[tuple[str, ...], list[int]] = {}
    for seen in report.ranks:
        alike.setdefault(tuple(report.stacks.get(seen.rank, ())), []).append(seen.rank)
    unsaid = alike.pop((), [])
    # Those of the ranks that the others wait for come first.
    stacks = sorted(alike.items(), key=lambda stack: (not set(stack[1]) & set(awaited), stack[1]))
    return _render(
        "report.html",
        title=report.headline(),
        report=report,
        now_ns=report.now_ns,
        awaited=awaited,
        kinds=kinds,
        rows=[(seen, _bars(drawn[seen.rank], at, report.now_ns)) for seen in report.ranks],
        labels=labels,
        left_out=sum(len(seen.recording.records) - len(drawn[seen.rank]) for seen in report.ranks if seen.recording),
        stacks=stacks[:_MOST_STACKS],
        other_stacks=sorted(rank for _, ranks in stacks[_MOST_STACKS:] for rank in ranks),
        unsaid=unsaid,
        most_rows=most_rows,
        operations=[(seen, _latest(seen, most_rows)) for seen in report.ranks],
    )


def _latest(seen: RankSnapshot, most: int) -> list[Record]:
    """A rank's last operations, the oldest first, and before them those that have been under way for longer."""
    records = seen.recording.records if seen.recording is not None else ()
    before = [record for record in records[:-most] if record.under_way][: most - 1]
    return [*before, *records[len(before) - most :]]


def _axis(records: Sequence[Record], now_ns: int) -> tuple[Callable[[int], float], list[str]]:
    """The place of each moment, from 0 to ``_WIDTH``, and the labels of the left ends of the axis's fifths."""
    moments = [min(moment, now_ns) for each in records for moment in (each.entered_ns, each.left_ns) if moment]
    first, last = min(moments, default=now_ns), max(moments, default=now_ns)

    def at(moment_ns: int) -> float:
        if moment_ns <= last:
            return max(0.0, (moment_ns - first) / max(1, last - first)) * _WAIT_AT
        return _WAIT_AT + min(1.0, (moment_ns - last) / max(1, now_ns - last)) * (_WIDTH - _WAIT_AT)

    quarter = (last - first) / 4
    return at, [*(f"−{duration(quarter * left)}" for left in (4, 3, 2, 1)), f"wait, {duration(now_ns - last)}"]


def _bars(records: Sequence[Record], at: Callable[[int], float], now_ns: int) -> list[tuple[Record, dict[str, str]]]:
    """The bars of one rank's operations; of those that run at once each has a lane of its own."""
    lanes: list[int] = []  # when the last operation of each ends
    placed = []
    for record in sorted(records, key=lambda record: record.entered_ns):
        end = now_ns if record.under_way else record.left_ns
        free = next((number for number, until in enumerate(lanes) if until <= record.entered_ns), len(lanes))
        lane = min(free, _LANES - 1)
        lanes[lane : lane + 1] = [max(end, lanes[lane]) if lane < len(lanes) else end]
        placed.append((record, lane, end))
    height = _HEIGHT / max(1, len(lanes))
    bars = []
    for record, lane, end in placed:
        begin, width = at(record.entered_ns), max(_NARROWEST, at(end) - at(record.entered_ns))
        marks = [_CLASSES.get(record.kind, "k0"), "open" if record.under_way else "", "failed" if record.failed else ""]
        bar = {
            "classes": " ".join(filter(None, marks)),
            "x": f"{min(begin, _WIDTH - width):.2f}",
            "y": f"{lane * height + 1:.1f}",
            "width": f"{width:.2f}",
            "height": f"{height - 2:.1f}",
        }
        bars.append((record, bar))
    return bars


def timeline_page(timeline: Timeline) -> str:
    """A job's timeline as a page: the picture, all ranks, and the longest waits."""
    title = f"Timeline of {timeline.report.job}"
    return _render("timeline.html", title=title, timeline=timeline, picture=timeline_svg(timeline))


def timeline_svg(timeline: Timeline) -> str:
    """A lane for each rank, for screens of 360 pixels or more, light or dark; ``<desc>`` says in words what is drawn.

    A lane has a thousand columns, each of what the rank did most there. What is left over counts in the next column, so
    that the shares are right also where operations are shorter than a column.
    """
    most = sorted(timeline.lanes, key=lambda lane: (-timeline.awaited_ns(lane.seen.rank), lane.seen.rank))
    lanes = sorted(most[:_MOST_DRAWN], key=lambda lane: lane.seen.rank)
    whole = timeline.end_ns - timeline.begin_ns
    marks, free = [], -1.0
    for since, text in lanes[0].marks:
        at, label = _GAP + (since - timeline.begin_ns) * (_PICTURE - 2 * _GAP) / whole, text[:16]
        if label and at >= free and at + _LETTER * len(label) <= _PICTURE:
            marks.append((f"{at:.1f}", label))
            free = at + _LETTER * len(label) + 8
    lines = [timeline.verdict]
    for wait in timeline.waits[:1]:
        lines += [f"the longest time: {duration(wait.wait_ns)}", f"in {wait.record.name()}{wait.record.where()}"]
    names = [
        f"rank {lane.seen.rank}: {', '.join(f'{kind} {lane.share(kind):.0%}' for kind in _PARTS)}" for lane in lanes
    ]
    return _render(
        "timeline.svg",
        title=timeline.report.job.partition(";")[0].partition(": ")[2],
        whole=duration(whole),
        said="; ".join([*names, *lines]),
        marks=marks,
        lanes=[(name, _paths(lane, timeline)) for name, lane in zip(names, lanes, strict=True)],
        lines=lines,
    )


def _paths(lane: Lane, timeline: Timeline) -> dict[str, str]:
    """A rank's lane, with all that it did, as it is drawn."""
    width = (timeline.end_ns - timeline.begin_ns) / _COLUMNS
    owed = dict.fromkeys(_PARTS, 0.0)
    runs: list[tuple[int, int, str]] = []  # from which column to which it did what
    at = 0
    for column in range(_COLUMNS):
        begin = timeline.begin_ns + width * column
        while at < len(lane.parts):
            first, until, kind = lane.parts[at]
            owed[kind] += max(0.0, min(begin + width, until) - max(begin, first)) / width
            if until > begin + width:
                break
            at += 1
        kind = max(owed, key=lambda kind: owed[kind])
        owed[kind] -= 1
        since = runs.pop()[0] if runs and runs[-1][2] == kind else column
        runs.append((since, column + 1, kind))
    paths = dict.fromkeys(_PARTS, "")
    for begin_at, end_at, kind in runs:
        top, height = _PARTS[kind]
        paths[kind] += f"M{begin_at} {top}h{end_at - begin_at}v{height}h{begin_at - end_at}z"
    return paths
