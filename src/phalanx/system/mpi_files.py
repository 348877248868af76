"""The files that MPI libraries make in /dev/shm, and leave there if their processes do not end them in order."""

from __future__ import annotations

import contextlib
import os
import re

__all__ = ["FOLDER", "NAMES", "own_files", "remove"]

FOLDER = "/dev/shm"
# How the names begin. libfabric's have a process id, with Intel MPI.
NAMES = re.compile(
    "|".join(
        (
            *("mpich_shm_", "mpich_shar_"),
            *(r"sm_segment\.", r"vader_segment\.", "pmix-", "prte", "ucx_"),  # Open MPI
            *(r"\d+:\d+:\d+$", "fi_shm", "efa_shm", "psm2_shm", "psm3_shm", "Intel_MPI", "shm_impi", "impi_"),
        )
    )
)


def own_files() -> list[str]:
    """The paths of those that this process has mapped."""
    found = set()
    with contextlib.suppress(OSError), open("/proc/self/maps", errors="surrogateescape") as maps:
        for line in maps:
            _, is_there, name = line.rstrip("\n").partition(f" {FOLDER}/")
            if is_there and NAMES.match(name) and not name.endswith(" (deleted)"):
                found.add(f"{FOLDER}/{name}")
    return sorted(found)


def remove(paths: list[str]) -> None:
    """Remove these files. Processes that have them mapped keep their memory."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
