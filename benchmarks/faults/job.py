"""One job that runs: its processes, what its ranks note, and what is printed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["BEGIN", "PATIENCE_S", "Job", "World", "named_pipe"]

# How long a job may take to start, and its survivors to have their errors, before they count as not told.
PATIENCE_S = 200.0
# How each script begins. Its arguments are the pipe for notes, a folder of the job's, and the backend.
BEGIN = """
    import json, os, signal, sys, time
    from pathlib import Path
    import torch, torch.distributed as dist, phalanx

    notes, folder, backend = os.open(sys.argv[1], os.O_WRONLY), Path(sys.argv[2]), sys.argv[3]
    rank, asked = None, []

    def note(**said):
        os.write(notes, json.dumps({"rank": rank, **said}).encode() + b"\\n")

    def knows(error, **more):
        facts = {name: getattr(error, name, None) for name in ("rank", "pid", "host")}
        note(what="knows", at=time.monotonic(), asked=asked[:1], error=type(error).__name__, of=facts,
             last=getattr(error, "last_operation", ""), text=str(error)[:2000], **more)
"""


class World(NamedTuple):
    """Who starts the ranks, on how many hosts, and how many on each; no hosts mean this one."""

    by: str
    hosts: int
    ranks: int

    @classmethod
    def parse(cls, text: str) -> World:
        """Read ``8``, ``2x2`` or ``mpi:3``."""
        by, _, places = text.rpartition(":")
        hosts, _, ranks = places.rpartition("x")
        return cls(by or "run", int(hosts or 0), int(ranks))

    def __str__(self) -> str:
        places = f"{self.hosts}x{self.ranks}" if self.hosts else str(self.ranks)
        return places if self.by == "run" else f"{self.by}:{places}"

    @property
    def kind(self) -> str:
        """Who starts the ranks; ``hosts`` if that is ``phalanx run`` over several."""
        return "hosts" if self.hosts and self.by == "run" else self.by

    @property
    def size(self) -> int:
        """All ranks."""
        return max(1, self.hosts) * self.ranks


class Job:
    """One job.

    Args:
        processes: what has been started: the launcher alone, or each rank.
        folder: a folder of the job's, which its ranks see.
        err: the file to which all write their standard errors.
        notes: a pipe with what the ranks note.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], folder: Path, err: Path, notes: int) -> None:
        self.processes, self._folder, self._err, self._notes = processes, folder, err, notes
        self._lines: deque[bytes] = deque()
        self._rest = b""

    @property
    def err(self) -> str:
        """What the launcher and the ranks have written to their standard errors."""
        return self._err.read_text()

    def began(self, count: int) -> dict[int, dict[str, Any]]:
        """For so many ranks what each notes when it is ready for the fault."""
        found: dict[int, dict[str, Any]] = {}
        for said in self.noted(time.monotonic() + PATIENCE_S):
            if said["what"] == "ready":
                found[said["rank"]] = said
            if len(found) == count:
                return found
        sys.exit(f"the job did not begin:\n{self.err}")

    def noted(self, until: float) -> Iterator[dict[str, Any]]:
        """What the ranks note, as it comes, until a time on the monotonic clock."""
        while (left_s := until - time.monotonic()) > 0:
            # One at a time: if nobody wants more now, the next look begins with the rest.
            while self._lines:
                yield json.loads(self._lines.popleft())
            if select.select([self._notes], [], [], left_s)[0]:
                *lines, self._rest = (self._rest + os.read(self._notes, 1 << 16)).split(b"\n")
                self._lines.extend(lines)

    def await_note(self, what: str) -> dict[str, Any]:
        """The next note of this kind."""
        for said in self.noted(time.monotonic() + PATIENCE_S):
            if said["what"] == what:
                return said
        sys.exit(f"no rank has noted that it {what}:\n{self.err}")

    def await_line(self, pattern: str, until: float) -> float | None:
        """When such a line was printed, to some milliseconds; None if it was not until then."""
        line = re.compile(pattern, re.MULTILINE)
        while time.monotonic() < until:
            if line.search(self.err):
                return time.monotonic()
            time.sleep(0.002)
        return None

    def tell(self, name: str, words: str = "") -> None:
        """Leave a file of this name in the job's folder, for which a rank looks."""
        part = self._folder / f"{name}.part"
        part.write_text(words)
        part.rename(self._folder / name)


@contextlib.contextmanager
def named_pipe(folder: Path) -> Iterator[tuple[str, int]]:
    """A named pipe, which ranks on test hosts reach too, also on those that are cut off."""
    path = folder / "notes"
    os.mkfifo(path)
    # For writing too: the pipe does not end while no rank has opened it.
    descriptor = os.open(path, os.O_RDWR)
    try:
        yield str(path), descriptor
    finally:
        os.close(descriptor)
        path.unlink()
