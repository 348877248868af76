"""Waits with a limit, and threads for them: a stopped process, an ending interpreter and signal handlers included."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from typing import Any

import pytest
from tests.support.waiting import soon

from phalanx.errors import BackendError
from phalanx.system import threads
from phalanx.system.threads import AwakeClock, TimedQueue, start, wait_awake, within

PATIENCE_S = 120.0
START = next(name for name in ("_start_new_thread", "_start_joinable_thread") if hasattr(threading, name))


class Time:
    """A clock for the module under test, which goes on only when a test says so."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, timeout_s: float) -> bool:
        self.now_s += timeout_s
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr("phalanx.system.threads.time.monotonic", made.monotonic)
    return made


def test_awake_clock_and_wait_leave_out_the_time_of_a_stop(clock: Time) -> None:
    counted, waits = AwakeClock(), list[float]()
    clock.now_s += 1.0
    assert counted.now() == 1.0
    clock.now_s += 3600.0
    assert counted.now() <= 1.0 + 2 * threads.SLICE_S

    def wait(timeout_s: float) -> bool:
        waits.append(timeout_s)
        return clock.wait(1000.0 if len(waits) == 2 else timeout_s)

    assert not wait_awake(wait, 10.0)
    assert len(waits) >= 9  # the stop took at most two seconds of the ten
    assert max(waits) <= threads.SLICE_S


def test_clock_of_the_caller_counts_the_whole_of_a_long_wait(clock: Time) -> None:
    counted = AwakeClock()
    assert not wait_awake(clock.wait, 30.0, counted)
    assert counted.now() == pytest.approx(30.0)
    assert wait_awake(lambda timeout_s: True, 10.0, counted)
    assert wait_awake(lambda timeout_s: True, None)
    assert counted.now() == pytest.approx(30.0)


def test_what_takes_too_long_is_left_alone() -> None:
    before = threading.active_count()
    goes_on = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.05, lambda: goes_on.wait(100))
    goes_on.set()
    assert within(60, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(60, lambda: 1 / 0)
    assert soon(lambda: threading.active_count() <= before)


def test_only_the_systems_refusal_of_a_thread_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (("can't start new thread", BackendError), ("of a signal handler", RuntimeError)):

        def refused(*_: Any, text: str = text, **__: Any) -> None:
            raise RuntimeError(text)

        monkeypatch.setattr(threading, START, refused)
        with pytest.raises(RuntimeError, match=text) as caught:
            start(threading.Thread())
        assert type(caught.value) is expected


def test_timed_queue_hands_every_item_over_once_and_in_order() -> None:
    passed: TimedQueue[int | None] = TimedQueue()
    taken: list[list[int]] = [[] for _ in range(3)]

    def take(mine: list[int]) -> None:
        while True:
            try:
                # Some waits are over before they begin: SimpleQueue of Python 3.11 blocks for ever in such a one.
                item = passed.get(1e-6 if len(mine) % 2 else None)
            except queue.Empty:
                continue
            if item is None:
                return
            mine.append(item)

    threads = [threading.Thread(target=take, args=(mine,), daemon=True) for mine in taken]
    for thread in threads:
        thread.start()
    for number in range(10_000):
        passed.put(number)
        if number % 100 == 0:
            time.sleep(0.0005)  # so that the threads wait now and then
    for _ in threads:
        passed.put(None)
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert sorted(itertools.chain(*taken)) == list(range(10_000))
    assert all(mine == sorted(mine) for mine in taken)
    assert passed.qsize() == 0
