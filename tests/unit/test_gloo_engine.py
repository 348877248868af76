"""An engine over Gloo that is aborted while it connects, and what it calls late.

No connection is taken for broken before it is made, and none stays open, so that nobody waits on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from phalanx.errors import CollectiveMismatch
from phalanx.transports.hierarchical.frames import Frames
from phalanx.transports.hierarchical.gloo import GlooEngine, GlooOnDemand, TransferFailed, TransferLate, lazy_gloo
from phalanx.transports.hierarchical.layout import Layout
from phalanx.transports.hierarchical.reason import CallsDiffer
from phalanx.transports.solo import SoloCommunicator

LIMIT = timedelta(seconds=60)
REFUSED = "[gloo/transport/tcp/pair.cc:680] Connect timeout: timed out connecting: SO_ERROR: Connection refused"
ENDED = "[gloo/transport/tcp/pair.cc:547] Read error [10.0.0.2]:5050: Connection timed out"


class Work:
    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None or self.fails:
            raise RuntimeError(self.fails or "Timed out waiting 1ms for recv operation to complete")


class Gloo:
    """It connects as soon as ``connects`` is set, and notes the peers whose connections an abort closes."""

    def __init__(self, timeout: timedelta = LIMIT, refuses: str = "", ends: str = "") -> None:
        self.connects, self.begun, self.closes = threading.Event(), threading.Event(), threading.Event()
        self.closed: list[int] = []
        self.made = self
        self.timeout, self.refuses, self.ends = timeout, refuses, ends

    def get(self) -> Any:
        return self

    def release(self) -> None:
        pass

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        self.begun.set()
        connected = self.connects.wait(self.timeout.total_seconds())
        if self.refuses:
            raise RuntimeError(self.refuses)
        assert connected
        return Work(self.ends)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        assert self.connects.is_set()  # else Gloo would end the process when the connection is made
        self.closed.append(peer)
        self.closes.set()
        return Work()


def in_thread(task: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=task, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("patience_s", [60.0, 0.01], ids=["in time", "long after it"])
def test_connection_that_is_being_made_at_an_abort_is_closed(
    patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.transports.hierarchical.gloo._CONNECTING_S", patience_s)
    gloo: Any = Gloo()
    engine = GlooEngine(gloo, LIMIT)

    def send() -> None:
        with pytest.raises(TransferFailed, match="aborted"):
            engine.send(torch.ones(1), 3, 1)

    sends = in_thread(send)
    assert gloo.begun.wait(60)
    aborts = in_thread(engine.abort)
    sends.join(60)  # it waits for nobody any more
    assert not sends.is_alive()
    if patience_s < 1:
        aborts.join(60)
    assert gloo.closed == []
    gloo.connects.set()
    aborts.join(60)
    assert gloo.closes.wait(60)
    assert gloo.closed == [3]
    with pytest.raises(TransferFailed, match="aborted"):
        engine.send(torch.ones(1), 4, 1)


@pytest.mark.parametrize(
    ("fault", "limit", "late"),
    [
        ({"refuses": REFUSED}, LIMIT, False),
        ({"ends": ENDED}, LIMIT, False),
        ({"refuses": "[gloo/transport/tcp/pair.h:311] Connect timeout [none]"}, timedelta(days=365), True),
    ],
)
def test_what_gloo_calls_a_timeout_is_late_only_if_the_time_is_over(
    fault: dict[str, str], limit: timedelta, late: bool
) -> None:
    gloo: Any = Gloo(timedelta(seconds=0.1) if late else LIMIT, **fault)
    if not late:
        gloo.connects.set()
    engine = GlooEngine(gloo, limit)
    with pytest.raises(TransferFailed) as failed:
        engine.send(torch.ones(1), 1, 1).wait()
    assert isinstance(failed.value, TransferLate) == late, failed.value
    if not late:
        engine.close()
        assert failed.value.peer == 1


def test_rank_that_does_not_send_in_time_is_late() -> None:
    store = HashStore()
    other: Any = lazy_gloo(store, 1, 2, LIMIT, one_host=True)
    engine = GlooEngine(GlooOnDemand(lambda limit: lazy_gloo(store, 0, 2, limit, one_host=True), LIMIT), LIMIT)
    thread = in_thread(lambda: other.send([torch.ones(1)], 0, 1).wait())
    engine.recv(torch.empty(1), 1, 1).wait()
    thread.join(60)
    engine.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(TransferLate):
        engine.recv(torch.empty(1), 1, 1).wait()
    engine.close()
    other.shutdown()


def test_error_of_what_is_done_while_transfers_are_awaited_is_its_own() -> None:
    def differ() -> None:
        raise CollectiveMismatch("inside this host")

    gloo: Any = Gloo()
    gloo.connects.set()
    engine = GlooEngine(gloo, LIMIT)
    with pytest.raises(CollectiveMismatch):
        engine.wait([engine.send(torch.ones(1), 1, 1)], differ)
    engine.close()


def test_leader_hears_the_others_while_its_own_frame_is_on_its_way() -> None:
    """It may be for ever, behind what was sent before it in the same call."""
    engine = Mock()
    engine.recv.side_effect = lambda memory, *_: Mock(wait=memory.zero_, tensor=memory)
    frames = Frames(Layout([0, 1], 0), 0, SoloCommunicator(), engine, 64)
    with pytest.raises(CallsDiffer):
        frames.meet(7)
    assert not engine.send.return_value.method_calls
