"""When the launcher says that ranks wait, and writes reports: with made-up ranks and a clock that the test moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

from msgspec.structs import replace
from tests.support.reports import operation

from phalanx.diagnosis.report import latest_report, read_report
from phalanx.diagnosis.snapshot import Group, RankSnapshot, Recording
from phalanx.launch.hang_watch import HangWatch
from phalanx.launch.job.job import Job
from phalanx.launch.job.options import Diagnosis
from phalanx.launch.job.target import Target
from phalanx.launch.output.failure import RankState
from phalanx.launch.protocol import Examined, Waits
from phalanx.launch.roster import AgentState

WORLD = Group("0", "phalanx", (0, 1))
STACK = 'Stack (most recent call first):\n  File "/job/train.py", line 7 in load\n'


def seen(rank: int, *, waits: bool, state: str = "S") -> RankSnapshot:
    done = operation(0, world=WORLD)
    records = (done, replace(operation(1, world=WORLD), left_ns=0)) if waits else (done,)
    return RankSnapshot(rank, Recording(100 + rank, rank, 2, -1, "", len(records), records), state)


class Watch:
    """The watch over rank 0, which waits for rank 1 for ``waited_s``, and what it says; the agent answers at once."""

    def __init__(self, **diagnosis: Any) -> None:
        self.now, self.waited_s, self.still_s = 100.0, 0.0, 0.0
        self.stacks: dict[int, str] = {}
        self.seen = [seen(0, waits=True), seen(1, waits=False)]
        self.said = list[str]()
        target = Target("script", "train.py", "/job/train.py", ("train.py",))
        diagnosed = Diagnosis(**diagnosis)
        job = Job(ranks=2, target=target, run_id="run", host="here", cores=2, threads="1", diagnosis=diagnosed)
        self._agent = AgentState(0, "here", [RankState(0), RankState(1)], link=Mock(), later=0.0)
        self._watch = HangWatch(job, [self._agent], job.rows, self._answer, self.said.append, lambda: self.now)

    def _answer(self, agent: AgentState, question: Any) -> None:
        ranks = {
            one.rank: {"state": one.state, "recording": one.recording and one.recording.to_json()} for one in self.seen
        }
        stacks = self.stacks if question.stacks else {}
        answer = Examined(
            number=question.number, waited_s=self.waited_s, still_s=self.still_s, ranks=ranks, stacks=stacks
        )
        self._watch.hear(agent, answer)

    def after(self, seconds: float, *, moves: bool = False) -> int:
        """Let so many seconds pass; how many lines were said in them. Ranks that move are not still."""
        before = len(self.said)
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            self.waited_s += 0.25
            self.still_s = 0.0 if moves else self.still_s + 0.25
            stopped = [one.rank for one in self.seen if one.state == "T"]
            self._watch.hear_waits(self._agent, Waits(waited_s=self.waited_s, still_s=self.still_s, stopped=stopped))
            self._watch.look()
            self._watch.act()
        return len(self.said) - before


def test_a_wait_is_said_ever_more_seldom_and_anew_after_it_is_over() -> None:
    watch = Watch(warn_after_s=5.0)
    assert [watch.after(4), watch.after(2), watch.after(13), watch.after(3)] == [0, 1, 0, 1]
    assert watch.said[0].startswith("rank 1 is in no operation; its last was all_reduce #1"), watch.said
    assert watch.said[0].endswith("; rank 0 waits for it in all_reduce #2 at train.py:7, for 5 s now"), watch.said
    watch.waited_s = 0.0
    assert [watch.after(4), watch.after(2)] == [0, 1]


def test_nothing_is_said_if_the_user_wants_that() -> None:
    assert Watch(warn_after_s=0.0).after(100) == 0


def test_a_report_waits_until_no_rank_goes_on(tmp_path: Path) -> None:
    watch = Watch(warn_after_s=1.0, report_after_s=5.0, report_dir=str(tmp_path))
    watch.stacks = {0: STACK, 1: STACK}
    watch.after(20, moves=True)
    assert list(tmp_path.iterdir()) == []
    watch.after(6)
    assert latest_report(tmp_path) == tmp_path / "hang-1.json"


def test_a_report_without_a_late_rank_is_written_again_with_it(tmp_path: Path) -> None:
    watch = Watch(warn_after_s=1.0, report_after_s=2.0, report_dir=str(tmp_path))
    watch.stacks = {0: STACK}
    watch.after(3)
    assert "has every rank's stack and operations (rank 1 did not answer); read it with: " in watch.said[-1]
    watch.stacks[1] = STACK
    watch.after(4)
    assert "has every rank's stack and operations; read it with: " in watch.said[-1]
    assert [path.name for path in tmp_path.glob("*.json")] == ["hang-1.json"]  # in the place of the first one
    assert sorted(read_report(tmp_path / "hang-1.json").stacks) == [0, 1]
    assert watch.after(8) <= 1  # the next warning, and no other report


def test_stopped_rank_is_named_once_before_a_wait_is_long() -> None:
    watch = Watch(warn_after_s=10.0)
    watch.seen[1] = seen(1, waits=False, state="T")
    assert [watch.after(1), watch.after(4), watch.after(20)] == [0, 1, 0]
    assert "rank 1 is stopped (state T)" in watch.said[0]
    watch.seen[1] = seen(1, waits=True)
    watch.after(4)
    watch.seen[1] = seen(1, waits=False, state="T")
    assert watch.after(4) == 1
