"""A rank that calls a function of another interpreter: it runs the call, and leaves the result for that interpreter.

The result is a pickle in a file in memory, which has been opened before the rank was forked; so nothing is left of it
when all processes have ended, and it may be large. Whether it is there is the rank's exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from phalanx.errors import LaunchError
from phalanx.launch.rank.start import RankStart, reported
from phalanx.system.processes import exit_without_finalising

__all__ = ["call_and_end"]


def call_and_end(start: RankStart, call: Callable[[], Any], results: Sequence[int]) -> NoReturn:
    """Be a rank: call a function, write what it returns, and end this process.

    Args:
        start: the rank's start.
        call: the function, with its arguments.
        results: the file for each rank's result.
    """
    code = 1
    try:
        with reported(start):
            _write(start.rank, call(), results)
        code = 0
    except SystemExit as error:
        # As multiprocessing has it: exiting with 0 is returning None.
        if error.code is None or isinstance(error.code, int):
            code = (error.code or 0) & 0xFF
        if code == 0:
            _write(start.rank, None, results)
    except KeyboardInterrupt:
        code = 130
    _end(code)


def _write(rank: int, value: Any, results: Sequence[int]) -> None:
    for other, descriptor in enumerate(results):
        if other == rank:
            with open(descriptor, "wb", closefd=False) as file:
                _pickle(value, file)


def _pickle(value: Any, file: Any) -> None:
    """Pickle a result; by cloudpickle, where it is installed, if pickle cannot."""
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
    ending = sys.modules.get("phalanx.diagnosis.ends")
    if code == 0 and ending is not None:
        # The core tells other ranks by a handler of C's exit(), which runs only if the core was loaded after the fork.
        from phalanx.native.core import library

        with contextlib.suppress(Exception):
            library().phx_process_leaves()
    exit_without_finalising(code)
