"""One worker's part of one distributed backward pass: its states are in the table of ``engine.py``.

``Pass._changed`` guards all fields but ``_running``. Gates sleep on it.

| field | written by | read by |
|---|---|---|
| ``_reach``, ``_live``, ``asked`` | ``mark_roots``, handlers of MARK | the run |
| ``_arrived`` | handlers of GRADIENTS, gates | gates |
| ``_collected``, ``_owed`` | functions on the engine's threads | the same, gates |
| ``_error`` | whoever fails first; CANCEL | all |
| ``_running`` | the thread of the run | ``state``, which may be late |
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.diagnosis.call_site import running_at
from phalanx.errors import PhalanxError
from phalanx.rpc.agent import Agent
from phalanx.rpc.autograd.contexts import Context
from phalanx.rpc.autograd.errors import blamed
from phalanx.rpc.autograd.graph import Reach, Recv, Send
from phalanx.rpc.autograd.local_run import Leaves, add, run_graph
from phalanx.rpc.future import Future
from phalanx.rpc.members import Member

__all__ = ["GRADIENTS", "MARK", "Gradients", "Pass", "gathered"]

MARK = "autograd.mark"
GRADIENTS = "autograd.gradients"

# The gradients of a message's tensors, by their places in it. None where a function gave none.
Gradients = dict[int, torch.Tensor | None]


class Pass:
    """One worker's part.

    Args:
        agent: this worker.
        context: its context.
        number: the number of the pass: which worker has called ``backward``, and which time.
        keep_graph: whether the graph can be used again.
        timeout_s: how long the pass may take from now on, in seconds.

    Attributes:
        done: completes when the part has ended.
        asked: the workers that this one has asked to mark something.
    """

    def __init__(
        self, agent: Agent, context: Context, number: tuple[int, int], *, keep_graph: bool, timeout_s: float
    ) -> None:
        self._agent, self._context, self._number, self._keep_graph = agent, context, number, keep_graph
        self._until = time.monotonic() + timeout_s
        self._changed = threading.Condition()
        self._reach = Reach(context.number)
        self._leaves = Leaves()
        self._live: dict[Send, set[int]] = {}  # the sent messages that take part, and which of their tensors
        self._arrived: dict[int, Gradients] = {}  # by edge, until a gate takes them
        self._collected: dict[Recv, Gradients] = {}  # until a message can be handed back
        self._owed: list[int] = []  # the orders of received messages that are not handed back, sorted
        self._begun = False
        self._running: tuple[int, float] | None = None  # the thread that computes, and since when
        self._latest: Send | None = None  # whose gradients came last
        self._error: BaseException | None = None
        self.done: Future[None] = Future()
        self.asked: set[Member] = set()

    # Marking

    def mark(self, wanted: Sequence[tuple[int, Sequence[int]]]) -> Future[set[Member]]:
        """Take part with messages that this worker has sent.

        Args:
            wanted: their edges, and the places of those tensors in the message that gradients will reach.

        Returns:
            All workers that take part because of it.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            handles = []
            for edge, places in wanted:
                send = self._context.sends.get(edge)
                if send is None:
                    raise PhalanxError(f"{self._agent.me} knows no message {edge} in context {self._context.number}")
                known = self._live.setdefault(send, set())
                handles += [send.handles[place] for place in places if place not in known]
                known.update(places)
            return self._ask(self._reach.extend(handles)).then(lambda others: others | {self._agent.me})

    def mark_roots(self, roots: Sequence[torch.Tensor]) -> Future[set[Member]]:
        """Begin the marking at the roots of the pass. Returns all workers that take part, beside this one."""
        with self._changed:
            return self._ask(self._reach.extend(roots))

    def _ask(self, fresh: dict[Recv, list[int]]) -> Future[set[Member]]:
        wanted: dict[Member, list[tuple[int, list[int]]]] = {}
        for recv, places in fresh.items():
            wanted.setdefault(recv.sender, []).append((recv.edge, places))
        self.asked.update(wanted)
        requests = []
        for to, edges in wanted.items():
            value = (self._context.number, self._number, self._keep_graph, self.left_s(), edges)
            requests.append(self._agent.request(to, MARK, value, self.left_s(), asked="backward()"))
        return gathered(requests).then(lambda found: set[Member]().union(*found))

    # Gradients

    def arrive(self, edge: int, gradients: Gradients) -> None:
        """The gradients of a message that this worker sent have come. The last one that is needed runs the part."""
        with self._changed:
            self._arrived[edge] = gradients
            self._changed.notify_all()
            latest = max(self._live, key=lambda send: send.order)
            calls = self._number[0] == self._agent.me.incarnation  # then it runs on the thread that called backward()
            if calls or self._begun or self._error is not None or latest.edge not in self._arrived:
                return
            self._begun = True
        try:
            self.run(())
        except BaseException as error:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)

    def run(self, roots: Sequence[torch.Tensor]) -> None:
        """Run this worker's part, and keep its gradients in the context."""
        with self._changed:
            gates = [(send, sorted(self._live[send])) for send in sorted(self._live, key=lambda send: -send.order)]
            self._owed = sorted(recv.order for recv in self._reach.recvs)
            self._compute()
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
            raise blamed(error, self._agent.me, self._latest) from error
        finally:
            self._running = None
        with self._context.lock:
            add(self._context.gradients, self._leaves.gradients)

    def _compute(self) -> None:
        self._running = threading.get_ident(), time.monotonic()

    def hand_back(self, recv: Recv, place: int, gradient: torch.Tensor | None) -> None:
        """Take the gradient of one tensor of a received message; with the last one, they are sent to its sender."""
        with self._changed:
            gradients = self._collected.setdefault(recv, {})
            gradients[place] = gradient
            if len(gradients) < len(self._reach.recvs[recv]):
                return
            del self._collected[recv]
        value = (self._context.number, self._number, recv.edge, gradients)
        with torch.no_grad():
            request = self._agent.request(recv.sender, GRADIENTS, value, self.left_s(), asked="backward()")
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
            self._running = None
            self._changed.wait_for(lambda: send.edge in self._arrived or self._error is not None)
            self._compute()
            if self._error is not None:
                raise self._error
            self._latest = send
            return self._arrived.pop(send.edge)

    # The end

    def left_s(self) -> float:
        """Return how long the pass may still take, in seconds."""
        return max(0.0, self._until - time.monotonic())

    def state(self) -> dict[str, Any]:
        """Describe what this worker's part does, for the search for the one that keeps the pass. It takes no lock.

        Returns:
            ``asked``: the names of the workers whose parts this one depends on. While it computes also ``for_s``: for
            how long; and ``at``: the function and line, empty if it is in none of the program's.
        """
        state: dict[str, Any] = {"asked": sorted(member.name for member in list(self.asked))}
        running = self._running
        if running is not None:
            frame = sys._current_frames().get(running[0])
            state.update(for_s=time.monotonic() - running[1], at=running_at(frame))
        return state

    def fail(self, error: BaseException) -> None:
        """End the waits of the pass here with an error; the first one counts."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()
            begun = self._begun
        if not begun:
            self.done.set_exception(error)

    def watch(self, request: Future[Any]) -> None:
        """Fail if a request of the pass has failed."""
        try:
            request.wait(0)
        except BaseException as error:
            self.fail(error)


def gathered(futures: Sequence[Future[Any]]) -> Future[list[Any]]:
    """The values of several futures, or the first error among them."""
    every: Future[list[Any]] = Future()
    if not futures:
        every.set_result([])
    left = itertools.count(len(futures) - 1, -1)  # one step of it is atomic

    def count(future: Future[Any]) -> None:
        try:
            future.wait(0)
        except BaseException as error:
            every.set_exception(error)
            return
        if not next(left):
            every.set_result([each.wait(0) for each in futures])

    for future in futures:
        future.add_done_callback(count)
    return every
