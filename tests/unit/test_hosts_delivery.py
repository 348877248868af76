"""What a rank has sent to other hosts when it leaves, where no thread can be started: the interpreter is ending."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx.transports.hosts import message_delivery
from phalanx.transports.hosts.lane import Engine, Transfer
from phalanx.transports.hosts.message_delivery import Delivery
from phalanx.transports.hosts.message_way import Way

PATIENCE_S = 60.0
PEERS = (1, 2)


class Events:
    """What happens to a delivery, in order; it is the engine as well."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self.limits_s: list[float] = []

    def set_timeout(self, timeout: timedelta) -> None:
        self.limits_s.append(timeout.total_seconds())


class OneWay:
    """A way, on which everything is there when it is asked for."""

    def __init__(self, events: Events, peer: int) -> None:
        self._events, self.peer = events, peer

    def wait_until_there(self, sent: Sequence[Transfer]) -> None:
        self._events.all.append(f"to rank {self.peer}")


def delivery(events: Events, unwanted: Collection[int] = (), finish: Callable[[], None] | None = None) -> Delivery:
    def finished() -> None:
        events.all.append("finish")

    return Delivery(
        cast(Engine, events),
        {cast(Way, OneWay(events, peer)): () for peer in PEERS},
        lambda ranks: [rank for rank in ranks if rank in unwanted],
        PATIENCE_S,
        finish or finished,
    )


@pytest.fixture
def started() -> Iterator[list[threading.Thread]]:
    """The threads that were started."""
    threads: list[threading.Thread] = []
    yield threads
    for thread in threads:
        thread.join(PATIENCE_S)


def start_threads(monkeypatch: pytest.MonkeyPatch, started: list[threading.Thread], count: int) -> None:
    """Let so many threads be started, and no more."""

    class Refused(threading.Thread):
        def start(self) -> None:
            if len(started) == count:
                raise RuntimeError("can't create new thread at interpreter shutdown")
            started.append(self)
            super().start()

    monkeypatch.setattr(message_delivery, "threading", SimpleNamespace(Thread=Refused, Event=threading.Event))


def in_time(task: Callable[[], Any]) -> None:
    thread = threading.Thread(target=task, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it still waits"


@pytest.mark.parametrize("threads", [0, 1, 2, 3])
def test_all_is_delivered_with_as_many_threads_as_can_be_started(
    monkeypatch: pytest.MonkeyPatch, started: list[threading.Thread], threads: int
) -> None:
    start_threads(monkeypatch, started, threads)
    events = Events()
    under_way = delivery(events)
    in_time(lambda: under_way.begin(PATIENCE_S))
    in_time(under_way.wait)
    assert sorted(events.all) == ["finish", "to rank 1", "to rank 2"]
    assert events.all[-1] == "finish"
    assert len(events.limits_s) == min(2, 3 - threads)  # for those without, nothing else ends a wait
    assert all(0 < limit_s <= PATIENCE_S for limit_s in events.limits_s)


@pytest.mark.parametrize("threads", [0, 1])
def test_a_rank_that_wants_nothing_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, started: list[threading.Thread], threads: int
) -> None:
    start_threads(monkeypatch, started, threads)
    events = Events()
    in_time(lambda: delivery(events, unwanted=[1]).begin(PATIENCE_S))
    assert events.all == ["to rank 2", "finish"]


@pytest.mark.parametrize("threads", [0, 1])
def test_nothing_is_delivered_once_the_script_has_failed(
    monkeypatch: pytest.MonkeyPatch, started: list[threading.Thread], threads: int
) -> None:
    start_threads(monkeypatch, started, threads)
    monkeypatch.setattr(sys, "last_value", ValueError("the script's"), raising=False)
    events = Events()
    in_time(lambda: delivery(events).begin(PATIENCE_S))
    assert events.all == ["finish"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("threads", [0, 1, 3])
def test_the_end_of_the_process_waits_for_no_delivery_that_failed(
    monkeypatch: pytest.MonkeyPatch, started: list[threading.Thread], threads: int
) -> None:
    start_threads(monkeypatch, started, threads)

    def fail() -> None:
        raise OSError("it cannot be closed")

    under_way = delivery(Events(), finish=fail)
    if threads:
        in_time(lambda: under_way.begin(PATIENCE_S))
    else:
        with pytest.raises(OSError, match="it cannot be closed"):
            under_way.begin(PATIENCE_S)
    in_time(under_way.wait)
