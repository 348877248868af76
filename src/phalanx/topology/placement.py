"""Draw where the ranks of a job run, as SVG: a box for each host, and in it one for each of its ranks."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from phalanx.errors import LaunchError
from phalanx.topology.table import RankRow
from phalanx.watch.html_text import shown
from phalanx.words import format_count

__all__ = ["DARK", "LIGHT", "MOST_RANKS", "placement_svg", "write_placement"]

#: With more ranks than this, only the first and the last host are drawn.
MOST_RANKS = 64
#: The colours of each scheme. Text has a contrast of at least 4.5 with every surface, and lines one of at least 3.
LIGHT = {"page": "#ffffff", "host": "#eceff2", "rank": "#ffffff", "line": "#6b7682", "text": "#1b1f24"}
DARK = {"page": "#14171b", "host": "#22272e", "rank": "#14171b", "line": "#87929e", "text": "#e4e8ec"}

# One unit is a pixel if the picture is as wide as a phone, so no text may be smaller than 11 of them.
_WIDTH, _GAP, _LINE, _FONT = 360, 5, 14, 11
# The width of a letter of the widest common font, DejaVu Sans; names that are too long are wrapped.
_LETTER, _BOLD_LETTER = 6.4, 7.2
# On a wide screen the picture stops growing where its text is that of a headline. A window that shows the file alone
# would shrink it to its own height, so the height is set, with the aspect ratio.
_STYLE = f""".placement {{ width: 100%; max-width: 720px; height: auto; font: {_FONT}px Arial, Helvetica, sans-serif; }}
.placement .name {{ font-weight: bold; }}
"""


def placement_svg(rows: Sequence[RankRow], *, title: str = "") -> str:
    """Draw the ranks on their hosts, in light and dark, for screens of 360 pixels or more.

    Two hosts are beside each other, further ones below. ``<desc>`` says in words what is drawn. With more than 64 ranks
    only the first and the last host are drawn.

    Args:
        rows: the ranks, in any order; at least one.
        title: the line above the hosts; by default it says how many ranks and hosts there are.
    """
    members: dict[int, list[RankRow]] = {}
    for row in sorted(rows, key=lambda row: (row.node_rank, row.local_rank)):
        members.setdefault(row.node_rank, []).append(row)
    hosts = list(members.values())
    title = title or f"{format_count(len(rows), 'rank')} on {format_count(len(hosts), 'host')}"
    if len(rows) > MOST_RANKS and len(hosts) > 2:
        title += ": first and last drawn"
        hosts = [hosts[0], hosts[-1]]
    beside = min(2, len(hosts))
    width = (_WIDTH - _GAP) / beside - _GAP
    columns = min(4 // beside, max(map(len, hosts)))
    drawn, top = _lines(title, _GAP, _GAP, _WIDTH - 2 * _GAP, bold=True)
    for first in range(0, len(hosts), beside):
        bottoms = []
        for place, host in enumerate(hosts[first : first + beside]):
            parts, bottom = _host(host, _GAP + place * (width + _GAP), top + _GAP, width, columns)
            drawn += parts
            bottoms.append(bottom)
        top = max(bottoms)
    height = top + _GAP
    said = "; ".join(
        f"{shown(host[0].host)}: "
        + ", ".join(f"rank {row.rank} (local rank {row.local_rank}, {shown(row.device)})" for row in host)
        for host in hosts
    )
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" version="1.1" class="placement" width="100%" role="img"',
        f'viewBox="0 0 {_WIDTH} {height:g}" style="aspect-ratio: {_WIDTH} / {height:g}"',
        'aria-labelledby="placement-title placement-desc">',
        f'<title id="placement-title">{shown(title)}</title>',
        f'<desc id="placement-desc">{said}</desc>',
        f"<style>\n{_STYLE}{_colours(LIGHT)}",
        f"@media (prefers-color-scheme: dark) {{\n{_colours(DARK)}}}\n</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height:g}"/>',
    )
    return "\n".join([*head, *drawn, "</svg>\n"])


def write_placement(path: str, rows: Sequence[RankRow], *, title: str = "") -> None:
    """Write the picture of :func:`placement_svg` to a file.

    Raises:
        LaunchError: the file cannot be written.
    """
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(placement_svg(rows, title=title))
    except OSError as error:
        raise LaunchError(f"--svg {path}: cannot be written: {error.strerror}") from error


def _host(host: Sequence[RankRow], left: float, top: float, width: float, columns: int) -> tuple[list[str], float]:
    """Draw a host with its ranks, and return its elements and where they end."""
    inner = width - 2 * _GAP
    drawn, y = _lines(host[0].host, left + _GAP, top + _GAP, inner, bold=True)
    rank_width = (inner + _GAP) / columns - _GAP
    for first in range(0, len(host), columns):
        y += _GAP
        boxes, bottoms = [], []
        for place, row in enumerate(host[first : first + columns]):
            x = left + _GAP + place * (rank_width + _GAP)
            number, bottom = _lines(f"rank {row.rank}", x + 4, y + _GAP, _WIDTH, bold=True)
            local, bottom = _lines(f"local rank {row.local_rank}", x + 4, bottom, _WIDTH)
            device, bottom = _lines(row.device, x + 4, bottom, rank_width - 8)
            boxes.append((x, [*number, *local, *device]))
            bottoms.append(bottom)
        height = max(bottoms) + _GAP - y
        for x, texts in boxes:
            drawn += ["<g>", _box("rank", x, y, rank_width, height), *texts, "</g>"]
        y += height
    bottom = y + _GAP
    return ["<g>", _box("host", left, top, width, bottom - top), *drawn, "</g>"], bottom


def _lines(words: str, left: float, top: float, width: float, *, bold: bool = False) -> tuple[list[str], float]:
    """Write text in as many lines as it needs, and return its elements and where they end."""
    letters = int(width / (_BOLD_LETTER if bold else _LETTER))
    lines = textwrap.wrap(words, letters, break_on_hyphens=False) or [""]
    kind = ' class="name"' if bold else ""
    texts = [
        f'<text{kind} x="{left:g}" y="{top + index * _LINE + _FONT:g}">{shown(line)}</text>'
        for index, line in enumerate(lines)
    ]
    return texts, top + len(lines) * _LINE


def _box(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'


def _colours(scheme: dict[str, str]) -> str:
    """Give the boxes and the text the colours of a scheme; the page's is also that of the window around the picture."""
    boxes = "".join(
        f".placement .{kind} {{ fill: {scheme[kind]}; stroke: {scheme['line']}; }}\n" for kind in ("host", "rank")
    )
    page = f".placement {{ background: {scheme['page']}; fill: {scheme['text']}; }}\n"
    return f"{page}.placement .page {{ fill: {scheme['page']}; }}\n{boxes}"
