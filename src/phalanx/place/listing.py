"""The launchers for people, rendered from their rows: the table of ``docs/launchers.md``, and lists for help texts.

``python -m phalanx.place.listing`` prints the table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from phalanx.place.launcher import MASTER_ADDR, MASTER_PORT, Launcher
from phalanx.place.launchers import LAUNCHERS
from phalanx.place.readers import Reader

__all__ = ["commands_started", "launcher_names", "launcher_table"]

_HEAD = (
    "`world.launcher`",
    "started by",
    "recognised by",
    "rank; world size",
    "address of rank 0, unless MASTER_ADDR is set",
)
_PLAIN = ("`none`", "`python train.py`", "no variable", "a world of one", "")


def launcher_names() -> list[str]:
    """Every value of ``world.launcher``, in the order in which launchers are tried; ``none`` comes last."""
    return [*dict.fromkeys(row.name for row in LAUNCHERS), "none"]


def commands_started(command: str) -> list[str]:
    """The command lines by which launchers start ``command``, each once."""
    return list(dict.fromkeys(f"{row.example} {command}" for row in LAUNCHERS if row.example))


def launcher_table() -> str:
    """A table of all rows in Markdown, in the order in which they are tried."""
    lines = [_HEAD, ("---",) * len(_HEAD), *map(_cells, LAUNCHERS), _PLAIN]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cells(row: Launcher) -> tuple[str, ...]:
    size = _names(row.world_size) or "not in the variables"
    return f"`{row.name}`", row.title, _recognition(row), f"{_names(row.rank)}; {size}", _meeting(row)


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
    sys.stdout.write(launcher_table())
