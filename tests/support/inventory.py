"""What processes hold, seen from outside: descriptors, mappings, threads and children, by name and number."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

__all__ = ["children_of", "held_by", "more_than", "shared_memory_files"]

_NUMBER = re.compile(r"\d+")


def held_by(pid: int) -> Counter[str]:
    """Everything that lasts as long as nobody lets go of it: each kind of thing, and how many the process has of it.

    Numbers in names are left out, so that a segment is the same thing in every world.
    """
    held: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            held["descriptor " + _NUMBER.sub("N", os.readlink(f"/proc/{pid}/fd/{name}"))] += 1
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _, _, name = line.partition("/")
        if name.startswith(("memfd:", "dev/shm/")):
            held["mapping " + _NUMBER.sub("N", name)] += 1
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            held["thread " + _NUMBER.sub("N", (task / "comm").read_text().strip())] += 1
    held["child"] = len(children_of(pid))
    return held


def children_of(pid: int) -> set[int]:
    """The children of a process, living or not yet waited for."""
    children: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children.update(map(int, (task / "children").read_text().split()))
    return children


def more_than(before: Counter[str], after: Counter[str]) -> dict[str, int]:
    """What ``after`` has more of, and how many."""
    return dict(after - before)


def shared_memory_files(prefixes: Iterable[str] = ("torch_", "psm_", "sem.", "phalanx")) -> set[str]:
    """The files of /dev/shm that torch, multiprocessing or Phalanx could have made."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(tuple(prefixes))}
