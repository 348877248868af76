"""Draw where the ranks of a job run, as SVG: a box for each host, and in it one for each of its ranks.

The second half has the boxes and lines of text that all pictures share. One unit is a pixel of a phone's width.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from phalanx.diagnosis.render import shown
from phalanx.errors import LaunchError
from phalanx.topology.table import RankRow
from phalanx.words import format_count

#: The colours of each scheme. Text has a contrast of at least 4.5 with every surface, and lines one of at least 3.
_PARTS = ("page", "host", "rank", "line", "text", "fresh")
LIGHT = dict(zip(_PARTS, ("#ffffff", "#eceff2", "#ffffff", "#6b7682", "#1b1f24", "#cfe3ff"), strict=True))
DARK = dict(zip(_PARTS, ("#14171b", "#22272e", "#14171b", "#87929e", "#e4e8ec", "#1b4069"), strict=True))
WIDTH, GAP, LINE, FONT = 360, 5, 14, 11
#: The width of a letter of the widest common font, DejaVu Sans.
LETTER = 6.4
_BOLD_LETTER = 7.2
#: With more ranks than this, only the first and the last host are drawn.
MOST_RANKS = 64


def placement_svg(rows: Sequence[RankRow], *, title: str = "") -> str:
    """Draw the ranks, in any order, on their hosts; ``<desc>`` says in words what is drawn.

    Two hosts are beside each other, further ones below. With more than 64 ranks only the first and the last are drawn.
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
    width = (WIDTH - GAP) / beside - GAP
    columns = min(4 // beside, max(map(len, hosts)))
    drawn, top = text_lines(title, GAP, GAP, WIDTH - 2 * GAP, bold=True)
    for first in range(0, len(hosts), beside):
        bottoms = []
        for place, host in enumerate(hosts[first : first + beside]):
            parts, bottom = _host(host, GAP + place * (width + GAP), top + GAP, width, columns)
            drawn += parts
            bottoms.append(bottom)
        top = max(bottoms)
    height = top + GAP
    said = "; ".join(
        f"{shown(host[0].host)}: "
        + ", ".join(f"rank {row.rank} (local rank {row.local_rank}, {shown(row.device)})" for row in host)
        for host in hosts
    )
    return picture("placement", title, said, drawn, height, style("placement", ("host", "rank")))


def write_placement(path: str, rows: Sequence[RankRow], *, title: str = "") -> None:
    """Write the picture of :func:`placement_svg` to a file."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(placement_svg(rows, title=title))
    except OSError as error:
        raise LaunchError(f"--svg {path}: cannot be written: {error.strerror}") from error


def _host(host: Sequence[RankRow], left: float, top: float, width: float, columns: int) -> tuple[list[str], float]:
    """Draw a host with its ranks, and return its elements and where they end."""
    inner = width - 2 * GAP
    drawn, y = text_lines(host[0].host, left + GAP, top + GAP, inner, bold=True)
    rank_width = (inner + GAP) / columns - GAP
    for first in range(0, len(host), columns):
        y += GAP
        boxes, bottoms = [], []
        for place, row in enumerate(host[first : first + columns]):
            x = left + GAP + place * (rank_width + GAP)
            number, bottom = text_lines(f"rank {row.rank}", x + 4, y + GAP, WIDTH, bold=True)
            local, bottom = text_lines(f"local rank {row.local_rank}", x + 4, bottom, WIDTH)
            device, bottom = text_lines(row.device, x + 4, bottom, rank_width - 8)
            boxes.append((x, [*number, *local, *device]))
            bottoms.append(bottom)
        height = max(bottoms) + GAP - y
        for x, texts in boxes:
            drawn += ["<g>", box("rank", x, y, rank_width, height), *texts, "</g>"]
        y += height
    bottom = y + GAP
    return ["<g>", box("host", left, top, width, bottom - top), *drawn, "</g>"], bottom


# -- what all pictures share ---------------------------------------------------------------------------


def text_lines(words: str, left: float, top: float, width: float, *, bold: bool = False) -> tuple[list[str], float]:
    """Write text in as many lines as it needs, and return its elements and where they end."""
    letters = int(width / (_BOLD_LETTER if bold else LETTER))
    lines = textwrap.wrap(words, letters, break_on_hyphens=False) or [""]
    kind = ' class="name"' if bold else ""
    texts = [
        f'<text{kind} x="{left:g}" y="{top + index * LINE + FONT:g}">{shown(line)}</text>'
        for index, line in enumerate(lines)
    ]
    return texts, top + len(lines) * LINE


def box(kind: str, x: float, y: float, width: float, height: float) -> str:
    """Draw a box of a kind, which has its colour of the scheme."""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'


def style(name: str, kinds: Sequence[str]) -> str:
    """Return the style of a picture of this class, with boxes of these kinds, in the colours of the schemes."""
    light, dark = (_colours(name, kinds, scheme) for scheme in (LIGHT, DARK))
    # On a wide screen the picture stops growing where its text is that of a headline. A window that shows the file
    # alone would shrink it to its own height, so the height is set, with the aspect ratio.
    return (
        f".{name} {{ width: 100%; max-width: 720px; height: auto; font: {FONT}px Arial, Helvetica, sans-serif; }}\n"
        f".{name} .name {{ font-weight: bold; }}\n"
        f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"
    )


def picture(name: str, title: str, said: str, drawn: Sequence[str], height: float, css: str = "") -> str:
    """Return the picture as one element, which has its title and description for those who do not see it.

    ``name`` is its class, and the beginning of its ids; ``said`` is the description, as text of a page; ``css`` is its
    style, empty if the page around it has that.
    """
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" version="1.1" class="{name.split("-")[0]}" width="100%" role="img"',
        f'viewBox="0 0 {WIDTH} {height:g}" style="aspect-ratio: {WIDTH} / {height:g}"',
        f'aria-labelledby="{name}-title {name}-desc">',
        f'<title id="{name}-title">{shown(title)}</title>',
        f'<desc id="{name}-desc">{said}</desc>',
        *([f"<style>\n{css}</style>"] if css else []),
        f'<rect class="page" width="{WIDTH}" height="{height:g}"/>',
    )
    return "\n".join([*head, *drawn, "</svg>\n"])


def _colours(name: str, kinds: Sequence[str], scheme: Mapping[str, str]) -> str:
    """Give the boxes and the text the colours of a scheme; the page's is also that of the window around the picture."""
    boxes = "".join(f".{name} .{kind} {{ fill: {scheme[kind]}; stroke: {scheme['line']}; }}\n" for kind in kinds)
    page = f".{name} {{ background: {scheme['page']}; fill: {scheme['text']}; }}\n"
    return f"{page}.{name} .page {{ fill: {scheme['page']}; }}\n{boxes}"
