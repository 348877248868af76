"""Errors of a backward pass, with where they happened."""

from __future__ import annotations

from functools import cache
from typing import Any

from phalanx.diagnosis.call_site import inside
from phalanx.errors import CallTimeout, ClosedError, PeerLost, PhalanxError
from phalanx.rpc.autograd.edges import Send
from phalanx.rpc.members import Member

__all__ = ["BackwardError", "blamed"]


class BackwardError(PhalanxError):
    """A function or a hook has failed in a distributed backward pass, on this worker or on another.

    It is also of the type of what was raised there, where one class can be both. The gradients of the pass are
    incomplete: the workers whose part had ended keep theirs, so leave the context and begin a new one.

    Example:
        Error on Node 1: bad gradient. It was raised on worker1 in backward (model.py:12), in the backward pass over the
        gradients of what forward returned to worker0

    What to do:
        Mend the function that the message names, and compute the loss again in a new ``rpc.context()``.

    Attributes:
        worker, rank, host, pid: where.
        function, line: the innermost function of the program that was running, and ``file:line`` in it; empty if
            torch's C++ raised it.
    """

    worker: str = ""
    rank: int = -1
    host: str = ""
    pid: int = 0
    function: str = ""
    line: str = ""

    def __init__(self, message: str) -> None:
        BaseException.__init__(self, message)  # the other base may want arguments of its own

    def __str__(self) -> str:
        return str(self.args[0])

    @staticmethod
    def text(error: str, rank: int, worker: str, function: str, line: str, part: str) -> str:
        """What it says, in torch's words first.

        Args:
            error: the error's own words.
            rank, worker: where it happened.
            function, line: in which function and line; empty if that is not known.
            part: whose gradients were being computed, as ``what f returned to worker0``; empty for the caller's roots.
        """
        where = f" in {function} ({line})" if function else ""
        of = f"the gradients of {part}" if part else "the gradients of the roots"
        return f"Error on Node {rank}: {error}\nIt was raised on {worker}{where}, in the backward pass over {of}"


def blamed(error: BaseException, on: Member, latest: Send | None) -> BaseException:
    """The error that ``backward`` raises for one that a function or a hook has raised.

    It is a :class:`~phalanx.errors.BackwardError`, and of the error's own type as well where one class can be both.

    Args:
        error: what the engine raised.
        on: this worker.
        latest: the message whose gradients came last; None before the first.
    """
    if isinstance(error, (BackwardError, PeerLost, CallTimeout, ClosedError)) or not isinstance(error, Exception):
        return error
    function, line = _raised_in(error)
    kind: Any = type(error)
    inner = _both(kind)
    text = BackwardError.text(str(error) or type(error).__name__, on.rank, str(on), function, line, str(latest or ""))
    try:
        made = inner(text)
    except Exception:
        made = BackwardError(text)
    made.__dict__.update(error.__dict__)
    made.worker, made.rank, made.host, made.pid = on.name, on.rank, on.host, on.pid
    made.function, made.line = function, line
    return made


def _raised_in(error: BaseException) -> tuple[str, str]:
    """The innermost function and line of the user's program; empty if torch's C++ raised it."""
    trace, function, line = error.__traceback__, "", ""
    while trace is not None:
        if not inside(trace.tb_frame):
            code = trace.tb_frame.f_code
            function, line = getattr(code, "co_qualname", code.co_name), f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return function, line


def _rebuilt(kind: Any, text: str, facts: dict[str, Any]) -> BackwardError:
    made = _both(kind)(text)
    made.__dict__.update(facts)
    return made


@cache
def _both(kind: Any) -> type[BackwardError]:
    """A class that is both; plain ``BackwardError`` if there can be none."""
    if issubclass(BackwardError, kind):
        return BackwardError

    def reduce(self: BackwardError) -> Any:
        return _rebuilt, (kind, str(self), self.__dict__)

    try:
        return type(f"{kind.__name__}InBackward", (BackwardError, kind), {"__reduce__": reduce})
    except TypeError:
        return BackwardError
