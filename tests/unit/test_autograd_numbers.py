"""The numbers of contexts and of edges between workers, which no two of a job may share."""

from __future__ import annotations

import threading

import pytest

from phalanx.rpc.autograd.contexts import COUNT_BITS, Contexts

THREADS = 4


@pytest.mark.parametrize("counted", ["contexts", "edges"])
def test_threads_whose_first_use_coincides_get_different_numbers(counted: str) -> None:
    """Each finds that the worker's numbers have not begun, and then begins them; one has taken a number by then."""
    contexts = Contexts()
    found = threading.Barrier(THREADS)
    turns = [threading.Event() for _ in range(THREADS + 1)]
    numbers: list[int] = []

    def first_use(place: int) -> None:
        assert contexts.worker_id < 0
        found.wait()
        turns[place].wait()
        contexts.count_as(3)
        numbers.append(contexts.new().number if counted == "contexts" else contexts.next_edge())
        turns[place + 1].set()

    threads = [threading.Thread(target=first_use, args=(place,)) for place in range(THREADS)]
    for thread in threads:
        thread.start()
    turns[0].set()
    for thread in threads:
        thread.join()
    assert numbers == [(3 << COUNT_BITS) + place for place in range(THREADS)]


def test_a_process_that_becomes_another_worker_counts_as_that_one() -> None:
    contexts = Contexts()
    contexts.count_as(3, 1)
    contexts.clear()
    contexts.count_as(5, 2)
    assert contexts.next_edge() >> COUNT_BITS == 5
