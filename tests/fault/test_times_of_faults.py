"""How soon a fault is known and a job works again, against what Phalanx promises; two of ``benchmarks/`` measure.

On a busy machine the bound is multiplied by how late everything is there (``tests/support/lateness.py``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.mpi.environments import MpiEnvironment, mpi_parameters
from tests.support.hosts import why_no_hosts
from tests.support.lateness import Lateness, quantile

from phalanx import settings

pytestmark = pytest.mark.fault

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RECOVERED_S = 1.5
PATIENCE_S = 3000.0  # a quiet machine needs two minutes for the longest
on_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")


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
    return found, lateness.factor(0.99)


def measured(world: str, fault: str, rounds: int, python: str = sys.executable) -> tuple[dict[str, Any], float]:
    """When a fault is known; all must have been told right."""
    options = ("--worlds", world, "--faults", fault, "--rounds", rounds)
    found, factor = found_by("deaths.py", *options, python=python)
    assert len(found["taken_s"]) == found["expected"] >= rounds
    return found, factor


@pytest.mark.parametrize(
    ("world", "fault", "rounds", "share", "bound_s"),
    [
        pytest.param("8", "killed", 15, 0.99, 0.2, id="a rank is killed on one host"),
        pytest.param("3", "killed", 50, 0.99, 0.2, id="a rank of three is killed on one host"),
        pytest.param("2x2", "killed", 10, 1.0, 1.0, id="a rank is killed on two hosts", marks=on_hosts),
        pytest.param("3", "stopped-rank", 4, 1.0, 5.0, id="a rank is stopped on one host"),
        pytest.param("2x2", "stopped-rank", 4, 1.0, 5.0, id="a rank is stopped on two hosts", marks=on_hosts),
        pytest.param("hand:3", "killed", 20, 0.99, 0.2, id="a rank is killed without a launcher"),
        pytest.param("gloo:3", "stopped-rank", 4, 1.0, 5.0, id="a rank is stopped over Gloo"),
        pytest.param("gloo:3", "absent", 4, 1.0, 5.0, id="a rank stays away from a call over Gloo"),
        pytest.param("gloo:3", "launcher-killed", 5, 1.0, 1.0, id="the launcher is killed over Gloo"),
        pytest.param("gloo:3", "raised-ends", 5, 1.0, 1.0, id="a rank raises over Gloo"),
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
    if fault == "killed" and world != "hand:3":  # the signal is known to the launcher alone
        # The ranks of another host wait 0.75 s to hear the signal. On a busy machine they take a tenth of that for all.
        assert found["signals"] == found["expected"], found
    assert taken_s <= bound_s * factor, f"{taken_s:.3f} s, of {bound_s} s times {factor:.2f}: {found['taken_s']}"


@pytest.mark.parametrize("mpi", mpi_parameters())
@pytest.mark.parametrize(
    ("world", "fault", "bound_s"),
    [
        pytest.param("mpi:3", "mismatch", 1.0, id="calls differ"),
        pytest.param("mpi:3", "launcher-killed", 1.0, id="the launcher is killed"),
        pytest.param("mpi:3", "raised-ends", 1.0, id="a rank raises"),
        pytest.param("mpiexec:3", "raised-ends", 1.0, id="a rank raises under mpiexec alone"),
        pytest.param("mpi:3", "stopped-rank", 5.0, id="a rank is stopped"),
        pytest.param("mpi:3", "absent", 5.0, id="a rank stays away from a call"),
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
