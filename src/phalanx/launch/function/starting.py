"""Start the supervisor of ``phalanx.launch()``: a fork of this interpreter, or a fresh one.

A fork has one thread, a copy of that which forked, and what other threads were doing is never finished there. Three
things must not have happened before (:func:`why_not`): an accelerator was opened, since its driver does not work in a
fork; a process group was joined; MPI was started. One more that usually has happened does no harm if it is known:
torch has computed. OpenMP's pool of threads belongs to the thread that used it first, so in a fork of that thread the
next parallel loop would wait for threads that do not exist. A thread of its own forks here (:func:`fork_apart`), which
has no pool yet and makes one when it computes.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NoReturn

from phalanx.errors import PROCESS_LIMIT_HINT, LaunchError
from phalanx.launch.job.job import Job

__all__ = ["fork_apart", "pickle_call", "spawn", "why_not"]

_PROGRAM = """
import pickle, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would answer Ctrl-C with a traceback of imports
with open(int(sys.argv[1]), "rb") as file:
    sys.path[:], start = pickle.load(file)  # Phalanx may be found only there
from phalanx.launch.function.supervise import begin
begin(*pickle.loads(start))
"""


def why_not() -> str:
    """Why ranks cannot be forked from this process, with what the user can do; empty if they can."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "this process is in a process group, which a fork would share; leave it before, with phalanx.close()"
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        return "this process has started MPI, which does not work in a fork; restart the interpreter"
    device = _opened(torch)
    if device:
        return (
            f"this process has used {device} already, and a fork cannot; restart the interpreter, and touch the device "
            "in the function alone (torch.cuda.is_available() counts, too)"
        )
    return ""


def _opened(torch: Any) -> str:
    """The accelerator that this process has opened so that no fork can use it; empty if it has opened none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return ""
    in_bad_fork = getattr(torch.get_device_module(accelerator.type), "_is_in_bad_fork", None)
    if in_bad_fork is None:
        return ""
    with _unwarned():
        pid = os.fork()  # torch knows it only in a fork
    if pid == 0:
        bad = True
        try:
            bad = bool(in_bad_fork())
        finally:
            os._exit(bad)
    _, status = os.waitpid(pid, 0)
    return str(accelerator.type) if status != 0 else ""


def fork_apart(child: Callable[[int], NoReturn]) -> tuple[int, Callable[[], None]]:
    """Fork from a thread of its own, with all signals blocked in the child.

    Args:
        child: what the child does, given the process id of its parent.

    Returns:
        The child's process id, and a function to be called when the child has ended: its forking thread lives until
        then, because the kernel takes the end of that thread for the end of the parent (PR_SET_PDEATHSIG).

    Raises:
        LaunchError: the system refuses another process.
    """
    parent = os.getpid()
    forked, ended = threading.Event(), threading.Event()
    outcome: list[int | OSError] = []

    def fork() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with _unwarned():
                outcome.append(os.fork())
        except OSError as error:
            outcome.append(error)
        if outcome == [0]:
            try:
                child(parent)
            except BaseException:
                os.write(2, traceback.format_exc().encode(errors="backslashreplace"))
            finally:
                os._exit(70)
        forked.set()
        ended.wait()

    def end() -> None:
        ended.set()
        thread.join()

    thread = threading.Thread(target=fork, name="phalanx-fork", daemon=True)
    thread.start()
    forked.wait()
    if isinstance(outcome[0], OSError):
        end()
        raise LaunchError(
            f"the ranks cannot be started: {outcome[0].strerror}; {PROCESS_LIMIT_HINT}, or free memory"
        ) from outcome[0]
    return outcome[0], end


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """Without the warning of Python 3.12 that a process with threads forks; the top of this file says why it may."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


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


def spawn(
    job: Job, call: bytes, variables: Mapping[str, str], results: Sequence[int], reason: int, out: int, err: int
) -> int:
    """Start a fresh interpreter that becomes the job's supervisor; return its process id.

    Args:
        job: the job.
        call: the function and its arguments, pickled.
        variables: what is set in the environment of all ranks.
        results: the descriptors of the files for the ranks' results.
        reason: the descriptor of the file for the reason of a failure.
        out, err: the descriptors of its standard output and error.

    Raises:
        LaunchError: the system refuses another process, or there is no interpreter to start.
    """
    descriptor = os.memfd_create("phalanx-start")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            # In two layers, because the inner one can be read only with the search path.
            pickle.dump((sys.path, pickle.dumps((job, call, variables, results, reason, os.getpid()))), file)
        os.lseek(descriptor, 0, os.SEEK_SET)
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(descriptor)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=(descriptor, reason, *results),
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise LaunchError(f"a fresh interpreter ({sys.executable!r}) cannot be started: {error}") from error
    finally:
        os.close(descriptor)
    process.returncode = 0  # its end is awaited by its process id, and not by this object
    return process.pid
