"""Contexts: what one forward pass left on each worker, and the gradients of its backward passes.

A context is made on one worker, its *creator*, and is named by a number. Every call inside it carries the number, so
that each worker that takes part has a context of the same number. The number has the creator's worker id in its top
16 bits, as torch's has, then 16 bits of the creator's incarnation, so that a creator that comes back does not count
through the numbers of its former life, then a count.

The creator learns of all who take part, also of those that it has not called itself, and releases the context there
when it releases its own. If the creator is lost, the others release what it made.

``Context`` is shared by the threads of a process. ``lock`` guards its tables; whoever holds it never waits.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
from collections import OrderedDict
from typing import Any

import torch

from phalanx.errors import PhalanxError
from phalanx.rpc.members import Member

__all__ = ["Context", "Contexts", "contexts", "is_creator", "worker_id"]

COUNT_BITS = 48
LIFE_BITS = 32
_NO_RANK = 0x8000
# How many released contexts are remembered, so that a late call does not bring one back.
_REMEMBERED = 4096

# The context of this thread, or of this asyncio task.
_current: contextvars.ContextVar[int | None] = contextvars.ContextVar("phalanx_autograd_context", default=None)


class Context:
    """What this worker has of one context.

    Attributes:
        number: its number, equal on all workers.
        sends, recvs: the edges that leave and reach this worker, by their numbers, in their order.
        gradients: the gradients of this worker's leaves.
        known: the workers that this one has sent messages to in this context, by worker id.
        others: on the creator, the workers that have said that they take part.
        passes: the backward passes that are under way, by their numbers.
        order: numbers the edges of this worker in the order in which they came to be.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.Lock()
        self.sends: dict[int, Any] = {}
        self.recvs: dict[int, Any] = {}
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.known: dict[int, Member] = {}
        self.others: dict[int, Member] = {}
        self.passes: dict[tuple[int, int], Any] = {}
        self.order = itertools.count(1)

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
        self._lock = threading.Lock()
        self._contexts: dict[int, Context] = {}
        self._released: OrderedDict[int, None] = OrderedDict()
        self._worker_id = -1  # not known yet
        self._numbers = itertools.count()
        self._edges = itertools.count()

    def clear(self) -> None:
        """Forget everything: this process becomes another worker."""
        with self._lock:
            self._contexts.clear()
            self._released.clear()
            self._worker_id = -1

    def count_as(self, worker: int, incarnation: int = 0) -> None:
        """Number new contexts and edges as those of this worker; once, before any thread can make one."""
        with self._lock:
            self._worker_id = worker
            start = worker << COUNT_BITS | (incarnation & 0xFFFF) << LIFE_BITS
            self._numbers = itertools.count(start)
            self._edges = itertools.count(start)

    def max_id(self) -> int:
        """The largest number that a context of this worker can have."""
        return self._worker_id << COUNT_BITS | (1 << COUNT_BITS) - 1

    def next_edge(self) -> int:
        """A number that no other edge of the job has."""
        return next(self._edges)

    def new(self) -> Context:
        """Make a context and let it be this thread's.

        Raises:
            PhalanxError: this thread is in one.
        """
        if _current.get() is not None:
            raise PhalanxError(
                "Already have an autograd context id for this thread: contexts do not nest; leave the other one first"
            )
        with self._lock:
            number = next(self._numbers)
            context = self._contexts[number] = Context(number)
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
            raise PhalanxError(
                f"Could not find autograd context with id: {number}. It lives as long as its `with context()` block, "
                f"on the workers that were called inside it"
            )
        return context

    def join(self, number: int) -> tuple[Context | None, bool]:
        """The context of this number, made if another worker has begun it; and whether it was made now.

        It is None if it has been released: the call is late, and nobody will ask for its gradients.
        """
        with self._lock:
            context = self._contexts.get(number)
            if context is not None or number in self._released:
                return context, False
            context = self._contexts[number] = Context(number)
            return context, True

    def release(self, number: int) -> Context | None:
        """Forget a context; it is returned if there was one."""
        if _current.get() == number:
            _current.set(None)
        with self._lock:
            self._released[number] = None
            while len(self._released) > _REMEMBERED:
                self._released.popitem(last=False)
            return self._contexts.pop(number, None)

    def was_released(self, number: int) -> bool:
        """Whether a context has been released here lately."""
        with self._lock:
            return number in self._released

    def all(self) -> list[Context]:
        """All contexts that are alive."""
        with self._lock:
            return list(self._contexts.values())

    def current(self) -> Context | None:
        """The context of this thread; None if it is in none, or if that was released."""
        number = _current.get()
        return None if number is None else self._contexts.get(number)

    def enter(self, number: int | None) -> contextvars.Token[int | None]:
        """Let a context be this thread's, until ``leave`` gets the token."""
        return _current.set(number)

    def leave(self, token: contextvars.Token[int | None]) -> None:
        """Undo ``enter``."""
        _current.reset(token)


def worker_id(member: Member) -> int:
    """The id of a worker in the numbers of contexts and edges: its rank, or what stands for one."""
    return member.rank if member.rank >= 0 else _NO_RANK | member.incarnation & (_NO_RANK - 1)


def is_creator(member: Member, number: int) -> bool:
    """Whether a worker, in this incarnation, has made the context of this number."""
    return number >> LIFE_BITS == worker_id(member) << 16 | member.incarnation & 0xFFFF


contexts = Contexts()
