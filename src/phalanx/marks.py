"""Step and label of a script, as it says them for the flight recorder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.diagnosis import recorder
from phalanx.wrong_arguments import explained

__all__ = ["label"]


@explained
@contextmanager
def label(text: str) -> Iterator[None]:
    """Name what the script does in a ``with`` block; every operation that begins there is recorded with it.

    The launcher's reports say it: ``all_reduce #118 at train.py:42 in "evaluation"``. Blocks may lie inside each other:
    the innermost counts, for all threads of this process. It costs less than a microsecond and needs no group; no other
    rank need call it.

    Args:
        text: a few words; a text is kept as long as the process runs, so use few different ones, and
            :meth:`World.step <phalanx.World.step>` for numbers.
    """
    before = recorder.label_now()
    recorder.mark(label=str(text))
    try:
        yield
    finally:
        recorder.mark(label=before)
