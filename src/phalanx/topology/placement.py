"""Draw where the ranks of a job run, as SVG: a box for each host, and in it one for each of its ranks."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.diagnosis.render import shown
from phalanx.errors import LaunchError
from phalanx.topology.drawing import DARK, GAP, LIGHT, WIDTH, box, picture, style, text_lines
from phalanx.topology.table import RankRow
from phalanx.words import format_count

__all__ = ["DARK", "LIGHT", "MOST_RANKS", "placement_svg", "write_placement"]

#: With more ranks than this, only the first and the last host are drawn.
MOST_RANKS = 64


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
