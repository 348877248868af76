"""Errors of a backward pass: where a function has failed, and which worker keeps a pass that does not end in time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import cache
from typing import Any

from phalanx.diagnosis.call_site import capture, inside, shown, text_of
from phalanx.errors import CallTimeout, ClosedError, PeerLost, PhalanxError
from phalanx.rpc.agent import Agent
from phalanx.rpc.autograd.graph import Send
from phalanx.rpc.codec import FACTS
from phalanx.rpc.inquiry import Finding
from phalanx.rpc.members import Member
from phalanx.rpc.peer import facts_of

__all__ = ["STATE", "BackwardError", "blamed", "overdue"]

STATE = "autograd.state"
_PATIENCE_S = 1.0


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
        f"It was raised on {on}{where}, in the backward pass over {of}"
    )
    facts = {"worker": on.name, "rank": on.rank, "host": on.host, "pid": on.pid, "function": function, "line": line}
    return _made(type(error), text, {**error.__dict__, **facts})


def _raised_in(error: BaseException) -> tuple[str, str]:
    """The innermost function and line of the user's program; empty if torch's C++ raised it."""
    trace, function, line = error.__traceback__, "", ""
    while trace is not None:
        if not inside(trace.tb_frame):
            code = trace.tb_frame.f_code
            function, line = getattr(code, "co_qualname", code.co_name), f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return function, line


def _made(kind: Any, text: str, facts: dict[str, Any]) -> BackwardError:
    try:
        made = _both(kind)(text)
    except Exception:  # its __new__ wants other arguments
        made = BackwardError(text)
    made.__dict__.update(facts)
    return made


@cache
def _both(kind: Any) -> type[BackwardError]:
    """A class that is both; plain ``BackwardError`` if there can be none."""
    if issubclass(BackwardError, kind):
        return BackwardError

    def reduce(self: BackwardError) -> Any:
        return _made, (kind, str(self), self.__dict__)

    try:
        return type(f"{kind.__name__}InBackward", (BackwardError, kind), {"__reduce__": reduce})
    except TypeError:
        return BackwardError


def overdue(
    agent: Agent, state: dict[str, Any], key: tuple[int, tuple[int, int]], others: Iterable[str], timeout_s: float
) -> CallTimeout | None:
    """The error for a pass that has not ended in time. It names the first worker that computes or does not answer.

    Args:
        agent: this worker, which has called ``backward``.
        state: of its own part (``Pass.state``).
        key: by which the others know the pass.
        others: the workers that take part, as far as they are known.
        timeout_s: how long the pass could take.
    """
    seen = {agent.me.name}
    pending = [*state["asked"], *others]
    member, finding = agent.me, _computes(state)
    while finding is None and pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        with contextlib.suppress(PhalanxError):  # nobody has that name any more
            member = agent.member(name)
            finding, asked = _look(agent, member, key)
            pending += asked
    if finding is None:
        return None
    line = text_of(capture())
    asked_for = f"its part of backward() ({shown(line)})" if line else "its part of backward()"
    facts = facts_of(member, "backward()", line)
    return CallTimeout.not_answered(
        str(member), asked_for, timeout_s, finding.text, cause=finding.cause, at=finding.at, **facts
    )


def _look(agent: Agent, member: Member, key: tuple[int, tuple[int, int]]) -> tuple[Finding | None, list[str]]:
    """Ask a worker why it keeps the pass; return that, if it does, and the workers on which its part depends."""
    try:
        state = agent.request(member, STATE, [key[0], *key[1]], _PATIENCE_S, asked="backward()", codec=FACTS).wait()
    except CallTimeout:
        return agent.inquiries.of_worker(member), []
    except PeerLost:
        return Finding("gone", "It is gone."), []
    return _computes(state), state["asked"]


def _computes(state: dict[str, Any]) -> Finding | None:
    if "for_s" not in state:
        return None
    at = str(state["at"])
    where = f" and is at {shown(at)}" if at else ""
    return Finding("handler", f"It has computed that for {state['for_s']:.1f} s{where}.", at)
