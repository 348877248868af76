"""How soon a fault is known, against the bounds that Phalanx promises; ``benchmarks/deaths.py`` measures.

A machine that is busy with something else, as with the tests beside this one, is as late with everything. So a thread
measures meanwhile how much longer than on a quiet machine a short sleep with some work behind it takes, and the bound
is multiplied by that.
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
from types import TracebackType
from typing import Any

import pytest
from tests.mpi.environments import MpiEnvironment, mpi_parameters
from tests.support.hosts import why_no_hosts

from phalanx import settings

pytestmark = pytest.mark.fault

DEATHS = Path(__file__).parents[2] / "benchmarks" / "deaths.py"
MPI_BOUND_S = 1.0
PATIENCE_S = 3000.0  # a quiet machine needs two minutes for the longest
on_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")


class Lateness:
    """Measures, while it is entered, how many times longer than on a quiet machine things take."""

    SLEEP_S = 0.02
    ADDITIONS = 100_000  # about as much work as an error takes to be made and told

    def __init__(self) -> None:
        self._ratios: list[float] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._measure)

    def __enter__(self) -> Lateness:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()

    def _measure(self) -> None:
        while not self._ends.is_set():
            began, had = time.monotonic(), time.thread_time()
            time.sleep(self.SLEEP_S)
            sum(range(self.ADDITIONS))
            # What the thread itself computes, it computes on a quiet machine too.
            self._ratios.append((time.monotonic() - began) / (self.SLEEP_S + time.thread_time() - had))

    def factor(self, share: float) -> float:
        """The ratio that this share of the measurements does not exceed; at least 1."""
        return max(1.0, quantile(self._ratios, share))


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def measured(world: str, fault: str, rounds: int, python: str = sys.executable) -> tuple[dict[str, Any], float]:
    """What ``benchmarks/deaths.py`` measures, where all must have been told right, and how late this machine is."""
    options = ["--worlds", world, "--faults", fault, "--rounds", str(rounds), "--seed", "16", "--json"]
    # The other tests want no line about ranks that wait (tests/conftest.py).
    environment = {name: value for name, value in os.environ.items() if name != settings.WARN_AFTER}
    with Lateness() as lateness:
        ended = subprocess.run(
            [python, str(DEATHS), *options],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any]
    (found,) = json.loads(ended.stdout)
    assert len(found["taken_s"]) == found["expected"] >= rounds
    return found, lateness.factor(0.99)


@pytest.mark.parametrize(
    ("world", "fault", "rounds", "share", "bound_s"),
    [
        pytest.param("8", "killed", 15, 0.99, 0.2, id="a rank is killed on one host"),
        pytest.param("3", "killed", 50, 0.99, 0.2, id="a rank of three is killed on one host"),
        pytest.param("2x2", "killed", 10, 1.0, 1.0, id="a rank is killed on two hosts", marks=on_hosts),
        pytest.param("3", "stopped-rank", 4, 1.0, 5.0, id="a rank is stopped on one host"),
        pytest.param("2x2", "stopped-rank", 4, 1.0, 5.0, id="a rank is stopped on two hosts", marks=on_hosts),
        pytest.param("3", "absent", 4, 1.0, 5.0, id="a rank stays away from a call on one host"),
        pytest.param("2x2", "absent", 4, 1.0, 5.0, id="a rank stays away from a call on two hosts", marks=on_hosts),
        pytest.param("hand:3", "absent", 4, 1.0, 5.0, id="a rank stays away from a call without a launcher"),
        pytest.param("2x2", "cut", 4, 1.0, 5.0, id="a link is cut", marks=on_hosts),
        pytest.param("2x2", "stopped-host", 4, 1.0, 5.0, id="a host is stopped", marks=on_hosts),
        pytest.param("3", "mismatch", 10, 1.0, 1.0, id="calls differ on one host"),
        pytest.param("2x2", "mismatch", 10, 1.0, 1.0, id="calls differ on two hosts", marks=on_hosts),
        pytest.param("3", "launcher-killed", 10, 1.0, 1.0, id="the launcher is killed"),
        pytest.param("2x2", "launcher-killed", 5, 1.0, 1.0, id="the launcher of two hosts is killed", marks=on_hosts),
        pytest.param("3", "raised", 10, 1.0, 1.0, id="a rank raises on one host"),
        pytest.param("2x2", "raised", 5, 1.0, 1.0, id="a rank raises on two hosts", marks=on_hosts),
        pytest.param("hand:3", "twice", 5, 1.0, 1.0, id="two processes claim a rank"),
        pytest.param("torchrun:3", "twice", 5, 1.0, 1.0, id="two processes claim a rank in a store of torch's"),
        pytest.param("hand:3", "sizes", 5, 1.0, 1.0, id="world sizes differ"),
        pytest.param("torchrun:3", "sizes", 5, 1.0, 1.0, id="world sizes differ in a store of torch's"),
    ],
)
def test_it_is_known_in_time(
    world: str,
    fault: str,
    rounds: int,
    share: float,
    bound_s: float,
    record_property: Callable[[str, object], None],
) -> None:
    found, factor = measured(world, fault, rounds)
    taken_s = quantile(found["taken_s"], share)
    record_property("taken_s", taken_s)
    record_property("factor", factor)
    if fault == "killed":
        # The ranks of another host wait 0.75 s to hear the signal. On a busy machine they take a tenth of that for all.
        assert found["signals"] == found["expected"], found
    assert taken_s <= bound_s * factor, f"{taken_s:.3f} s, of {bound_s} s times {factor:.2f}: {found['taken_s']}"


@pytest.mark.parametrize("mpi", mpi_parameters())
@pytest.mark.parametrize(
    ("world", "fault"),
    [
        pytest.param("mpi:3", "mismatch", id="calls differ"),
        pytest.param("mpi:3", "launcher-killed", id="the launcher is killed"),
        pytest.param("mpi:3", "raised-ends", id="a rank raises"),
        pytest.param("mpiexec:3", "raised-ends", id="a rank raises under mpiexec alone"),
    ],
)
def test_it_is_known_in_time_over_mpi(
    world: str, fault: str, mpi: MpiEnvironment, record_property: Callable[[str, object], None]
) -> None:
    found, factor = measured(world, fault, 5, mpi.python)
    record_property("taken_s", max(found["taken_s"]))
    record_property("factor", factor)
    assert max(found["taken_s"]) <= MPI_BOUND_S * factor, f"{found['taken_s']}, times {factor:.2f}"
