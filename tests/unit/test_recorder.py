"""The flight recorder's memory: what readers find while threads write, after wrapping, after a death in the middle."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import addressof
from itertools import chain

import pytest
from tests.support.ranks import Member, on_ranks

from phalanx.launch.rank.new_calls import NewCalls
from phalanx.launch.rank.trace import Trace, open_trace
from phalanx.native.core import NBYTES_BITS, RECORDER_BYTES, RECORDS, RecordedGroup, library
from phalanx.watch import recorder
from phalanx.watch.glance import glance
from phalanx.watch.records import Recording, read_recording

ALL_REDUCE, BROADCAST, SEND = 1, 2, 10
FLOAT32 = 1 << 8
RECORDS_AT, RECORD_BYTES = 4096, 64
MOST_ASTRAY_NS = 100_000


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, RECORDER_BYTES)
    yield descriptor
    os.close(descriptor)


def in_child(work: Callable[[], None]) -> int:
    """A forked child that does the work and ends; its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def record_in(file: int, operations: Callable[[RecordedGroup], None]) -> Recording:
    """What a reader finds after a child has recorded these operations and has been killed."""

    def work() -> None:
        recorder.keep_in(lambda: (file, 0))
        assert recorder.open_recorder(3, 8)
        group = recorder.group("0", "phalanx", range(8), 3)
        assert group is not None
        operations(group)
        os.kill(os.getpid(), signal.SIGKILL)

    _, status = os.waitpid(in_child(work), 0)
    assert os.WIFSIGNALED(status)
    found = read_recording(file)
    assert found is not None
    return found


def test_operations_of_a_killed_process_can_be_read(file: int) -> None:
    def operations(group: RecordedGroup) -> None:
        recorder.mark(step=7, label="evaluation")
        done = recorder.begin(addressof(group), ALL_REDUCE | FLOAT32 | 1 << 16, 4096, -1)
        recorder.end(done, False)
        failed = recorder.begin(addressof(group), SEND | FLOAT32, 12, 5)
        recorder.end(failed, True)
        recorder.mark(label="")
        recorder.begin(addressof(group), BROADCAST, 8, 2)

    found = record_in(file, operations)
    assert (found.rank, found.size, found.step, found.label, found.begun) == (3, 8, 7, "", 3)
    first, second, third = found.records
    line = operations.__code__.co_firstlineno
    assert first.kind == "all_reduce"
    assert first.in_group == 1
    assert first.nbytes == 4096
    assert first.op == "sum"
    assert first.site == f"{__file__}:{line + 2}"
    assert first.step == 7
    assert first.label == "evaluation"
    assert first.left_ns > first.entered_ns > 0
    assert not first.failed
    assert second.name() == "send to rank 5"
    assert second.in_group == 1
    assert second.failed
    assert third.in_group == 2
    assert third.under_way
    assert third.label == ""
    assert third.group.ranks == tuple(range(8))
    assert third.group.own == 3
    assert found.last is third


def test_ring_keeps_the_last_operations_if_an_early_one_ends_late(file: int) -> None:
    def operations(group: RecordedGroup) -> None:
        early = recorder.begin(addressof(group), ALL_REDUCE, 1, -1)
        for _ in range(RECORDS + 10):
            recorder.end(recorder.begin(addressof(group), BROADCAST, 2, 0), False)
        last = recorder.begin(addressof(group), BROADCAST, 3, 0)
        for _ in range(RECORDS - 1 - last % RECORDS):  # up to the record that the first one had
            recorder.begin(addressof(group), BROADCAST, 4, 0)
        recorder.begin(addressof(group), BROADCAST, 5, 0)
        recorder.end(early, False)

    found = record_in(file, operations)
    assert len(found.records) == RECORDS
    assert [record.number for record in found.records] == list(range(found.begun - RECORDS, found.begun))
    assert found.records[-1].nbytes == 5
    assert found.records[-1].under_way


def record_at(file: int, number: int) -> int:
    return RECORDS_AT + number % RECORDS * RECORD_BYTES


@pytest.mark.parametrize("word", [2 * 1 + 1, 2 * 4097 + 1])
def test_record_whose_writer_died_in_the_middle_is_left_out(file: int, word: int) -> None:
    """Before the word is even again no reader trusts the fields, and no later operation writes between them."""

    def operations(group: RecordedGroup) -> None:
        for size in range(3):
            recorder.end(recorder.begin(addressof(group), BROADCAST, size, 0), False)
        os.pwrite(
            file, struct.pack("Q", word), record_at(file, 1)
        )  # as after the first store of a writer that then died
        for _ in range(RECORDS):
            recorder.begin(addressof(group), BROADCAST, 9, 0)

    found = record_in(file, operations)
    assert len(found.records) == RECORDS - 1
    assert {record.number % RECORDS for record in found.records} == set(range(RECORDS)) - {1}
    assert found.begun == RECORDS + 3


def test_death_before_a_record_is_written_shows_the_operation_before(file: int) -> None:
    def operations(group: RecordedGroup) -> None:
        recorder.end(recorder.begin(addressof(group), BROADCAST, 1, 0), False)
        os.pwrite(file, struct.pack("Q", 2), 64)  # `next` was raised for operation 1, and nothing else was done

    found = record_in(file, operations)
    assert [record.number for record in found.records] == [0]
    assert found.begun == 2


def test_readers_never_see_a_half_written_record_while_threads_wrap_around(file: int) -> None:
    """Every field of a record follows from one number here, so a mixture of two operations shows."""
    core = library()

    def work() -> None:
        recorder.keep_in(lambda: (file, 0))
        assert recorder.open_recorder()
        groups = [RecordedGroup(name=number) for number in range(4)]

        def write(own: int) -> None:
            size = own
            while True:
                ticket = core.phx_record_begin(groups[own], ALL_REDUCE, size, size & 0xFFFF, size & 0x7FFF)
                core.phx_record_end(ticket, size & 1)
                size += 4

        for own in range(4):
            threading.Thread(target=write, args=(own,), daemon=True).start()
        time.sleep(60)

    pid = in_child(work)
    try:
        until, checked, last = time.monotonic() + 1, 0, -1
        while time.monotonic() < until or last < 3 * RECORDS:
            found = read_recording(file)
            for record in found.records if found is not None else ():
                assert record.peer == record.nbytes & 0x7FFF, record
                assert record.in_group == record.nbytes // 4 + 1, record
                assert record.under_way or record.failed == bool(record.nbytes & 1), record
                assert record.under_way or record.left_ns >= record.entered_ns, record
                checked += 1
                last = max(last, record.number)
            assert time.monotonic() < until + 60
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert checked > RECORDS
    # Killed anywhere: at most one record for each thread is lost, and all others are whole.
    found = read_recording(file)
    assert found is not None
    assert len(found.records) >= RECORDS - 4
    assert sum(record.under_way for record in found.records) <= 4


def test_the_times_of_records_are_those_of_the_clock(file: int) -> None:
    """They are made of the processor's counter between two looks at the clock, on each thread by itself."""
    told = threading.Lock()
    seen: list[tuple[int, int]] = []

    def operations(group: RecordedGroup) -> None:
        def some() -> None:
            for number in range(1000):
                if number % 100 == 0:
                    time.sleep(0.01)
                with told:
                    before = time.monotonic_ns()
                    ticket = recorder.begin(addressof(group), ALL_REDUCE, len(seen), -1)
                    recorder.end(ticket, False)
                    seen.append((before, time.monotonic_ns()))

        threads = [threading.Thread(target=some) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sent.write(struct.pack(f"{2 * len(seen)}q", *chain.from_iterable(seen)))
        sent.flush()

    read, write = os.pipe()
    with os.fdopen(read, "rb") as told_by, os.fdopen(write, "wb") as sent:
        records = record_in(file, operations).records
        sent.close()
        moments = struct.unpack(f"{2 * len(records)}q", told_by.read())
    assert len(records) == 3000
    for number, (record, before, after) in enumerate(zip(records, moments[::2], moments[1::2], strict=True)):
        assert record.nbytes == number
        assert before - MOST_ASTRAY_NS <= record.entered_ns <= record.left_ns <= after + MOST_ASTRAY_NS


def test_a_damaged_memory_is_read_without_an_error(file: int) -> None:
    assert read_recording(file) is None
    record_in(file, lambda group: recorder.end(recorder.begin(addressof(group), ALL_REDUCE, 1, -1), False))
    for at in range(8, 4096 + 64, 4):
        os.pwrite(file, b"\xff\xfe\xfd\xfc", at)
    os.pwrite(file, b"\xff" * 4096, RECORDS_AT + RECORDS * RECORD_BYTES)
    damaged = read_recording(file)
    assert damaged is not None
    for record in damaged.records:
        assert record.text()


def begin_of(group: RecordedGroup, nbytes: int, *shape: int) -> int:
    return recorder.begin(addressof(group), ALL_REDUCE | FLOAT32, recorder.shaped(nbytes, shape), -1)


def test_the_shape_is_recorded_of_tensors_whose_shapes_are_compared(file: int) -> None:
    most = (1 << NBYTES_BITS) - 1

    def operations(group: RecordedGroup) -> None:
        begin_of(group, 24, 2, 3)
        begin_of(group, 24, 3, 2)
        begin_of(group, 24, 2, 1, 3)
        begin_of(group, 24, 6)
        begin_of(group, 24, 6, 1)
        begin_of(group, 24, 2, 3)
        begin_of(group, most, 2, 3)
        begin_of(group, 0, 0, 3)

    found = [(record.nbytes, record.shape) for record in record_in(file, operations).records]
    small = [(24, shape) for shape in ("[2, 3]", "[3, 2]", "[2, 1, 3]", "", "", "[2, 3]")]
    assert found == [*small, (most, "[2, 3]"), (0, "")]


def test_labels_leave_room_for_the_groups_and_lines_that_come_later(file: int) -> None:
    def operations(group: RecordedGroup) -> None:
        for batch in range(20_000):
            recorder.mark(label=f"epoch {batch // 100} batch {batch}")
        late = recorder.group("late", "phalanx", [1, 3], 1)
        assert late is not None
        recorder.begin(addressof(late), ALL_REDUCE, 8, -1)

    (record,) = record_in(file, operations).records
    assert record.group.name == "late"
    assert tuple(record.group.ranks) == (1, 3)
    assert record.site.startswith(f"{__file__}:")
    assert record.label == ""


@pytest.mark.parametrize(("moved", "pieces", "done"), [(3, 8, 37), (8, 8, -1), (0, 0, -1)])
def test_the_pieces_that_have_moved_say_how_far_a_call_is(file: int, moved: int, pieces: int, done: int) -> None:
    def operations(group: RecordedGroup) -> None:
        recorder.begin(addressof(group), ALL_REDUCE, 1, -1)
        library().phx_record_piece(moved, pieces)

    found, seen = record_in(file, operations), glance(file, 0)
    assert Recording.from_json(found.to_json()).done == found.done == done
    assert seen is not None
    assert seen.pieces == moved << 32 | pieces  # so a look finds that the rank goes on


def test_operation_that_was_taken_back_hides_none_behind_it() -> None:
    def body(_: Member) -> list[int]:
        file = open_trace("phalanx-test")
        trace = Trace(file, "phalanx-test")
        os.ftruncate(file, trace.place_of_recorder(0) + RECORDER_BYTES)
        recorder.keep_in(lambda: (file, trace.place_of_recorder(0)))
        recorder.open_recorder(3, 4)
        group = recorder.group("0", "gloo", (2, 3), 1)
        assert group is not None
        taken_back, *others = (recorder.begin(addressof(group), 1, 4, -1) for _ in range(3))
        library().phx_record_drop(taken_back)
        for each in others:
            recorder.end(each, False)
        new = NewCalls(trace, [3], 4)
        return [each.first + len(each.calls) - 1 for _ in range(3) for each in new.look()]

    assert on_ranks(body, 1) == [[3]]
