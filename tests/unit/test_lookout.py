"""The thread that watches other hosts: what it tells of groups, and what it leaves behind when the last is closed."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.leaks import descriptors

from phalanx.transports.hosts.contact import Sign
from phalanx.transports.hosts.lookout import Lookout, lookout
from phalanx.transports.hosts.reaching import KEEP_ALIVE, PROBE_S, ROLE, WELCOME
from phalanx.transports.hosts.watcher import Endpoint
from phalanx.wire.dial import dial
from phalanx.wire.key import job_key

BROKEN = {"broken": "rank 1 was killed"}


class Group:
    """What one process knows of a group."""

    def __init__(self, name: str = "group", says: dict[str, Any] | None = None, fails: bool = False) -> None:
        self.name, self.fails = name, fails
        self.heard: dict[str, Any] = {}
        self.sign: tuple[Sign | None, float] = (None, float("inf"))
        self.signs: list[Sign | None] = []  # each that was seen, in order
        self.watches: Endpoint | None = None
        self._says = says or {}

    def look(self, now: float, sign_of: Callable[[Endpoint], tuple[Sign | None, float]]) -> None:
        if self.fails:
            raise AttributeError("it is not ready")
        if self.watches is not None:
            self.sign = sign_of(self.watches)
            if self.signs[-1:] != [self.sign[0]]:
                self.signs.append(self.sign[0])

    def told(self, sender: str, message: dict[str, Any]) -> None:
        self.heard |= message
        if self.fails:
            raise KeyError(sender)

    def says(self) -> dict[str, Any]:
        return self._says


@pytest.fixture(params=["the first one dials", "the second one dials"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Lookout, Lookout]]:
    """Those of two processes."""
    lower, higher = sorted((Lookout(), Lookout()), key=lambda each: each.endpoint.identity)
    yield (lower, higher) if request.param == "the first one dials" else (higher, lower)
    for each in lower, higher:
        each.end("close")


def happens(what: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not what() and time.monotonic() < until:
        time.sleep(0.01)
    return what()


def hears(group: Group, what: str = "broken") -> bool:
    return happens(lambda: what in group.heard)


def connect(first: Lookout, second: Lookout) -> None:
    """Have the two watch each other for a group of their own."""
    met = [Group("met", {"hello": 1}), Group("met", {"hello": 2})]
    first.join(met[0], [second.endpoint])
    second.join(met[1], [first.endpoint])
    assert hears(met[0], "hello")
    assert hears(met[1], "hello")


@pytest.mark.parametrize("connected", [True, False])
def test_a_group_hears_what_was_said_before_it_was_watched(pair: tuple[Lookout, Lookout], connected: bool) -> None:
    """A rank that makes the group more slowly than the others would wait in it for ever."""
    there, here = pair
    if connected:
        connect(there, here)
    theirs, mine = Group(says=BROKEN), Group()
    there.join(theirs, [here.endpoint])
    there.send(theirs, [here.endpoint], BROKEN)
    time.sleep(0.5)  # so that all of it has come before
    here.join(mine, [there.endpoint])
    assert hears(mine)


@pytest.mark.parametrize("connected", [True, False])
def test_a_group_hears_what_was_said_when_another_rank_left_it(pair: tuple[Lookout, Lookout], connected: bool) -> None:
    there, here = pair
    if connected:
        connect(there, here)
    theirs, mine = Group(says=BROKEN), Group()
    there.join(theirs, [here.endpoint])
    there.leave(theirs, {"left": 1})
    here.join(mine, [there.endpoint])
    assert hears(mine)


def test_a_process_that_ended_before_anybody_connected_is_known_to_have_gone(pair: tuple[Lookout, Lookout]) -> None:
    there, here = pair
    there.end("close")
    mine = Group()
    mine.watches = there.endpoint
    here.join(mine, [there.endpoint])
    assert happens(lambda: mine.sign[0] is Sign.GONE)
    assert mine.sign[1] < float("inf")


def test_a_process_is_not_taken_for_gone_because_it_does_not_watch_this_one(pair: tuple[Lookout, Lookout]) -> None:
    there, here = pair
    mine = Group()
    mine.watches = there.endpoint
    here.join(mine, [there.endpoint])
    time.sleep(PROBE_S + 1.0)
    assert mine.sign[0] in (None, Sign.HERE)
    assert mine.sign[1] == float("inf") or mine.sign[0] is Sign.HERE


def test_a_process_is_not_taken_for_gone_because_its_attempt_to_connect_again_came_too_late(
    pair: tuple[Lookout, Lookout],
) -> None:
    """While a cable is out a process dials again. The answer to that may be lost, and then it gives up."""
    there, here = pair
    connect(there, here)
    mine = Group()
    mine.watches = there.endpoint
    here.join(mine, [there.endpoint])
    assert happens(lambda: mine.sign[0] is Sign.HERE)
    claim = {"from": there.endpoint.identity, "to": here.endpoint.identity, "probes": False}
    where = (here.endpoint.address, here.endpoint.port)
    for _ in range(3):
        line, verdict = dial(where, job_key(), ROLE, json.dumps(claim).encode(), patience_s=60.0, keep_alive=KEEP_ALIVE)
        assert verdict == WELCOME
        line.close()
    time.sleep(0.5)
    there.join(Group("group", {"still": "here"}), [here.endpoint])
    assert hears(mine, "still")
    assert mine.signs == [None, Sign.HERE] or mine.signs == [Sign.HERE]


def test_a_process_whose_connection_has_ended_is_not_taken_for_gone(pair: tuple[Lookout, Lookout]) -> None:
    """The network may have ended it. The other process is asked before anything is concluded."""
    there, here = pair
    connect(there, here)
    mine = Group()
    mine.watches = there.endpoint
    here.join(mine, [there.endpoint])
    assert happens(lambda: mine.sign[0] is Sign.HERE)
    here._contacts[there.endpoint.identity].sock.shutdown(socket.SHUT_RDWR)
    time.sleep(0.5)
    there.join(Group("group", {"still": "here"}), [here.endpoint])
    assert hears(mine, "still")
    assert Sign.GONE not in mine.signs
    there.end("close")
    assert happens(lambda: mine.sign[0] is Sign.LEFT)


def test_a_group_that_fails_does_not_blind_the_others(
    pair: tuple[Lookout, Lookout], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: printed.append(arguments.exc_value))
    there, here = pair
    failing, whole = Group("failing", fails=True), Group("whole")
    here.join(failing, [there.endpoint])
    here.join(whole, [there.endpoint])
    for name in "failing", "whole":
        there.join(Group(name, BROKEN), [here.endpoint])
        assert hears({"failing": failing, "whole": whole}[name])
    assert len(printed) == 1


def test_a_lookout_that_is_released_leaves_nothing_open() -> None:
    before = sorted(descriptors())
    for _ in range(3):
        first, second = lookout(), lookout()
        assert first is second
        first.release()
        first.wake()
        second.release()
        first.wake()  # a thread that was late
        assert sorted(descriptors()) == before


def test_a_forked_child_has_nothing_of_its_parents_lookout() -> None:
    before = descriptors()
    made = lookout()
    pid = os.fork()
    if not pid:
        os._exit(len(descriptors()) != len(before))
    made.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
