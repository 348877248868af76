"""How soon a fault is known and a job works again, against what Phalanx promises; two of ``benchmarks/`` measure.

A machine that is busy with something else is as late with everything. So a thread measures meanwhile how much longer
than on a quiet machine a short sleep with some work behind it takes, and the bound is multiplied by that.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.mpi.environments import MpiEnvironment, mpi_parameters
from tests.support.hosts import why_no_hosts

from phalanx import settings

pytestmark = pytest.mark.fault

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RECOVERED_S = 1.5
PATIENCE_S = 3000.0  # a quiet machine needs two minutes for the longest


class Lateness:
    """Measures, while it is entered, how many times longer than on a quiet machine things take."""

    SLEEP_S = 0.02
    ADDITIONS = 100_000  # about as much work as an error takes to be made and told

    def __enter__(self) -> Lateness:
        self._ratios: list[float] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._measure)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _measure(self) -> None:
        while not self._ends.is_set():
            began, had = time.monotonic(), time.thread_time()
            time.sleep(self.SLEEP_S)
            sum(range(self.ADDITIONS))
            # What the thread itself computes, it computes on a quiet machine too.
            self._ratios.append((time.monotonic() - began) / (self.SLEEP_S + time.thread_time() - had))

    def factor(self) -> float:
        return max(1.0, quantile(self._ratios, 0.99))


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def found_by(benchmark: str, *options: object, python: str = sys.executable) -> tuple[dict[str, Any], float]:
    """What a benchmark has measured, and how late this machine is."""
    # The other tests want no line about ranks that wait (tests/conftest.py).
    environment = {name: value for name, value in os.environ.items() if name != settings.WARN_AFTER}
    command = [python, str(BENCHMARKS / benchmark), *map(str, options), "--seed", "16", "--json"]
    with Lateness() as lateness:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any]
    (found,) = json.loads(ended.stdout)
    return found, lateness.factor()


def measured(world: str, fault: str, rounds: int, python: str = sys.executable) -> tuple[dict[str, Any], float]:
    """When a fault is known; all must have been told right."""
    options = ("--worlds", world, "--faults", fault, "--rounds", rounds)
    found, factor = found_by("deaths.py", *options, python=python)
    assert len(found["taken_s"]) == found["expected"] >= rounds
    return found, factor


# The world, the fault, how often, and after how many seconds it must be known; 99 % of the kills on one host.
FAULTS = [
    ("8", "killed", 15, 0.2),
    ("3", "killed", 50, 0.2),
    ("hand:3", "killed", 20, 0.2),
    ("2x2", "killed", 10, 1.0),
    *((world, "stopped-rank", 4, 5.0) for world in ("3", "2x2", "gloo:3")),
    *((world, "absent", 4, 5.0) for world in ("3", "2x2", "gloo:3", "hand:3")),
    *(("2x2", fault, 4, 5.0) for fault in ("cut", "stopped-host")),
    *((world, fault, 5, 1.0) for world in ("3", "2x2") for fault in ("mismatch", "launcher-killed", "raised")),
    *(("gloo:3", fault, 5, 1.0) for fault in ("launcher-killed", "raised-ends")),
    *((world, fault, 5, 1.0) for world in ("hand:3", "torchrun:3") for fault in ("twice", "sizes")),
]


@pytest.mark.parametrize(("world", "fault", "rounds", "bound_s"), FAULTS)
def test_it_is_known_in_time(
    world: str,
    fault: str,
    rounds: int,
    bound_s: float,
    record_property: Callable[[str, object], None],
) -> None:
    if "x" in world and why_no_hosts():
        pytest.skip(why_no_hosts())
    found, factor = measured(world, fault, rounds)
    taken_s = quantile(found["taken_s"], 0.99 if fault == "killed" and world != "2x2" else 1.0)
    record_property("taken_s", taken_s)
    record_property("factor", factor)
    if fault == "killed" and world != "hand:3":  # the signal is known to the launcher alone
        # The ranks of another host wait 0.75 s to hear the signal. On a busy machine they take a tenth of that for all.
        assert found["signals"] == found["expected"], found
    assert taken_s <= bound_s * factor, f"{taken_s:.3f} s, of {bound_s} s times {factor:.2f}: {found['taken_s']}"


@pytest.mark.parametrize("mpi", mpi_parameters())
@pytest.mark.parametrize(
    ("world", "fault", "bound_s"),
    [
        *(("mpi:3", fault, 1.0) for fault in ("mismatch", "launcher-killed", "raised-ends")),
        ("mpiexec:3", "raised-ends", 1.0),
        *(("mpi:3", fault, 5.0) for fault in ("stopped-rank", "absent")),
    ],
)
def test_it_is_known_in_time_over_mpi(
    world: str, fault: str, bound_s: float, mpi: MpiEnvironment, record_property: Callable[[str, object], None]
) -> None:
    found, factor = measured(world, fault, 5, mpi.python)
    record_property("taken_s", max(found["taken_s"]))
    record_property("factor", factor)
    assert max(found["taken_s"]) <= bound_s * factor, f"{found['taken_s']}, times {factor:.2f}"


@pytest.mark.parametrize(("ranks", "jobs", "kills"), [(8, 5, 10), (8, 10, 1), (3, 5, 10)])
@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_every_kill_is_recovered_in_time(
    backend: str, ranks: int, jobs: int, kills: int, record_property: Callable[[str, object], None]
) -> None:
    options = ("--rounds", jobs, "--kills", kills, "--ranks", ranks, "--backend", backend)
    found, factor = found_by("restarts.py", *options)
    record_property("longest_s", max(found["taken_s"]))
    record_property("factor", factor)
    assert len(found["taken_s"]) == found["kills"] == jobs * kills
    assert max(found["taken_s"]) <= RECOVERED_S * factor, f"{found['taken_s']}, times {factor:.2f}"
