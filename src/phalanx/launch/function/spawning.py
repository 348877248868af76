"""Ranks of a fresh interpreter: what is called is pickled, and ``start.py`` unpickles it there."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from phalanx.errors import LaunchError
from phalanx.launch.job.job import Job

__all__ = ["Start", "pickle_call", "spawn"]


@dataclass(frozen=True)
class Start:
    """What a fresh interpreter is told, as a pickle in a file in memory.

    Attributes:
        job: the job.
        pickled: the function and its arguments.
        variables: what is set in the environment of all ranks.
        results: the descriptors of the files for the ranks' results.
        reason: the descriptor of the file for the reason of a failure.
        parent: the process id of the interpreter that started it.
    """

    job: Job
    pickled: bytes
    variables: Mapping[str, str]
    results: Sequence[int]
    reason: int
    parent: int

    def call(self) -> Any:
        """In a rank: unpickle the function and its arguments, and call it."""
        function, arguments, named = pickle.loads(self.pickled)
        return function(*arguments, **named)


def pickle_call(call: Any) -> bytes:
    """Pickle a function with its arguments so that a fresh interpreter can unpickle them.

    Raises:
        LaunchError: something in them cannot be pickled, or is defined in ``__main__``, which a fresh interpreter does
            not have, and cloudpickle, which would send its code, is not installed.
    """
    try:
        try:
            import cloudpickle
        except ImportError:
            data = io.BytesIO()
            _Pickler(data, protocol=5).dump(call)
            return data.getvalue()
        pickled: bytes = cloudpickle.dumps(call, protocol=5)
        return pickled
    except Exception as error:
        raise LaunchError(
            f"the function and its arguments cannot be sent to a fresh interpreter: {error}; define it in a module, or "
            f"install cloudpickle"
        ) from error


class _Pickler(pickle.Pickler):
    """Refuses what would be found in ``__main__``: it is there in this interpreter, and not in a fresh one."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} is defined in __main__")
        return NotImplemented


def spawn(start: Start, out: int, err: int) -> int:
    """Start a fresh interpreter that becomes the job's supervisor; return its process id.

    Args:
        start: what it is told.
        out: the descriptor of its standard output.
        err: the descriptor of its standard error.

    Raises:
        LaunchError: the system refuses another process, or there is no interpreter to start.
    """
    descriptor = os.memfd_create("phalanx-start")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            # In two layers, because the inner one can be read only with the search path.
            pickle.dump((sys.path, pickle.dumps(start)), file)
        os.lseek(descriptor, 0, os.SEEK_SET)
        program = os.path.join(os.path.dirname(__file__), "start.py")
        process = subprocess.Popen(
            [sys.executable, program, str(descriptor)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=(descriptor, start.reason, *start.results),
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise LaunchError(f"a fresh interpreter ({sys.executable!r}) cannot be started: {error}") from error
    finally:
        os.close(descriptor)
    with contextlib.suppress(AttributeError):
        process.returncode = 0  # its end is awaited by its process id, and not by this object
    return process.pid
