"""The queue between threads: nothing is lost, nobody waits for longer than asked."""

from __future__ import annotations

import itertools
import queue
import threading
import time

import pytest

from phalanx.system.timed_queue import TimedQueue

PATIENCE_S = 120.0


def test_a_wait_that_is_over_before_it_begins_ends() -> None:
    waited: TimedQueue[int] = TimedQueue()
    done = threading.Event()

    def wait() -> None:
        for number in range(100_000):  # SimpleQueue of Python 3.11 blocks for ever in one of the first thousand
            waited.put(number)
            assert waited.get() == number
            with pytest.raises(queue.Empty):
                waited.get(1e-6)
        done.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert done.wait(PATIENCE_S)
    thread.join()


@pytest.mark.parametrize("getters", [1, 2, 5])
@pytest.mark.parametrize("timeout_s", [None, 1e-4])
def test_every_item_is_taken_once_and_in_order(getters: int, timeout_s: float | None) -> None:
    passed: TimedQueue[int | None] = TimedQueue()
    taken: list[list[int]] = [[] for _ in range(getters)]

    def take(mine: list[int]) -> None:
        while True:
            try:
                item = passed.get(timeout_s)
            except queue.Empty:
                continue
            if item is None:
                return
            mine.append(item)

    threads = [threading.Thread(target=take, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for number in range(20_000):
        passed.put(number)
        if number % 100 == 0:
            time.sleep(0.0005)  # so that the threads wait now and then
    for _ in threads:
        passed.put(None)
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert sorted(itertools.chain(*taken)) == list(range(20_000))
    for mine in taken:
        assert mine == sorted(mine)
    assert passed.qsize() == 0


def test_a_thread_that_waits_without_a_limit_gets_what_comes() -> None:
    passed: TimedQueue[str] = TimedQueue()
    taken: list[str] = []
    threads = [threading.Thread(target=lambda: taken.append(passed.get())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for item in "abc":
        time.sleep(0.01)
        passed.put(item)
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert sorted(taken) == ["a", "b", "c"]
