"""Starting a thread where the system may refuse it, and while a signal handler may raise.

``Thread.start()`` keeps the thread in a table until it runs. If a handler of the script's raises an ``Exception`` in
there, it takes the thread out of the table; but a thread that runs by then has done so itself. So what comes out is a
``KeyError`` with the thread as its key, and the handler's exception is only its context (seen with CPython 3.11).
"""

from __future__ import annotations

from threading import Thread

from phalanx.errors import PROCESS_LIMIT_HINT, BackendError

__all__ = ["start"]


def start(thread: Thread) -> None:
    """Start it; if a signal handler raises meanwhile, its exception comes out, and the thread may run or not.

    Raises:
        BackendError: the system gives this process no more threads.
        RuntimeError: the interpreter ends, when Python 3.12 and later start none.
    """
    try:
        thread.start()
    except KeyError as error:
        if error.args != (thread,) or error.__context__ is None:
            raise
        raise error.__context__ from None
    except RuntimeError as error:
        if str(error) != "can't start new thread":  # a signal handler has raised it, or the interpreter ends
            raise
        raise BackendError(f"the system gives this process no more threads ({error}): {PROCESS_LIMIT_HINT}") from error
