"""The store that rank 0 serves: against a plain dict, with several ranks and threads, and its end."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.stores import Job
from tests.support.waiting import soon
from torch._C._distributed_c10d import PrefixStore

from phalanx.errors import InitializationError
from phalanx.store import requests as wire
from phalanx.store.client import JobStore
from phalanx.store.table import Table

SOON = timedelta(milliseconds=100)
KEYS = ("a", "b", "c", "")


class Model:
    """What torch's stores do, as a dict."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.entries[key] = value

    def add(self, key: str, value: int) -> int:
        total = int(self.entries.get(key, b"0")) + value
        self.entries[key] = str(total).encode()
        return total

    def append(self, key: str, value: bytes) -> None:
        self.entries[key] = self.entries.get(key, b"") + value

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        if key not in self.entries and expected:
            return expected
        if self.entries.get(key, b"") == expected:
            self.entries[key] = desired
        return self.entries[key]

    def delete_key(self, key: str) -> bool:
        return self.entries.pop(key, None) is not None

    def check(self, keys: list[str]) -> bool:
        return all(key in self.entries for key in keys)

    def num_keys(self) -> int:
        return len(self.entries)

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self.entries.update(zip(keys, values, strict=True))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.entries[key] for key in keys]

    def get(self, key: str) -> bytes:
        return self.entries[key]

    def list_keys(self) -> list[str]:
        return list(self.entries)

    def wait(self, keys: list[str], _: timedelta) -> None:
        for key in keys:
            self.entries[key]


def calls() -> st.SearchStrategy[tuple[Any, ...]]:
    key, value = st.sampled_from(KEYS), st.binary(max_size=6) | st.sampled_from([b"", b"x" * 70_000])
    keys = st.lists(key, max_size=3, unique=True)
    number = st.integers(-(1 << 62), 1 << 62)
    return st.one_of(
        st.tuples(st.just("set"), key, value),
        st.tuples(st.just("add"), key, number),
        st.tuples(st.just("append"), key, value),
        st.tuples(st.just("compare_set"), key, value | st.just(b""), value),
        st.tuples(st.just("delete_key"), key),
        st.tuples(st.just("check"), keys),
        st.tuples(st.just("num_keys")),
        st.tuples(st.just("list_keys")),
        st.tuples(st.just("multi_set"), keys, st.just([b"1", b"2", b"3"])),
        st.tuples(st.just("multi_get"), keys),
        st.tuples(st.just("get"), key),
        st.tuples(st.just("wait"), keys, st.just(timedelta(milliseconds=1))),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), calls()), max_size=25), st.booleans())
def test_every_call_does_what_it_does_to_a_dict(program: list[tuple[int, tuple[Any, ...]]], prefixed: bool) -> None:
    """From rank 0, which needs no connection, and from others; called from Python, and by way of torch's C++."""
    with Job(3) as job:
        stores: list[Any] = job.everybody()
        for store in stores:
            store.set_timeout(timedelta(milliseconds=1))
        if prefixed:
            stores = [PrefixStore("p", store) for store in stores]
        model = Model()
        for rank, (name, *given) in program:
            if name == "multi_set":
                given[1] = given[1][: len(given[0])]
            if name == "list_keys" and prefixed:
                continue  # torch's prefix has no way to it
            try:
                expected = getattr(model, name)(*given)
            except (KeyError, ValueError) as error:
                missing = isinstance(error, KeyError)
                with pytest.raises(RuntimeError, match="wait timeout" if missing else "."):
                    getattr(stores[rank], name)(*given)
                continue
            if name == "add" and not -(1 << 63) <= expected < 1 << 63:
                model.entries.pop(given[0])
                stores[rank].delete_key(given[0])
                continue
            assert getattr(stores[rank], name)(*given) == expected, (name, given)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_counting_from_many_threads_loses_nothing(size: int) -> None:
    each, threads_each = 60, 4

    def count(store: JobStore, seed: int) -> None:
        pause = random.Random(seed)
        for number in range(each):
            store.add("count", 1)
            store.append("log", "x")
            if pause.random() < 0.1:
                time.sleep(0.001)
            store.set(f"{seed}/{number}", str(number))

    with Job(size) as job:
        stores = job.everybody()
        threads = [
            threading.Thread(target=count, args=(stores[index % size], index)) for index in range(size * threads_each)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        total = size * threads_each * each
        for store in stores:
            assert store.add("count", 0) == total
            assert store.get("log") == b"x" * total
            assert store.num_keys() == total + 2


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_wait_holds_up_nobody_not_even_its_own_rank(size: int) -> None:
    with Job(size) as job:
        stores = job.everybody()
        got: list[bytes] = []
        waiting = [
            threading.Thread(target=lambda store=store, key=key: got.append(store.get(key)))
            for store in stores
            for key in ("late", "later")
        ]
        for thread in waiting:
            thread.start()
        for store in stores:
            store.set("quick", "1")
            assert store.get("quick") == b"1"
        assert got == []
        stores[-1].set("late", "1")
        assert soon(lambda: got == [b"1"] * size)
        stores[0].multi_set(["later"], ["2"])
        for thread in waiting:
            thread.join(20)
        assert sorted(got) == [b"1"] * size + [b"2"] * size


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wait_that_takes_too_long_names_what_is_missing(rank: int) -> None:
    with Job(2) as job:
        store = job.everybody()[rank]
        store.set("there", "")
        started = time.monotonic()
        with pytest.raises(dist.DistStoreError, match=r"wait timeout after 0.1 s, keys: one, two$"):
            store.wait(["two", "there", "one"], SOON)
        assert 0.1 <= time.monotonic() - started < 15  # not the store's own timeout
        store.set_timeout(SOON)
        assert store.timeout == SOON
        with pytest.raises(dist.DistStoreError, match="keys: none"):
            store.get("none")
        # By way of torch's C++, too; and the store is as good as before.
        with pytest.raises(RuntimeError, match="keys: p/none"):
            PrefixStore("p", store).get("none")
        store.set("none", "1")
        assert store.get("none") == b"1"


def test_a_key_that_is_deleted_while_another_is_waited_for_is_waited_for_again() -> None:
    table, answers = Table(), []

    def answer(*given: Any) -> None:
        answers.append(given)

    table.handle(wire.SET, 0, [b"a", b"1"], lambda *_: None, 0.0)
    parked = table.handle(wire.READ, 0, [b"a", b"b"], answer, 0.0)
    assert parked is not None
    assert parked.missing == {b"b"}
    for code, *fields in ((wire.DELETE, b"a"), (wire.SET, b"b", b"2")):
        table.handle(code, 0, fields, lambda *_: None, 0.0)
    assert answers == []
    table.handle(wire.SET, 0, [b"a", b"3"], lambda *_: None, 0.0)
    assert answers == [(wire.DONE, 0, [b"3", b"2"])]


@pytest.mark.parametrize(
    "message",
    [
        struct.pack("!I", wire.LONGEST + 1) + b"x" * 100,
        struct.pack("!I", 3) + b"xxx",
        struct.pack("!IBqI", 13, wire.SET, 0, 1),
        struct.pack("!IBqII", 17, wire.SET, 0, 1, 5),
        struct.pack("!IBqI", 14, wire.COUNT, 0, 0) + b"x",
        struct.pack("!IBqI", 13, wire.SET, 0, (1 << 32) - 1),
    ],
)
def test_a_request_that_makes_no_sense_ends_its_connection_alone(message: bytes) -> None:
    with Job(3) as job:
        stores = job.everybody()
        line = stores[1]._peer._idle[0]  # type: ignore[union-attr]
        line.sock.sendall(line.session.seal(message))
        assert line.sock.recv(100) == b""
        assert job.heard("sent bytes that are not a request")
        stores[2].set("a", "b")
        assert job.ranks[0].get("a") == b"b"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ((99, 0, []), "there is no request with the code 99"),
        ((wire.SET, 0, [b"key"]), "a key without a value"),
        ((wire.ADD, 1, []), "."),
        ((wire.COMPARE_SET, 0, [b"a"]), "."),
        ((wire.DELETE, 0, []), "."),
    ],
)
def test_a_request_of_the_wrong_kind_is_answered_in_words(request_: tuple[int, int, list[bytes]], words: str) -> None:
    with Job(2) as job:
        for store in job.everybody():
            with pytest.raises(dist.DistStoreError, match=words):
                store._ask(*request_)


def test_what_is_too_large_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LONGEST", 1000)
    with Job(2) as job:
        store = job.everybody()[1]
        with pytest.raises(ValueError, match="at most 1000 bytes are taken"):
            store.set("a", "x" * 1000)
        for name in ("a", "b"):
            store.set(name, "x" * 900)
        with pytest.raises(dist.DistStoreError, match="at most 1000 bytes are taken"):
            store.multi_get(["a", "b"])
        assert store.check(["a"])


def test_a_large_value_goes_through_and_does_not_hold_up_others() -> None:
    large = os.urandom(20_000_000)
    with Job(3) as job:
        stores = job.everybody()
        stores[1].set("large", large)
        reader = stores[2]._peer._idle[0]  # type: ignore[union-attr]
        reader.sock.sendall(reader.session.seal(wire.pack(wire.READ, 0, [b"large"])))  # and reads nothing
        stores[1].set("a", "b")
        assert stores[0].get("a") == b"b"
        assert stores[1].get("large") == large


def test_a_rank_that_dies_while_it_waits_leaves_nothing_behind() -> None:
    with Job(3) as job:
        stores = job.everybody()
        line = stores[1]._peer._idle[0]  # type: ignore[union-attr]
        line.sock.sendall(line.session.seal(wire.pack(wire.READ, 0, [b"never"])))
        assert soon(lambda: bool(job.server._table._parked))
        line.close()
        assert soon(lambda: not job.server._table._parked)
        stores[2].set("never", "1")


# -- its end -------------------------------------------------------------------------------------------


def test_when_rank_0_gives_up_everybody_is_told_why() -> None:
    with Job(3) as job:
        store = job.join(1)
        errors: list[BaseException] = []

        def wait(what: Callable[[], object]) -> None:
            try:
                what()
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=wait, args=(what,))
            for what in (lambda: store.wait_for_all(20), lambda: job.ranks[0].get("never"))
        ]
        for thread in threads:
            thread.start()
        assert soon(lambda: len(job.server._waiting_for_all) == 1 and bool(job.server._table._parked))
        job.server.end("rank 2 had not come")
        for thread in threads:
            thread.join(20)
        assert [str(error) for error in errors] == ["rank 2 had not come"] * 2
        with pytest.raises(dist.DistStoreError, match=r"lost the store of rank 0 at 127.0.0.1 port \d+ .*has ended"):
            store.set("a", "b")


def test_a_rank_that_asks_after_rank_0_has_gone_is_told_which_rank_went_first() -> None:
    """Rank 0 gives up because of rank 2, and its process ends before rank 1, which is slow, asks for anything."""
    with Job(4) as job:
        stores = job.everybody()
        for store in stores:
            store.meeting(begins=True)
        stores[3].meeting(begins=False)
        job.ranks.pop(2).end()
        with pytest.raises(InitializationError, match=r"rank 2 \(pid 1002 on h2\) has ended"):
            stores[0].get("of rank 2")
        stores[3].set("a", "b")  # it has all that it needs of the others, and goes on
        job.server.end()
        job.server._thread.join(20)
        for _ in range(2):
            with pytest.raises(InitializationError, match=r"rank 2 \(pid 1002 on h2\) has ended"):
                stores[1].set("of rank 1", "")
        with pytest.raises(InitializationError, match="rank 2"):
            stores[1].get("of rank 0")


def test_rank_0_answers_until_the_others_have_left() -> None:
    with Job(3) as job:
        stores = job.everybody()
        stores[0].end()
        with pytest.raises(ConnectionRefusedError):
            job.stranger()  # the port is free for the next world
        stores[1].set("a", "b")
        assert stores[2].get("a") == b"b"
        stores[1].end()
        with pytest.raises(dist.DistStoreError, match="the store was closed"):
            stores[1].get("a")
        stores[2].end()
        assert soon(lambda: not job.server._thread.is_alive())


def test_a_host_that_vanishes_is_lost_after_40_s_whether_or_not_a_request_is_under_way() -> None:
    with Job(2) as job:
        job.join(1)
        guests, idle_ones = job.server._guests, job.ranks[1]._peer._idle  # type: ignore[union-attr]
        assert soon(lambda: bool(guests and idle_ones))
        sockets = [guest.sock for guest in list(guests.values())] + [line.sock for line in idle_ones]
        for sock in sockets:
            idle, interval, probes, unacknowledged_ms = (
                sock.getsockopt(socket.IPPROTO_TCP, option)
                for option in (
                    socket.TCP_KEEPIDLE,
                    socket.TCP_KEEPINTVL,
                    socket.TCP_KEEPCNT,
                    socket.TCP_USER_TIMEOUT,
                )
            )
            assert idle + interval * probes == 40
            assert unacknowledged_ms == 40_000


def test_a_store_that_nobody_holds_any_more_lets_its_port_go() -> None:
    with Job(2) as job:
        job.ranks.clear()
        assert soon(lambda: not job.server._thread.is_alive())
