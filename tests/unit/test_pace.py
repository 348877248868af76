"""The pace of a rank, from two looks at a recorder whose times the test has written itself."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from phalanx.launch.running.rank_look import Pace, PaceOfRank
from phalanx.native.core import RECORDER_BYTES, RECORDS, RECORDS_AT, STRINGS_AT

ALL_REDUCE, BARRIER, SEND = 1, 4, 10
MAGIC = 0x31636552786C6850
SECOND = 1_000_000_000
START = 1000 * SECOND  # when everything here begins, on the monotonic clock
WORLD, PAIR = 4, 200  # where the texts of the groups are


@dataclass
class Operation:
    """An operation from ``entered`` to ``left``, in seconds after the start; None while it is under way."""

    entered: float
    left: float | None
    kind: int = ALL_REDUCE
    nbytes: int = 4
    step: int = -1
    group: int = WORLD


class Recorder:
    """A recorder's memory, written by the letters of native/csrc/recorder/record.h."""

    def __init__(self) -> None:
        self.file = os.memfd_create("test")
        os.ftruncate(self.file, RECORDER_BYTES)
        self.begun = 0
        self.in_group: dict[int, int] = {}
        for at, ranks in ((WORLD, "[[0, 4, 1]]"), (PAIR, "[[1, 2, 2]]")):
            text = f'{{"name": "{at}", "backend": "phalanx", "ranks": {ranks}, "own": 1}}'.encode()
            os.pwrite(self.file, struct.pack("=I", len(text)) + text, STRINGS_AT + at)

    def write(self, operations: Sequence[Operation], step: int = -1) -> None:
        for operation in operations:
            number = self.begun
            self.begun += 1
            self.in_group[operation.group] = self.in_group.get(operation.group, 0) + (operation.kind != SEND)
            left = 1 << 63 | number if operation.left is None else nanoseconds(operation.left) * 2
            record = struct.pack(
                "=4Q5I3i",
                *(2 * number + 2, left, nanoseconds(operation.entered), operation.nbytes),
                *(self.in_group[operation.group], operation.kind, operation.group, 0, 0),
                *(-1, -1, operation.step),
            )
            os.pwrite(self.file, record, RECORDS_AT + number % RECORDS * 64)
        os.pwrite(self.file, struct.pack("=IIIiIiI", 1, 4, os.getpid(), 1, 0, step, 0), 8)
        os.pwrite(self.file, struct.pack("=Q", self.begun), 64)
        os.pwrite(self.file, struct.pack("=Q", MAGIC), 0)


def nanoseconds(seconds: float) -> int:
    return START + round(seconds * SECOND)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    yield made
    os.close(made.file)


def look(pace: PaceOfRank, seconds: float) -> Pace:
    found = pace.look(nanoseconds(seconds))
    assert found is not None
    return found


def test_rates_are_those_since_the_look_before(recorder: Recorder) -> None:
    recorder.write([Operation(0.0, 0.5, nbytes=1000), Operation(0.5, 1.5, nbytes=100)])
    pace = PaceOfRank(recorder.file, 0)
    look(pace, 1.0)
    ended = [Operation(2.0, 2.5, nbytes=200), Operation(2.25, 2.75, SEND, nbytes=60)]
    recorder.write([*ended, Operation(2.875, None, nbytes=1 << 20)])
    found = look(pace, 3.0)
    assert found.begun == 5
    assert found.operations_per_s == 1.5
    assert found.bytes_per_s == (100 + 200 + 60) / 2  # what ended between the two looks
    # From 1.0 to 1.5, from 2.0 to 2.75, and from 2.875 to 3.0: time in two operations counts once.
    assert found.communication == pytest.approx((0.5 + 0.75 + 0.125) / 2)
    assert found.operation is not None
    assert found.operation["nbytes"] == 1 << 20
    assert found.collectives == [("4", [[0, 4, 1]], 4)]
    assert found.complete


def test_steps_are_counted_in_time_between_their_first_operations(recorder: Recorder) -> None:
    # Two operations in each step of a quarter of a second; the look comes in the middle of one.
    operations = [Operation(k / 8, k / 8 + 0.01, step=k // 2) for k in range(80)]
    recorder.write(operations, step=39)
    found = look(PaceOfRank(recorder.file, 0), 80 / 8)
    assert found.step == 39
    assert found.steps_per_s == pytest.approx(4.0)


def test_rates_leave_out_what_begins_after_the_time_of_a_late_look(recorder: Recorder) -> None:
    pace = PaceOfRank(recorder.file, 0)
    recorder.write([Operation(0.25, 0.5), Operation(0.75, 1.0), Operation(1.5, 1.75)])
    assert look(pace, 1.0).operations_per_s == pytest.approx(2 / 0.75)
    assert look(pace, 2.0).operations_per_s == pytest.approx(1.0)
