"""Slurm's two compressed notations: lists of nodes, ``node[01-03,7]``, and of counts, ``4(x2),3``."""

from __future__ import annotations

import re
from collections.abc import Callable

from phalanx.errors import LauncherEnvironmentError

__all__ = ["expand_node_list", "expand_task_counts"]

# More than any cluster has; a list that claims more is a mistake, and would fill the memory.
MOST_NODES = 1_000_000


def expand_node_list(name: str, value: str) -> list[str]:
    """The nodes of ``a,node[01-03,7]x`` in order: a, node01x, node02x, node03x, node7x.

    Args:
        name: the variable that holds the list, for the error.
        value: the list. Several brackets in one name multiply, the last varying fastest: ``r[1-2]n[1-2]``.

    Raises:
        LauncherEnvironmentError: it is not such a list.
    """

    def wrong(why: str) -> LauncherEnvironmentError:
        return LauncherEnvironmentError(f"{name}={value!r} is not a list of nodes: {why}")

    nodes: list[str] = []
    for item in _split(value.strip()):
        names = [""]
        for part in re.findall(r"\[[^\[\]]*\]|[^\[\]]+|[\[\]]", item):
            if part in "[]":
                raise wrong("a bracket has no partner")
            pieces = _expand_ranges(part[1:-1], wrong) if part.startswith("[") else [part]
            if len(names) * len(pieces) > MOST_NODES:
                raise wrong(f"more than {MOST_NODES} nodes")
            names = [name + piece for name in names for piece in pieces]
        if names == [""]:
            raise wrong("a name is empty")
        nodes += names
    return nodes


def _split(value: str) -> list[str]:
    """Cut at the commas outside brackets."""
    items, depth = [""], 0
    for char in value:
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            items.append("")
        else:
            items[-1] += char
    return items


def _expand_ranges(ranges: str, wrong: Callable[[str], LauncherEnvironmentError]) -> list[str]:
    found: list[str] = []
    for one in ranges.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", one.strip())
        if not match:
            raise wrong(f"{one!r} is neither a number nor a range")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise wrong(f"{one!r} is not a range: its end is below its start")
        if int(high) - int(low) > MOST_NODES:
            raise wrong(f"more than {MOST_NODES} nodes")
        # Leading zeros are part of the name: 08, 09, 10.
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return found


def expand_task_counts(name: str, value: str) -> list[int]:
    """The tasks of each node in ``4(x2),3``: 4, 4, 3.

    Args:
        name: the variable that holds them, for the error.
        value: the counts.

    Raises:
        LauncherEnvironmentError: it is not such a list.
    """
    counts: list[int] = []
    for item in value.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", item.strip())
        if not match:
            raise LauncherEnvironmentError(f"{name}={value!r} is not a list of tasks per node, such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
