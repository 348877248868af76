"""What ranks of other hosts do, asked and answered through a store, also where an asker or an answerer dies meanwhile.

Each writes one key, in one step of the store. So a process that dies right before has left nothing, and one that dies
right after has left what it wrote; the tests begin with such a store.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import pytest
from torch._C._distributed_c10d import HashStore

from phalanx.transports.hosts import inquiry
from phalanx.transports.hosts.asking import Questions
from phalanx.transports.hosts.inquiry import Inquiry
from phalanx.transports.hosts.layout import Layout
from phalanx.watch.verdict import Seen

HOST_OF = [0, 0, 1, 1, 2]  # ranks 0 and 1 are on h0, 2 and 3 on h1, 4 on h2
NAMES = ["h0", "h0", "h1", "h1", "h2"]


def part(store: HashStore, rank: int) -> Inquiry:
    """One rank's side."""
    return Inquiry(store, rank, Layout(HOST_OF, rank, NAMES), Questions())


def beside(rank: int, state: str = "R") -> list[Seen]:
    """What a rank sees of those of its host."""
    return [Seen(each, state=state) for each, host in enumerate(HOST_OF) if host == HOST_OF[rank]]


@contextmanager
def answering(store: HashStore, *ranks: int, state: str = "R") -> Iterator[None]:
    """These ranks answer whoever asks, as their threads do, until the body is over."""
    over = threading.Event()

    def answer(rank: int) -> None:
        own = part(store, rank)
        while not over.wait(0.02):
            own.answer(lambda: beside(rank, state))

    threads = [threading.Thread(target=answer, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def never() -> bool:
    return False


def no_one() -> Sequence[Seen]:
    raise AssertionError("nobody has asked this rank")


def ask(store: HashStore, rank: int, seen: Callable[[], Sequence[Seen]] | None = None) -> dict[int, tuple[str, str]]:
    """For each rank of another host the host's name, and its state or that nobody answered for it."""
    found = part(store, rank).ask(seen or (lambda: beside(rank)), never)
    return {each.rank: (each.host, "silent" if each.silent else each.state) for each in found}


def test_one_rank_of_each_other_host_answers_for_all_there() -> None:
    store = HashStore()
    with answering(store, 2, 4):
        assert ask(store, 0) == {2: ("h1", "R"), 3: ("h1", "R"), 4: ("h2", "R")}
    with answering(store, 1, 4, state="T"):
        assert ask(store, 3) == {0: ("h0", "T"), 1: ("h0", "T"), 4: ("h2", "T")}


def test_nothing_is_written_for_nobody() -> None:
    store = HashStore()
    part(store, 2).answer(no_one)
    assert not store.check(["seen/2"])


def test_an_asker_that_dies_has_asked_in_vain_and_leaves_the_next_no_old_answer() -> None:
    store = HashStore()
    store.add("asked", 1)  # right after this it has died
    for rank in (2, 4):
        part(store, rank).answer(partial(beside, rank, "T"))
    before = store.get("seen/2")
    with answering(store, 2, 4):  # since then they have been continued
        assert ask(store, 0) == {2: ("h1", "R"), 3: ("h1", "R"), 4: ("h2", "R")}
    assert store.get("seen/2") != before


def test_what_a_rank_has_answered_before_it_died_is_there() -> None:
    """Rank 2 has answered the second question before it died; who asked the first one waits for it still."""
    store = HashStore()

    class AskedMeanwhile:
        """Rank 0's way to the store: right after it has asked, another rank does, and is answered."""

        def add(self, key: str, amount: int) -> int:
            number = store.add(key, amount)
            store.add(key, 1)
            for rank in (2, 4):
                part(store, rank).answer(partial(beside, rank))
            return number

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

    assert ask(cast(HashStore, AskedMeanwhile()), 0) == {2: ("h1", "R"), 3: ("h1", "R"), 4: ("h2", "R")}


def test_the_next_rank_of_a_host_answers_if_the_first_has_died_before_it_could() -> None:
    store = HashStore()
    with answering(store, 3, 4):
        assert ask(store, 0) == {2: ("h1", "R"), 3: ("h1", "R"), 4: ("h2", "R")}


def test_two_that_ask_at_once_answer_each_other() -> None:
    store = HashStore()
    found: dict[int, dict[int, tuple[str, str]]] = {}

    def one(rank: int) -> None:
        found[rank] = ask(store, rank)

    with answering(store, 4):
        threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {
        0: {2: ("h1", "R"), 3: ("h1", "R"), 4: ("h2", "R")},
        2: {0: ("h0", "R"), 1: ("h0", "R"), 4: ("h2", "R")},
    }


@pytest.mark.parametrize("said", ["[]", "no JSON", json.dumps({"number": 99, "ranks": []})])
def test_a_host_of_which_nobody_gives_an_answer_in_time_is_silent(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "_PATIENCE_S", 0.3)
    store = HashStore()
    store.set("seen/2", said)
    with answering(store, 4):
        assert ask(store, 0) == {2: ("h1", "silent"), 3: ("h1", "silent"), 4: ("h2", "R")}


def test_a_store_that_has_gone_answers_nothing() -> None:
    class Gone(HashStore):
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Broken pipe")

    assert ask(Gone(), 0) == {}
