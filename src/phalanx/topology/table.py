"""The rank table: which rank runs where, printed before user code runs.

This module does not import torch: the launcher, which never does, prints the table while another process imports torch.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from phalanx.words import format_spans

# With more ranks than this the table has one line for each node instead of one for each rank.
MOST_RANK_LINES = 16
# What is left of a host's name, or of a list of ranks, in a narrow terminal.
_SHORTEST = 9
_TEXT_COLUMNS = ("host", "device", "ranks")  # the others have numbers, which are aligned to the right


@dataclass(frozen=True)
class RankRow:
    """One rank and where it runs.

    Attributes:
        device: what it computes on, as torch writes it (``cpu``, ``cuda:3``).
        pid: None if the process does not exist yet.
        cores: how many cores it may run on; None if unknown.
        threads: how many threads its operations may use; None if unknown.
        cpus: the logical cores to which the launcher binds it; empty if it does not.
    """

    rank: int
    node_rank: int
    host: str
    local_rank: int
    device: str
    pid: int | None
    cores: int | None
    threads: int | None
    cpus: Sequence[int] = ()

    @property
    def cores_text(self) -> str:
        """The number of its cores, and which they are if it is bound: ``4 (0-1, 8-9)``."""
        return _number(self.cores) + (f" ({format_spans(self.cpus)})" if self.cpus else "")


def format_rank_table(
    rows: Sequence[RankRow],
    *,
    title: str,
    backend: str | None = None,
    width: int | None = None,
    color: bool = False,
) -> str:
    """Format ranks, in any order, as text that ends in a newline: up to 16 ranks have a line each, else each node.

    ``backend`` is added to the title if it is known; the other arguments are those of :func:`format_table`.
    """
    rows = sorted(rows, key=lambda row: row.rank)
    lines = _rank_lines(rows) if len(rows) <= MOST_RANK_LINES else _node_lines(rows)
    if width is not None:
        lines = _fit(lines, width)
    heading = title if backend is None else f"{title}, {backend}"
    return format_table(lines, title=heading, text_columns=_TEXT_COLUMNS, width=width, color=color)


def format_table(
    lines: Sequence[dict[str, str]],
    *,
    title: str,
    text_columns: Collection[str] = (),
    width: int | None = None,
    color: bool = False,
) -> str:
    """Format lines of equal columns as a table with a title, which ends in a newline.

    Args:
        lines: the cells of each line by the names of their columns; at least one line.
        title: the line above the table.
        text_columns: the columns that are aligned to the left; the others have numbers.
        width: how many columns of characters a line may have; None for as many as it needs.
        color: whether to write ANSI colours, for a terminal.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in lines[0]:
        table.add_column(name, justify="left" if name in text_columns else "right", no_wrap=True)
    for line in lines:
        table.add_row(*(Text(cell) for cell in line.values()))
    out = io.StringIO()
    console = Console(
        file=out,
        width=width or 1000,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
        legacy_windows=False,
    )
    console.print(Text(title, style="bold"))
    console.print(table)
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def _rank_lines(rows: Sequence[RankRow]) -> list[dict[str, str]]:
    started = any(row.pid is not None for row in rows)
    return [
        {
            "rank": str(row.rank),
            "node": str(row.node_rank),
            "host": row.host,
            "local rank": str(row.local_rank),
            "device": row.device,
            **({"pid": "" if row.pid is None else str(row.pid)} if started else {}),
            "cores": row.cores_text,
            "threads": _number(row.threads),
        }
        for row in rows
    ]


def _node_lines(rows: Sequence[RankRow]) -> list[dict[str, str]]:
    nodes: dict[int, list[RankRow]] = {}
    for row in rows:
        nodes.setdefault(row.node_rank, []).append(row)
    return [
        {
            "node": str(node),
            "host": members[0].host,
            "ranks": format_spans([row.rank for row in members]),
            "count": str(len(members)),
            "device": _common([row.device for row in members]),
            "cores": _common([row.cores_text for row in members]),
            "threads": _common([_number(row.threads) for row in members]),
        }
        for node, members in sorted(nodes.items())
    ]


def _fit(lines: list[dict[str, str]], width: int) -> list[dict[str, str]]:
    """Shorten host names in the middle, then lists of ranks, and then leave columns out from the right, until it fits.

    The ends of the names stay, because hosts of a cluster differ there; so do the numbers of ranks and nodes.
    """
    while True:
        names = list(lines[0])
        widest = {name: max(len(name), *(len(line[name]) for line in lines)) for name in names}
        over = sum(widest.values()) + 2 * (len(names) - 1) - width
        long = next((name for name in ("host", "ranks") if widest.get(name, 0) > _SHORTEST), None)
        if over <= 0 or (long is None and names[-1] in ("rank", "node", "host", "ranks")):
            return lines
        if long is not None:
            room = max(_SHORTEST, widest[long] - over)
            lines = [{**line, long: _shorten(line[long], room)} for line in lines]
        else:
            lines = [{name: line[name] for name in names[:-1]} for line in lines]


def _shorten(text: str, columns: int) -> str:
    if len(text) <= columns:
        return text
    head = (columns - 1) // 2
    return f"{text[:head]}…{text[len(text) - (columns - 1 - head) :]}"


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _common(values: Sequence[str]) -> str:
    """Return the value that all ranks of a node have in common, or the first and the last of several."""
    seen = list(dict.fromkeys(values))
    return seen[0] if len(seen) == 1 else f"{seen[0]} … {seen[-1]}"
