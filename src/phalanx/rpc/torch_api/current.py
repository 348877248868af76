"""The agent of this process, as torch's functions ask for it, and what its calls share."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from phalanx.errors import InitializationError
from phalanx.rpc.agent import Agent
from phalanx.rpc.future import Future
from phalanx.rpc.handlers import Handlers
from phalanx.rpc.members import Member
from phalanx.rpc.torch_api.references import References

__all__ = ["TorchAgent", "agent", "is_set", "reset", "start", "started"]


class TorchAgent(Protocol):
    """The parts of ``TensorPipeAgent`` that other modules use.

    Attributes:
        me: this worker.
        phalanx: the agent that moves the messages.
        references: the remote references of this process.
        pool: threads for the callbacks of futures.
        timeout_s: how long a call may take by default, in seconds; 0 for no limit.
        lost: the names of workers that went without ``shutdown``.
        leaks: what others referred to when all came to ``shutdown``, in words.
    """

    me: Member
    phalanx: Agent
    references: References
    pool: Handlers
    timeout_s: float
    lost: set[str]
    leaks: list[str]

    def get_worker_info(self, who: Any = None) -> Any:
        """The name and number of a worker; of this one by default."""

    def member(self, to: Any) -> Member:
        """The worker that torch calls so."""

    def count(self, call: Future[Any]) -> None:
        """A call of this worker has begun."""


_NOT_SET = "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"

_agent: Any = None
_changed = threading.Condition()


def is_set() -> bool:
    """Whether ``init_rpc`` has made an agent that ``shutdown`` has not ended."""
    return _agent is not None


def agent() -> TorchAgent:
    """The agent.

    Raises:
        InitializationError: there is none.
    """
    if _agent is None:
        raise InitializationError(_NOT_SET)
    found: TorchAgent = _agent
    return found


def start(made: Any) -> None:
    """From now on ``made`` is the agent, and what others ask of it is served."""
    global _agent
    with _changed:
        _agent = made
        _changed.notify_all()


def reset() -> None:
    """There is no agent any more."""
    global _agent
    with _changed:
        _agent = None


def started(made: Any, timeout_s: float) -> bool:
    """Wait until ``made`` is the agent: others may call a worker before its own ``init_rpc`` has come so far."""
    with _changed:
        return _changed.wait_for(lambda: _agent is made, timeout_s)
