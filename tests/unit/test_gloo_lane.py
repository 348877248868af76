"""An engine over Gloo that is aborted while it connects: no connection is taken for broken before it is made, and none
stays open, so that nobody waits on it.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

from phalanx.transports.hosts import gloo_lane
from phalanx.transports.hosts.gloo_lane import GlooEngine
from phalanx.transports.hosts.lane import TransferFailed

PATIENCE_S = 60.0


class Work:
    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            raise RuntimeError("Timed out waiting 1ms for recv operation to complete")


class Gloo:
    """It connects as soon as ``connects`` is set, and notes the peers whose connections an abort closes."""

    def __init__(self) -> None:
        self.connects, self.begun, self.closes = threading.Event(), threading.Event(), threading.Event()
        self.closed: list[int] = []
        self.made = self

    def get(self) -> Any:
        return self

    def release(self) -> None:
        pass

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        self.begun.set()
        assert self.connects.wait(PATIENCE_S)
        return Work()

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        assert self.connects.is_set()  # else Gloo would end the process when the connection is made
        self.closed.append(peer)
        self.closes.set()
        return Work()


def in_thread(task: Any) -> threading.Thread:
    thread = threading.Thread(target=task, daemon=True)
    thread.start()
    return thread


def start_to_send(engine: GlooEngine, gloo: Gloo) -> threading.Thread:
    def send() -> None:
        with pytest.raises(TransferFailed, match="aborted"):
            engine.send(torch.ones(1), 3, 1)

    thread = in_thread(send)
    assert gloo.begun.wait(PATIENCE_S)
    return thread


def test_an_abort_waits_for_a_connection_that_is_being_made_and_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_lane, "_CONNECTING_S", PATIENCE_S)
    gloo: Any = Gloo()
    engine = GlooEngine(gloo, timedelta(seconds=PATIENCE_S))
    sends = start_to_send(engine, gloo)
    aborts = in_thread(engine.abort)
    sends.join(PATIENCE_S)  # it waits for nobody any more
    assert not sends.is_alive()
    assert gloo.closed == []
    gloo.connects.set()
    aborts.join(PATIENCE_S)
    assert gloo.closed == [3]
    with pytest.raises(TransferFailed, match="aborted"):
        engine.send(torch.ones(1), 4, 1)


def test_a_connection_that_is_made_long_after_an_abort_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_lane, "_CONNECTING_S", 0.01)
    gloo: Any = Gloo()
    engine = GlooEngine(gloo, timedelta(seconds=PATIENCE_S))
    sends = start_to_send(engine, gloo)
    engine.abort()
    sends.join(PATIENCE_S)
    assert gloo.closed == []
    gloo.connects.set()
    assert gloo.closes.wait(PATIENCE_S)
    assert gloo.closed == [3]
