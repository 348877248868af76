"""The rank table: who runs where, shown before user code runs.

Torch-free and cheap, because the launcher prints it while torch is still being imported elsewhere.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.words import format_spans

__all__ = ["RankRow", "format_rank_table"]

# Above this, one line a node says more than one line a rank.
MOST_RANK_LINES = 16


@dataclass(frozen=True)
class RankRow:
    """One process and its place.

    Attributes:
        rank: its number in the world.
        node_rank: the index of its host in the world.
        host: that host's name.
        local_rank: its number on that host.
        device: what it computes on, as torch writes it (``cpu``, ``cuda:3``).
        pid: its process id, or None before it exists.
        cores: cores it may run on; None while unknown.
        threads: threads its operations may use; None while undecided.
    """

    rank: int
    node_rank: int
    host: str
    local_rank: int
    device: str
    pid: int | None
    cores: int | None
    threads: int | None


def format_rank_table(
    rows: Sequence[RankRow],
    *,
    title: str,
    backend: str | None = None,
    width: int | None = None,
    color: bool = False,
) -> str:
    """The table as text that ends in a newline.

    Up to 16 ranks get a line each; above that each node gets one.

    Args:
        rows: the ranks, in any order.
        title: the line above the table.
        backend: the backend by which the ranks communicate, where it is known; it is added to the title.
        width: columns the text may take; as many as it needs by default.
        color: write ANSI colours, for a terminal.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    rows = sorted(rows, key=lambda row: row.rank)
    lines = _rank_lines(rows) if len(rows) <= MOST_RANK_LINES else _node_lines(rows)
    for name in lines[0]:
        table.add_column(name, justify="left" if name in ("host", "device", "ranks") else "right", no_wrap=True)
    for line in lines[1:]:
        table.add_row(*(Text(cell) for cell in line))
    out = io.StringIO()
    console = Console(
        file=out,
        width=width or 1000,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    console.print(Text(title if backend is None else f"{title}, {backend}", style="bold"))
    console.print(table)
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def _rank_lines(rows: Sequence[RankRow]) -> list[list[str]]:
    with_pid = any(row.pid is not None for row in rows)
    names = ["rank", "node", "host", "local rank", "device", "pid", "cores", "threads"]
    lines = [names]
    lines += [
        [
            str(row.rank),
            str(row.node_rank),
            row.host,
            str(row.local_rank),
            row.device,
            "" if row.pid is None else str(row.pid),
            _number(row.cores),
            _number(row.threads),
        ]
        for row in rows
    ]
    if not with_pid:
        lines = [line[:5] + line[6:] for line in lines]
    return lines


def _node_lines(rows: Sequence[RankRow]) -> list[list[str]]:
    nodes: dict[int, list[RankRow]] = {}
    for row in rows:
        nodes.setdefault(row.node_rank, []).append(row)
    lines = [["node", "host", "ranks", "count", "device", "cores", "threads"]]
    for node, members in sorted(nodes.items()):
        lines.append(
            [
                str(node),
                members[0].host,
                format_spans([row.rank for row in members]),
                str(len(members)),
                _common([row.device for row in members]),
                _common([_number(row.cores) for row in members]),
                _common([_number(row.threads) for row in members]),
            ]
        )
    return lines


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _common(values: Sequence[str]) -> str:
    """The one value that all share, or else the first and the last."""
    seen = list(dict.fromkeys(values))
    return seen[0] if len(seen) == 1 else f"{seen[0]} … {seen[-1]}"
