"""Whether ranks can be forked from this interpreter, and how that is done.

A fork has one thread, a copy of that which forked, and what other threads were doing is never finished there. Three
things must not have happened before (:func:`why_not`): an accelerator was opened, since its driver does not work in a
fork; a process group was joined; MPI was started. One more that usually has happened does no harm if it is known:
torch has computed. OpenMP's pool of threads belongs to the thread that used it first, so in a fork of that thread the
next parallel loop would wait for threads that do not exist. A thread of its own forks here (:func:`fork_apart`), which
has no pool yet and makes one when it computes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from phalanx.errors import PROCESS_LIMIT_HINT, LaunchError

__all__ = ["fork_apart", "why_not"]


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
    """The accelerator that this process has opened so that no fork can use it; empty if it has opened none.

    torch knows that only in a fork, so one is made to look.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return ""
    in_bad_fork = getattr(torch.get_device_module(accelerator.type), "_is_in_bad_fork", None)
    if in_bad_fork is None:
        return ""
    with _unwarned():
        pid = os.fork()
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
                pid = os.fork()
        except OSError as error:
            outcome.append(error)
            forked.set()
            return
        if pid == 0:
            try:
                child(parent)
            except BaseException:
                os.write(2, traceback.format_exc().encode(errors="backslashreplace"))
            finally:
                os._exit(70)
        outcome.append(pid)
        forked.set()
        ended.wait()

    def end() -> None:
        ended.set()
        thread.join()

    thread = threading.Thread(target=fork, name="phalanx-fork", daemon=True)
    thread.start()
    forked.wait()
    if isinstance(outcome[0], OSError):
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
