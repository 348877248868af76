"""The numbers of contexts and of edges between workers, which no two of a job may share."""

from __future__ import annotations

import threading

import pytest
from tests.support import autograd_workers as workers
from tests.support.pool import Pool

from phalanx.rpc.agent import Agent
from phalanx.rpc.autograd import engine
from phalanx.rpc.autograd.contexts import COUNT_BITS, Contexts, contexts

THREADS = 4


def numbers_of_first_use(agent: Agent) -> tuple[int, list[int]]:
    """This worker's id among the numbers, and those that threads get which use it for the first time together."""
    found = threading.Barrier(THREADS)
    begin = contexts.count_as
    numbers: list[int] = []

    def begin_together(worker: int, incarnation: int = 0) -> None:
        found.wait(60)
        begin(worker, incarnation)

    vars(contexts)["count_as"] = begin_together

    def use() -> None:
        with engine.context() as number:
            numbers.extend([number, contexts.next_edge()])

    threads = [threading.Thread(target=use) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del vars(contexts)["count_as"]
    return agent.me.rank, numbers


@pytest.mark.parametrize("size", [2, 3, 5])
def test_threads_whose_first_use_coincides_get_numbers_of_their_own(size: int) -> None:
    with Pool(size, workers.start_worker) as pool:
        for worker, numbers in pool.do(numbers_of_first_use):
            assert {number >> COUNT_BITS for number in numbers} == {worker}
            assert sorted(numbers) == sorted(2 * [min(numbers) + place for place in range(THREADS)])


def test_a_process_that_becomes_another_worker_counts_as_that_one() -> None:
    own = Contexts()
    own.count_as(3, 1)
    own.clear()
    own.count_as(5, 2)
    assert own.next_edge() >> COUNT_BITS == 5
