"""Stacks on demand: how a process writes them though its interpreter may be held, and how another one asks and reads.

A thread that gets a signal writes its stack by ``faulthandler``, in C. But if the signal comes while the interpreter
links in the frame of a call (Python 3.11 and later), ``faulthandler`` may end the process, or not end itself. So a copy
of the process writes the stack (``native/csrc/system/stacks.c``), unless the thread is outside the interpreter's own
code: a copy costs some 40 ms for each GiB of memory. If the copy could not, who has asked asks again
(:func:`was_changed`).

A process that others of its user may look at has one file in memory for that (:func:`be_seen`). Only its handler writes
there, behind what is there. Others find the file through /proc, lock it, since two threads would write at once, ask by
a signal, and take the first whole stack that comes then.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from phalanx.diagnosis.call_site import OWN, is_library
from phalanx.errors import BackendError
from phalanx.native.core import library
from phalanx.system import processes
from phalanx.system.files import beside, own_folder, source_lines
from phalanx.system.processes import start_of
from phalanx.words import format_named

# No library is known to use it. The launcher asks its ranks by the next one (launch/rank/trace.py).
PLACE_SIGNAL = signal.SIGRTMAX - 4
# In front of what a rank has asked another process for (:func:`publish`), behind its stack.
ASKED = "\nAsked: "
# Where a process is whose script has ended, while Python still waits for its threads; it stands after the word "at".
SCRIPT_ENDED = "the end of its script, waiting for its other threads to end"

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d{1,9}) in (?P<function>.*)$', re.MULTILINE)
_HEADER = "Stack (most recent call first):\n"  # with which each begins
_CHANGED = "  (it was being changed)"  # PHX_STACK_CHANGED
_IGNORE = ctypes.c_void_p(1)  # SIG_IGN
_LARGEST, _BLOCK = 1 << 20, 1 << 16  # how large the file may be before a reader cuts it, and a stack
# How long the main thread may take to write, and another one. A busy machine or a disk delays it.
_MAIN_S, _WRITTEN_S = 2.0, 0.5
_LOOK_S = 0.002
_SILENT = ("", "T", "t", "Z", "X")  # the kernel's letters for a thread that runs no handler: gone, stopped, ended
_MOST_THREADS = 4
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Frame:
    """One call of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_librarys(self) -> bool:
        """Return whether it belongs to an installed library or to Phalanx, and not to the user's program."""
        return is_library(self.file)


def frames_of(stack: str) -> list[Frame]:
    """The frames of a stack, the innermost first, as faulthandler lists them."""
    return [Frame(match["file"], int(match["line"]), match["function"]) for match in _FRAME.finditer(stack)]


def has_ended(frames: Sequence[Frame]) -> bool:
    """Return whether this is a main thread whose script is over, and which waits for other threads."""
    return bool(frames) and frames[-1].function == "_shutdown" and os.path.basename(frames[-1].file) == "threading.py"


def asked_in(stack: str) -> str:
    """Return what the process had asked another one for, if that stands behind its stack; else an empty text."""
    return stack.rpartition(ASKED)[2] if ASKED in stack else ""


_publish: Callable[[str], None] | None = None


def publish_by(function: Callable[[str], None]) -> None:
    """Have ``function`` called with each text of :func:`publish`; the launcher does so in its ranks."""
    global _publish
    _publish = function


def publish(text: str) -> None:
    """Let the launcher know what this process has asked another one for, as ``worker1 for add (train.py:12)``."""
    if _publish is not None:
        _publish(text)


def write_stacks_on(number: int, file: int) -> None:
    """From now on whichever thread gets this signal writes its Python stack into a file, the innermost call first."""
    faulthandler.unregister(number)
    _libc.signal(number, _IGNORE)  # which faulthandler puts back
    faulthandler.register(number, file=file, all_threads=False)
    if sys.version_info >= (3, 11):
        with contextlib.suppress(BackendError):  # the core was not built
            somewhere = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p)
            library().phx_stacks_in_copy(number, file, somewhere)


def was_changed(stack: str) -> bool:
    """Return whether a stack could not be read, as its thread was just entering a function; ask again."""
    return _CHANGED in stack


_opening = threading.Lock()
_seen: tuple[int, int] | None = None  # this process, and its file; -1 if it has none


def be_seen() -> None:
    """Let other processes look at this one, as long as it lives.

    They cannot if it has no descriptor left, or if its program handles or blocks the signal itself.
    """
    global _seen
    pid = os.getpid()
    with _opening, contextlib.suppress(OSError):
        if _seen is not None and _seen[0] == pid:
            return
        inherited, _seen = _seen, (pid, -1)
        if inherited is not None and inherited[1] >= 0:
            faulthandler.unregister(PLACE_SIGNAL)  # else the handler of the parent would count as the program's
            os.close(inherited[1])
        if processes.signal_sets(pid, PLACE_SIGNAL).isdisjoint({"SigCgt", "SigBlk"}):
            file = os.memfd_create(_stacks_of(pid))
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # also after a reader has cut it
            write_stacks_on(PLACE_SIGNAL, file)
            _seen = pid, file


class Mark:
    """A name, unique on the host, by which others see this process and know it from a later one of its pid."""

    def __init__(self, name: str) -> None:
        be_seen()
        self._file = -1
        with contextlib.suppress(OSError):
            self._file = os.memfd_create(name)

    def close(self) -> None:
        """Take it away."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def is_there(pid: int, name: str) -> bool:
    """Return whether the process of this pid is the one with this :class:`Mark`."""
    return bool(memory_file(pid, name))


def place_of(pid: int, name: str) -> str:
    """Find the place in the user's program of a thread of a process that runs, or else of its main thread.

    Returns:
        ``function (file:line)``, or ``SCRIPT_ENDED``; empty if it cannot be found out, as of a process that is stopped
        or has no :class:`Mark` of this name.
    """
    with contextlib.suppress(OSError):  # it has ended
        threads = [int(each) for each in os.listdir(f"/proc/{pid}/task")] if is_there(pid, name) else []
        running = [each for each in threads if processes.state_of(pid, each) == "R"]
        running.sort(key=lambda each: each != pid)  # the main thread first, if it runs
        return _place(pid, dict.fromkeys([*running[:_MOST_THREADS], pid]), _WRITTEN_S) if threads else ""
    return ""


def place_of_main(pid: int) -> str:
    """Find the place of the main thread of a process that can be seen; see :func:`place_of`."""
    return _place(pid, [pid], _MAIN_S)


def _place(pid: int, threads: Iterable[int], patience_s: float) -> str:
    start = start_of(pid)
    path = memory_file(pid, _stacks_of(pid))
    with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file, _locked(file.fileno(), patience_s):
        for thread in threads:
            frames = frames_of(_ask(pid, start, thread, file.fileno(), patience_s))
            for frame in frames:
                if not frame.is_librarys:
                    return f"{frame.function} ({frame.file}:{frame.line})"
            if has_ended(frames):
                return SCRIPT_ENDED
    return ""


def _stacks_of(pid: int) -> str:
    return f"phalanx-stacks-{pid}"


def memory_file(pid: int, name: str) -> str:
    """The path of the file in memory of that name that a process has open; empty if it has none."""
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{number}"
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith(f"/memfd:{name} "):
                    return path
    return ""


@contextlib.contextmanager
def _locked(file: int, patience_s: float) -> Iterator[None]:
    """Have nobody else ask meanwhile; OSError if others do for too long, or are stopped while they do."""
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
        time.sleep(_LOOK_S)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open, too


def _ask(pid: int, start: int, thread: int, file: int, patience_s: float) -> str:
    """Have a thread write its stack, and read it; empty if nothing comes in time."""
    if os.fstat(file).st_size > _LARGEST:
        os.ftruncate(file, 0)
    before = _signal(pid, start, thread, file)
    until = time.monotonic() + patience_s
    while time.monotonic() < until and processes.state_of(pid, thread) not in _SILENT:
        time.sleep(_LOOK_S)
        # The handler writes in many small pieces, and blocks the signal until it returns.
        if _first_whole(file, before) and "SigBlk" not in processes.signal_sets(thread, PLACE_SIGNAL):
            if not was_changed(_first_whole(file, before)):
                break
            before = _signal(pid, start, thread, file)
    return _first_whole(file, before)


def _signal(pid: int, start: int, thread: int, file: int) -> int:
    """Ask a thread, if its process is still the one that answers, and not another program by now; the file's size."""
    size = os.fstat(file).st_size
    if start_of(pid) == start and "SigCgt" in processes.signal_sets(pid, PLACE_SIGNAL):
        if hasattr(_libc, "tgkill"):
            _libc.tgkill(pid, thread, int(PLACE_SIGNAL))
        elif thread == pid:
            os.kill(pid, PLACE_SIGNAL)
    return size


def _first_whole(file: int, begin: int) -> str:
    """The first stack that begins at or behind ``begin``; empty if there is none yet.

    What comes before it is the end of a stack for which somebody had no patience left.
    """
    _, header, stack = os.pread(file, _BLOCK, begin).decode(errors="replace").partition(_HEADER)
    return header + stack.partition(_HEADER)[0]


# -- as people read them -------------------------------------------------------------------------------

_LAUNCHERS = ("<frozen ", f"{OWN}launch{os.sep}", f"{OWN}commands{os.sep}", f"{OWN}__main__.py")
_MOST_PLACES = 8
_LONGEST_LINE = 60


def frames_in(stack: str) -> tuple[Frame, ...]:
    """The frames of the last stack in a text, the innermost first, without those of the launcher below the script."""
    found = frames_of(stack[max(0, stack.rfind("Stack (")) :])
    launchers = [frame.file.startswith(_LAUNCHERS) for frame in found]
    # Below an exit handler, which the interpreter calls, there is nothing; below the launcher its console script.
    end = len(found)
    if any(launchers):
        while not launchers[end - 1]:
            end -= 1
        while end and launchers[end - 1]:
            end -= 1
    return tuple(found[:end])


def place_in(stack: str) -> str:
    """The innermost line of the script in a stack, with its text, or that it is over; empty if it has neither."""
    frames = frames_in(stack)
    own = [frame for frame in frames if not frame.is_librarys]
    if own or (frames and not has_ended(frames)):
        frame = (own or frames)[0]
        text = _text_of(frame) or frame.function
        shown = text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 1]}…"
        return f"{beside(frame.file, own_folder())}:{frame.line} {shown}"
    return SCRIPT_ENDED if frames else ""


def _text_of(frame: Frame) -> str:
    return "".join(source_lines(frame.file)[frame.line - 1 : frame.line]).strip()


def format_stack(stack: str) -> list[str]:
    """A stack as in a traceback, the innermost call last, without the launcher's frames."""
    lines = []
    for frame in reversed(frames_in(stack)):
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        text = _text_of(frame)
        lines += [f"    {text}"] if text else []
    return lines


def format_places(stacks: Mapping[int, str]) -> list[str]:
    """A line for each distinct place at which ranks were, from the stack of each."""
    places: dict[str, list[int]] = {}
    for rank, stack in stacks.items():
        asked = asked_in(stack)
        place = f"{place_in(stack) or 'not in its script'}{f'; it waits for {asked}' if asked else ''}"
        places.setdefault(place, []).append(rank)
    lines = [f"{format_named('rank', ranks)}: {place}" for place, ranks in places.items()]
    if len(lines) > _MOST_PLACES:
        lines = [*lines[:_MOST_PLACES], f"and {len(lines) - _MOST_PLACES} more places"]
    return lines


def format_stacks(stacks: Mapping[int, str]) -> list[str]:
    """The stacks in full, as tracebacks; those of several ranks once if they are equal."""
    alike: dict[tuple[tuple[Frame, ...], str], list[int]] = {}
    for rank, stack in stacks.items():
        alike.setdefault((frames_in(stack), asked_in(stack)), []).append(rank)
    lines = []
    for (_, asked), ranks in alike.items():
        lines += [f"{format_named('rank', ranks)} {'is' if len(ranks) == 1 else 'are'} at"]
        lines += format_stack(stacks[ranks[0]]) + ([f"  waiting for {asked}"] if asked else [])
    return lines
