"""A job's timeline as a picture (SVG) and as a page of HTML with it: a lane for each rank, in light and dark.

A lane has a thousand columns, each of what the rank did most there. What is left over counts in the next column, so
that the shares are right also where operations are shorter than a column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phalanx.diagnosis.html_page import cells, document, table
from phalanx.diagnosis.html_text import duration, shown
from phalanx.diagnosis.timeline import COMMUNICATES, COMPUTES, WAITS, Lane, Timeline
from phalanx.words import format_named

__all__ = ["timeline_page", "timeline_svg"]

_MOST_DRAWN = 64  # of more ranks those for which the others waited most
_LISTED = 50  # of the waits on the page
# What a rank did begins so far from the top of its lane, and is so high, which tells them apart without colours.
_COLUMNS, _BARS = 1000, {COMPUTES: (0, 24), COMMUNICATES: (4, 16), WAITS: (10, 4)}
# Text has a contrast of at least 4.5 with the page, and so have bars.
_LIGHT = {"page": "#ffffff", "text": "#1b1f24", COMPUTES: "#2f6fde", COMMUNICATES: "#b35900", WAITS: "#5d6670"}
_DARK = {"page": "#14171b", "text": "#e4e8ec", COMPUTES: "#5b94f7", COMMUNICATES: "#f2913a", WAITS: "#9aa4af"}
# A unit is a pixel of a picture as wide as a phone, whose lines have room for so many letters.
_WIDTH, _GAP, _LINE, _FONT, _LANE, _LETTER, _LETTERS = 360, 5, 14, 11, 16, 6.4, 54
_ROW = _LINE + _LANE + 2


def timeline_svg(timeline: Timeline) -> str:
    """The picture, for screens of 360 pixels or more; ``<desc>`` says in words what is drawn."""
    lanes, whole = _drawn(timeline), timeline.end_ns - timeline.begin_ns
    title = f"{shown(timeline.report.job.partition(';')[0].partition(': ')[2], 40)}, {duration(whole)}"
    parts, x = [_text(title, _GAP, _GAP, "name")], float(_GAP)
    for kind in _BARS:
        key = f'<svg x="{x:g}" y="24" width="12" height="12" viewBox="0 0 24 24">{_bars([(0, 24, kind)], kind)}</svg>'
        parts += [key, _text(kind, x + 16, 23)]
        x += 30 + _LETTER * len(kind)
    y, ticks, free = 42.0, "", -1.0
    for since, text in lanes[0].marks:
        at, label = _GAP + (since - timeline.begin_ns) * (_WIDTH - 2 * _GAP) / whole, text[:16]
        if label and at >= free and at + _LETTER * len(label) <= _WIDTH:
            parts.append(_text(shown(label), at + 2, y))
            ticks += f"M{at:.1f} {y:g}v{_LINE}"
            ticks += "".join(f"M{at:.1f} {y + 2 * _LINE + each * _ROW:g}v{_LANE}" for each in range(len(lanes)))
            free = at + _LETTER * len(label) + 8
    y += _LINE if ticks else 0
    for lane in lanes:
        parts += [
            _text(f"rank {lane.seen.rank}: {_shares(lane)}", _GAP, y),
            f'<svg x="{_GAP}" y="{y + _LINE:g}" width="{_WIDTH - 2 * _GAP}" height="{_LANE}" '
            f'preserveAspectRatio="none" viewBox="0 0 {_COLUMNS} 24">{_lane(lane, timeline)}</svg>',
        ]
        y += _ROW
    parts += [f'<path class="mark" d="{ticks}"/>', _text("0 s", _GAP, y)]
    parts.append(_text(duration(whole), _WIDTH - _GAP, y, "end"))
    lines = [timeline.verdict]
    for wait in timeline.waits[:1]:
        lines += [f"the longest time: {duration(wait.wait_ns)}", f"in {wait.record.name()}{wait.record.where()}"]
    for line in lines:
        y += _LINE
        parts.append(_text(shown(line, _LETTERS), _GAP, y + _GAP))
    height = y + _LINE + 2 * _GAP
    said = [f"rank {lane.seen.rank} {_shares(lane)}" for lane in lanes]
    head = [
        '<svg xmlns="http://www.w3.org/2000/svg" version="1.1" class="timeline" width="100%" role="img"',
        f'viewBox="0 0 {_WIDTH} {height:g}" style="aspect-ratio: {_WIDTH} / {height:g}"',
        'aria-labelledby="timeline-title timeline-desc">',
        f'<title id="timeline-title">{title}</title>',
        f'<desc id="timeline-desc">{shown("; ".join([*said, *lines]), 4000)}</desc>',
        f"<style>\n.timeline {{ width: 100%; max-width: 720px; height: auto; font: {_FONT}px Arial, sans-serif; }}",
        f".timeline .name {{ font-weight: bold; }} .timeline .end {{ text-anchor: end; }}\n{_colours(_LIGHT)}",
        f"@media (prefers-color-scheme: dark) {{\n{_colours(_DARK)}}}\n</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height:g}"/>',
    ]
    return "\n".join([*head, *parts, "</svg>\n"])


def timeline_page(timeline: Timeline) -> str:
    """The page: the picture, all ranks, and the longest waits."""
    ranks = ("rank", "host", *_BARS, "was waited for", "operations")
    waits = ("awaited", "wait", "operation", "by", "after")
    of_ranks, of_waits = [], []
    for lane in timeline.lanes:
        awaited, shares = timeline.awaited_ns(lane.seen.rank), [f"{lane.share(kind):.1%}" for kind in _BARS]
        times = [duration(awaited) if awaited else "", f"{len(lane.spans):,}"]
        of_ranks.append(cells(ranks, [str(lane.seen.rank), shown(lane.seen.host), *shares, *times]))
    for wait in timeline.waits[:_LISTED]:
        by, after = format_named("rank", wait.waiting), duration(wait.record.entered_ns - timeline.begin_ns)
        said = shown(wait.record.text(), 300)
        of_waits.append(cells(waits, [f"rank {wait.awaited}", duration(wait.wait_ns), said, shown(by), after]))
    parts = [
        f"<h1>{timeline.verdict.capitalize()}.</h1>",
        f"<p>{shown(timeline.report.job, 2000)}; ended {shown(timeline.report.when)}.</p>",
        f'<div id="timeline">{timeline_svg(timeline)}</div><div id="about" hidden></div>',
        *("<h2>Ranks</h2>", *table(ranks, of_ranks, "stacked")),
        *("<h2>The longest waits</h2>", *table(waits, of_waits, "stacked")),
    ]
    return document(f"Timeline of {timeline.report.job}", parts)


def _drawn(timeline: Timeline) -> Sequence[Lane]:
    most = sorted(timeline.lanes, key=lambda lane: (-timeline.awaited_ns(lane.seen.rank), lane.seen.rank))
    return sorted(most[:_MOST_DRAWN], key=lambda lane: lane.seen.rank)


def _shares(lane: Lane) -> str:
    return ", ".join(f"{kind} {lane.share(kind):.0%}" for kind in _BARS)


def _lane(lane: Lane, timeline: Timeline) -> str:
    """A rank's lane: a path for each kind of what it did."""
    width = (timeline.end_ns - timeline.begin_ns) / _COLUMNS
    owed = dict.fromkeys(_BARS, 0.0)
    runs: list[tuple[int, int, str]] = []
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
    return "".join(_bars(runs, kind) for kind in _BARS)


def _bars(runs: Iterable[tuple[int, int, str]], of: str) -> str:
    top, height = _BARS[of]
    drawn = "".join(f"M{begin} {top}h{end - begin}v{height}h{begin - end}z" for begin, end, kind in runs if kind == of)
    return f'<path class="{of}" d="{drawn}"/>' if drawn else ""


def _text(text: str, x: float, top: float, kind: str = "") -> str:
    """A line of text, which is text of a page already."""
    return f'<text class="{kind}" x="{x:g}" y="{top + _FONT:g}">{text}</text>'


def _colours(scheme: dict[str, str]) -> str:
    bars = "".join(f".timeline .{kind} {{ fill: {scheme[kind]}; }}\n" for kind in (*_BARS, "page"))
    mark = f".timeline .mark {{ stroke: {scheme['text']}; stroke-width: .6; stroke-dasharray: 2 2; }}\n"
    return f".timeline {{ background: {scheme['page']}; fill: {scheme['text']}; }}\n{bars}{mark}"
