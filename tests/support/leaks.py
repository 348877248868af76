"""Processes, threads, descriptors and shared memory, none of which a test may leave behind."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.diagnosis.recorder import MEMORY_NAME
from tests.support.waiting import soon


@dataclass(frozen=True)
class Holdings:
    """Everything of that kind that this process holds or has started."""

    children: frozenset[int]
    threads: frozenset[str]
    descriptors: tuple[str, ...]
    shared_memory: frozenset[str]

    @staticmethod
    def now() -> Holdings:
        children: set[str] = set()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError):  # a thread that was joined, and is gone by now
                children.update((task / "children").read_text().split())
        threads = frozenset(thread.name for thread in threading.enumerate())
        # Only what torch, multiprocessing or Phalanx would make: other programs of this machine come and go.
        ours = ("torch_", "psm_", "sem.", "phalanx")
        files = frozenset(name for name in os.listdir("/dev/shm") if name.startswith(ours))
        return Holdings(frozenset(map(int, children)), threads, tuple(descriptors()), files)

    def left_in_time(self, look: Callable[[], Holdings], patience_s: float = 30.0) -> list[str]:
        """:meth:`left_by`, when a look finds nothing any more, or at the last one."""
        soon(lambda: not self.left_by(look()), patience_s)
        return self.left_by(look())

    def left_by(self, later: Holdings) -> list[str]:
        """In words, everything that ``later`` holds and this does not."""
        left = []
        if more := later.children - self.children:
            left.append(f"processes {sorted(more)}")
        if names := later.threads - self.threads:
            left.append(f"threads {sorted(names)}")
        if (grown := len(later.descriptors) - len(self.descriptors)) > 0:
            new = Counter(later.descriptors) - Counter(self.descriptors)
            gone = Counter(self.descriptors) - Counter(later.descriptors)
            left.append(f"{grown} descriptors: {sorted(new.elements())} in the place of {sorted(gone.elements())}")
        if files := {name for name in later.shared_memory - self.shared_memory if lasts(name)}:
            left.append(f"/dev/shm/{sorted(files)}")
        return left


def descriptors() -> list[str]:
    """What this process has open, but for its flight recorder and its stacks, which stay from the first group on."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in found if not name.startswith((f"/memfd:{MEMORY_NAME}", "/memfd:phalanx-stacks-"))]


def lasts(name: str) -> bool:
    """Whether a file of /dev/shm stays although no process has it; else it belongs to what runs beside this test."""
    for _ in range(400):  # on a busy machine the tracker of a process that was killed takes seconds to remove its files
        if mapped(name) or not Path("/dev/shm", name).exists():
            return False
        time.sleep(0.05)
    return True


def mapped_by(process: int | str) -> list[str]:
    """The files of /dev/shm that a process has mapped, by their names there."""
    lines = Path("/proc", str(process), "maps").read_text(errors="replace").splitlines()
    names = {line.partition(" /dev/shm/")[2] for line in lines}
    return sorted(name for name in names if name and not name.endswith(" (deleted)"))


def mapped(name: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if f"/dev/shm/{name}" in maps.read_text():
                return True
    return False
