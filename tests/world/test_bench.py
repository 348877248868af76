"""phalanx bench as a user starts it: real ranks, every operation, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.launch_support import MARK, comm, marked, wait_for

from phalanx.bench.operations import OPERATIONS

PATIENCE_S = 300  # only a measurement that hangs takes so long, also on a busy machine
SHORT = ("--rounds", "2", "--round-ms", "0.5", "--json")


def start(temporary: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "phalanx", "bench", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), MARK: str(temporary)},
    )


def finish(process: subprocess.Popen[str], temporary: Path) -> tuple[int, str, str]:
    """Wait for the end; then no process and no file may be left."""
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    wait_for(lambda: not marked(str(temporary)))
    assert list(temporary.iterdir()) == []
    return process.returncode, out, err


def check_row(row: dict[str, Any], rounds: int, backends: set[str]) -> None:
    assert row["wrong"] == []
    assert backends <= set(row["samples_us"]) | set(row["left_out"])
    assert "phalanx" in row["samples_us"]
    for name, samples in row["samples_us"].items():
        assert len(samples) == rounds
        assert all(sample > 0 for sample in samples)
        assert row["calls"][name] >= 1
    assert set(row["cpu_us"]) == set(row["samples_us"])
    assert all(used >= 0 for used in row["cpu_us"].values())
    assert set(row["noise"]) == {"probe_spread", "stolen", "others"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "dtypes", "against"),
    [
        ("4K", "float32", "gloo"),
        pytest.param("4,4K", "float32,bfloat16", "gloo,nothing", marks=pytest.mark.long),
    ],
)
def test_every_operation_is_right_and_measured(tmp_path: Path, sizes: str, dtypes: str, against: str) -> None:
    words = ("--sizes", sizes, "--dtypes", dtypes, "--against", against, "--ranks", "3", "--async", "--patience", "0")
    code, out, err = finish(start(tmp_path, "all", *words, *SHORT), tmp_path)
    assert code == 0, err
    results = json.loads(out)
    assert results["complete"]
    assert results["machine"]["usable_cores"] >= 1
    assert 0 <= results["stolen"] <= 1
    (job,) = results["jobs"]
    assert (job["size"], job["shared_memory"]) == (3, True)
    cases = len(sizes.split(",")) * len(dtypes.split(","))
    assert [row["operation"] for row in job["rows"]] == [
        name for name in OPERATIONS for _ in range(1 if name == "barrier" else cases)
    ]
    for row in job["rows"]:
        check_row(row, 2, {"phalanx", *against.split(",")})
    assert "3 ranks, all_reduce float32 4" in err


@pytest.mark.long
def test_ctrl_c_prints_what_was_measured_and_a_killed_rank_is_reported(tmp_path: Path) -> None:
    words = ("all", "--rounds", "5", "--round-ms", "20", "--patience", "0", "--against", "none", "--ranks", "2")
    process = start(tmp_path, *words)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("2 ranks, all_reduce float32 4: phalanx")
    process.send_signal(signal.SIGINT)
    code, out, _ = finish(process, tmp_path)
    assert code == 130
    assert "| all_reduce " in out
    assert "The measurement ended early" in out
    process = start(tmp_path, *words)
    assert process.stderr is not None
    process.stderr.readline()
    (victim,) = [pid for pid in marked(str(tmp_path)) if comm(pid) == "bench-1"]
    os.kill(victim, signal.SIGKILL)
    code, _, err = finish(process, tmp_path)
    assert code == 1
    assert "rank 1 of 2 failed" in err
    assert "SIGKILL" in err
