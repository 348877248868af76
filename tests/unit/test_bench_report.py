"""The statistics, the noise of the machine, the tables and the plot, from canned figures."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from phalanx.bench.machine import Noise, probe_spread, quartiles
from phalanx.bench.report import format_noise, format_report
from phalanx.commands.bench import bench

QUIET = {"probe_spread": 0.01, "stolen": 0.0, "others": 0.0}


def test_quartiles_are_those_of_the_samples_themselves() -> None:
    assert quartiles([5, 1, 4, 2, 3]) == (2, 3, 4)
    assert quartiles([1, 2, 3, 4]) == (1.75, 2.5, 3.25)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)
    assert probe_spread([8, 9, 10, 11, 12]) == pytest.approx(0.2)


def test_noise_is_explained() -> None:
    assert Noise(0.10, 0.02, 0.05).reasons() == []
    assert not Noise(0.10, 0.02, 0.05).excessive
    for noise, words in (
        (Noise(0.35, 0.0, 0.0), "the same piece of work took times that differ by 35%"),
        (Noise(0.0, 0.07, 0.0), "the hypervisor took 7% of the CPU time"),
        (Noise(0.0, 0.0, 0.4), "other programs took 40% of the CPU time"),
    ):
        assert (noise.reasons(), noise.excessive) == ([words], True)


def make_row(**changes: Any) -> dict[str, Any]:
    samples = {"phalanx": [60.0, 61.0, 65.0], "gloo": [600.0, 610.0, 700.0], "memcpy": [30.0, 30.0, 31.0]}
    row = {"operation": "all_reduce", "dtype": "float32", "nbytes": 1 << 20, "used_nbytes": 1 << 20}
    row |= {"calls": {"phalanx": 100, "gloo": 10, "memcpy": 1000}, "samples_us": samples}
    return {**row, "left_out": {}, "wrong": [], "noise": QUIET, **changes}


def make_results(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    job: dict[str, Any] = {"size": 2, "mpiexec": None, "mpi": None, "rows": list(rows), "cores": 2, "versions": {}}
    job |= {"transport": "SharedMemoryCommunicator", "shared_memory": True}
    machine = {"cpu": "Some CPU", "architecture": "x86_64", "cores": 4, "usable_cores": 2, "memory_nbytes": 1 << 34}
    machine |= {"caches": ["L1d 32K", "L2 1024K"], "kernel": "6.1", "system": "Linux", "load_average": [0.1, 0.1, 0.1]}
    return {
        "schema": 2,
        "command": "phalanx bench",
        "date": "2026-11-21T12:00:00+00:00",
        "machine": machine,
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "parameters": {"asynchronous": False, "rounds": 3, "round_s": 0.04},
        "jobs": [{**job, **changes}],
        "complete": True,
        "exit_code": 0,
    }


def cells(text: str, operation: str = "all_reduce") -> list[str]:
    (line,) = [line for line in text.splitlines() if f" {operation} " in line and line.startswith("|")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_shows_medians_quartiles_and_ratio() -> None:
    text = format_report(make_results(make_row()))
    assert cells(text) == [
        "", "all_reduce", "float32", "1M", "30.0", "61.0 (60.5–63.0)", "610 (605–655)", "10.0×",
    ]  # fmt: skip
    assert "Some CPU, 2 of 4 cores usable, L1d 32K, L2 1024K; Linux 6.1" in text
    assert "3 interleaved rounds of 40 ms" in text
    assert "The machine was quiet" in text


def test_a_noisy_row_is_marked_and_the_report_says_why() -> None:
    noisy = make_row(operation="broadcast", noise={**QUIET, "others": 0.4})
    results = make_results(make_row(), noisy)
    text = format_report(results)
    assert cells(text)[0] == ""
    assert cells(text, "broadcast")[0] == "~"
    assert "TOO NOISY TO BELIEVE 1 OF 2 ROWS" in text
    assert "other programs took 40% of the CPU time" in format_noise(results)


def test_between_hosts_a_row_has_the_bound_of_the_wire_and_what_crossed_it() -> None:
    hosts = {"hosts": [["h0", 2], ["h1", 1]], "link_bytes_per_s": 125e6, "engine": "shared memory and TCP"}
    crossed = {
        "stated_bytes": [[1048576, 1048576], [1048576, 1048576]],
        "wire_us": 8388.6,
        "counted_bytes": {"phalanx": [[1060000, 1050000], [1050000, 1060000]], "gloo": [[1500000, 3], [3, 1500000]]},
    }
    samples = {"phalanx": [9000.0], "gloo": [18000.0], "memcpy": [30.0]}
    row = make_row(samples_us=samples, **crossed)
    barrier = make_row(
        operation="barrier", samples_us={"phalanx": [50.0]}, stated_bytes=[[0, 0]] * 2, wire_us=0.0, counted_bytes={}
    )
    text = format_report(make_results(row, barrier, shared_memory=False, size=3, **hosts))
    assert "### 3 ranks on 2 hosts (h0: 2, h1: 1), links of 125.0 MB/s" in text
    assert cells(text)[4:8] == ["30.0", "8,390", "1.07×", "9,000 (9,000–9,000)"]
    assert cells(text)[-3:] == ["1.049", "1.060", "1.500"]
    assert cells(text, "barrier")[5:7] == ["", ""]
    assert "- phalanx went over shared memory and TCP" in text
    assert "wire: what the busiest link between hosts must carry" in text


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_plot_is_a_png(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text(json.dumps(make_results(make_row(nbytes=4), make_row())))
    # In a process of its own: matplotlib keeps fonts open.
    command = [sys.executable, "-m", "phalanx", "bench", "--load", str(file), "--plot", str(tmp_path / "out.png")]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_files_are_looked_at_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, installed, said in (
        (["--plot", "out.png"], None, "--plot needs matplotlib: pip install matplotlib"),
        (["--plot", "/dev/null/out.png"], "here", "--plot /dev/null/out.png: cannot be written: Not a directory"),
        (["--tune"], None, "--tune cannot write its file: [Errno 17] File exists: '/dev/null'; PHALANX_TUNING=FILE"),
    ):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, installed=installed: installed)
        result = CliRunner(env={"PHALANX_TUNING": "/dev/null/tuning.json"}).invoke(bench, arguments)
        assert (result.exit_code, said in result.output) == (2, True), result.output


def test_an_old_file_is_shown_again(tmp_path: Path) -> None:
    results = make_results(make_row())
    file = tmp_path / "old.json"
    file.write_text(json.dumps(results))
    result = CliRunner().invoke(bench, ["--load", str(file)])
    assert result.exit_code == 0
    assert result.output == format_report(results)
