"""The calls of ranks on their way from their recorders to the comparison: in parts, between hosts, and bounded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from ctypes import addressof
from dataclasses import replace
from typing import Any

import pytest
from tests.support.ranks import on_ranks

from phalanx.launch.rank.new_calls import NewCalls
from phalanx.launch.rank.trace import Trace, open_trace
from phalanx.launch.relay.call_sender import CallSender
from phalanx.native.core import RECORDER_BYTES, library
from phalanx.watch import recorder
from phalanx.watch.comparison import Comparison
from phalanx.watch.done_calls import CallGatherer, DoneCall, DoneCalls
from phalanx.watch.records import Group, Recording, copy_recorder
from phalanx.watch.sent_calls import LARGEST, calls_from_json, calls_to_json

GLOO = Group("0", "gloo", (0, 1, 2, 3))
ALL_REDUCE = 1


def call(number: int = 0, label: str = "") -> DoneCall:
    return DoneCall(number + 1, "all_reduce", 16 + number, "float32", "sum", -1, f"train.py:{number}", label, number)


def sent(calls: list[DoneCalls]) -> Any:
    values = calls_to_json(calls)
    assert values is not None
    return json.loads(json.dumps(values))


def test_what_is_sent_is_what_comes() -> None:
    calls = [
        DoneCalls(GLOO, (2, 3), 7, (call(1), None, replace(call(2), shape="[2, 3]"), call(1))),
        DoneCalls(Group("3", "gloo", (1, 3)), (3,), 1, (), failed=True),
    ]
    assert calls_from_json(sent(calls), (2, 3), 4) == calls


def test_a_loop_of_equal_ranks_takes_a_few_bytes_a_call() -> None:
    loop = tuple(replace(call(number % 5), step=number // 5) for number in range(4000))
    assert len(json.dumps(sent([DoneCalls(GLOO, (0, 1, 2, 3), 1, loop)]))) < 6 * 4000


def test_of_too_much_the_newest_is_sent() -> None:
    every = tuple(call(number, "x" * 500) for number in range(4096))
    values = sent([DoneCalls(GLOO, (0, 1), 1, every)])
    assert len(json.dumps(values)) <= LARGEST
    (come,) = calls_from_json(values, (0, 1), 4)
    assert 100 < len(come.calls) < 4096
    assert come.calls == every[-len(come.calls) :]
    assert come.first + len(come.calls) - 1 == 4096


def not_ours(values: Any) -> None:
    values["done"][0][1] = [[0, 2, 1]]


def no_such_rank(values: Any) -> None:
    values["groups"][0][2] = [[2, 40, 1]]


def no_such_call(values: Any) -> None:
    values["done"][0][3] = [99]


def a_message_among_calls(values: Any) -> None:
    values["texts"][values["calls"][0][3]] = "send"


def a_shape_that_is_none(values: Any) -> None:
    values["texts"][values["calls"][0][7]] = "[2, \x1b[2J]"


def no_number(values: Any) -> None:
    values["done"][0][2] = 1 << 40


def too_long(values: Any) -> None:
    values["done"][0][3] = [0] * 5000


@pytest.mark.parametrize(
    "change",
    [not_ours, no_such_rank, no_such_call, a_message_among_calls, a_shape_that_is_none, no_number, too_long],
)
def test_what_a_host_may_not_say_is_refused(change: Callable[[Any], None]) -> None:
    values = sent([DoneCalls(GLOO, (2, 3), 7, (replace(call(1), shape="[2, 3]"),))])
    calls_from_json(values, (2, 3), 4)
    change(values)
    with pytest.raises((ValueError, IndexError)):
        calls_from_json(values, (2, 3), 4)


def look(comparison: Comparison, ranks: tuple[int, ...], first: int, *calls: DoneCall | None) -> list[str]:
    return comparison.look([DoneCalls(GLOO, ranks, first, calls)])


def test_hosts_are_compared_when_the_last_one_has_come() -> None:
    comparison = Comparison(0.0, 4096, lines=True)
    assert look(comparison, (0, 1), 1, call(1), call(2)) == []
    assert look(comparison, (2,), 1, call(1), call(3)) == []
    (told,) = look(comparison, (3,), 1, call(1), call(2))
    assert "ranks 0-1, 3: all_reduce #2 (float32, 18 B, sum) at train.py:2" in told
    assert "rank 2: all_reduce #2 (float32, 19 B, sum) at train.py:3" in told
    assert look(comparison, (0, 1, 2, 3), 3, call(4)) == []


def test_of_a_host_that_is_far_ahead_the_newest_calls_are_kept() -> None:
    comparison = Comparison(0.0, 10, lines=True)
    for number in range(1, 101):
        look(comparison, (0, 1, 2), number, call(number))
    assert all(len(done) <= 10 for state in comparison._groups.values() for done in state.done.values())
    assert look(comparison, (3,), 1, *(call(5) for _ in range(90))) == []  # those that were kept begin with #91
    assert len(look(comparison, (3,), 91, call(5))) == 1


def test_groups_that_a_program_makes_without_end_are_not_kept_without_end() -> None:
    comparison = Comparison(0.0, 10, lines=True)
    for number in range(3000):
        comparison.look([DoneCalls(Group(str(number), "gloo", (0, 1)), (0,), 1, (call(number),))])
    assert len(comparison._groups) <= 1024
    assert len(comparison._known) <= (1 << 14) + 1


def test_each_operation_is_read_once_and_one_under_way_when_it_is_done() -> None:
    """Over a real recorder, whose ring is used more than once."""

    def body(_: object) -> tuple[list[int], list[int], int]:
        file = os.memfd_create("test")
        os.ftruncate(file, RECORDER_BYTES)
        recorder.keep_in(lambda: (file, 0))
        recorder.open_recorder(0, 2)
        group = recorder.group("0", "gloo", (0, 1), 0)
        assert group is not None
        place = addressof(group)
        gatherer = CallGatherer((0,), 4096)
        handed: list[int] = []
        read: list[int] = []

        def take() -> None:
            copy = copy_recorder(file, 0, gatherer.first(0))
            assert copy is not None
            read.append(len(copy.seen))
            gatherer.read(0, copy)
            for calls in gatherer.take():
                handed.extend(range(calls.first, calls.first + len(calls.calls)))

        for _ in range(3):
            for _ in range(3000):
                recorder.end(recorder.begin(place, ALL_REDUCE, 4, -1), False)
            take()
        long = recorder.begin(place, ALL_REDUCE, 4, -1)
        recorder.end(recorder.begin(place, ALL_REDUCE, 4, -1), False)
        take()
        before = len(handed)
        recorder.end(long, False)
        take()
        return handed, read, before

    ((handed, read, before),) = on_ranks(body, 1)
    assert handed == list(range(1, 9003))
    assert before == 9000
    assert read == [3000, 3000, 3000, 2, 2]


def test_an_operation_that_was_taken_back_hides_none_behind_it() -> None:
    """As the wait for the others that join is (``watch/joining.py``), although the rank does nothing more then."""

    def body(_: object) -> list[list[int]]:
        file = open_trace("phalanx-test")
        trace = Trace(file, "phalanx-test")
        os.ftruncate(file, trace.place_of_recorder(0) + RECORDER_BYTES)
        recorder.keep_in(lambda: (file, trace.place_of_recorder(0)))
        recorder.open_recorder(3, 4)
        group = recorder.group("0", "gloo", (2, 3), 1)
        assert group is not None
        library().phx_record_drop(recorder.begin(addressof(group), ALL_REDUCE, 4, -1))
        for _ in range(3):
            recorder.end(recorder.begin(addressof(group), ALL_REDUCE, 4, -1), False)
        new = NewCalls(trace, [3], 4)
        return [[each.first + len(each.calls) - 1 for each in new.look()] for _ in range(3)]

    (looks,) = on_ranks(body, 1)
    assert sorted(looks) == [[], [], [4]]


def test_nothing_is_sent_over_a_link_that_is_behind_but_the_last_calls_are() -> None:
    def body(_: object) -> list[list[int]]:
        file = open_trace("phalanx-test")
        trace = Trace(file, "phalanx-test")
        os.ftruncate(file, trace.place_of_recorder(0) + RECORDER_BYTES)
        recorder.keep_in(lambda: (file, trace.place_of_recorder(0)))
        recorder.open_recorder(3, 4)
        group = recorder.group("0", "gloo", (2, 3), 1)
        assert group is not None
        waits = 0
        said: list[Any] = []
        sender = CallSender(
            trace,
            [3],
            4,
            hosts=2,
            is_python=True,
            say=lambda **message: said.append(message),
            waiting=lambda: waits,
        )

        def look() -> list[int]:
            del said[:]
            recorder.end(recorder.begin(addressof(group), ALL_REDUCE, 4, -1), False)
            sender._next = 0.0  # it is time
            sender.look()
            return numbers()

        def numbers() -> list[int]:
            come = [each for message in said for each in calls_from_json(message["calls"], (3,), 4)]
            return [number for each in come for number in range(each.first, each.first + len(each.calls))]

        first = look()
        waits = 100
        second = look()
        waits = 0
        third = look()
        waits = 100
        recorder.end(recorder.begin(addressof(group), ALL_REDUCE, 4, -1), False)
        del said[:]
        sender.end(0)
        recording = sender.recording(0)
        assert recording is not None
        assert Recording.from_json(recording).begun == 4
        assert sender.due_in_s() is None
        return [first, second, third, numbers()]

    assert on_ranks(body, 1) == [[[1], [], [2, 3], [4]]]
