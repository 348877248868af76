"""The call at which ranks stop: whoever asks, and whenever, all ranks leave at the same one."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.errors import ArgumentError, LaunchError
from phalanx.launch.job.job import make_job
from phalanx.launch.job.options import LaunchOptions, read_stop_signals, slurm_end_time
from phalanx.launch.job.target import Target
from phalanx.launch.protocol import AskedToStop, CallsShouldStop, Held, Hold, StopAt
from phalanx.launch.stop_in_step import GENTLY, LAUNCHER, HostStop, StopInStep
from phalanx.training.should_stop import _LaunchedStopper, stopper_of


class Launch:
    """A job of one rank on each of two hosts, whose agents answer when they are told to."""

    def __init__(self, **options: Any) -> None:
        given = {"max_hours": None, "stop_before_s": None, "grace_s": None, "requeue": False, **options}
        job = SimpleNamespace(
            stop_on=(signal.SIGTERM, signal.SIGUSR1), began_at=time.monotonic(), patience_s=lambda _: 30.0, **given
        )
        self.ranks = [SimpleNamespace(number=n, end=None, calls=0, recording=None) for n in range(2)]
        self.agents = [SimpleNamespace(number=n, link=object(), over=False, ranks=[self.ranks[n]]) for n in range(2)]
        self.sent: list[tuple[int, object]] = []
        self.said: list[str] = []
        self.stop: Any = StopInStep(job, self.agents, self._send, self.said.append)  # type: ignore[arg-type]

    def _send(self, agent: Any, order: object) -> None:
        self.sent.append((agent.number, order))

    def use(self) -> None:
        self.stop.hear(self.agents[0], CallsShouldStop())

    def answer(self, calls: Sequence[int]) -> None:
        for agent, count in zip(self.agents, calls, strict=True):
            self.stop.hear(agent, Held(calls={agent.number: count}))

    def end(self, rank: int, calls: int, status: int) -> None:
        self.ranks[rank].end, self.ranks[rank].calls = SimpleNamespace(status=status), calls


def test_request_before_a_rank_asks_is_none() -> None:
    launch = Launch()
    assert not launch.stop.ask_by_signal(signal.SIGTERM)
    assert launch.stop.ask_by_signal(GENTLY)  # which means nothing to ranks
    assert launch.sent == []
    assert launch.said == [
        "phalanx stop --gently: no rank has called world.should_stop(); the job goes on",
    ]
    launch.use()
    assert launch.stop.ask_by_signal(signal.SIGTERM)
    assert launch.sent == [(0, Hold()), (1, Hold())]


def test_agreed_call_is_the_first_that_no_rank_has_begun() -> None:
    launch = Launch()
    launch.use()
    assert not launch.stop.ask_by_signal(signal.SIGUSR2)
    assert launch.stop.ask_by_signal(GENTLY)
    launch.sent.clear()
    launch.stop.hear(launch.agents[0], Held(calls={0: 7}))
    assert launch.sent == []
    launch.stop.hear(launch.agents[1], Held(calls={1: 9}))
    assert launch.sent == [(0, StopAt(call=10)), (1, StopAt(call=10))]
    launch.stop.ask_by_signal(GENTLY)
    assert len(launch.sent) == 2  # agreed once and for all
    for rank in range(2):
        launch.end(rank, 10, 0)
    assert launch.stop.conclude(launch.ranks) == 0
    assert launch.said == ["stopped after step 10 on request (phalanx stop --gently)"]


def test_host_that_is_lost_is_not_waited_for() -> None:
    launch = Launch()
    launch.use()
    launch.stop.ask_by_signal(GENTLY)
    launch.sent.clear()
    launch.stop.hear(launch.agents[0], Held(calls={0: 3}))
    launch.stop.lose(launch.agents[1])
    assert launch.sent[0] == (0, StopAt(call=4))


def test_second_signal_of_the_launcher_ends_the_job() -> None:
    """One that came to a rank before is the same request: Slurm signals all processes of a step."""
    launch = Launch()
    launch.use()
    launch.stop.hear(launch.agents[0], AskedToStop(signal=signal.SIGTERM, where="rank 0"))
    assert launch.stop.ask_by_signal(signal.SIGTERM, source=LAUNCHER)
    assert not launch.stop.ask_by_signal(signal.SIGTERM, source=LAUNCHER)
    assert launch.stop.why == "SIGTERM at rank 0"


def test_signal_of_every_node_is_one_request() -> None:
    """As a scheduler sends it; the second one of a node ends the job."""
    launch = Launch()
    launch.use()
    assert launch.stop.ask_by_signal(signal.SIGTERM, source=LAUNCHER)
    assert launch.stop.ask_by_signal(signal.SIGTERM, "node 1", source=1)
    assert launch.stop.ask_by_signal(signal.SIGTERM, "node 2", source=2)
    assert not launch.stop.ask_by_signal(signal.SIGTERM, "node 1", source=1)


def test_job_goes_on_after_a_stop_only_if_nodes_alone_asked() -> None:
    launch = Launch()
    launch.use()
    for node in (1, 2):
        launch.stop.ask_by_signal(signal.SIGTERM, f"node {node}", source=node, for_node=True)
    assert launch.stop.for_node
    launch.stop.ask_by_signal(GENTLY)
    assert not launch.stop.for_node


def test_later_request_shortens_the_time_to_end() -> None:
    launch = Launch()
    launch.use()
    launch.stop.ask_by_signal(GENTLY)
    launch.stop.ask_by_signal(signal.SIGTERM)
    launch.answer([4, 0])
    assert launch.stop.act(time.monotonic() + 29.0) is None
    assert launch.stop.act(time.monotonic() + 31.0) == signal.SIGKILL


def test_ranks_that_do_not_end_are_killed_after_the_grace_and_named() -> None:
    launch = Launch(grace_s=5.0)
    launch.use()
    launch.stop.ask_by_signal(signal.SIGUSR1)
    launch.answer([4, 0])
    now = time.monotonic()
    assert launch.stop.due_at <= now + 5.0
    assert launch.stop.act(now) is None
    assert launch.stop.explain(launch.ranks) is None
    assert launch.stop.act(now + 6.0) == signal.SIGKILL
    launch.end(0, 5, -9)
    launch.end(1, 0, -9)
    assert launch.stop.explain(launch.ranks) == (
        "phalanx: a stop was requested (SIGUSR1): rank 1 never called world.should_stop(); rank 0 was told to stop and "
        "did not end; after 5 s they were killed (--grace)\n",
        143,
    )


@pytest.mark.parametrize(
    ("signum", "grace_s", "expected_s"), [("SIGTERM", None, 30.0), ("SIGUSR1", None, None), ("SIGTERM", 2.0, 2.0)]
)
def test_grace_is_that_of_sigterm_or_the_users(signum: str, grace_s: float | None, expected_s: float | None) -> None:
    launch = Launch(grace_s=grace_s)
    launch.use()
    launch.stop.ask_by_signal(getattr(signal, signum))
    killed = launch.stop.act(time.monotonic() + (expected_s or 10000.0))
    assert (killed == signal.SIGKILL) == (expected_s is not None)


def test_ranks_that_are_late_are_named_if_there_is_no_grace() -> None:
    launch = Launch()
    launch.use()
    launch.stop.ask_by_signal(GENTLY)
    launch.answer([4, 0])
    launch.sent.clear()
    assert launch.stop.act(time.monotonic() + 31.0) is None
    assert launch.sent == [(0, Hold()), (1, Hold())]
    launch.answer([4, 0])
    assert launch.said == [
        "a stop was requested (phalanx stop --gently) 30 s ago: rank 1 never called world.should_stop(); rank 0 did "
        "not come to call 5 of world.should_stop()"
    ]
    assert launch.sent == [(0, Hold()), (1, Hold())]  # the agreed call stays


def test_time_ends_a_job_that_cannot_stop_in_step() -> None:
    launch = Launch(max_hours=1.0)
    assert launch.stop.act(launch.stop.due_at - 1.0) is None
    assert launch.stop.act(launch.stop.due_at) == signal.SIGTERM
    assert launch.said == ["--max-hours 1: no rank has called world.should_stop(); the job is ended as by SIGTERM"]
    launch = Launch(max_hours=1.0)
    launch.use()
    assert launch.stop.act(launch.stop.due_at) is None
    assert launch.stop.why == "--max-hours 1"


def test_slurms_limit_leaves_the_time_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000))
    launch = Launch(stop_before_s=300.0)
    launch.use()
    assert 600 < launch.stop.due_at - time.monotonic() < 701
    assert launch.stop.act(launch.stop.due_at) is None
    assert launch.stop.act(time.monotonic() + 299.0) is None
    assert launch.stop.act(time.monotonic() + 301.0) == signal.SIGKILL


def test_job_that_came_to_its_end_was_not_stopped() -> None:
    launch = Launch()
    launch.use()
    launch.stop.ask_by_signal(GENTLY)
    launch.answer([4, 5])
    for rank in range(2):
        launch.end(rank, 5, 0)
    assert launch.stop.conclude(launch.ranks) == 0
    assert launch.said == []


@pytest.mark.parametrize("seed", range(20))
def test_ranks_leave_at_the_same_call_whenever_it_is_asked(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of two hosts that call it at their own pace, until each is told."""
    monkeypatch.setattr("os.kill", lambda *_: None)
    hosts = [HostStop([0, 1]), HostStop([2])]
    left: dict[int, int] = {}
    draw = random.Random(seed)
    pauses = [draw.random() / 5000 for _ in range(3)]

    def train(rank: int, cell: memoryview) -> None:
        stopper = _LaunchedStopper(cell, 0, ())
        stopper.begin()
        step = 1
        while not stopper.should_stop(1):
            time.sleep(pauses[rank])
            step += 1
        left[rank] = step

    cells = [hosts[0].cell(0), hosts[0].cell(1), hosts[1].cell(0)]
    threads = [threading.Thread(target=train, args=each) for each in enumerate(cells)]
    for thread in threads:
        thread.start()
    time.sleep(draw.random() / 50)
    at = 1 + max(count for host in hosts for count in host.hold().calls.values())
    for host in hosts:
        host.stop_at(at)
    for thread in threads:
        thread.join(60.0)
    assert left == dict.fromkeys(range(3), at)
    assert [type(event) for host in hosts for event in host.news()] == [CallsShouldStop, CallsShouldStop]


def test_options_that_cannot_be_carried_out_are_refused() -> None:
    assert read_stop_signals("usr1, SIGTERM") == (signal.SIGUSR1, signal.SIGTERM)
    with pytest.raises(LaunchError, match="--stop-on INT: 'INT' is none of TERM, USR1, USR2, HUP"):
        read_stop_signals("INT")
    with pytest.raises(LaunchError, match="SLURM_JOB_END_TIME, which is not set here"):
        slurm_end_time({})
    target = Target("script", "train.py", "train.py", ("train.py",), ".")
    with pytest.raises(LaunchError, match="--requeue: queues a job of Slurm again, and this is none"):
        make_job(LaunchOptions(requeue=True), target, {})
    with pytest.raises(LaunchError, match="--stop-before: Slurm says the end"):
        make_job(LaunchOptions(stop_before_s=60.0), target, {"SLURM_JOB_ID": "7"})
    with pytest.raises(ArgumentError, match="every=0 is not a number of calls"):
        stopper_of(SimpleNamespace(), "cpu", 0)  # type: ignore[arg-type]
