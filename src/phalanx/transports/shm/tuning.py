"""The sizes at which the shared-memory transport changes its algorithm, built in or measured on this machine.

``phalanx bench --tune`` writes a file; rank 0 of each group reads it and its values travel in the group's segment, so
all ranks of a group act alike whatever they could read themselves.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from phalanx import settings
from phalanx.system.files import check_creatable, whole_file
from phalanx.system.foreign_values import read_json

__all__ = ["Tuning", "check_tuning_file", "load_tuning", "save_tuning", "tuning_in_force", "tuning_path"]

LINE_BYTES = 64


@dataclass(frozen=True)
class Tuning:
    """Switch points.

    Attributes:
        chunk_bytes: bytes a rank puts into its slot at a time.
        small_bytes: an all-reduce whose inputs, over all ranks, add up to at most so many bytes takes one
            synchronisation instead of two per chunk.
        stream_bytes: an output of at least so many bytes is written past the caches.
    """

    chunk_bytes: int = 512 * 1024
    small_bytes: int = 16 * 1024
    stream_bytes: int = 16 * 1024 * 1024

    def for_size(self, size: int) -> tuple[int, int, int]:
        """Chunk, small and stream bytes for a group of ``size``: a chunk has a whole cache line for every rank."""
        chunk = max(self.chunk_bytes // LINE_BYTES, size) * LINE_BYTES
        return chunk, self.small_bytes, self.stream_bytes


def tuning_path() -> Path:
    """``$PHALANX_TUNING``, or ``phalanx/tuning.json`` in the user's configuration directory."""
    named = os.environ.get(settings.TUNING)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "phalanx" / "tuning.json"


_in_force: Tuning | None = None


@contextmanager
def tuning_in_force(tuning: Tuning) -> Iterator[None]:
    """Make groups that this process creates inside the ``with`` use these values, where it is their rank 0."""
    global _in_force
    before, _in_force = _in_force, tuning
    try:
        yield
    finally:
        _in_force = before


def load_tuning() -> Tuning:
    """The sizes measured on this machine, else the built-in ones. A file that cannot be used causes a warning."""
    return _in_force or _read()


@cache
def _read() -> Tuning:
    try:
        path = tuning_path()
        data = path.read_bytes()
    except (OSError, RuntimeError):  # a RuntimeError if the user has no home directory
        return Tuning()
    try:
        values = read_json(data)
        tuning = Tuning(*(int(values[name]) for name in ("chunk_bytes", "small_bytes", "stream_bytes")))
        if tuning.chunk_bytes < LINE_BYTES or tuning.small_bytes < 0 or tuning.stream_bytes < 0:
            raise ValueError(f"sizes out of range: {values}")
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        warnings.warn(f"{path} is ignored: {error}. Write it anew with: phalanx bench --tune", stacklevel=2)
        return Tuning()
    return tuning


def check_tuning_file() -> Path:
    """Return the path of the file if it can be made; raise OSError if not, and RuntimeError without a home."""
    path = tuning_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    check_creatable(path)
    return path


def save_tuning(tuning: Tuning) -> Path:
    """Write the file that :func:`load_tuning` reads, whole or not at all; returns its path."""
    path = check_tuning_file()
    with whole_file(path) as file:
        file.write(json.dumps(asdict(tuning), indent=2).encode() + b"\n")
    _read.cache_clear()
    return path
