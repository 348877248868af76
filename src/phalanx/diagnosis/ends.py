"""Tell other ranks how this process's script ends, and find out how other processes of the job have ended.

A process takes seconds to end once torch is loaded, so others are told earlier:

- an exception that nobody caught, from the exception hook: by the core to ranks that share memory, and by the groups of
  :func:`tell_of_failure` to those of other hosts;
- an exit, by the core (``native/csrc/segment/breaking.c``), and earlier by the launcher (:func:`tell_of_exit`);
- an exception on whose way a group is closed, as by ``with``, by that group (:func:`cause_of_going`).

How another process has ended only its parent knows, which is the launcher: it answers :func:`how_ended`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from phalanx.diagnosis.call_site import raised_at, shown
from phalanx.exception import chain
from phalanx.lost import PeerLost
from phalanx.native.core import TEXT_BYTES, library
from phalanx.system import processes
from phalanx.system.threads import within
from phalanx.words import printable

# The parent says how a process has ended before it reaps it: while a zombie is there, its end may still be said.
PATIENCE_S = 2.0
AT_ONCE_S = 0.1
_POLL_S = 0.001
_TELLING_S = 3.0  # the groups' own limits are shorter, each for itself


class Teller(Protocol):
    """A group that tells its ranks what the core does not."""

    def script_fails(self, error: BaseException, cause: str) -> None:
        """An exception that nobody caught, or an exit with a code other than 0, ends this process's script."""


_installed = False
_exits_badly = False
_has_told = False
_worker: object = None  # of multiprocessing, once its end is told
# By identity: unlike a WeakSet it can be listed in one step, while other threads make groups.
_tellers: weakref.WeakValueDictionary[int, Teller] = weakref.WeakValueDictionary()


def _after_fork() -> None:
    """The groups are the parent's, whose script goes on when that of a forked child fails."""
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
    import multiprocessing.util  # torch has it, but not every script that the launcher runs has torch

    global _installed, _worker
    if not _installed:
        _installed = True
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            # A program may also call the hook by hand, to print an exception that it has caught, and go on.
            if script_failed() and sys.last_value is error:
                _tell_failure(error)
            before(kind, error, trace)

        sys.excepthook = hook
    # A forked worker ends by os._exit, after multiprocessing's finalisers; one that was spawned ends as others do.
    process = multiprocessing.current_process()
    method = getattr(process, "_start_method", None) or multiprocessing.get_start_method(allow_none=True)
    if multiprocessing.parent_process() is not None and method != "spawn" and _worker is not process:
        _worker = process
        multiprocessing.util.Finalize(None, _worker_ends, exitpriority=-1000)


def script_failed() -> bool:
    """Return whether an exception that nobody caught, or an exit with a code other than 0, has ended the script."""
    prompts = hasattr(sys, "ps1") or bool(sys.flags.interactive)  # after an exception, and the process goes on
    # The interpreter records an exception before its hook runs.
    return _exits_badly or (getattr(sys, "last_value", None) is not None and not prompts)


def tell_of_exit(error: BaseException, code: int) -> None:
    """Tell the other ranks that an exit with a code other than 0 ends the script, unless they know that it has failed.

    ``error`` is the exit, or an exception that the script was handling when it ended the process.
    """
    global _exits_badly
    _exits_badly = True
    if _installed and not _has_told:
        # On a thread: a signal handler may end the process while its own thread has a lock that telling needs.
        with contextlib.suppress(Exception):  # the process must exit all the same
            within(_TELLING_S, lambda: _tell(error, f"exit code {code}"))


def cause_of_going(error: BaseException) -> str:
    """The failure that an exception is by which a rank comes to close a group, in words; empty if it is none."""
    if isinstance(error, SystemExit):
        code = _exit_code(error.code)
        return f"exit code {code}" if code else ""
    return _cause(error) if isinstance(error, (Exception, KeyboardInterrupt)) else ""


def _tell_failure(error: BaseException) -> None:
    with contextlib.suppress(Exception):  # a __str__ that fails must not hide the error itself
        _tell(error, _cause(error))


def _exit_code(status: object) -> int:
    """The code with which a process exits for what was given to ``sys.exit()``."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1


def _cause(error: BaseException) -> str:
    """Describe an error in a line, and the loss of a rank for which it was raised."""
    lost = next((each for each in chain(error) if isinstance(each, PeerLost)), error)
    site = shown(raised_at(error.__traceback__))
    text = f"{_line(error)}{'' if lost is error else f', for {_line(lost)}'}{f' at {site}' if site else ''}"
    return printable(text)


def _line(error: BaseException) -> str:
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}"[:200] if first else type(error).__name__


def _tell(error: BaseException, cause: str) -> None:
    global _has_told
    _has_told = True
    library().phx_process_fails(cause.encode()[: TEXT_BYTES - 1])
    for teller in [teller for reference in _tellers.valuerefs() if (teller := reference()) is not None]:
        with contextlib.suppress(Exception):  # the others must be told all the same
            teller.script_fails(error, cause)


def _worker_ends() -> None:
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit) and (code := _exit_code(error.code)):
        tell_of_exit(error, code)
    elif error is not None and not isinstance(error, SystemExit):
        _tell_failure(error)
    else:
        library().phx_process_leaves()


class Ending(NamedTuple):
    """Exit status of a process; empty and 0 if it is not known."""

    text: str = ""  # as ``with exit code 3`` or ``by signal 9 (SIGKILL)``
    signal: int = 0


_look: Callable[[int], Ending | None] | None = None
_look_elsewhere: Callable[[str, int], dict[str, Any] | None] | None = None


def learn_by(
    here: Callable[[int], Ending | None], elsewhere: Callable[[str, int], dict[str, Any] | None] | None
) -> None:
    """Have ends looked up by the launcher's functions: by pid, and by another host's name and pid; None if it runs."""
    global _look, _look_elsewhere
    _look, _look_elsewhere = here, elsewhere


def ended_elsewhere(host: str, pid: int) -> dict[str, Any] | None:
    """Ask the launcher about a process of another host that has ended; None without such a launcher.

    Returns:
        ``how`` it has ended, its ``signal``, ``last_operation`` and ``last_line``, and whether it ``was_in_it``; empty
        if nothing has been said so far.
    """
    return None if _look_elsewhere is None else _look_elsewhere(host, pid) or {}


def how_ended(pid: int, patience_s: float = PATIENCE_S) -> Ending:
    """Ask the launcher for the exit status of a process that is gone or ending, for ``patience_s``."""
    if _look is None:
        return Ending()
    until = time.monotonic() + patience_s
    while True:
        # In this order: the end of one that has been reaped was said before.
        may_be_said = processes.state_of(pid) != "" and time.monotonic() < until
        found = _look(pid)
        if found is not None or not may_be_said:
            return found or Ending()
        time.sleep(_POLL_S)
