"""When the launcher says which rank the others wait for: before the limit is over, and of a stopped one sooner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.launch.hang_watch import HangWatch
from phalanx.launch.job.diagnosis import Diagnosis
from phalanx.launch.job.job import Job
from phalanx.launch.job.target import Target
from phalanx.launch.sight import Examination, Pace
from phalanx.watch.records import Group, Record, Recording
from phalanx.watch.verdict import Seen

TARGET = Target("script", "a.py", "/a.py", ("a.py",))
WORLD = Group("0", "phalanx", (0, 1, 2))


def record(number: int, entered_ns: int, left_ns: int) -> Record:
    return Record(
        number, WORLD, number, "all_reduce", 4, "float32", "sum", -1, "a.py:1", "", -1, entered_ns, left_ns, False, -1
    )


class Watched:
    """A job of three ranks, its clock, and what the launcher has said of it, with the time."""

    def __init__(self, **diagnosis: Any) -> None:
        self.now = 1000.0
        self.said: list[tuple[float, str]] = []
        self.states = ["S", "S", "S"]
        self.waits_since: dict[int, float] = {}  # of each rank in the operation
        self.stacks_wanted: list[Sequence[int]] = []
        job = Job(3, TARGET, "", "h", cores=1, threads="", diagnosis=Diagnosis(**diagnosis))
        self.watch = HangWatch(job, self, lambda text: self.said.append((self.now, text)), lambda: self.now)

    # The sight.

    def look(self) -> Pace:
        waited_s = max((self.now - since for since in self.waits_since.values()), default=0.0)
        stopped = tuple(rank for rank, state in enumerate(self.states) if state == "T")
        return Pace(waited_s, waited_s, stopped)

    def ask(self, of: Sequence[int], skip: Sequence[int], *, whole: bool) -> Examination | None:
        if of:
            self.stacks_wanted.append(of)
        return self.see({})

    def see(self, stacks: Mapping[int, str]) -> Examination:
        pace = self.look()
        return Examination([self._seen(rank) for rank in range(3)], stacks, pace.waited_s, pace.still_s)

    def hear(self, message: Mapping[str, Any]) -> Examination | None:
        return None

    def _seen(self, rank: int) -> Seen:
        records = [record(1, 1, 2)]
        if rank in self.waits_since:
            records.append(record(2, int(self.waits_since[rank] * 1e9), 0))
        return Seen(rank, Recording(100 + rank, rank, 3, -1, "", len(records), tuple(records)), self.states[rank])

    # What happens.

    def wait(self, *ranks: int) -> None:
        self.waits_since |= dict.fromkeys(ranks, self.now)

    def stop(self, *ranks: int) -> None:
        for rank in ranks:
            self.states[rank] = "T"

    def go_on(self, *ranks: int) -> None:
        for rank in ranks:
            self.states[rank] = "S"

    def run(self, for_s: float) -> None:
        """Let so much time pass; the watch looks whenever it says that it has to."""
        end = self.now + for_s
        while True:
            due_in_s = self.watch.due_in_s()
            assert due_in_s is not None
            if self.now + due_in_s > end:
                break
            self.now += due_in_s
            self.watch.look()
        self.now = end


def test_a_line_stands_there_before_the_limit_is_over() -> None:
    job = Watched()
    job.run(0.7)
    job.wait(0, 2)
    began = job.now
    job.run(30)
    times = [when - began for when, _ in job.said]
    assert [round(time_s, 3) for time_s in times] == [4.75, 20.0], job.said
    assert all("ranks 0, 2 wait for it in all_reduce #2" in text for _, text in job.said)
    assert job.stacks_wanted


def test_a_stopped_rank_is_named_sooner_and_once() -> None:
    job = Watched()
    job.run(0.3)
    began = job.now
    job.stop(1)
    job.wait(0, 2)
    job.run(30)
    (first, text), (second, _) = job.said
    assert text == (
        "rank 1 is stopped (state T), after all_reduce #1 at a.py:1; "
        f"ranks 0, 2 wait for it in all_reduce #2 at a.py:1, for {first - began:.0f} s now"
    )
    assert 1.0 <= first - began <= 3.0
    assert round(second - began, 3) == 20.0


def test_a_stopped_rank_is_named_sooner_also_if_ranks_may_wait_for_long() -> None:
    job = Watched(warn_after_s=600.0)
    job.stop(1)
    job.wait(0, 2)
    job.run(60)
    assert len(job.said) == 1, job.said


def test_no_rank_is_asked_where_it_is_because_another_one_is_stopped() -> None:
    """The signal for that may cut short what it does."""
    job = Watched()
    job.stop(1)
    job.wait(0, 2)
    job.run(4)
    assert len(job.said) == 1
    assert job.stacks_wanted == []


def test_of_a_suspended_job_nothing_is_said_before_it_has_gone_on() -> None:
    job = Watched(warn_after_s=600.0)
    job.wait(0, 2)
    job.run(0.5)
    job.stop(0, 1, 2)
    job.run(100)
    job.go_on(0)  # as ranks go on one after the other
    job.run(0.9)
    job.go_on(1, 2)
    job.run(100)
    assert job.said == []


def test_a_stopped_rank_that_nobody_waits_for_is_not_named() -> None:
    job = Watched()
    job.stop(1)
    job.run(100)
    assert job.said == []
    job.wait(0, 2)
    began = job.now
    job.run(10)
    assert len(job.said) == 1
    assert job.said[0][0] - began <= 5.0


def test_a_rank_that_is_stopped_again_is_named_again() -> None:
    job = Watched()
    for _ in range(2):
        job.stop(1)
        job.wait(0, 2)
        job.run(4)
        job.go_on(1)
        job.waits_since = {}
        job.run(4)
    assert len(job.said) == 2, job.said


def test_another_cause_is_named_at_the_limit_also_after_a_stopped_rank() -> None:
    job = Watched()
    job.wait(0, 2)
    job.stop(1)
    job.run(4)
    job.go_on(1)
    job.run(4)
    assert ["stopped" in text for _, text in job.said] == [True, False], job.said


def test_a_rank_in_a_debugger_is_named_at_the_limit() -> None:
    job = Watched()
    job.states[1] = "t"
    began = job.now
    job.wait(0, 2)
    job.run(10)
    assert [round(when - began, 3) for when, _ in job.said] == [4.75], job.said
    assert "rank 1 is held by a debugger (state t)" in job.said[0][1]


class ComesWhenAsked(Watched):
    """A job whose last rank comes to the operation while the others are asked where they are."""

    def __init__(self, *, goes_on: bool) -> None:
        super().__init__()
        self._goes_on = goes_on

    def ask(self, of: Sequence[int], skip: Sequence[int], *, whole: bool) -> Examination | None:
        if of:
            self.wait(1)
        return super().ask(of, skip, whole=whole)

    def look(self) -> Pace:
        if self._goes_on and self.now > self.waits_since.get(1, self.now):
            self.waits_since.clear()
        return super().look()


def test_nothing_is_said_of_ranks_that_have_all_come_meanwhile() -> None:
    job = ComesWhenAsked(goes_on=True)
    job.wait(0, 2)
    job.run(10)
    assert not job.said


def test_ranks_that_have_all_come_and_do_not_go_on_are_told_of() -> None:
    job = ComesWhenAsked(goes_on=False)
    job.wait(0, 2)
    job.run(10)
    assert len(job.said) == 1, job.said
    assert "all have come, and it is not over" in job.said[0][1]
