"""``--log-dir``, ``--tee`` and ``--only``: what is in the files, what is shown, and what a failure says about it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher, wait_for

__all__ = ["launcher"]

LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d) (stdout|stderr|phalanx) (.*)")


def content(path: Path) -> list[tuple[str, str]]:
    """The lines of a file without their times, of which each is a time and none is before the one of the line above."""
    lines = path.read_bytes().decode(errors="surrogateescape").removesuffix("\n").split("\n")
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    times = [datetime.fromisoformat(line[1]) for line in found if line]
    assert times == sorted(times)
    return [(line[2], line[3]) for line in found if line]


def written(path: Path) -> list[tuple[str, str]]:
    """What the rank has written, without the launcher's own lines."""
    return [line for line in content(path) if line[0] != "phalanx"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_each_rank_has_a_file_and_the_terminal_shows_none(launcher: Launcher, ranks: int) -> None:
    script = "echo out $RANK; echo err $RANK >&2; printf 'a\\n\\nlast'"
    outcome = launcher.run("-n", str(ranks), "--log-dir", "deep/logs", "sh", "-c", script)
    logs = launcher.directory / "deep" / "logs"
    assert (outcome.code, outcome.out) == (0, b"")
    assert sorted(os.listdir(logs)) == [f"rank-{rank}.log" for rank in range(ranks)]
    for rank in range(ranks):
        lines = content(logs / f"rank-{rank}.log")
        assert lines[0] == ("phalanx", f"rank {rank} of {ranks}: {shlex.join(['sh', '-c', script])}")
        assert [re.fullmatch(r"started on host \S+, pid \d+", text) for _, text in lines].count(None) == len(lines) - 1
        assert sorted(written(logs / f"rank-{rank}.log")) == sorted(
            [("stdout", f"out {rank}"), ("stderr", f"err {rank}"), ("stdout", "a"), ("stdout", ""), ("stdout", "last")]
        )
        assert lines[-1] == ("phalanx", "exit code 0")
    assert "rank-0.log" in outcome.err_text


def test_tee_and_only_say_what_is_shown(launcher: Launcher) -> None:
    shown = {("--tee",): [0, 1, 2, 3], ("--only", "0,2-3"): [0, 2, 3]}
    for options, ranks in shown.items():
        outcome = launcher.run("-n", "4", "-q", "--log-dir", "logs", *options, "sh", "-c", "echo $RANK")
        assert sorted(outcome.out_lines) == [f"[rank {rank}] {rank}" for rank in ranks]
    # The second job has continued the files of the first.
    for rank in range(4):
        path = launcher.directory / "logs" / f"rank-{rank}.log"
        assert written(path) == [("stdout", str(rank))] * 2
        assert len(content(path)) == 8
    outcome = launcher.run("-n", "3", "-q", "--only", "1", "sh", "-c", "echo $RANK; echo err $RANK >&2")
    assert (outcome.out, outcome.err) == (b"[rank 1] 1\n", b"[rank 1] err 1\n")


def test_a_failure_names_the_file_which_has_the_reason_of_every_rank(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, signal, sys
        rank = os.environ["RANK"]
        print("about to fail", rank)
        if rank == "1":
            raise ValueError("one")
        signal.pause()
    """)
    outcome = launcher.run("-n", "3", "-q", "--log-dir", "logs", script)
    assert (outcome.code, outcome.out) == (1, b"")
    assert "phalanx: rank 1 of 3 failed: ValueError: one\n" in outcome.err_text
    assert "  its output is in logs/rank-1.log\n" in outcome.err_text
    assert "    about to fail 1\n" in outcome.err_text
    lines = content(launcher.directory / "logs" / "rank-1.log")
    assert ("phalanx", "ValueError: one") in lines
    assert lines[-1] == ("phalanx", "exit code 1")
    assert content(launcher.directory / "logs" / "rank-0.log")[-1][1] == "ended by signal 15 (SIGTERM)"


def test_a_rank_that_is_not_shown_is_quoted_when_it_fails(launcher: Launcher) -> None:
    outcome = launcher.run(
        "-n", "2", "-q", "--only", "0", "sh", "-c", "seq 20; echo reason >&2; test $RANK = 0 && sleep 60; exit 3"
    )
    assert outcome.code == 3
    block = outcome.err_text[outcome.err_text.index("phalanx: rank 1 of 2 failed") :].splitlines()
    quoted = block[block.index("  the last lines of its output, which was not shown:") + 1 :]
    assert quoted[:11] == [f"    {number}" for number in range(11, 21)] + ["    reason"]
    assert "printed a reason, that is below" in outcome.err_text


def test_bytes_long_lines_and_progress_bars(launcher: Launcher) -> None:
    script = launcher.script("""
        import os
        os.write(1, b"\\xff\\n  0%\\r100%\\n")
        for number in range(20000):
            os.write(1, b"%d " % number + b"x" * 200 + b"\\n")
    """)
    assert launcher.run("-n", "2", "-q", "--log-dir", "logs", script).code == 0
    for rank in range(2):
        lines = written(launcher.directory / "logs" / f"rank-{rank}.log")
        expected = ["\udcff", "  0%\r100%", *(f"{number} {'x' * 200}" for number in range(20000))]
        assert [text for _, text in lines] == expected


def test_two_jobs_cannot_write_the_same_files(launcher: Launcher) -> None:
    first = launcher.start("-n", "2", "-q", "--log-dir", "logs", "sh", "-c", "echo up; cat", stdin=-1)
    log = launcher.directory / "logs" / "rank-0.log"
    wait_for(lambda: log.exists() and ("stdout", "up") in content(log))
    second = launcher.run("-n", "2", "--log-dir", "logs", "true")
    assert (second.code, len(second.err_text.splitlines())) == (2, 1)
    assert "another job" in second.err_text
    assert first.finish().code == 0
    assert launcher.run("-n", "2", "-q", "--log-dir", "logs", "true").code == 0


def test_files_that_cannot_be_written(launcher: Launcher) -> None:
    (launcher.directory / "file").write_text("")
    outcome = launcher.run("-n", "2", "--log-dir", "file/logs", "true")
    assert (outcome.code, outcome.err_text.count("\n")) == (2, 1)
    assert "cannot be written" in outcome.err_text
    logs = launcher.directory / "logs"
    logs.mkdir()
    os.symlink("/dev/full", logs / "rank-1.log")
    outcome = launcher.run("-n", "2", "-q", "--log-dir", "logs", "echo", "on")
    assert (outcome.code, outcome.err_text) == (
        0,
        "phalanx: warning: logs/rank-1.log cannot be written: No space left on device; the job goes on, and lines are "
        "lost while that lasts\n",
    )
    assert ("stdout", "on") in content(logs / "rank-0.log")


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_report_on_the_folder_shows_why_the_job_failed(launcher: Launcher, restarts: int) -> None:
    script = launcher.script("raise SystemExit('no data')\n")
    outcome = launcher.run("-n", "2", "-q", "--log-dir", "logs", "--restarts", str(restarts), script)
    block = outcome.err_text[outcome.err_text.rindex("phalanx: rank ") :].partition("\nphalanx: ")[0].rstrip("\n")

    def report(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "phalanx", "report", "logs", *options]
        return subprocess.run(command, capture_output=True, text=True, cwd=launcher.directory, timeout=240)

    heading, _, shown = report().stdout.partition("\n")
    assert re.fullmatch(r"logs/failure\.txt, written 20\d\d-\S+:", heading)
    assert shown.rstrip("\n") == block
    assert "no data" in block
    assert "logs has no report" in report("--json").stderr
