"""Gloo as the engine between hosts: it comes with torch, and needs no setup. It neither authenticates nor encrypts."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.transports.gloo.engine import GlooOnDemand
from phalanx.transports.hosts.lane import Engine, Transfer, TransferFailed, TransferLate

__all__ = ["GlooEngine"]


class _GlooTransfer(Transfer):
    __slots__ = ("_engine", "_peer", "_tensor", "_work")

    def __init__(self, engine: GlooEngine, peer: int, work: dist.Work, tensor: torch.Tensor) -> None:
        self._engine, self._peer, self._work, self._tensor = engine, peer, work, tensor

    def wait(self) -> None:
        try:
            self._work.wait(self._engine.timeout)
        except RuntimeError as error:
            raise _failure(self._peer, error) from error


class GlooEngine(Engine):
    """A Gloo group of its own, over all ranks; it connects two ranks when they first have something to exchange.

    Args:
        gloo: makes the group when it is first used.
        timeout: how long a transfer may take.
    """

    name = "Gloo"

    def __init__(self, gloo: GlooOnDemand, timeout: timedelta) -> None:
        self._gloo = gloo
        self.timeout = timeout

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._start("send", tensor, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._start("recv", tensor, peer, tag)

    def _start(self, verb: str, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        try:
            work: dist.Work = getattr(self._gloo.get(), verb)([tensor], peer, tag)
        except RuntimeError as error:
            raise _failure(peer, error) from error
        return _GlooTransfer(self, peer, work, tensor)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def abort(self) -> None:
        self._gloo.abort()

    def close(self) -> None:
        self._gloo.shutdown()


def _failure(peer: int, error: RuntimeError) -> TransferFailed:
    text = " ".join(str(error).split())
    # torch and Gloo have no type for this.
    late = "timed out" in text.lower() or "timeout" in text.lower()
    return TransferLate(peer, text) if late else TransferFailed(peer, text)
