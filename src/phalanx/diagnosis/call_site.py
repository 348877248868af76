"""Which line of the user's program called an operation."""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType, FrameType, TracebackType

from phalanx.diagnosis.stack_text import is_library
from phalanx.system.folder import beside, jobs_folder
from phalanx.words import printable

__all__ = ["CallSite", "call_site", "capture", "inside", "raised_at", "running", "running_at", "shown", "text_of"]

# The code and the place in it, in bytes. The line follows from them, and finding it takes longer than an operation may.
CallSite = tuple[CodeType, int]

# The modules in the middle have the wrapper of torch's functions that are marked as deprecated.
_THREADS = ("threading", "concurrent.", "multiprocessing.")
_INSIDE = ("torch.", "phalanx.", "typing_extensions", "warnings", "_py_warnings", *_THREADS)

# The files with code of those modules, which are skipped. Several frames of every call are checked, and a
# file's name is found faster than its module's. Code made from a string has no file of its own, so it is not kept here.
_files: dict[str, bool] = {}

_folders: list[str] = []  # torch's, once it has been imported

# ``running.site`` is where the queued operation that this thread runs was called, since its stack does not show that.
running = threading.local()


def capture(depth: int = 1) -> CallSite | None:
    """The nearest place outside torch and Phalanx; None if there is none."""
    queued: CallSite | None = getattr(running, "site", None)
    if queued is not None:
        return queued
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and (_files.get(frame.f_code.co_filename) or inside(frame)):
        frame = frame.f_back
    return (frame.f_code, frame.f_lasti) if frame is not None else None


def inside(frame: FrameType) -> bool:
    """Whether the frame is torch's or Phalanx's own, which are passed over."""
    name = frame.f_code.co_filename
    if _files.get(name):
        return True
    found: bool = frame.f_globals.get("__name__", "").startswith(_INSIDE) or _is_made_by_torch(name)
    if found and not name.startswith("<"):
        _files[name] = True
    return found


def _is_made_by_torch(name: str) -> bool:
    """Whether torch's compiler has made the code with this file's name, which belongs to none of its modules."""
    if not _folders and (torch := sys.modules.get("torch")) is not None:
        _folders.append(os.path.join(os.path.dirname(torch.__file__ or ""), ""))
    return name.startswith(("<eval_with_key>", *_folders))


def text_of(site: CallSite | None) -> str:
    """The place as ``file:line``, with the path as Python has it; empty for None."""
    if site is None:
        return ""
    code, instruction = site
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return f"{code.co_filename}:{line}"
    return f"{code.co_filename}:{code.co_firstlineno}"


def shown(place: str) -> str:
    """A place as the errors and notes of a rank name it: below the folder of ``phalanx run`` without that folder.

    This is how the launcher's own lines name it. Without ``phalanx run`` a place stays as it is.

    Args:
        place: ``file:line``, or ``function (file:line)`` as :func:`running_at` gives it.
    """
    function, bracket, line = place.partition(" (") if place.endswith(")") else ("", "", place)
    return printable(f"{function}{bracket}{beside(line, jobs_folder())}")


def call_site(site: CallSite | None = None) -> str:
    """Name the line of this thread's call for people, with the thread unless it is the main one; may be empty."""
    place, thread = shown(text_of(site or capture(2))), threading.current_thread()
    if thread is threading.main_thread() or getattr(running, "site", None) is not None:
        return place
    frame: FrameType | None = sys._getframe(1)
    outermost = ""
    while frame is not None:
        if not (module := str(frame.f_globals.get("__name__", ""))).startswith(_THREADS):
            outermost = f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    # What Phalanx's threads call for torch's C++ was called on another thread.
    return place if outermost.startswith("phalanx.") else f"{place or outermost} in thread {thread.name!r}"


def running_at(frame: FrameType | None) -> str:
    """The innermost place of the user's program in a stack, as ``function (file:line)``; empty if there is none.

    Installed libraries are passed over, unless the whole program is one. The path is absolute, since processes of
    other jobs may be told: the one that puts it into words shortens it.
    """
    within = ""
    while frame is not None:
        if not inside(frame):
            code = frame.f_code
            place = f"{getattr(code, 'co_qualname', code.co_name)} ({code.co_filename}:{frame.f_lineno})"
            if not is_library(code.co_filename):
                return place
            within = within or place
        frame = frame.f_back
    return within


def raised_at(trace: TracebackType | None) -> str:
    """The innermost line of the user's program in a traceback, as ``file:line``; empty if there is none.

    Installed libraries are passed over, unless the whole program is one.
    """
    site = within = ""
    while trace is not None:
        if not inside(trace.tb_frame):
            file = trace.tb_frame.f_code.co_filename
            within = f"{file}:{trace.tb_lineno}"
            if not is_library(file):
                site = within
        trace = trace.tb_next
    return site or within
