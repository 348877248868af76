"""Contexts: what one forward pass left on each worker, and the gradients of its backward passes.

A context is made on one worker, its creator. Every call inside it carries its number, and a worker that gets such a
call joins the context: the sender becomes its *parent* there. A context is released along this tree: its creator
releases it, each worker tells those to which it has sent messages, and a worker whose parent is gone releases it too:
a backward pass that needs it fails with ``WorkerLost``.

A number has the creator's worker id in its top 16 bits, as torch's has, 16 bits of the creator's incarnation, so that
a worker that comes back does not repeat the numbers of its former life, and a count.

| field | written by | read by | guard |
|---|---|---|---|
| ``Contexts._contexts``, ``_released`` | threads that make, join and release contexts | all | ``Contexts._lock`` |
| tables of a ``Context`` | calls, answers, backward passes, releases | the same | ``Context.lock`` |

Who holds a lock never waits.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from phalanx.errors import ClosedError, PhalanxError, WorkerLost
from phalanx.rpc.members import Member
from phalanx.rpc.peer import facts_of
from phalanx.rpc.worker import Incoming, Worker

__all__ = ["Context", "Contexts", "contexts", "worker_id"]

RELEASE = "autograd.release"
COUNT_BITS = 48
LIFE_BITS = 32
_NO_RANK = 0x8000
# How many released contexts are remembered, so that a late call does not bring one back.
_REMEMBERED = 4096

# The context of this thread, or of this asyncio task.
_current: contextvars.ContextVar[int | None] = contextvars.ContextVar("phalanx_autograd_context", default=None)


class Context:
    """One context, as far as this worker has a part in it."""

    def __init__(self, number: int, parent: Member | None) -> None:
        self.number = number  # equal on all workers
        self.parent = parent  # whose message brought it here; None on its creator
        self.lock = threading.Lock()
        self.sends: dict[int, Any] = {}  # the edges that leave this worker, by their numbers, in their order
        self.recvs: dict[int, Any] = {}  # those that reach it
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}  # of this worker's leaves
        self.known: dict[int, Member] = {}  # those to which this worker has sent messages in it, by worker id
        self.passes: dict[tuple[int, int], Any] = {}  # the backward passes under way
        self.order = itertools.count(1)  # numbers the edges of this worker as they come to be
        self.released = False  # nothing is added any more

    # torch's names

    def _context_id(self) -> int:
        return self.number

    def _known_worker_ids(self) -> set[int]:
        with self.lock:
            return set(self.known)

    def _send_functions(self) -> dict[int, Any]:
        with self.lock:
            return dict(self.sends)

    def _recv_functions(self) -> dict[int, object]:
        with self.lock:
            return {edge: recv.node for edge, recv in self.recvs.items()}


class Contexts:
    """All contexts of this process."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._lock = threading.Lock()
        self._contexts: dict[int, Context] = {}
        self._released: OrderedDict[int, Member | None] = OrderedDict()  # and whose loss was the reason
        self._worker_id = -1
        self._numbers = itertools.count()
        self._edges = itertools.count()

    def start(self, worker: Worker) -> None:
        """Number contexts as those of this worker, and release what others release. Forget what an earlier one had."""
        with self._lock:
            self._contexts.clear()
            self._released.clear()
            self._worker, self._worker_id = worker, worker_id(worker.me)
            first = self._worker_id << COUNT_BITS | (worker.me.incarnation & 0xFFFF) << LIFE_BITS
            self._numbers, self._edges = itertools.count(first), itertools.count(first)
        worker.serve(RELEASE, self._on_release)
        worker.on_change(self._on_gone)
        worker.on_close(lambda: self._end(worker))

    def worker(self) -> Worker:
        """This process as a worker.

        Raises:
            ClosedError: it is none.
        """
        worker = self._worker  # another thread may end it
        if worker is None:
            raise ClosedError(
                "distributed autograd needs workers: call rpc.init() first, on every rank that takes part"
            )
        return worker

    def max_id(self) -> int:
        """The largest number that a context of this worker can have."""
        self.worker()
        return self._worker_id << COUNT_BITS | (1 << COUNT_BITS) - 1

    def next_edge(self) -> int:
        """A number that no other edge of the job has."""
        return next(self._edges)

    def new(self) -> Context:
        """Make a context and let it be this thread's.

        Raises:
            PhalanxError: this thread is in one.
        """
        self.worker()
        if _current.get() is not None:
            raise PhalanxError(
                "Already have an autograd context id for this thread: contexts do not nest; leave the other one first"
            )
        with self._lock:
            number = next(self._numbers)
            context = self._contexts[number] = Context(number, None)
        _current.set(number)
        return context

    def find(self, number: int) -> Context | None:
        """The context of this number; None if there is none, or no more."""
        return self._contexts.get(number)

    def get(self, number: int) -> Context:
        """The context of this number.

        Raises:
            PhalanxError: there is none, or no more.
        """
        context = self._contexts.get(number)
        if context is None:
            if (lost := self._released.get(number)) is not None:
                raise _lost(lost, number)
            raise PhalanxError(
                f"Could not find autograd context with id: {number}. It lives as long as its `with context()` block, "
                f"on the workers that were called inside it"
            )
        return context

    def join(self, number: int, sender: Member) -> Context | None:
        """The context of a message that ``sender`` has sent; None if it has been released and the message is late."""
        with self._lock:
            context = self._contexts.get(number)
            if context is not None or number in self._released:
                return context
            context = self._contexts[number] = Context(number, sender)
        if sender in self.worker().directory.known_gone():  # so its end was told before there was a context to release
            self.release(number, sender)
            return None
        return context

    def release(self, number: int, lost: Member | None = None) -> bool:
        """Forget a context, and tell those to which this worker has sent messages in it. Whether there was one.

        Args:
            number: the context's.
            lost: its parent, if that is gone.
        """
        if _current.get() == number:
            _current.set(None)
        with self._lock:
            self._released[number] = lost
            while len(self._released) > _REMEMBERED:
                self._released.popitem(last=False)
            context = self._contexts.pop(number, None)
        if context is None:
            return False
        with context.lock:
            context.released = True
            passes, known = list(context.passes.values()), list(context.known.values())
            for recv in context.recvs.values():
                recv.node = None  # else the function and what describes it would keep each other alive
        for part in passes:
            released = PhalanxError(f"context {number} was released during its backward pass")
            part.fail(_lost(lost, number) if lost is not None else released)
        for member in known:
            with contextlib.suppress(PhalanxError, OSError):  # that worker, or this one, is leaving
                self.worker().notify(member, RELEASE, number)
        return True

    def all(self) -> list[Context]:
        """All contexts that are alive."""
        with self._lock:
            return list(self._contexts.values())

    def current(self) -> Context | None:
        """The context of this thread; None if it is in none, or if that was released."""
        number = _current.get()
        return None if number is None else self._contexts.get(number)

    @contextlib.contextmanager
    def entered(self, number: int | None) -> Iterator[None]:
        """Let a context, or none, be this thread's meanwhile."""
        token = _current.set(number)
        try:
            yield
        finally:
            _current.reset(token)

    def _on_release(self, _: Incoming, number: int) -> None:
        self.release(number)

    def _on_gone(self, member: Member, _: str) -> None:
        for context in self.all():
            if context.parent == member:
                self.release(context.number, member)
                continue
            with context.lock:
                orphans = [part for number, part in context.passes.items() if number[0] == member.incarnation]
            for part in orphans:
                part.fail(PhalanxError(f"{member}, which called backward(), is gone"))

    def _end(self, worker: Worker) -> None:
        if self._worker is not worker:
            return  # it is another one meanwhile, which has forgotten all that
        self._worker = None
        for context in self.all():
            if context.parent is not None:  # the gradients of its own contexts can still be read
                self.release(context.number)


def _lost(parent: Member, number: int) -> WorkerLost:
    text = f"{parent} is gone, and with it what it had other workers do in context {number}"
    return WorkerLost(text, **facts_of(parent, "backward()", ""))


def worker_id(member: Member) -> int:
    """The id of a worker in the numbers of contexts and edges: its rank, or what stands for one."""
    return member.rank if member.rank >= 0 else _NO_RANK | member.incarnation & (_NO_RANK - 1)


contexts = Contexts()
