"""One worker's part of one distributed backward pass.

A pass has two phases. In the first, *marking*, the worker that calls ``backward`` finds out which received messages its
roots reach, and asks their senders to mark them; these follow their graphs from the marked tensors and ask others in
turn. When all have answered, every worker knows exactly which of its messages take part. Torch's FAST mode assumes
instead that all do, and waits for ever if the result of one call is not used; following only what is known to be used
is also what a backward pass does in one process, where an unused part runs no function and no hook.

In the second phase gradients flow: a worker runs its part (gates.py) as soon as the gradients of its latest message
have come, and hands back those of what it received. The caller is told by every worker when its part has ended.

A pass fails as a whole: the first error goes to the caller, which tells all others to give up, and raises it. What a
worker had computed is dropped, except where its part had ended already.

``_changed`` guards the attributes. They are written by handlers of the agent (marks, gradients, cancellations), by the
thread that runs the part, and by callbacks of requests; a gate sleeps on it. ``fail`` wakes all of them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.diagnosis.call_site import running_at
from phalanx.errors import PhalanxError
from phalanx.rpc.agent import Agent
from phalanx.rpc.autograd import gates, tasks
from phalanx.rpc.autograd.blame import blamed
from phalanx.rpc.autograd.contexts import Context
from phalanx.rpc.autograd.edges import Recv, Send
from phalanx.rpc.autograd.leaves import Leaves, add
from phalanx.rpc.autograd.reach import Reach
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
        self._requests: list[tuple[Member, Future[Any]]] = []  # of this part, some of which may be complete
        self._thread = 0  # which runs the part
        self._since = 0.0  # when it began to
        self._awaited: Send | None = None  # the message whose gradients that thread waits for
        self._changed = threading.Condition()
        self._reach = Reach(context.number)
        self._live: dict[Send, set[int]] = {}
        self._arrived: dict[int, Gradients] = {}
        self._collected: dict[Recv, Gradients] = {}
        self._owed: list[
            int
        ] = []  # the orders of received messages that have not been handed back, the first one first
        self._begun = False
        self._latest: Send | None = None
        self._error: BaseException | None = None
        self._leaves = Leaves()
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
            requests.append(self._request(to, MARK, value))
        return gathered(requests).then(lambda found: set[Member]().union(*found))

    def _request(self, to: Member, service: str, value: Any) -> Future[Any]:
        request = self._agent.request(to, service, value, self.left_s(), asked="backward()")
        self._requests = [pair for pair in self._requests if not pair[1].done()] + [(to, request)]
        return request

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
        number = -1

        def begin() -> None:
            nonlocal number
            number = tasks.enter(self)
            self._leaves.begin(number)

        self._thread, self._since = threading.get_ident(), time.monotonic()
        with self._changed:
            live = sorted(self._live, key=lambda send: -send.order)
            openings = [gates.Opening(send, sorted(self._live[send]), self._wait, self._later) for send in live]
            self._owed = sorted(recv.order for recv in self._reach.recvs)
            leaves = self._reach.leaves
        try:
            try:
                self._leaves.watch(leaves)
                gates.run(openings, roots, begin, keep_graph=self._keep_graph)
            finally:
                tasks.leave(number)
                self._leaves.end()
            with self._changed:
                if self._error is not None:
                    raise self._error
        except BaseException as error:
            if error is self._error:
                raise
            raise blamed(error, self._agent.me, self._latest) from error
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
        value = (self._context.number, self._number, recv.edge, gradients)
        with torch.no_grad():
            request = self._request(recv.sender, GRADIENTS, value)
        request.add_done_callback(self.watch)
        with self._changed:
            self._owed.remove(recv.order)

    def _later(self, send: Send) -> bool:
        with self._changed:
            return not self._owed or self._owed[-1] < send.order or self._error is not None

    def _wait(self, send: Send) -> Gradients:
        with self._changed:
            self._awaited = send
            self._changed.wait_for(lambda: send.edge in self._arrived or self._error is not None)
            self._awaited = None
            if self._error is not None:
                raise self._error
            self._latest = send
            return self._arrived.pop(send.edge)

    # The end

    def left_s(self) -> float:
        """How long the pass may still take, in seconds."""
        return max(0.0, self._until - time.monotonic())

    def state(self) -> dict[str, Any]:
        """What this worker's part does, so that others can find out which worker keeps the pass.

        It takes no lock, which a thread may hold while it sends. What it says may be over already.

        Returns:
            ``waits_for``: the names of the workers whose answers it needs to go on. If there are none, ``for_s``: for
            how long it has computed; and ``at``: the function and line, empty if it is in none of the program's.
        """
        awaited, thread = self._awaited, self._thread
        asked = {to.name for to, request in list(self._requests) if not request.done()}
        if awaited is not None:
            asked.add(awaited.to.name)
        elif not thread and not asked and self._live:
            asked.add(max(self._live, key=lambda send: send.order).to.name)
        elif thread and not self.done.done():
            frame = sys._current_frames().get(thread)
            return {"waits_for": [], "for_s": time.monotonic() - self._since, "at": running_at(frame)}
        return {"waits_for": sorted(asked - {self._agent.me.name})}

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
    lock = threading.Lock()
    missing = len(futures)

    def count(future: Future[Any]) -> None:
        nonlocal missing
        try:
            future.wait(0)
        except BaseException as error:
            every.set_exception(error)
            return
        with lock:
            missing -= 1
            last = not missing
        if last:
            every.set_result([each.wait(0) for each in futures])

    if not futures:
        every.set_result([])
    for future in futures:
        future.add_done_callback(count)
    return every
