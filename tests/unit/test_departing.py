"""How ranks leave a group over hosts: the last one deletes its keys, whichever it is, and whoever dies meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import count, permutations

import pytest
from tests.support.interrupted import Interrupted
from tests.support.waiting import soon
from torch._C._distributed_c10d import HashStore, Store

from phalanx.store.peek import peek
from phalanx.transports.hosts import asking, departing
from phalanx.transports.hosts.asking import Questions
from phalanx.transports.hosts.departing import _GONE, _MARKS, _WRITTEN_WITH_A_MARK
from phalanx.transports.hosts.layout import Layout
from phalanx.transports.hosts.whereabouts import Whereabouts

SIZES = [2, 3, 5]
ADDRESSES = ["lanes", "messages"]
broken_or_not = pytest.mark.parametrize("broken", [False, True])


class Death(BaseException):
    """The end of a process, which runs no handler and makes no further request."""


def die() -> None:
    raise Death


def fill(store: Store, size: int, broken: bool) -> None:
    """Write what the ranks of a group write as long as they are in it."""
    for rank in range(size):
        kinds = ["lookout", "left", *ADDRESSES, *(_WRITTEN_WITH_A_MARK if broken else [])]
        for kind in kinds:
            store.set(f"{kind}/{rank}", "something")
    for key in _MARKS if broken else []:
        if key != _GONE:  # written by ranks that leave
            store.set(key, "something")


def depart(store: Store, size: int, rank: int, ended: Collection[int] = ()) -> None:
    def forget(rank: int) -> None:
        for kind in ADDRESSES:
            store.delete_key(f"{kind}/{rank}")

    departing.depart(store, rank, size, ended, forget, lambda rank: store.delete_key(f"gloo/{rank}"))


def depart_all(store: Store, size: int, ranks: Iterable[int], ended: Collection[int] = ()) -> None:
    for rank in ranks:
        depart(store, size, rank, ended)


@broken_or_not
@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_leave_one_after_the_other_leave_no_keys(size: int, broken: bool) -> None:
    store = HashStore()
    fill(store, size, broken)
    there = store.num_keys()
    depart_all(store, size, range(size - 1))
    assert store.num_keys() == there + size  # nothing that the last one may read is deleted; and who has left
    depart(store, size, size - 1)
    assert store.num_keys() == 0


@broken_or_not
@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_leave_between_two_requests_of_one_that_leaves_leave_no_keys(size: int, broken: bool) -> None:
    """All others, or some before it and the others then, whichever two requests these are."""
    for before in range(size):
        for number in count():
            store = Interrupted()
            fill(store.all, size, broken)
            depart_all(store, size, range(before))
            store.something = partial(depart_all, store.all, size, range(before + 1, size))
            store.requests_until = number
            depart(store, size, before)
            if store.requests_until >= 0:
                break  # it has finished with fewer requests
            assert store.num_keys() == 0, f"after {number} requests, {before} had left before"
        assert number >= 1


@broken_or_not
@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_dies_while_it_leaves_disturbs_nobody(size: int, broken: bool) -> None:
    """Before whichever of its requests: what the others may still read is there until they have left."""
    for before in range(size):
        for number in count():
            store = Interrupted()
            fill(store.all, size, broken)
            depart_all(store, size, range(before))
            there = store.num_keys()
            store.something, store.requests_until = die, number
            try:
                depart(store, size, before)
            except Death:
                pass
            else:
                break
            assert store.num_keys() >= there or before == size - 1
            depart_all(store, size, range(before + 1, size), ended=[before])
            if number == 0 and before < size - 1:  # the others find it gone before it has counted itself
                assert store.num_keys() == 0
        assert number >= 1


@broken_or_not
@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_are_gone_are_counted_by_those_that_know_of_them(size: int, broken: bool) -> None:
    """By one of the others or all of them, in any order, and each once, also one that has left before its end."""
    for gone in range(size):
        others = [rank for rank in range(size) if rank != gone]
        for knowing in ([rank] for rank in others), [others]:
            for those in knowing:
                for left_before in False, True:
                    store = HashStore()
                    fill(store, size, broken)
                    store.set(f"gloo/{gone}", "an address that the rank deletes itself unless it dies")
                    if left_before:
                        store.delete_key(f"gloo/{gone}")
                        depart(store, size, gone)
                    for rank in others:
                        assert store.check([f"lookout/{rank}", f"left/{rank}"])  # the group has members still
                        depart(store, size, rank, [gone] if rank in those else [])
                    assert store.num_keys() == 0, (gone, those, left_before)


@pytest.mark.parametrize("size", [3, 5])
def test_ranks_that_know_of_different_ends_leave_no_keys(size: int) -> None:
    for gone in permutations(range(size), 2):
        store = HashStore()
        fill(store, size, broken=True)
        others = [rank for rank in range(size) if rank not in gone]
        for at, rank in enumerate(others):
            assert store.check([f"lookout/{rank}"])
            depart(store, size, rank, gone if len(others) == 1 else [gone[at % 2]])
        assert store.num_keys() == 0


@pytest.mark.parametrize("size", [3, 5])
def test_ranks_that_leave_while_others_count_one_that_is_gone_leave_no_keys(size: int) -> None:
    """All but the first rank, which is gone, and the second, between any two of whose requests the others leave."""
    for known in [0], []:
        for number in count():
            store = Interrupted()
            fill(store.all, size, broken=True)
            store.something = partial(depart_all, store.all, size, range(2, size), [0])
            store.requests_until = number
            depart(store, size, 1, known)
            if store.requests_until >= 0:
                break
            assert store.num_keys() == 0, (known, number)
        assert number >= 2


class Rank:
    """One rank's questions, some of which are answered only when they are let go on."""

    def __init__(self, store: Store, size: int, rank: int) -> None:
        self.questions = Questions()
        self._store, self._size, self._rank = store, size, rank
        self._goes_on = threading.Event()
        self.departed = threading.Event()

    def begin(self, ask: Callable[[Questions, Callable[[], object]], object], request: Callable[[], object]) -> None:
        """Begin a request that is on its way for long."""
        under_way = threading.Event()

        def task() -> None:
            under_way.set()
            assert self._goes_on.wait(100)
            request()

        threading.Thread(target=ask, args=(self.questions, task), daemon=True).start()
        assert under_way.wait(100)

    def leave(self) -> None:
        def last() -> None:
            depart(self._store, self._size, self._rank)
            self.departed.set()

        self.questions.close(last)

    def go_on(self) -> None:
        self._goes_on.set()


def note(store: Store, kind: str) -> None:
    """Write what a rank does, as one that learns that the group is broken, whether or not anybody has written that."""
    Whereabouts(store, 0, Layout([0, 1, 2], 0), [1, 2, 3], Questions())._set(kind, (1, "all_reduce", ""))


WAYS: dict[str, Callable[[Questions, Callable[[], object]], object]] = {
    "waited for": lambda questions, task: questions.ask(task, 100.0),
    "late": lambda questions, task: questions.ask(task, 0.01),
    "late for another question": lambda questions, task: questions.say(task),
    "aside": lambda questions, task: questions.aside(task),
}
REQUESTS: dict[str, Callable[[Store], object]] = {
    "a rank's place": lambda store: note(store, "place"),
    "a rank's call": lambda store: note(store, "call"),
    "a reason": lambda store: store.compare_set("broken", "", "because"),
    "a look": lambda store: peek(store, "left/1"),
}


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("what", REQUESTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_late_request_recreates_no_key(way: str, what: str, slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "keep_spare_thread", lambda user: None)  # the interpreter does not end here
    size, store = 3, HashStore()
    fill(store, size, broken=False)
    ranks = [Rank(store, size, rank) for rank in range(size)]
    ranks[slow].begin(WAYS[way], lambda: REQUESTS[what](store))
    for rank in ranks:
        rank.leave()
    assert all(rank.departed.wait(100) for rank in ranks if rank is not ranks[slow])
    assert store.check([f"lookout/{slow}"])  # the group has a member still
    for rank in ranks:
        assert rank.questions.ask(lambda: store.set("broken", "too late"), anyway=True) is None
        rank.questions.aside(lambda: store.set("place/1", "too late"))
    assert not store.check(["broken"])
    ranks[slow].go_on()
    assert ranks[slow].departed.wait(100)
    assert store.num_keys() == 0


def test_ranks_that_ask_while_they_leave_leave_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any thread may ask at any moment, and what was asked before the end is carried out before it."""
    monkeypatch.setattr(asking, "keep_spare_thread", lambda user: None)
    size = 3
    for _ in range(20):
        store = HashStore()
        fill(store, size, broken=True)
        ranks = [Rank(store, size, rank) for rank in range(size)]
        begun = threading.Barrier(2 * size + 1)

        def ask(questions: Questions, begun: threading.Barrier = begun, store: Store = store) -> None:
            begun.wait(100)
            for turn in range(30):
                if turn % 2:
                    questions.say(lambda: note(store, "place"))
                else:
                    questions.aside(lambda: store.compare_set("broken", "", "because"))

        asking_threads = [
            threading.Thread(target=ask, args=(rank.questions,), daemon=True) for rank in ranks for _ in range(2)
        ]
        for thread in asking_threads:
            thread.start()
        begun.wait(100)
        for rank in ranks:
            rank.leave()
        for thread in asking_threads:
            thread.join(100)
        assert all(rank.departed.wait(100) for rank in ranks)
        assert store.num_keys() == 0


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_questions_that_are_answered_in_any_order_are_all_before_the_last(
    order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "keep_spare_thread", lambda user: None)
    questions, done = Questions(), list[str]()
    go_on = [threading.Event() for _ in order]
    ended = threading.Event()

    def task(number: int) -> None:
        assert go_on[number].wait(100)
        done.append(f"question {number}")

    for number in order:
        questions.aside(partial(task, number))

    def last() -> None:
        done.append("the last")
        ended.set()

    questions.close(last)
    for at, number in enumerate(order):
        go_on[number].set()
        assert soon(lambda at=at: len(done) > at)  # type: ignore[misc]
    assert ended.wait(100)
    questions.close(last)
    assert done == [*(f"question {number}" for number in order), "the last"]
