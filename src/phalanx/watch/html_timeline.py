"""The timeline of a job's last operations: for each rank a row of bars, as SVG within a page of HTML.

All rows have one axis. A job that hangs has done its last operations within milliseconds and has waited for half a
minute since, so long spans of time in which no rank begins or ends anything are drawn shorter. Each is marked.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from phalanx.watch.html_text import ago, duration, shown
from phalanx.watch.records import KINDS, Record
from phalanx.words import format_bytes

__all__ = ["Axis", "bar_text", "kind_class", "row"]

WIDTH = 1000  # the axis, in units of the drawing; the page stretches it
_HEIGHT = 24
_LANES = 3  # operations that a rank has under way at a time; more are drawn over each other
_NARROWEST = 1.5
_STEADY = 0.95  # the share of the spans, the shortest ones, by which is measured what is a long one
_LONG = 0.06
_CLASSES = {kind: f"k{number}" for number, kind in KINDS.items()}


class Axis:
    """Where on the page a moment is.

    Args:
        records: every operation that is drawn.
        now_ns: the moment of the report, which is the end of the axis.
    """

    def __init__(self, records: Sequence[Record], now_ns: int) -> None:
        moments = {
            min(moment, now_ns) for record in records for moment in (record.entered_ns, record.left_ns) if moment
        }
        self._moments = sorted(moments | {now_ns})
        spans = [after - before for before, after in pairwise(self._moments)]
        steady = sum(sorted(spans)[: int(_STEADY * len(spans))]) or sum(spans) or 1
        longest = max(1, _LONG * steady)
        places = [0.0]
        for span in spans:
            places.append(places[-1] + min(span, longest))
        scale = WIDTH / (places[-1] or 1.0)
        self._places = [place * scale for place in places]
        self.cuts = [
            ((self._places[i] + self._places[i + 1]) / 2, span) for i, span in enumerate(spans) if span > longest
        ]
        """Where a long span is drawn shorter, and how long it is, in ns."""

    @property
    def first_ns(self) -> int:
        return self._moments[0]

    def at(self, moment_ns: int) -> float:
        """The place of a moment, from 0 to ``WIDTH``."""
        index = max(0, bisect_right(self._moments, moment_ns) - 1)
        if index + 1 >= len(self._moments):
            return self._places[-1]
        before, after = self._moments[index : index + 2]
        share = max(0.0, (moment_ns - before) / (after - before))
        return self._places[index] + share * (self._places[index + 1] - self._places[index])


def kind_class(kind: str) -> str:
    """The class of a kind of operation, which gives it its colour."""
    return _CLASSES.get(kind, "k0")


def row(rank: object, records: Sequence[Record], axis: Axis, now_ns: int) -> str:
    """The drawing of one rank's operations; of those that run at once each has a lane of its own."""
    lanes: list[int] = []  # when the last operation of each ends
    placed = []
    for record in sorted(records, key=lambda record: record.entered_ns):
        end = now_ns if record.under_way else record.left_ns
        free = next((number for number, until in enumerate(lanes) if until <= record.entered_ns), len(lanes))
        lane = min(free, _LANES - 1)
        lanes[lane : lane + 1] = [max(end, lanes[lane]) if lane < len(lanes) else end]
        placed.append((record, lane, end))
    height = _HEIGHT / max(1, len(lanes))
    bars = "".join(_bar(record, lane * height, height, axis, end, now_ns) for record, lane, end in placed)
    cuts = "".join(f'<path class="cut" d="M{place:.1f} 0V{_HEIGHT}"/>' for place, _ in axis.cuts)
    return (
        f'<svg class="row" viewBox="0 0 {WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="operations of rank {shown(rank)}">{cuts}{bars}</svg>'
    )


def _bar(record: Record, top: float, height: float, axis: Axis, end: int, now_ns: int) -> str:
    left = axis.at(record.entered_ns)
    width = max(_NARROWEST, axis.at(end) - left)
    left = min(left, WIDTH - width)
    marks = f"{' open' if record.under_way else ''}{' failed' if record.failed else ''}"
    return (
        f'<rect class="{kind_class(record.kind)}{marks}" x="{left:.2f}" y="{top + 1:.1f}" width="{width:.2f}" '
        f'height="{height - 2:.1f}"><title>{bar_text(record, now_ns)}</title></rect>'
    )


def bar_text(record: Record, now_ns: int) -> str:
    """What an operation's bar says when one points at it, as text of a page."""
    about = [shown(record.dtype, 20)] if record.dtype else []
    about += [shown(record.op, 20)] if record.op else []
    about += [format_bytes(record.nbytes)] if record.kind != "barrier" else []
    lines = [
        f"{shown(record.name(), 80)}, operation {shown(record.number, 20)}",
        ", ".join(about),
        shown(record.where().strip(), 120, keep_end=True),
        f"entered {ago(now_ns - record.entered_ns)} before the report",
        _ending(record, now_ns),
    ]
    return "\n".join(line for line in lines if line)


def _ending(record: Record, now_ns: int) -> str:
    if record.under_way:
        return f"under way for {duration(now_ns - record.entered_ns)}"
    how = "failed" if record.failed else "left"
    return f"{how} {ago(now_ns - record.left_ns)} before it, after {duration(record.left_ns - record.entered_ns)}"
