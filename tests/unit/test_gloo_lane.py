"""An engine over Gloo that is aborted while it connects: no connection is taken for broken before it is made, and none
stays open, so that nobody waits on it. And what it calls late.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from tests.support.connecting import gloo_engine
from torch._C._distributed_c10d import HashStore

from phalanx.errors import CollectiveMismatch
from phalanx.transports.gloo.engine import lazy_gloo
from phalanx.transports.hosts import gloo_lane
from phalanx.transports.hosts.gloo_lane import UNLIMITED, GlooEngine
from phalanx.transports.hosts.lane import SHORT_BYTES, TransferFailed, TransferLate

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
        self.timeout = timedelta(seconds=PATIENCE_S)

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


class Refused(Gloo):
    """Connections to it are refused: Gloo gives up after a few attempts, in about two seconds."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        raise RuntimeError(
            "[gloo/transport/tcp/pair.cc:680] Connect timeout: timed out connecting: SO_ERROR: Connection refused"
        )


class Ended(Gloo):
    """Its connections are made, and end: the kernel has sent something in vain for long."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        return EndedWork()


class EndedWork(Work):
    def wait(self, timeout: timedelta | None = None) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Read error [10.0.0.2]:5050: Connection timed out")


@pytest.mark.parametrize("gloo", [Refused(), Ended()])
def test_what_gloo_calls_a_timeout_is_late_only_if_the_time_is_over(gloo: Any) -> None:
    engine = GlooEngine(gloo, timedelta(seconds=PATIENCE_S))
    gloo.connects.set()
    with pytest.raises(TransferFailed) as failed:
        engine.send(torch.ones(SHORT_BYTES), 1, 1).wait()
    engine.close()
    assert not isinstance(failed.value, TransferLate), failed.value
    assert failed.value.peer == 1


class Awaited(Gloo):
    """The other rank does not connect for as long as Gloo waits for that."""

    def __init__(self) -> None:
        super().__init__()
        self.timeout = timedelta(seconds=0.2)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        time.sleep(self.timeout.total_seconds())
        raise RuntimeError("[gloo/transport/tcp/pair.h:311] Connect timeout [none]")


def test_a_rank_that_does_not_connect_in_time_is_late_though_transfers_have_no_limit() -> None:
    gloo: Any = Awaited()
    with pytest.raises(TransferLate):
        GlooEngine(gloo, UNLIMITED).send(torch.ones(1), 1, 1)


def test_a_rank_that_does_not_send_in_time_is_late() -> None:
    store, limit = HashStore(), timedelta(seconds=PATIENCE_S)
    other: Any = lazy_gloo(store, 1, 2, limit, one_host=True)
    engine = gloo_engine(store, 0, 2, limit)
    thread = in_thread(lambda: other.send([torch.ones(1)], 0, 1).wait())
    engine.recv(torch.empty(1), 1, 1).wait()
    thread.join(PATIENCE_S)
    engine.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(TransferLate):
        engine.recv(torch.empty(1), 1, 1).wait()
    engine.close()
    other.shutdown()


def test_as_many_short_sends_as_one_likes_are_waited_for_together() -> None:
    gloo: Any = Ended()
    gloo.connects.set()
    engine = GlooEngine(gloo, timedelta(seconds=PATIENCE_S))
    sent = [engine.send(torch.ones(1), 1, 1) for _ in range(5000)]
    calls: list[int] = []
    sent[0].wait_with(sent[1:], lambda: calls.append(1))
    assert calls == [1]
    engine.close()


def test_error_of_what_is_done_while_transfers_are_awaited_is_its_own() -> None:
    def differ() -> None:
        raise CollectiveMismatch("inside this host")

    gloo: Any = Gloo()
    gloo.connects.set()
    engine = GlooEngine(gloo, timedelta(seconds=PATIENCE_S))
    with pytest.raises(CollectiveMismatch):
        engine.send(torch.ones(SHORT_BYTES), 1, 1).wait_with([], differ)
    engine.close()
