"""This process as a worker: the ways to the others, the calls under way, and the services that others may ask for.

Everything above (verbs, remote objects, distributed autograd, torch's names) is written with five calls: ``request``,
``notify``, ``serve``, ``member`` and ``members``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.rpc.future import Future

__all__ = ["Agent", "Incoming", "Member"]


@dataclass(frozen=True)
class Member:
    """A worker, in its present incarnation.

    Attributes:
        name: unique among the living workers of the job.
        rank: its rank in the world, or its number in torch's API; -1 for a worker that is no rank.
        host, pid: where it is, for people.
        incarnation: a number that no other worker of this job has had, and no earlier one of this name.
    """

    name: str
    rank: int
    host: str
    pid: int
    incarnation: int


@dataclass(frozen=True)
class Incoming:
    """What a service's handler learns about a request beside its value.

    Attributes:
        peer: who asks.
        cancelled: whether the caller has given the call up since.
    """

    peer: Member
    cancelled: Callable[[], bool]


class Agent:
    """This process as a worker. One at a time, from ``rpc.init()`` to ``rpc.shutdown()``.

    Attributes:
        me: this worker.
    """

    me: Member

    def member(self, to: str | int | Member) -> Member:
        """The living worker of this name or rank.

        Raises:
            RankError: there is none.
        """
        raise NotImplementedError

    def members(self) -> list[Member]:
        """All living workers, by rank and name."""
        raise NotImplementedError

    def request(self, to: str | int | Member, service: str, value: Any, timeout_s: float | None = None) -> Future[Any]:
        """Have ``to`` run a service with ``value``, at most once, and return a future of what it returns.

        Args:
            to: the worker; a ``Member`` is that incarnation only. It may be this process itself.
            service: the service's name.
            value: any value that ``encoding.py`` can encode. Tensors in it are sent beside it.
            timeout_s: until the answer; the agent's default if None; infinity for no limit.

        The future ends with the handler's exception (its own type where it can be, with the remote traceback in its
        text), ``CallTimeout``, or ``PeerLost``.
        """
        raise NotImplementedError

    def notify(self, to: str | int | Member, service: str, value: Any) -> None:
        """Like ``request``, but nothing comes back, and nobody learns of an error. Notices and requests from one thread
        to one worker begin in the order in which they were sent, if all are small."""
        raise NotImplementedError

    def serve(self, service: str, handler: Callable[[Incoming, Any], Any], *, quick: bool = False) -> None:
        """Let other workers ask for a service.

        Args:
            service: its name.
            handler: gets the request and its value, on one of the agent's threads. What it returns is the answer; if it
                is a :class:`~phalanx.rpc.future.Future`, its value will be. What it raises goes to the caller.
            quick: the handler never waits and is short, so it may run on a thread that receives messages.
        """
        raise NotImplementedError

    def on_change(self, callback: Callable[[Member, str], None]) -> None:
        """Have ``callback`` called with a member and ``came``, ``left`` or ``lost``, whenever that happens."""
        raise NotImplementedError
