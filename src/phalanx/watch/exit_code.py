"""With which exit code this process is about to end, as soon as that is decided: no exit handler of Python is told it.

Every exit that Python makes itself ends in one place: the interpreter asks the ``SystemExit`` that nobody has caught
for its ``code``, where no function runs any more, and exits with it. So ``SystemExit.code`` notes who asks. It makes no
difference how the exception came about (``raise SystemExit(3)``, ``exit(3)``, ``argparse``), and a program that catches
it asks inside of a function. Until Python 3.11 the interpreter makes no exception of what ``sys.exit()`` raises unless
something looks at it; ours raises it whole. There a script that has imported ``exit`` from ``sys`` before its process
had a group is missed. ``os._exit()`` makes no exception, and is the last function that runs.

Not seen here are an ``exit()`` or ``_exit()`` that a library calls in C, and an ``os._exit()`` of another thread than
the main one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["before_exit", "exit_code"]

# Called with the exception, as far as there is one, and the code, which is not 0. Both are written by the thread that
# makes this process's groups, before it makes the first one, and read by the thread that exits.
_note: Callable[[BaseException, int], None] | None = None
_pid = 0  # the process that this was asked for; the exit of a forked child is its own affair


def before_exit(note: Callable[[BaseException, int], None]) -> None:
    """Have ``note`` called when this process is about to exit with a code other than 0. It must not wait for long.

    Args:
        note: takes the exception that ends the process, or in which it ends by ``os._exit()``, and the code.
    """
    global _note, _pid
    if _note is None:
        _wrap_code()
        _wrap_exit()
        _wrap_abrupt_exit()
    _note, _pid = note, os.getpid()


def exit_code(status: object) -> int:
    """The code with which a process exits for what was given to ``sys.exit()``."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1


class _Code:
    """``SystemExit.code``, in the place of CPython's own.

    Args:
        own: CPython's, which has the value.
    """

    def __init__(self, own: Any) -> None:
        self._own = own

    def __get__(self, error: SystemExit | None, kind: type | None = None) -> object:
        if error is None:
            return self
        status: object = self._own.__get__(error, kind)
        if sys._getframe().f_back is None and _is_about_to_exit():
            _exits(error, status)
        return status

    def __set__(self, error: SystemExit, status: object) -> None:
        self._own.__set__(error, status)

    def __delete__(self, error: SystemExit) -> None:
        self._own.__delete__(error)


def _wrap_code() -> None:
    # The class is C's, and its attributes cannot be set; its dictionary can. Where Python hides that as well, the code
    # of an exit is not known beforehand.
    names = gc.get_referents(SystemExit.__dict__)
    if len(names) == 1 and type(names[0]) is dict and "code" in names[0]:
        names[0]["code"] = _Code(names[0]["code"])
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))  # what was looked up before is forgotten


def _is_about_to_exit() -> bool:
    """Whether the one that asks without a function is the interpreter, which ends with its main thread."""
    return (
        threading.current_thread() is threading.main_thread()
        and not sys.is_finalizing()
        and not hasattr(sys, "ps1")
        and not sys.flags.interactive
    )


def _wrap_exit() -> None:
    def exit(status: object = None, /) -> NoReturn:
        """Exit the interpreter by raising SystemExit(status)."""
        # As Python makes it: several arguments if the status is a tuple, none if it is None.
        raise SystemExit(*(status if isinstance(status, tuple) else () if status is None else (status,)))

    _put_in_place(sys, exit)


def _wrap_abrupt_exit() -> None:
    before: Callable[[int], NoReturn] = os._exit

    def _exit(status: int) -> NoReturn:
        """Exit to the system with specified status, without normal exit processing."""
        # The main thread would learn that its group is broken, and end the process in another way before this does.
        if threading.current_thread() is threading.main_thread():
            with contextlib.suppress(BaseException):  # also what a signal handler raises meanwhile
                _exits(sys.exc_info()[1] or SystemExit(status), status)
        before(status)

    _put_in_place(os, _exit)


def _put_in_place(module: Any, function: Any) -> None:
    """Have a function take the place of a module's, also for those that pickle it by its name."""
    function.__module__, function.__qualname__ = module.__name__, function.__name__
    setattr(module, function.__name__, function)


def _exits(error: BaseException, status: object) -> None:
    code = exit_code(status)
    if code and _note is not None and os.getpid() == _pid:
        _note(error, code)
