"""Timeouts that stand still while the whole process does, and only then."""

from __future__ import annotations

import pytest

from phalanx.system import awake
from phalanx.system.awake import AwakeClock, ended_early, wait_awake


class Time:
    """A clock for the module under test, which goes on only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr("phalanx.system.awake.time.monotonic", made.monotonic)
    return made


def test_time_in_which_the_process_stood_still_does_not_count(time: Time) -> None:
    clock = AwakeClock()
    time.now_s += 1.0
    assert clock.now() == 1.0
    time.now_s += 3600.0
    assert clock.now() <= 1.0 + 2 * awake.SLICE_S


def test_a_wait_ends_at_its_timeout_though_it_was_stopped_meanwhile(time: Time) -> None:
    waits: list[float] = []

    def wait(timeout_s: float) -> bool:
        waits.append(timeout_s)
        time.now_s += 1000.0 if len(waits) == 2 else timeout_s
        return False

    assert not wait_awake(wait, 10.0)
    assert len(waits) >= 9  # the stop took at most two seconds of the ten
    assert max(waits) <= awake.SLICE_S


def test_a_clock_of_the_caller_counts_the_whole_of_a_long_wait(time: Time) -> None:
    def wait(timeout_s: float) -> bool:
        time.now_s += timeout_s
        return False

    clock = AwakeClock()
    assert not wait_awake(wait, 30.0, clock)
    assert clock.now() == pytest.approx(30.0)
    assert not wait_awake(wait, 5.0, clock)
    assert clock.now() == pytest.approx(35.0)


def test_a_wait_that_is_over_returns_at_once(time: Time) -> None:
    assert wait_awake(lambda timeout_s: True, 10.0)
    assert wait_awake(lambda timeout_s: True, None)
    assert time.now_s == 100.0


def test_a_wait_that_ended_before_half_of_its_time_was_no_timeout(time: Time) -> None:
    began_s = time.now_s
    time.now_s += 4.9
    assert ended_early(began_s, 10.0)
    time.now_s += 0.2  # clocks and schedulers differ: this may have been a timeout
    assert not ended_early(began_s, 10.0)
    assert not ended_early(began_s, 0.0)
