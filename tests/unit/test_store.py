"""The store that rank 0 serves: against a plain dict, with several ranks and threads, and its end."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.stores import Job, Served
from tests.support.waiting import soon
from torch._C._distributed_c10d import PrefixStore, TCPStore

from phalanx.membership.client import JobStore, ended_ranks
from phalanx.membership.store_protocol import Code, pack
from phalanx.membership.table import Table

SOON = timedelta(milliseconds=100)


keys = st.sampled_from(["a", "b", "longer/key", ""])
values = st.sampled_from([b"", b"1", b"-7", b"x" * 70_000, b"\0\xff"])
lists = st.lists(keys, min_size=1, max_size=3, unique=True)
calls = st.one_of(
    st.tuples(st.just("set"), keys, values),
    st.tuples(st.just("get"), keys),
    st.tuples(st.just("add"), st.just("counter"), st.integers(-(10**6), 10**6)),
    st.tuples(st.just("append"), keys, values),
    st.tuples(st.just("compare_set"), keys, values, values),
    st.tuples(st.just("delete_key"), keys | st.just("counter")),
    st.tuples(st.just("check"), lists),
    st.tuples(st.just("num_keys")),
    st.tuples(st.just("list_keys")),
    st.tuples(st.just("multi_set"), lists, st.just([b"1", b"2", b"3"])),
    st.tuples(st.just("multi_get"), lists),
    st.tuples(st.just("wait"), lists),
)
queues = st.one_of(
    st.tuples(st.just("queue_push"), st.just("queue"), values),
    st.tuples(st.just("queue_pop"), st.just("queue"), st.just(False)),
    st.tuples(st.just("queue_len"), st.just("queue")),
)


def outcome(store: Any, name: str, *arguments: Any) -> Any:
    try:
        result = getattr(store, name)(*arguments)
    except RuntimeError as error:
        return type(error)
    return sorted(result) if name == "list_keys" else result


def check_alike(ours: Sequence[Any], theirs: Any, program: list[tuple[int, tuple[Any, ...]]]) -> None:
    """Each call, by one client of our store or another, has the result that it has on torch's own server."""
    for number, (name, *given_) in program:
        if name == "multi_set":
            given_[1] = given_[1][: len(given_[0])]
        wanted = {"get": given_[:1], "multi_get": given_[0], "wait": given_[0]}.get(name, []) if given_ else []
        if theirs.check(wanted):  # else it would wait
            one = ours[number % len(ours)]
            assert outcome(one, name, *given_) == outcome(theirs, name, *given_), (name, given_)


def empty(store: Any) -> None:
    for key in store.list_keys():
        store.delete_key(key)


@pytest.fixture(scope="module")
def torchs() -> TCPStore:
    """Torch's own server."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@settings(max_examples=40, deadline=None)
@given(program=st.lists(st.tuples(st.integers(0, 2), calls), max_size=25), prefixed=st.booleans())
def test_every_call_has_the_same_result_on_rank_0s_server(
    torchs: TCPStore, program: list[tuple[int, tuple[Any, ...]]], prefixed: bool
) -> None:
    """From rank 0, which needs no connection, and from others; called from Python, and by way of torch's C++."""
    empty(torchs)
    with Job(3) as job:
        stores: list[Any] = job.everybody()
        if prefixed:
            program = [each for each in program if each[1][0] != "list_keys"]  # torch's prefix has no way to it
            check_alike([PrefixStore("p", store) for store in stores], PrefixStore("p", torchs), program)
        else:
            check_alike(stores, torchs, program)


@pytest.fixture(scope="module")
def launchers() -> Iterator[TCPStore]:
    """A client of torch's of the store that the launcher serves."""
    with Served() as served:
        yield served.client()


@settings(max_examples=40, deadline=None)
@given(program=st.lists(st.tuples(st.just(0), calls | queues), max_size=20))
def test_every_call_has_the_same_result_on_the_launchers_server(
    torchs: TCPStore, launchers: TCPStore, program: list[tuple[int, tuple[Any, ...]]]
) -> None:
    for store in (torchs, launchers):
        empty(store)
        while store.queue_len("queue"):
            store.queue_pop("queue")
    check_alike([launchers], torchs, program)


def test_counting_from_many_threads_loses_nothing() -> None:
    size, each, threads_each = 3, 60, 2

    def count(store: JobStore) -> None:
        for _ in range(each):
            store.add("count", 1)
            store.append("log", "x")

    with Job(size) as job:
        stores = job.everybody()
        threads = [threading.Thread(target=count, args=(store,)) for store in stores * threads_each]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        total = size * threads_each * each
        for store in stores:
            assert store.add("count", 0) == total
            assert store.get("log") == b"x" * total


def test_wait_holds_up_nobody_not_even_its_own_rank() -> None:
    with Job(3) as job:
        stores = job.everybody()
        got: list[bytes] = []
        waiting = [threading.Thread(target=lambda store=store: got.append(store.get("late"))) for store in stores]
        for thread in waiting:
            thread.start()
        for store in stores:
            store.set("quick", "1")
            assert store.get("quick") == b"1"
        assert got == []
        stores[0].multi_set(["late"], ["2"])
        for thread in waiting:
            thread.join(20)
        assert got == [b"2"] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_wait_that_takes_too_long_names_what_is_missing(rank: int) -> None:
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


def test_key_that_is_deleted_during_a_wait_is_waited_for_again() -> None:
    table, answers = Table(), list[str]()
    table.set(b"a", b"1")
    assert table.wait([b"a", b"b"], lambda: answers.append("")).missing == {b"b"}
    table.delete(b"a")
    table.set(b"b", b"2")
    assert answers == []
    table.set(b"a", b"3")
    assert answers == [""]


def test_large_value_goes_through_and_does_not_hold_up_others() -> None:
    large = os.urandom(20_000_000)
    with Job(3) as job:
        stores = job.everybody()
        stores[1].set("large", large)
        reader = stores[2].connections._idle[0]
        reader.sock.sendall(reader.session.seal(pack(Code.READ, 0, [b"large"])))  # and reads nothing
        stores[1].set("a", "b")
        assert stores[0].get("a") == b"b"
        assert stores[1].get("large") == large


# -- its end -------------------------------------------------------------------------------------------


def test_when_rank_0_gives_up_the_ranks_that_wait_are_told_why() -> None:
    with Job(3) as job:
        store = job.join(1)
        assert store.describe_missing() == "rank 2 of 3"
        giving_up = threading.Thread(target=job.ranks[0].give_up, args=("rank 2 had not come",))
        giving_up.start()
        assert soon(lambda: bool(job.server.given_up))
        with pytest.raises(dist.DistStoreError, match=r"^rank 2 had not come$"):
            store.describe_missing()
        giving_up.join(20)
        with pytest.raises(dist.DistStoreError, match=r"lost the store of rank 0 at 127.0.0.1 port \d+ .*has ended"):
            store.set("a", "b")


def test_store_knows_the_ranks_whose_connections_have_ended() -> None:
    with Job(3) as job:
        stores = job.everybody()
        assert job.all_have_joined()
        assert ended_ranks(stores[0]) == []
        job.ranks.pop(2).end()
        job.ranks.pop(1).end()
        assert soon(lambda: len(ended_ranks(stores[0])) == 2)
        assert {(each.rank, each.host) for each in ended_ranks(PrefixStore("p", stores[0]))} == {(1, "h1"), (2, "h2")}


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
        assert soon(lambda: not job.server.loop.thread.is_alive())


def test_host_that_vanishes_is_lost_after_40_s() -> None:
    options = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT]
    with Job(2) as job:
        (line,) = job.join(1).connections._idle
        assert soon(lambda: len(job.server.loop.connections) == 2)
        for sock in [line.sock, *(connection.sock for connection in list(job.server.loop.connections))]:
            idle, interval, probes, unacknowledged_ms = (sock.getsockopt(socket.IPPROTO_TCP, one) for one in options)
            assert (idle + interval * probes, unacknowledged_ms) == (40, 40_000)
