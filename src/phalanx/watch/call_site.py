"""Which line of the user's program called an operation."""

from __future__ import annotations

import sys
import threading
from types import FrameType, TracebackType

__all__ = ["CallSite", "call_site", "capture", "raised_at", "running"]

CallSite = tuple[str, int]

_INSIDE = ("torch.", "phalanx.", "threading")

# The files with code of torch, Phalanx or threading, which are skipped. Several frames of every call are checked, and a
# file's name is found faster than its module's. Code made from a string has no file of its own, so it is not kept here.
_files: dict[str, bool] = {}

# ``running.site`` is where the queued operation that this thread runs was called, since its stack does not show that.
running = threading.local()


def capture(depth: int = 1) -> CallSite | None:
    """File and line of the nearest frame outside torch and Phalanx; None if there is none. Takes half a microsecond."""
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
    """Where the user's program made the call that this thread is in, as ``file:line``; empty if torch's C++ made it."""
    site = capture(2)
    return f"{site[0]}:{site[1]}" if site else ""


def raised_at(trace: TracebackType | None) -> str:
    """The innermost line of the user's program in a traceback, as ``file:line``; empty if there is none."""
    site = ""
    while trace is not None:
        if not _inside(trace.tb_frame):
            site = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return site
