"""The report on a job that hangs, as one page of HTML that needs nothing else.

Everything on it that comes from the job is foreign text (``html_text.py``). A policy within the page forbids every
script but its own, and everything that would have to be loaded, should that ever fail.

The page's size is bounded, however many ranks and operations there are: there are so many bars, rows and stacks of all
ranks together, each of so many characters. Each rank has some of them.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence

from phalanx.diagnosis.hang_report import HangReport
from phalanx.diagnosis.html_style import SCRIPT, STYLE
from phalanx.diagnosis.html_text import ago, duration, shown
from phalanx.diagnosis.html_timeline import Axis, kind_class, row
from phalanx.diagnosis.snapshot import KINDS, RankSnapshot, Record
from phalanx.system.process_use import state_text
from phalanx.words import format_bytes, format_named

__all__ = ["cells", "document", "page", "table"]

# Of all ranks together, the fewest of each, and the most of each.
_BARS = 8192, 4, 256
_ROWS = 2048, 2, 32
_MOST_STACKS, _LONGEST_STACK = 64, 400  # blocks, and lines of each
_LONGEST_LINE = 400
_MOST_OPEN = 2  # stacks that are shown without being asked for


def page(report: HangReport) -> str:
    """The page."""
    now_ns = report.now_ns
    bars = {seen.rank: _latest(seen, _share(_BARS, report.ranks)) for seen in report.ranks}
    rows = _share(_ROWS, report.ranks)
    parts = [
        f"<h1>{_code(shown(report.headline(), 4000))}.</h1>",
        f"<p>{shown(report.job, 2000)}; on host {shown(report.host)}, {shown(report.when)}. "
        f"The first rank has been waiting for {duration(now_ns - report.diagnosis.since_ns)}.</p>",
        *_timeline(report, bars),
        *_ranks(report),
        *_stacks(report),
        *_operations(report, rows),
    ]
    return document(report.headline(), parts)


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page with the style and the script of a report, whose parts have elements ``timeline`` and ``about``."""
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{shown(title, 120)}</title><style>{STYLE}</style></head><body>",
        *parts,
        f"<script>{SCRIPT}</script></body></html>",
    ]
    return "\n".join(lines) + "\n"


def _policy() -> str:
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"


def _share(bounds: tuple[int, int, int], ranks: Sequence[RankSnapshot]) -> int:
    together, fewest, most = bounds
    return min(most, max(fewest, together // max(1, len(ranks))))


def _latest(seen: RankSnapshot, most: int) -> list[Record]:
    """A rank's last operations, the oldest first, and before them those that have been under way for longer."""
    records = seen.recording.records if seen.recording is not None else ()
    before = [record for record in records[:-most] if record.under_way][: most - 1]
    return [*before, *records[len(before) - most :]]


def _code(text: str) -> str:
    return re.sub(r"`(\w+)`", r"<code>\1</code>", text)


def _timeline(report: HangReport, bars: dict[int, list[Record]]) -> Iterable[str]:
    records = [record for of_rank in bars.values() for record in of_rank]
    yield "<h2>The last operations of each rank</h2>"
    if not records:
        yield '<p class="faint" id="timeline">No rank has recorded an operation.</p><div id="about" hidden></div>'
        return
    axis = Axis(records, report.now_ns)
    yield f'<ul class="legend">{"".join(_legend(records))}</ul>'
    yield '<div class="wide"><div class="ranks" id="timeline">'
    for seen in report.ranks:
        awaited = seen.rank in report.diagnosis.awaited
        of_rank = bars[seen.rank]
        drawn = row(seen.rank, of_rank, axis, report.now_ns) if of_rank else '<span class="nothing">none</span>'
        yield (
            f'<div{" class=awaited" if awaited else ""}><span class="who">rank {shown(seen.rank)}'
            f"{' is awaited' if awaited else ''}</span>{drawn}</div>"
        )
    labels = "".join(f"<span>{label}</span>" for label in axis.labels)
    yield f'<div><span class="who"></span><span class="axis">{labels}</span></div></div></div>'
    left_out = sum(len(seen.recording.records) - len(bars[seen.rank]) for seen in report.ranks if seen.recording)
    if left_out:
        yield f'<p class="faint">{left_out:,} earlier operations of the report are not drawn.</p>'
    yield '<p id="about" class="faint" aria-live="polite">Click or touch a bar to read about its operation here.</p>'


def _legend(records: Sequence[Record]) -> Iterable[str]:
    used = {record.kind for record in records}
    for kind in [*KINDS.values(), *sorted(used.difference(KINDS.values()))]:
        if kind in used:
            yield _legend_entry(kind_class(kind), shown(kind, 30))
    if any(record.under_way for record in records):
        yield _legend_entry("k0 open", "under way")
    if any(record.failed for record in records):
        yield _legend_entry("k0 failed", "failed")


def _legend_entry(classes: str, text: str) -> str:
    drawn = f'<rect class="{classes}" x="1" y="1" width="12" height="12"/>'
    return f'<li><svg class="key" viewBox="0 0 14 14" aria-hidden="true">{drawn}</svg>{text}</li>'


def table(columns: Sequence[str], rows: Iterable[str], classes: str = "") -> Iterable[str]:
    """A table of rows that :func:`cells` has made."""
    heads = "".join(f"<th>{column}</th>" for column in columns)
    yield f'<div class="wide"><table class="{classes}"><thead><tr>{heads}</tr></thead><tbody>'
    yield from rows
    yield "</tbody></table></div>"


_LONG_COLUMNS = ("operation", "line", "step, label", "group", "host")


def cells(columns: Sequence[str], texts: Sequence[str], classes: str = "") -> str:
    """A row of a table, whose texts are those of a page already."""
    drawn = "".join(
        f'<td data-name="{column}"{"" if column in _LONG_COLUMNS else " class=short"}>{text or "–"}</td>'
        for column, text in zip(columns, texts, strict=True)
    )
    return f'<tr class="{classes}">{drawn}</tr>'


def _ranks(report: HangReport) -> Iterable[str]:
    columns = ("rank", "state", "operation", "for", "line", "host", "pid")
    yield "<h2>Ranks</h2>"
    yield from table(columns, (cells(columns, _rank_cells(report, seen)) for seen in report.ranks), "stacked")


def _rank_cells(report: HangReport, seen: RankSnapshot) -> list[str]:
    record = seen.operation
    last = seen.recording.records[-1] if seen.recording is not None and seen.recording.records else None
    if record is not None:
        doing = shown(record.text(), 300)
    else:
        doing = f"none; its last was {shown(last.text(), 300)}" if last is not None else "none yet"
    asked = f"; waits for {shown(seen.asked)}" if seen.asked else ""
    awaited = "<br><b>awaited</b>" if seen.rank in report.diagnosis.awaited else ""
    return [
        f"{shown(seen.rank)}{awaited}",
        _state(seen),
        f"{doing}{asked}",
        duration(report.now_ns - record.entered_ns) if record is not None else "",
        shown(seen.place or (record.site if record is not None else ""), 160),
        shown(seen.host or report.host),
        shown(seen.recording.pid) if seen.recording is not None else "",
    ]


def _state(seen: RankSnapshot) -> str:
    if seen.ended:
        return f"ended ({shown(seen.ended)})"
    return "its host did not answer" if seen.silent else shown(state_text(seen.state))


def _stacks(report: HangReport) -> Iterable[str]:
    yield "<h2>Stacks</h2>"
    yield '<p class="faint">Of each rank’s main thread, the innermost call last. Ranks at the same place share one.</p>'
    alike: dict[tuple[str, ...], list[int]] = {}
    for seen in report.ranks:
        alike.setdefault(tuple(report.stacks.get(seen.rank, ())), []).append(seen.rank)
    unsaid = alike.pop((), [])
    # Those of the ranks that the others wait for come first.
    groups = sorted(alike.items(), key=lambda group: (not set(group[1]) & set(report.diagnosis.awaited), group[1]))
    for number, (lines, ranks) in enumerate(groups[:_MOST_STACKS]):
        cut = len(lines) - _LONGEST_STACK
        text = "\n".join(shown(line, _LONGEST_LINE) for line in lines[-_LONGEST_STACK:])
        more = f"{cut} outer lines are left out\n" if cut > 0 else ""
        awaited = " (awaited)" if set(ranks) & set(report.diagnosis.awaited) else ""
        yield (
            f"<details{' open' if number < _MOST_OPEN else ''}><summary>{shown(format_named('rank', ranks), 2000)}"
            f"{awaited}</summary><pre>{more}{text}</pre></details>"
        )
    if len(groups) > _MOST_STACKS:
        rest = sorted(rank for _, ranks in groups[_MOST_STACKS:] for rank in ranks)
        yield f"<p>The stacks of {shown(format_named('rank', rest), 2000)} are in the report itself.</p>"
    if unsaid:
        yield f"<p>Without an answer: {shown(format_named('rank', unsaid), 2000)}.</p>"


def _operations(report: HangReport, most: int) -> Iterable[str]:
    columns = ("began", "operation", "dtype", "bytes", "group", "line", "step, label", "took")
    yield "<h2>Operations</h2>"
    yield f'<p class="faint">The last {most} of each rank, the newest last, by when they began before the report.</p>'
    for seen in report.ranks:
        records = _latest(seen, most)
        begun = f"{seen.recording.begun:,} in all" if seen.recording is not None else "none recorded"
        yield f"<details><summary>rank {shown(seen.rank)}, {begun}</summary>"
        yield from table(columns, (_operation(columns, record, report.now_ns) for record in records))
        yield "</details>"


def _operation(columns: Sequence[str], record: Record, now_ns: int) -> str:
    took = "under way" if record.under_way else duration(record.left_ns - record.entered_ns)
    said = [f"step {shown(record.step, 20)}"] if record.step >= 0 else []
    said += [shown(record.label, 60)] if record.label else []
    texts = [
        ago(now_ns - record.entered_ns),
        shown(record.name(), 80) + (f" ({shown(record.op, 20)})" if record.op else ""),
        shown(record.dtype, 20),
        format_bytes(record.nbytes) if record.kind != "barrier" else "",
        "world" if record.group.name in ("", "0") else shown(record.group.name, 60),
        shown(record.site, 100, keep_end=True),
        ", ".join(said),
        f"failed after {took}" if record.failed else took,
    ]
    return cells(columns, texts, "open" if record.under_way else "")
