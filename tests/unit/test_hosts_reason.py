"""What a rank of a group over hosts learns and tells when it breaks, also while rank 0's host answers late."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from phalanx.errors import PeerLost
from phalanx.native.core import TEXT_BYTES
from phalanx.transports.hosts import asking, whereabouts
from phalanx.transports.hosts.breaking import Reason
from phalanx.transports.hosts.contact import Sign
from phalanx.transports.hosts.guard import GRACE_S, _short
from phalanx.transports.hosts.lane import TransferFailed
from phalanx.transports.hosts.layout import Layout
from phalanx.transports.hosts.lookout import Lookout
from phalanx.transports.hosts.watcher import Endpoint
from phalanx.transports.hosts.whereabouts import PATIENCE_S
from phalanx.transports.solo import SoloCommunicator

OTHER, THIRD = 1, 2


class LateStore:
    """A store whose answers wait as long as it is stopped."""

    def __init__(self) -> None:
        self.held = HashStore()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.asked = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.asked += 1
            assert self.goes_on.wait(100)
            return getattr(self.held, name)(*arguments)

        return call


class Members:
    """A rank, which can be told that the group is broken."""

    def abort(self) -> None:
        pass

    def last_but(self, calls: int) -> str:
        return ""

    def is_late(self) -> bool:
        return False


class Unconcerned:
    """A group of another process, which looks and listens, and does nothing."""

    name = "unconcerned"

    def look(self, now: float, sign_of: Callable[[Endpoint], tuple[Sign | None, float]]) -> None:
        pass

    def told(self, sender: str, message: dict[str, Any]) -> None:
        pass

    def says(self) -> dict[str, Any]:
        return {}


@contextlib.contextmanager
def make_reason(
    store: LateStore,
    monkeypatch: pytest.MonkeyPatch,
    endpoint: Endpoint | None = None,
    hosts: Sequence[int] = (0, 1, 2),
) -> Iterator[Reason]:
    """Rank 0 of three, and where the lookout of the next one is."""
    monkeypatch.setattr(asking, "keep_spare_thread", lambda user: None)  # the interpreter does not end here
    for rank, where in (OTHER, endpoint), (THIRD, None):
        store.held.set(f"lookout/{rank}", json.dumps(["name", 123, where and where.encode()]))
    member = Members()
    reason = Reason(
        store,  # type: ignore[arg-type]
        0,
        Layout(hosts, 0),
        SoloCommunicator(),
        abort=member.abort,
        aborted=lambda: False,
        timeout=timedelta(seconds=60),
    )
    reason.history = member
    reason.watch()
    try:
        yield reason
    finally:
        reason.close()


@pytest.fixture
def store() -> Iterator[LateStore]:
    threads = threading.active_count()
    made = LateStore()
    yield made
    made.goes_on.set()
    wait_until(lambda: threading.active_count() <= threads)  # those whose question it has answered now


@pytest.fixture
def reason(store: LateStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reason]:
    with make_reason(store, monkeypatch) as made:
        yield made


def wait_until(happens: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_store_that_stood_still_is_asked_again_when_it_goes_on(store: LateStore, reason: Reason) -> None:
    store.goes_on.clear()
    assert not reason.is_told()
    asked = store.asked
    assert reason.left([OTHER]) == []
    assert reason.unwanting([OTHER]) == []
    assert store.asked == asked  # such an answer would take as long
    store.held.set(f"left/{OTHER}", "[]")
    store.goes_on.set()
    wait_until(lambda: reason.left([OTHER]) == [OTHER])
    assert reason.unwanting([OTHER]) == [OTHER]
    store.held.set("broken", "{}")
    assert reason.is_told()


def test_a_rank_says_that_it_leaves_to_a_store_that_is_late(store: LateStore, reason: Reason) -> None:
    store.goes_on.clear()
    assert not reason.is_told()
    reason.tell_left()
    store.goes_on.set()
    wait_until(lambda: store.held.check(["left/0"]))


def test_an_error_has_the_calls_of_the_others_though_the_store_was_late(store: LateStore, reason: Reason) -> None:
    """It has stood still when the group broke, and goes on a second after."""
    for rank in OTHER, THIRD:
        store.held.set(f"call/{rank}", json.dumps([0, "barrier() at there.py:1", ""]))
    fact = {"kind": "differs", "what": "", "text": "", "group_rank": -1, "by": OTHER, "at": 0}
    store.goes_on.clear()
    threading.Timer(1.0, store.goes_on.set).start()
    reason.guard.reason = fact
    error = reason.error(ValueError(), "all_reduce() at here.py:1", 60.0)
    assert "ranks 1-2: barrier() at there.py:1" in str(error)
    wait_until(lambda: store.held.check(["call/0", "broken"]))


def test_a_peer_that_is_there_is_not_blamed_before_it_has_said_whom_it_lost(
    store: LateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a rank that this one does not watch, and so learns nothing of it for a while."""
    other = Lookout()
    try:
        with make_reason(store, monkeypatch, other.endpoint) as reason:
            guard = reason.guard
            assert guard._lookout is not None
            other.join(Unconcerned(), [guard._lookout.endpoint])
            wait_until(lambda: guard.is_here(OTHER))
            fact = {"kind": "lost", "what": "failed", "text": "", "group_rank": THIRD, "by": OTHER}
            threading.Timer(PATIENCE_S + 0.5, lambda: store.held.set("broken", json.dumps(fact))).start()
            error = reason.error(TransferFailed(OTHER, "closed"), "all_reduce() at here.py:1", 60.0)
            assert isinstance(error, PeerLost)
            assert error.group_rank == THIRD
    finally:
        other.end("close")


def test_a_rank_that_waits_for_one_that_has_left_reads_in_the_store_why(
    store: LateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one broke the group, wrote down why and ended before this one was there to be told."""
    other = Lookout()
    fact = {"kind": "differs", "what": "", "text": "", "group_rank": -1, "by": OTHER, "at": 0}
    store.held.set("broken", json.dumps(fact))
    other.end("close")
    with make_reason(store, monkeypatch, other.endpoint) as reason:
        reason.begin()
        wait_until(lambda: reason.guard.reason is not None)
        assert reason.guard.reason == fact


@pytest.mark.parametrize("character", ["x", "é", "\U0001f4a5", '"'])
def test_a_reason_that_is_too_long_for_a_segment_is_cut(character: str) -> None:
    fact = {"kind": "failed", "what": "", "text": character * 4000, "group_rank": 1, "by": 1}
    short = json.loads(_short(fact))
    assert len(json.dumps(short)) < TEXT_BYTES
    assert set(short.pop("text")) == {character}
    assert short == {"kind": "failed", "what": "", "group_rank": 1, "by": 1}


def test_a_rank_that_has_left_before_it_could_be_reached_is_not_taken_for_one_that_has_ended(
    store: LateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Lookout()
    store.held.set(f"left/{OTHER}", "[]")
    other.end("close")
    with make_reason(store, monkeypatch, other.endpoint) as reason:
        reason.begin()
        wait_until(lambda: OTHER in reason.guard._left)
        time.sleep(GRACE_S + 0.5)
        assert reason.guard.reason is None
        reason.guard.failed_peer = OTHER
        wait_until(lambda: reason.guard.reason is not None)
        assert reason.guard.reason is not None
        assert reason.guard.reason["what"] == "left"


@pytest.mark.parametrize("left", [True, False])
def test_a_rank_whose_transfer_has_failed_is_not_said_to_have_ended_before_the_store_was_read(
    store: LateStore, monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    other = Lookout()
    if left:
        store.held.set(f"left/{OTHER}", "[]")
    other.end("close")
    with make_reason(store, monkeypatch, other.endpoint) as reason:
        store.goes_on.clear()
        reason.begin()
        reason.guard.failed_peer = OTHER
        wait_until(lambda: OTHER in reason.guard._asked_at)
        store.goes_on.set()
        wait_until(lambda: reason.guard.reason is not None)
        assert reason.guard.reason is not None
        assert reason.guard.reason["what"] == ("left" if left else "ended")


def test_a_rank_that_has_ended_is_named_though_the_store_does_not_answer(
    store: LateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Lookout()
    other.end("close")
    with make_reason(store, monkeypatch, other.endpoint) as reason:
        store.goes_on.clear()
        reason.begin()
        wait_until(lambda: reason.guard.reason is not None)
        assert reason.guard.reason is not None
        assert (reason.guard.reason["what"], reason.guard.reason["group_rank"]) == ("ended", OTHER)


ENDED_FACT = {"kind": "lost", "what": "ended", "text": "", "group_rank": OTHER, "by": 0}
KNOWN = {
    "how": "by signal 9 (SIGKILL)",
    "signal": 9,
    "last_operation": "all_reduce #7 (float32, 16 B, sum) at there.py:3",
    "last_line": "there.py:3",
}


def test_a_rank_of_another_host_says_what_those_beside_the_lost_one_know_of_it(
    store: LateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which come to it a moment later."""
    monkeypatch.setattr(whereabouts, "BESIDE_S", 60.0)
    with make_reason(store, monkeypatch, hosts=[0, 1, 1]) as reason:
        reason.guard.reason = dict(ENDED_FACT)
        threading.Timer(0.2, lambda: store.held.set(f"how/{OTHER}", json.dumps(KNOWN))).start()
        error = reason.error(TransferFailed(OTHER, "closed"), "all_reduce() at here.py:1", 60.0)
        assert isinstance(error, PeerLost)
        assert (error.signal, error.last_operation, error.last_line) == (
            9,
            KNOWN["last_operation"],
            KNOWN["last_line"],
        )
        assert "has ended by signal 9 (SIGKILL)" in str(error)
        wait_until(lambda: store.held.check(["broken"]))


@pytest.mark.parametrize("hosts", [[0, 1, 2], [0, 1, 1]])
def test_it_names_the_lost_one_though_nobody_beside_it_says_anything(
    store: LateStore, monkeypatch: pytest.MonkeyPatch, hosts: list[int]
) -> None:
    with make_reason(store, monkeypatch, hosts=hosts) as reason:
        reason.guard.reason = dict(ENDED_FACT)
        error = reason.error(TransferFailed(OTHER, "closed"), "all_reduce() at here.py:1", 60.0)
        assert isinstance(error, PeerLost)
        assert (error.group_rank, error.signal, error.last_operation) == (OTHER, 0, "")
        wait_until(lambda: store.held.check(["broken"]))
