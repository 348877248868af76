"""The supervisor and the ranks of ``phalanx.launch()``, which call a function of another interpreter.

The supervisor is a process of its own, because it takes over signals, adopts processes and ends all its descendants. A
rank leaves its result as a pickle in a file in memory; nothing is left of it when all processes have ended.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import json
import os
import pickle
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO, cast

from phalanx.errors import LaunchError, PhalanxError
from phalanx.launch.attempts import launch
from phalanx.launch.job.job import Job
from phalanx.launch.rank.start import RankStart, reported
from phalanx.system import exit_order, processes

__all__ = ["begin", "forget_interpreter", "supervise"]

# What an interpreter keeps of an exception that ended something, and of its prompt.
_OF_A_PROMPT = ("last_type", "last_value", "last_traceback", "last_exc", "ps1", "ps2")


def begin(file: int) -> NoReturn:
    """In a fresh interpreter: be the supervisor, as a pickle in a file in memory says."""
    with open(file, "rb") as start:
        job, pickled, variables, results, reason, parent = pickle.load(start)

    def call() -> Any:
        function, arguments, named = pickle.loads(pickled)
        return function(*arguments, **named)

    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    supervise(job, call, results, reason, parent)


def supervise(job: Job, call: Callable[[], Any], results: Sequence[int], reason: int, parent: int) -> NoReturn:
    """Run a job of a function; in each rank, call it.

    ``results`` are the descriptors of the files for what the ranks return, and ``reason`` is that for why the job
    fails. When the ``parent`` ends, the interpreter, this process is killed, and with it the ranks.
    """
    processes.die_with_parent(parent)
    processes.set_name("phalanx-launch")

    def hand_over(rank: int, text: str, code: int) -> None:
        os.pwrite(reason, json.dumps({"rank": rank, "text": text, "code": code}).encode(), 0)

    code = 130
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        outcome = launch(job, hand_over)
        if isinstance(outcome, RankStart):
            _call_and_end(outcome, call, results[outcome.plan.rank])
        code = outcome
    except (LaunchError, PhalanxError) as error:
        hand_over(-1, str(error), 2)
        code = 2
    except KeyboardInterrupt:
        pass  # nothing had been started
    finally:
        os._exit(code)


def _call_and_end(start: RankStart, call: Callable[[], Any], result: int) -> NoReturn:
    """Be a rank: call a function, write what it returns into a file, and end this process."""
    code = 1
    try:
        with reported(start):
            _write(call(), result)
        code = 0
    except SystemExit as error:
        # As multiprocessing has it: exiting with 0 is returning None.
        if error.code is None or isinstance(error.code, int):
            code = (error.code or 0) & 0xFF
        if code == 0:
            _write(None, result)
    except KeyboardInterrupt:
        code = 130
    _end(code)


def _write(value: Any, result: int) -> None:
    """Pickle a result; by cloudpickle, where it is installed, if pickle cannot."""
    with open(result, "wb", closefd=False) as file:
        try:
            pickle.dump(value, file, protocol=5)
            return
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        file.seek(0)
        file.truncate()
        try:
            import cloudpickle

            cloudpickle.dump(value, file, protocol=5)
        except Exception:
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            raise LaunchError(
                f"the function has returned a {kind} that cannot be pickled ({reason}); return what can be, such as "
                "tensors, numbers, state_dict() in place of a model, or nothing"
            ) from None


def _end(code: int) -> NoReturn:
    """End this process as an interpreter ends, but for taking apart its modules, which it has from another one."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code == 0:
        # The core tells other ranks by a handler of C's exit(), which runs only if the core was loaded after the fork.
        from phalanx.native.core import library

        with contextlib.suppress(Exception):
            library().phx_process_leaves()
    processes.exit_without_finalising(code)


def forget_interpreter() -> None:
    """Make a fork an interpreter that has just begun, but for its modules and their content; all signals are blocked.

    It has a notebook's exit handlers, which would close its files and sockets, its streams, and its children
    (``multiprocessing`` forgets the same in ``BaseProcess._bootstrap``). Its standard input is empty from here on.
    """
    _forget_exit_handlers()
    threading.main_thread().name = "MainThread"  # the one that forked had another name
    for name in _OF_A_PROMPT:
        with contextlib.suppress(AttributeError):
            delattr(sys, name)
    sys.excepthook = sys.__excepthook__
    processes.release_input()
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
    if process := sys.modules.get("multiprocessing.process"):
        process._children = set()  # type: ignore[attr-defined]
    if util := sys.modules.get("multiprocessing.util"):
        util._finalizer_registry.clear()
        util._run_after_forkers()
        atexit.register(util._exit_function)
