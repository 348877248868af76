"""The timeline of a job's last operations: for each rank a row of bars, as SVG within a page of HTML.

All rows have one axis. A job that hangs has done its last operations within milliseconds and has waited for half a
minute since: four fifths are linear up to the last moment at which a rank began or ended an operation, and the last
fifth is the wait since then.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.diagnosis.html_text import ago, duration, shown
from phalanx.diagnosis.snapshot import KINDS, Record
from phalanx.words import format_bytes

__all__ = ["Axis", "bar_text", "kind_class", "row"]

WIDTH, _WAIT_AT = 1000, 800  # the axis, in units of the drawing; the page stretches it
_TICKS = "".join(f'<path class="tick" d="M{place} 0V24"/>' for place in range(200, WIDTH, 200))
_HEIGHT = 24
_LANES = 3  # operations that a rank has under way at a time; more are drawn over each other
_NARROWEST = 1.5
_CLASSES = {kind: f"k{number}" for number, kind in KINDS.items()}


class Axis:
    """Where on the page a moment is.

    Args:
        records: every operation that is drawn.
        now_ns: the moment of the report, which is the end of the axis.
    """

    def __init__(self, records: Sequence[Record], now_ns: int) -> None:
        moments = [min(moment, now_ns) for each in records for moment in (each.entered_ns, each.left_ns) if moment]
        self._first, self._last, self._now = min(moments), max(moments), now_ns

    @property
    def labels(self) -> list[str]:
        """Label the left end of each fifth of the axis."""
        quarter = (self._last - self._first) / 4
        return [*(f"−{duration(quarter * left)}" for left in (4, 3, 2, 1)), f"wait, {duration(self._now - self._last)}"]

    def at(self, moment_ns: int) -> float:
        """The place of a moment, from 0 to ``WIDTH``."""
        if moment_ns <= self._last:
            return max(0.0, (moment_ns - self._first) / max(1, self._last - self._first)) * _WAIT_AT
        share = min(1.0, (moment_ns - self._last) / max(1, self._now - self._last))
        return _WAIT_AT + share * (WIDTH - _WAIT_AT)


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
    return (
        f'<svg class="row" viewBox="0 0 {WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="operations of rank {shown(rank)}">{_TICKS}{bars}</svg>'
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
