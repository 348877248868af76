"""The flight recorder's memory: what readers find while threads write, after wrapping, after a death in the middle."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import addressof

import pytest

from phalanx.diagnosis import recorder
from phalanx.diagnosis.reading import read_position, read_recording
from phalanx.diagnosis.snapshot import Recording
from phalanx.native.core import NBYTES_BITS, RECORDER_BYTES, RECORDS, RecordedGroup, library

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


def done(group: RecordedGroup, nbytes: int) -> None:
    recorder.end(recorder.begin(addressof(group), BROADCAST, nbytes, 0), False)


def test_ring_keeps_the_last_operations_if_an_early_one_ends_late(file: int) -> None:
    def operations(group: RecordedGroup) -> None:
        early = recorder.begin(addressof(group), ALL_REDUCE, 1, -1)
        for _ in range(RECORDS + 10):
            done(group, 2)
        last = recorder.begin(addressof(group), BROADCAST, 3, 0)
        for _ in range(RECORDS - 1 - last % RECORDS):  # up to the record that the first one had
            recorder.begin(addressof(group), BROADCAST, 4, 0)
        recorder.begin(addressof(group), BROADCAST, 5, 0)
        recorder.end(early, False)

    found = record_in(file, operations)
    assert [record.number for record in found.records] == list(range(found.begun - RECORDS, found.begun))
    assert found.records[-1].nbytes == 5
    assert found.records[-1].under_way


@pytest.mark.parametrize("word", [2 * 1 + 1, 2 * 4097 + 1])
def test_record_whose_writer_died_in_the_middle_is_left_out(file: int, word: int) -> None:
    """Before the word is even again no reader trusts the fields, and no later operation writes between them."""

    def operations(group: RecordedGroup) -> None:
        for size in range(3):
            done(group, size)
        # As after the first store of a writer that then died.
        os.pwrite(file, struct.pack("Q", word), RECORDS_AT + RECORD_BYTES)
        for _ in range(RECORDS):
            recorder.begin(addressof(group), BROADCAST, 9, 0)

    found = record_in(file, operations)
    assert len(found.records) == RECORDS - 1
    assert {record.number % RECORDS for record in found.records} == set(range(RECORDS)) - {1}
    assert found.begun == RECORDS + 3


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
        until, checked, last = time.monotonic() + 60, 0, -1
        while checked < 10 * RECORDS or last < 3 * RECORDS:
            found = read_recording(file)
            for record in found.records if found is not None else ():
                assert record.peer == record.nbytes & 0x7FFF, record
                assert record.in_group == record.nbytes // 4 + 1, record
                assert record.under_way or record.failed == bool(record.nbytes & 1), record
                assert record.under_way or record.left_ns >= record.entered_ns, record
                checked += 1
                last = max(last, record.number)
            assert time.monotonic() < until
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    # Killed anywhere: at most one record for each thread is lost, and all others are whole.
    found = read_recording(file)
    assert found is not None
    assert len(found.records) >= RECORDS - 4
    assert sum(record.under_way for record in found.records) <= 4


def test_the_times_of_records_are_those_of_the_clock(file: int) -> None:
    """They are made of the processor's counter between two looks at the clock."""
    times = os.memfd_create("times")

    def operations(group: RecordedGroup) -> None:
        for number in range(1000):
            if number % 200 == 0:
                time.sleep(0.01)
            before = time.monotonic_ns()
            done(group, number)
            os.write(times, struct.pack("qq", before, time.monotonic_ns()))

    records = record_in(file, operations).records
    assert len(records) == 1000
    for number, record in enumerate(records):
        before, after = struct.unpack("qq", os.pread(times, 16, 16 * number))
        assert before - MOST_ASTRAY_NS <= record.entered_ns <= record.left_ns <= after + MOST_ASTRAY_NS
    os.close(times)


def test_the_shape_is_recorded_of_tensors_whose_shapes_are_compared(file: int) -> None:
    most = (1 << NBYTES_BITS) - 1
    shapes = [(24, (2, 3)), (24, (3, 2)), (24, (2, 1, 3)), (24, (6,)), (24, (6, 1)), (most, (2, 3)), (0, (0, 3))]

    def operations(group: RecordedGroup) -> None:
        for nbytes, shape in shapes:
            recorder.begin(addressof(group), ALL_REDUCE | FLOAT32, recorder.shaped(nbytes, shape), -1)

    found = [(record.nbytes, record.shape) for record in record_in(file, operations).records]
    small = [(24, shape) for shape in ("[2, 3]", "[3, 2]", "[2, 1, 3]", "", "")]
    assert found == [*small, (most, "[2, 3]"), (0, "")]


@pytest.mark.parametrize(("moved", "pieces", "percent"), [(3, 8, 37), (8, 8, -1), (0, 0, -1)])
def test_the_pieces_that_have_moved_say_how_far_a_call_is(file: int, moved: int, pieces: int, percent: int) -> None:
    def operations(group: RecordedGroup) -> None:
        recorder.begin(addressof(group), ALL_REDUCE, 1, -1)
        library().phx_record_piece(moved, pieces)

    found, seen = record_in(file, operations), read_position(file, 0)
    assert Recording.from_json(found.to_json()).done == found.done == percent
    assert seen is not None
    assert seen.pieces == moved << 32 | pieces  # so a look finds that the rank goes on
