"""One worker's part of one distributed backward pass, and its error: its states are in the table of ``engine.py``.

| field | written by | read by | guard |
|---|---|---|---|
| ``_reach``, ``_live`` | the marking, one call at a time | the run, which begins afterwards | none |
| ``_arrived`` | handlers of GRADIENTS, gates | gates | ``_changed`` |
| ``_collected``, ``_owed`` | functions on the engine's threads | the same, gates | ``_changed`` |
| ``_error`` | whoever fails first; CANCEL | gates, the run | ``_changed`` |
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.diagnosis.call_site import inside
from phalanx.errors import CallTimeout, ClosedError, PeerLost, PhalanxError
from phalanx.rpc.autograd.contexts import Context
from phalanx.rpc.autograd.graph import Reach, Recv, Send
from phalanx.rpc.autograd.local_run import Leaves, add, run_graph
from phalanx.rpc.future import Future
from phalanx.rpc.members import Member
from phalanx.rpc.worker import Worker

__all__ = ["GRADIENTS", "BackwardError", "Gradients", "Key", "Pass", "Wanted"]

GRADIENTS = "autograd.gradients"

# Of a context, and of a pass in it: the incarnation of the worker that called ``backward``, and a count.
Key = tuple[int, tuple[int, int]]
# The gradients of a message's tensors, by their places in it. None where a function gave none.
Gradients = dict[int, torch.Tensor | None]
# By the sender of messages that a pass reaches: their edges, and the places of those tensors that get gradients.
Wanted = dict[Member, list[tuple[int, list[int]]]]


class Pass:
    """One worker's part.

    Args:
        worker: this worker.
        context: its context.
        number: the number of the pass, which is the second part of its key.
        keep_graph: whether the graph can be used again.
    """

    def __init__(self, worker: Worker, context: Context, number: tuple[int, int], *, keep_graph: bool) -> None:
        self._worker, self._context, self._number, self._keep_graph = worker, context, number, keep_graph
        self._changed = threading.Condition()
        self._reach = Reach(context.number)
        self._leaves = Leaves()
        self._live: dict[Send, set[int]] = {}  # the sent messages that take part, and which of their tensors
        self._arrived: dict[int, Gradients] = {}  # by edge, until a gate takes them
        self._collected: dict[Recv, Gradients] = {}  # until a message can be handed back
        self._owed: list[int] = []  # the orders of received messages that are not handed back, sorted
        self._latest: Send | None = None  # whose gradients came last
        self._error: BaseException | None = None

    # Marking

    def mark(self, wanted: Sequence[tuple[int, Sequence[int]]]) -> Wanted:
        """Take part with messages that this worker has sent.

        Args:
            wanted: their edges, and the places of those tensors in the message that gradients will reach.

        Returns:
            What others have to mark because of it.
        """
        handles = []
        for edge, places in wanted:
            send = self._context.sends.get(edge)
            if send is None:
                raise PhalanxError(f"{self._worker.me} knows no message {edge} in context {self._context.number}")
            known = self._live.setdefault(send, set())
            handles += [send.handles[place] for place in places if place not in known]
            known.update(places)
        return self.mark_roots(handles)

    def mark_roots(self, roots: Sequence[torch.Tensor]) -> Wanted:
        """Take part with tensors of this worker. Returns what others have to mark because of it."""
        wanted: Wanted = {}
        for recv, places in self._reach.extend(roots).items():
            wanted.setdefault(recv.sender, []).append((recv.edge, places))
        return wanted

    # Gradients

    def arrive(self, edge: int, gradients: Gradients) -> None:
        """Take the gradients of a message that this worker sent."""
        with self._changed:
            self._arrived[edge] = gradients
            self._changed.notify_all()

    def run(self, roots: Sequence[torch.Tensor] = ()) -> None:
        """Run this worker's part, and keep its gradients in the context."""
        gates = [(send, sorted(self._live[send])) for send in sorted(self._live, key=lambda send: -send.order)]
        self._owed = sorted(recv.order for recv in self._reach.recvs)
        try:
            try:
                self._leaves.watch(self._reach.leaves)
                run_graph(self, self._leaves, gates, roots, keep_graph=self._keep_graph)
            finally:
                self._leaves.end()
            with self._changed:
                if self._error is not None:
                    raise self._error
        except BaseException as error:
            if error is self._error:
                raise
            raise blamed(error, self._worker.me, self._latest) from error
        with self._context.lock:
            add(self._context.gradients, self._leaves.gradients)

    def hand_back(self, recv: Recv, place: int, gradient: torch.Tensor | None) -> None:
        """Take the gradient of one tensor of a received message; with the last one, they are sent to its sender."""
        with self._changed:
            gradients = self._collected.setdefault(recv, {})
            gradients[place] = gradient
            if len(gradients) < len(self._reach.recvs[recv]):
                return
            del self._collected[recv]
        value = ((self._context.number, self._number), recv.edge, gradients)
        with torch.no_grad():
            request = self._worker.request(recv.sender, GRADIENTS, value, math.inf, asked="backward()")
        request.add_done_callback(self.watch)
        with self._changed:
            self._owed.remove(recv.order)

    def has_handed_back(self, send: Send) -> bool:
        """Return whether all messages received after ``send`` have been handed back, or the pass has failed."""
        with self._changed:
            return not self._owed or self._owed[-1] < send.order or self._error is not None

    def wait_for(self, send: Send) -> Gradients:
        """The gradients of a sent message, when they have come."""
        with self._changed:
            self._changed.wait_for(lambda: send.edge in self._arrived or self._error is not None)
            if self._error is not None:
                raise self._error
            self._latest = send
            return self._arrived.pop(send.edge)

    # Failures

    def fail(self, error: BaseException) -> None:
        """End the waits of the pass here with an error; the first one counts."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def watch(self, request: Future[Any]) -> None:
        """Fail if a request of the pass has failed."""
        try:
            request.wait(0)
        except BaseException as error:
            self.fail(error)


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
