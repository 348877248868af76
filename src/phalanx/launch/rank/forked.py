"""What the fork of a running interpreter must forget before it can be a rank, or the launcher of ranks.

A fork has everything that a notebook has: its exit handlers, which would close files and sockets that belong to the
notebook; streams that send what is printed to it; processes that it has started. Python's own ``multiprocessing`` forks
in the same way and forgets the same things (``BaseProcess._bootstrap``).
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import signal
import sys
import threading
import weakref
from typing import Any, NoReturn, TextIO, cast

from phalanx.system import exit_order

__all__ = ["forget_interpreter"]

# What an interpreter keeps of an exception that ended something, and of its prompt.
_OF_A_PROMPT = ("last_type", "last_value", "last_traceback", "last_exc", "ps1", "ps2")


def forget_interpreter() -> None:
    """Make the only thread of a fork an interpreter that has just begun, but for its modules and their content.

    Call it once, right after the fork, with all signals blocked. Standard input is empty from here on; standard output
    and error are what descriptors 1 and 2 are. Signals have the actions that Python gives them.
    """
    _forget_exit_handlers()
    threading.main_thread().name = "MainThread"  # the one that forked had another name
    for name in _OF_A_PROMPT:
        with contextlib.suppress(AttributeError):
            delattr(sys, name)
    sys.excepthook = sys.__excepthook__
    sys.displayhook = sys.__displayhook__
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")
    if not isinstance(builtins.input, type(len)):
        builtins.input = _no_input  # a notebook has put in a function that asks its browser
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        if signal.getsignal(signum) not in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _stream(descriptor: int, mode: str) -> TextIO:
    opened = os.fdopen(descriptor, mode, buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    return cast("TextIO", opened)


def _no_input(prompt: Any = "", /) -> NoReturn:
    print(prompt, end="", flush=True)
    raise EOFError("ranks of phalanx.launch() have no input")


def _forget_exit_handlers() -> None:
    atexit._clear()
    exit_order.register()  # what this package does at exit, which is nothing for what belongs to another process
    # One exit handler runs all finalisers; without this line it would not run those that are made from here on.
    if exit_function := getattr(weakref.finalize, "_exitfunc", None):
        atexit.register(exit_function)
    for finaliser in list(getattr(weakref.finalize, "_registry", ())):
        finaliser.atexit = False
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process._children = set()  # type: ignore[attr-defined]
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()
        util._run_after_forkers()
        atexit.register(util._exit_function)
