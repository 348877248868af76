"""Telling the other ranks how this one's script ends, as soon as it does.

A process takes seconds to end once torch is loaded, and the others may wait for it meanwhile. So an exception that
nobody caught is told from the exception hook, before the interpreter begins to finalise: by the core to the ranks that
share memory, and by the groups of :func:`tell_of_failure` to those of other hosts. An exit is told by the core,
from the process's exit code (``native/csrc/life.c``); a worker of ``multiprocessing`` that was forked does not pass
there. The launcher, which runs the script, tells it earlier (:func:`tell_of_exit`), and to other hosts as well.

A script that closes its groups on the way of an exception, by ``with`` or ``finally``, has no groups left when the hook
runs. So each group that is closed then tells its ranks the exception (:func:`cause_of_going`).

Often a script fails because another rank has left the group in order: a message for that one cannot be sent. Then the
other ranks are told which rank left, because that is the cause of the failure. The error that reports a rank that left
is noted (:func:`note_left`) when it is made.
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

from phalanx.diagnosis.call_site import raised_at, shown
from phalanx.exception import PhalanxError, chain
from phalanx.native.core import TEXT_BYTES, library
from phalanx.system.bounded import within
from phalanx.words import printable

__all__ = [
    "Teller",
    "cause_of_going",
    "note_left",
    "script_failed",
    "tell_how_the_script_ends",
    "tell_of_exit",
    "tell_of_failure",
    "who_left",
]


class Teller(Protocol):
    """A group that tells its ranks what the core does not."""

    def about_to_fail(self, error: BaseException) -> None:
        """An exception is about to end this process's script; called before the core tells so. It must not wait."""
        ...

    def script_fails(self, cause: str) -> None:
        """An exception that nobody caught, or an exit with a code other than 0, ends this process's script."""
        ...


# The groups' own limits are shorter, each for itself.
_TELLING_S = 3.0

_installed = False
_exits_badly = False
_has_told = False
# Of errors that say that a rank has left a group in order: what made the error for the group, and the rank there.
_left: weakref.WeakKeyDictionary[BaseException, tuple[weakref.ref[object], int]] = weakref.WeakKeyDictionary()
_worker: multiprocessing.process.BaseProcess | None = None
# By identity: unlike a WeakSet it can be listed in one step, while other threads make groups.
_tellers: weakref.WeakValueDictionary[int, Teller] = weakref.WeakValueDictionary()
# The groups are the parent's, whose script goes on when that of a forked child fails.


def _after_fork() -> None:
    global _exits_badly, _has_told
    _exits_badly = _has_told = False
    _tellers.clear()


os.register_at_fork(after_in_child=_after_fork)


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
    """Whether an exception that nobody caught, or an exit with a code other than 0, has ended the script.

    The interpreter records an exception before its hook runs.
    """
    return _exits_badly or (getattr(sys, "last_value", None) is not None and not _interactive())


def tell_of_exit(error: BaseException, code: int) -> None:
    """Tell the other ranks that an exit, with a code other than 0, ends the script; called once it is certain.

    Nothing more is told if they know already that the script has failed.

    Args:
        error: the exit, or an exception that the script was handling when it ended the process.
        code: the exit code.
    """
    global _exits_badly
    _exits_badly = True
    if not _has_told:
        # On a thread: a signal handler may end the process while its own thread has a lock that telling needs.
        with contextlib.suppress(Exception):  # the process must exit all the same
            within(_TELLING_S, lambda: _tell(error, f"exit code {code}"))


def exit_code(status: object) -> int:
    """The code with which a process exits for what was given to ``sys.exit()``."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1


def cause_of_going(error: BaseException) -> str:
    """The failure that an exception is by which a rank comes to close a group, in words; empty if it is none."""
    if isinstance(error, SystemExit):
        code = exit_code(error.code)
        return f"exit code {code}" if code else ""
    return _cause(error) if isinstance(error, (Exception, KeyboardInterrupt)) else ""


def note_left(error: BaseException, maker: object, group_rank: int) -> None:
    """Note that an error, new and of this package, says that a rank has left a group in order.

    Args:
        error: the error.
        maker: what made it, for one group.
        group_rank: the rank that left.
    """
    _left[error] = weakref.ref(maker), group_rank


def who_left(error: BaseException | None, maker: object) -> tuple[int, str] | None:
    """The rank that has left a group, so that an error came about, and the text of the error that says so, or None.

    Args:
        error: what ends the script, perhaps raised because of another one.
        maker: what makes errors for the group.
    """
    for each in chain(error):
        noted = _left.get(each) if isinstance(each, PhalanxError) else None  # others cannot be looked up
        if noted is not None and noted[0]() is maker:
            return noted[1], str(each)
    return None


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
        _tell(error, _cause(error))


def _cause(error: BaseException) -> str:
    first = str(error).partition("\n")[0]
    site = shown(raised_at(error.__traceback__))
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return printable(f"{text[:200]}{f' at {site}' if site else ''}")


def _tell(error: BaseException, cause: str) -> None:
    global _has_told
    _has_told = True
    tellers = [teller for reference in _tellers.valuerefs() if (teller := reference()) is not None]
    for teller in tellers:
        with contextlib.suppress(Exception):  # the others must be told all the same
            teller.about_to_fail(error)
    library().phx_process_fails(cause.encode()[: TEXT_BYTES - 1])
    for teller in tellers:
        with contextlib.suppress(Exception):
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
    elif isinstance(error, SystemExit):
        tell_of_exit(error, exit_code(error.code))
    else:
        _tell_failure(error)
