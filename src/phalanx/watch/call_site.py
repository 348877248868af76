"""Which line of the user's program called an operation."""

from __future__ import annotations

import sys
import threading
from types import FrameType

__all__ = ["CallSite", "call_site", "capture", "running"]

CallSite = tuple[str, int]

_INSIDE = ("torch.", "phalanx.", "threading")

# Whether a file's code is torch's or ours. By file, since that is quicker to ask than a module's name, and this is
# asked for several frames of every call. Code made from strings has no file of its own and is asked each time.
_files: dict[str, bool] = {}

# The place from which the operation that this thread runs was queued; a queued operation runs on another stack.
running = threading.local()


def capture(depth: int = 1) -> CallSite | None:
    """The nearest frame outside torch and Phalanx: file and line. Half a microsecond."""
    queued: CallSite | None = getattr(running, "site", None)
    if queued is not None:
        return queued
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and (_files.get(frame.f_code.co_filename) or _inside(frame)):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else None


def _inside(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    inside: bool = frame.f_globals.get("__name__", "").startswith(_INSIDE)
    if inside and not name.startswith("<"):
        _files[name] = True
    return inside


def call_site() -> str:
    """The call that this thread is in, as ``file:line``; empty if it comes from inside torch's C++."""
    site = capture(2)
    return f"{site[0]}:{site[1]}" if site else ""
