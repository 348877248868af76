"""Name the calls of a user's program: the line that made one, and what was called.

A call site is kept as a code object and the instruction in it, which a call finds quickly; the line follows from them.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from traceback import walk_stack, walk_tb
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING

from phalanx.system.files import beside, jobs_folder
from phalanx.words import first_kinds, format_named, printable

if TYPE_CHECKING:
    import torch

CallSite = tuple[CodeType, int]

# The modules in the middle have the wrapper of torch's functions that are marked as deprecated.
_THREADS = ("threading", "concurrent.", "multiprocessing.")
_INSIDE = ("torch.", "phalanx.", "typing_extensions", "warnings", "_py_warnings", *_THREADS)
# The files with code of those modules. Several frames of every call are checked, and a file's name is found faster than
# its module's. Code made from a string has no file of its own, so it is not kept here.
_files: dict[str, bool] = {}
_folders: list[str] = []  # torch's, once it has been imported

OWN = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}{os.sep}"  # the folder of this package
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
# Those of other environments too, which a virtual environment may see, and what torch's compiler has made.
_PARTS = (*(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages")), f"{os.sep}torchinductor_")


class _Running(threading.local):
    """The call site of the queued operation that this thread runs, which its stack does not show."""

    site: CallSite | None = None


running = _Running()


def capture(depth: int = 1) -> CallSite | None:
    """The nearest place outside torch and Phalanx; None if there is none."""
    queued = running.site
    if queued is not None:
        return queued
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and (_files.get(frame.f_code.co_filename) or inside(frame)):
        frame = frame.f_back
    return (frame.f_code, frame.f_lasti) if frame is not None else None


def inside(frame: FrameType) -> bool:
    """Return whether the frame is torch's or Phalanx's own, which are passed over."""
    name = frame.f_code.co_filename
    if _files.get(name):
        return True
    if not _folders and (torch := sys.modules.get("torch")) is not None:
        _folders.append(os.path.join(os.path.dirname(torch.__file__ or ""), ""))
    # What torch's compiler has made belongs to none of its modules.
    made = name.startswith(("<eval_with_key>", *_folders))
    found: bool = made or frame.f_globals.get("__name__", "").startswith(_INSIDE)
    if found and not name.startswith("<"):
        _files[name] = True
    return found


def is_library(file: str) -> bool:
    """Return whether the code of a file is an installed library's, Python's, Phalanx's or made by torch's compiler."""
    return file.startswith(("<", *_LIBRARIES, OWN)) or any(part in file for part in _PARTS)


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
    """Name a place, ``file:line`` or ``function (file:line)``, for people: below the folder of ``phalanx run``."""
    function, bracket, line = place.partition(" (") if place.endswith(")") else ("", "", place)
    return printable(f"{function}{bracket}{beside(line, jobs_folder())}")


def call_site(site: CallSite | None = None, thread: threading.Thread | None = None) -> str:
    """Name the line of a call for people, with the thread that made it unless it is the main one; may be empty.

    By default it is that of this thread.
    """
    place, thread = shown(text_of(site or capture(2))), thread or threading.current_thread()
    if thread is threading.main_thread() or getattr(running, "site", None) is not None:
        return place
    frames = [frame for frame, _ in walk_stack(sys._current_frames().get(thread.ident or 0))]
    names = [f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}" for frame in frames]
    outermost = [name for name in names if not name.startswith(_THREADS)][-1]
    # What Phalanx's threads call for torch's C++ was called on another thread.
    return place if outermost.startswith("phalanx.") else f"{place or outermost} in thread {thread.name!r}"


def running_at(frame: FrameType | None) -> str:
    """The innermost place of the user's program in a stack, as ``function (file:line)``; empty if there is none.

    The path is absolute: whoever puts it into words may be a process of another job.
    """
    found = _of_user(walk_stack(frame)) if frame is not None else None
    if found is None:
        return ""
    code, line = found
    return f"{getattr(code, 'co_qualname', code.co_name)} ({code.co_filename}:{line})"


def raised_at(trace: TracebackType | None) -> str:
    """The innermost line of the user's program in a traceback, as ``file:line``; empty if there is none."""
    found = _of_user(reversed([*walk_tb(trace)]))
    return f"{found[0].co_filename}:{found[1]}" if found is not None else ""


def _of_user(places: Iterable[tuple[FrameType, int]]) -> tuple[CodeType, int] | None:
    """The first of these that is in no installed library, unless the whole program is one."""
    within = None
    for frame, line in places:
        if not inside(frame):
            within = within or (frame.f_code, line)
            if not is_library(frame.f_code.co_filename):
                return frame.f_code, line
    return within


def call_text(
    name: str, dtype: torch.dtype | None, shape: Sequence[int] = (), op: int | None = None, **root: int
) -> str:
    """A call as its user wrote it: ``all_reduce(float32[4, 2], sum)``, ``gather(int64[3], dst=0)``.

    Args:
        name: the name of the collective.
        dtype, shape: those of its tensor; None for a call that has no tensor.
        op: the number of the ``ReduceOp``.
        root: the root rank, by the name of its argument.
    """
    parts = [] if dtype is None else [f"{dtype_name(dtype)}{list(shape)}"]
    if op is not None:
        from torch.distributed import ReduceOp  # the launcher, which needs no torch, imports this module too

        parts.append(ReduceOp.RedOpType(op).name.lower())
    parts += [f"{key}={value}" for key, value in root.items()]
    return f"{name}({', '.join(parts)})"


def exchange_text(dtype: torch.dtype, sent: Sequence[int], expected: Sequence[int]) -> str:
    """An all_to_all, given how many elements it sends to and expects from each rank."""
    return f"all_to_all({dtype_name(dtype)}, sends {list(sent)}, expects {list(expected)} elements)"


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype without torch's name: ``float32``."""
    return str(dtype).removeprefix("torch.")


def lengths_that_count(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return what two ranks must have alike of a shape; empty if it goes with any of its size.

    torch asks for the same number of elements only, and a vector may well meet a matrix. Two matrices of different
    shapes are a mistake: one is transposed.
    """
    long = tuple(length for length in shape if length > 1)
    return long if len(long) > 1 else ()


@lru_cache(maxsize=4096)
def shape_word(shape: tuple[int, ...]) -> int:
    """A number by which ranks compare the shapes of a call; 0 for a shape that goes with any other of that size.

    ``native/csrc_entry/arguments.c`` computes it alike.
    """
    word = 0
    for length in lengths_that_count(shape):
        word = (word ^ length) * 0x9E3779B97F4A7C15 % (1 << 64)
    return word


def listed(calls: dict[int, str], ranks: Iterable[int]) -> str:
    """One line for each different call, with those of the ranks that made it."""
    ranks_of: dict[str, list[int]] = {}
    for rank in ranks:
        ranks_of.setdefault(calls.get(rank, "not known; in other code, or ended"), []).append(rank)
    lines = [f"  {format_named('rank', sorted(members))}: {call}" for call, members in ranks_of.items()]
    return "\n".join(first_kinds(lines))
