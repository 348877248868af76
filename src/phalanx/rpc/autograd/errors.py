"""Errors of a backward pass: where a function or a hook has failed."""

from __future__ import annotations

from phalanx.diagnosis.call_site import inside
from phalanx.errors import CallTimeout, ClosedError, PeerLost, PhalanxError
from phalanx.rpc.autograd.graph import Send
from phalanx.rpc.members import Member

__all__ = ["BackwardError", "blamed"]


class BackwardError(PhalanxError):
    """A function or a hook has failed in a distributed backward pass, on this worker or on another.

    The gradients of the pass are incomplete: the workers whose part had ended keep theirs, so leave the context and
    begin a new one.

    Example:
        Error on Node 1: bad gradient. ValueError was raised on worker1 in backward (model.py:12), in the backward pass
        over the gradients of what forward returned to worker0

    What to do:
        Mend the function that the message names, and compute the loss again in a new ``rpc.context()``.

    Attributes:
        type_name: the name of the type of what was raised.
        worker, rank, host, pid: where.
        function, line: the innermost function of the program that was running, and ``file:line`` in it; empty if
            torch's C++ raised it.
    """

    type_name: str = ""
    worker: str = ""
    rank: int = -1
    host: str = ""
    pid: int = 0
    function: str = ""
    line: str = ""


def blamed(error: BaseException, on: Member, latest: Send | None) -> BaseException:
    """The error that ``backward`` raises for one that a function or a hook has raised.

    Args:
        error: what the engine raised.
        on: this worker.
        latest: the message whose gradients came last; None before the first.
    """
    if isinstance(error, (BackwardError, PeerLost, CallTimeout, ClosedError)) or not isinstance(error, Exception):
        return error
    function, line = _raised_in(error)
    where = f" in {function} ({line})" if function else ""
    of = f"the gradients of {latest}" if latest else "the gradients of the roots"
    text = (  # torch's words first
        f"Error on Node {on.rank}: {str(error) or type(error).__name__}\n"
        f"{type(error).__qualname__} was raised on {on}{where}, in the backward pass over {of}"
    )
    blames = BackwardError(text)
    blames.type_name, blames.function, blames.line = type(error).__qualname__, function, line
    blames.worker, blames.rank, blames.host, blames.pid = on.name, on.rank, on.host, on.pid
    return blames


def _raised_in(error: BaseException) -> tuple[str, str]:
    """The innermost function and line of the user's program; empty if torch's C++ raised it."""
    trace, function, line = error.__traceback__, "", ""
    while trace is not None:
        if not inside(trace.tb_frame):
            code = trace.tb_frame.f_code
            function, line = getattr(code, "co_qualname", code.co_name), f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return function, line
