"""Telling the other ranks how this one's script ends, as soon as it does.

A process takes seconds to end once torch is loaded, and the others may wait for it meanwhile. So an exception that
nobody caught is told from the exception hook, before the interpreter begins to finalise: by the core to the ranks that
share memory, and by the groups of :func:`tell_of_failure` to those of other hosts. An exit is told by the core,
from the process's exit code (``native/csrc/life.c``); a worker of ``multiprocessing`` that was forked does not pass
there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import weakref
from multiprocessing import util
from types import TracebackType
from typing import Protocol

from phalanx.native.core import TEXT_BYTES, library
from phalanx.watch.call_site import raised_at

__all__ = ["Teller", "script_failed", "tell_how_the_script_ends", "tell_of_failure"]


class Teller(Protocol):
    """What tells ranks that the core does not reach."""

    def script_fails(self, cause: str) -> None:
        """An exception that nobody caught ends this process's script."""
        ...


_installed = False
_worker: multiprocessing.process.BaseProcess | None = None
# By identity: unlike a WeakSet it can be listed in one step, while other threads make groups.
_tellers: weakref.WeakValueDictionary[int, Teller] = weakref.WeakValueDictionary()
# The groups are the parent's, whose script goes on when that of a forked child fails.
os.register_at_fork(after_in_child=lambda: _tellers.clear())


def tell_of_failure(teller: Teller) -> None:
    """Have this one told as well when an exception that nobody caught ends the script, as long as it exists."""
    tell_how_the_script_ends()
    _tellers[id(teller)] = teller


def tell_how_the_script_ends() -> None:
    """Have the groups of this process told of the script's end. Called whenever a group is made."""
    global _installed
    if not _installed:
        _installed = True
        _wrap_excepthook()
    if multiprocessing.parent_process() is not None:
        _watch_worker()


def script_failed() -> bool:
    """Whether an exception that nobody caught has ended the script; the interpreter records it before its hook runs."""
    return getattr(sys, "last_value", None) is not None and not _interactive()


def _wrap_excepthook() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # A program may also call the hook by hand, to print an exception that it has caught, and go on.
        if script_failed() and sys.last_value is error:
            _tell_failure(error)
        before(kind, error, trace)

    sys.excepthook = hook


def _interactive() -> bool:
    """Whether a prompt follows an exception, and not the end of the process."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _tell_failure(error: BaseException) -> None:
    with contextlib.suppress(Exception):  # a __str__ that fails must not hide the error itself
        first = str(error).partition("\n")[0]
        site = raised_at(error.__traceback__)
        text = f"{type(error).__name__}: {first}" if first else type(error).__name__
        cause = f"{text[:200]}{f' at {site}' if site else ''}"
        library().phx_process_fails(cause.encode()[: TEXT_BYTES - 1])
        for reference in _tellers.valuerefs():
            if (teller := reference()) is not None:
                with contextlib.suppress(Exception):  # the others must be told all the same
                    teller.script_fails(cause)


def _watch_worker() -> None:
    """A forked worker ends by os._exit, after multiprocessing's finalisers; one that was spawned ends as others do."""
    global _worker
    process = multiprocessing.current_process()
    method = getattr(process, "_start_method", None) or multiprocessing.get_start_method(allow_none=True)
    if method != "spawn" and _worker is not process:
        _worker = process
        util.Finalize(None, _worker_ends, exitpriority=-1000)


def _worker_ends() -> None:
    error = sys.exc_info()[1]
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        library().phx_process_leaves()
    else:
        _tell_failure(error)
