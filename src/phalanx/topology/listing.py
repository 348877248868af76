"""The launchers for people, rendered from their rows: the tables of the documentation, and lists for help texts.

``python -m phalanx.topology.listing`` prints the tables of ``docs/launchers.md`` and ``docs/design/launching.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from phalanx.topology.launcher import MASTER_ADDR, MASTER_PORT, Launcher
from phalanx.topology.launchers import LAUNCHERS
from phalanx.topology.readers import Reader

__all__ = ["commands_started", "launcher_names", "launcher_table", "recognition_table"]

_HEAD = ("`world.launcher`", "started by", "rank; world size")
_PLAIN = ("`none`", "`python train.py`", "a world of one")


def launcher_names() -> list[str]:
    """Every value of ``world.launcher``, in the order in which launchers are tried; ``none`` comes last."""
    return [*dict.fromkeys(row.name for row in LAUNCHERS), "none"]


def commands_started(command: str) -> list[str]:
    """The command lines by which launchers start ``command``, each once."""
    return list(dict.fromkeys(f"{row.example} {command}" for row in LAUNCHERS if row.example))


def launcher_table() -> str:
    """A table of all launchers in Markdown, for users: one line for each name."""
    lines = []
    for name in launcher_names()[:-1]:
        rows = [row for row in LAUNCHERS if row.name == name and row.world_size]
        cells = zip(*((row.title, _variables(row)) for row in rows), strict=True)
        lines.append((f"`{name}`", *(" **or** ".join(dict.fromkeys(column)) for column in cells)))
    return _table(_HEAD, [*lines, _PLAIN])


def recognition_table() -> str:
    """A table of all rows in Markdown, for developers, in the order in which they are tried."""
    head = (*_HEAD[:2], "recognised by", _HEAD[2], "address of rank 0, unless MASTER_ADDR is set")
    return _table(
        head, [(f"`{row.name}`", row.title, _recognition(row), _variables(row), _meeting(row)) for row in LAUNCHERS]
    )


def _table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ("---",) * len(head), *lines))


def _variables(row: Launcher) -> str:
    return f"{_names(row.rank)}; {_names(row.world_size) or 'not in the variables'}"


def _recognition(row: Launcher) -> str:
    signs = [_list(row.all_of, "and"), _list(row.any_of, "or")]
    text = "; with ".join(sign for sign in signs if sign)
    if row.none_of:
        text += f"; without {_list(row.none_of, 'and')}"
    return f"{text}; {row.condition}" if row.condition else text


def _meeting(row: Launcher) -> str:
    """The variables that say where rank 0 is, beside MASTER_ADDR and MASTER_PORT, which all launchers may set."""
    own = [
        name
        for name in row.variables("master_addr", "master_port")
        if name not in (MASTER_ADDR.names, MASTER_PORT.names)
    ]
    return _list(own, "or")


def _list(names: Sequence[str], last: str) -> str:
    """``A, B or C``."""
    return f" {last} ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _names(reader: Reader | None) -> str:
    return "" if reader is None else reader.names


if __name__ == "__main__":
    sys.stdout.write(f"{launcher_table()}\n{recognition_table()}")
