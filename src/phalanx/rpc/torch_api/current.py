"""The agent of this process, as torch's functions ask for it, and what its calls share."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from phalanx.errors import InitializationError

if TYPE_CHECKING:
    from phalanx.rpc.torch_api.torch_agent import TensorPipeAgent

__all__ = ["agent", "is_set", "reset", "start", "started"]

_NOT_SET = "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"

_agent: Any = None
_changed = threading.Condition()


def is_set() -> bool:
    """Whether ``init_rpc`` has made an agent that ``shutdown`` has not ended."""
    return _agent is not None


def agent() -> TensorPipeAgent:
    """The agent.

    Raises:
        InitializationError: there is none.
    """
    if _agent is None:
        raise InitializationError(_NOT_SET)
    found: TensorPipeAgent = _agent
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
