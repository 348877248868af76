"""Where distributed autograd takes part in a call: the tensors of a message, on both of its ends."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from phalanx.rpc.agent import Member

__all__ = ["running_in", "unwrap", "wrap"]


def _engine() -> Any:
    try:
        from phalanx.rpc.autograd import engine
    except ImportError:
        return None
    return engine


def wrap(to: Member, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
    """The tensors to send, and what goes with them."""
    engine = _engine()
    return engine.wrap(to, tensors) if engine is not None else (tensors, None)


def unwrap(from_: Member, tensors: list[torch.Tensor], autograd: Any) -> list[torch.Tensor]:
    """The tensors that were received, as part of this worker's graph."""
    engine = _engine()
    return engine.unwrap(from_, tensors, autograd) if engine is not None else tensors


def running_in(autograd: Any) -> Any:
    """What others ask for runs in their context of distributed autograd."""
    engine = _engine()
    return engine.running_in(autograd) if engine is not None and autograd is not None else contextlib.nullcontext()
