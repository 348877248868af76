"""The output of the ranks: on the terminal, in a pipe, and in files by ``--log-dir``, ``--tee`` and ``--only``."""

from __future__ import annotations

import os
import pty
import re
import resource
import select
import shlex
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from tests.launch_support import PATIENCE_S, Launcher, RunningJob, launcher, wait_for

from phalanx.system import processes

__all__ = ["launcher"]


def test_lines_are_prefixed_kept_apart_and_written_while_they_are_read(launcher: Launcher) -> None:
    """A reader that goes ends the job by SIGPIPE, as of any tool; an interrupt gets past one that has stopped."""
    script = launcher.script("""
        import sys
        print("first")
        print("err", file=sys.stderr)
        sys.stdin.read()
        print("last", end="")
    """)
    job = launcher.start("-n", "1", "-q", "--no-preload", script, stdin=subprocess.PIPE)
    both, bare, odd = launcher.run_all(
        ["-n", "3", "-q", "sh", "-c", "echo out $RANK; echo err $RANK >&2"],
        ["-n", "2", "-q", "--no-prefix", "echo", "hi"],
        ["-n", "2", "-q", "printf", r"\377\n  0%%\r100%%\nlast"],
    )
    assert sorted(both.out_lines) == [f"[rank {rank}] out {rank}" for rank in range(3)]
    assert sorted(both.err_text.splitlines()) == [f"[rank {rank}] err {rank}" for rank in range(3)]
    assert bare.out == b"hi\nhi\n"
    for rank in (b"[rank 0] ", b"[rank 1] "):
        lines = [line + b"\n" for line in odd.out.split(b"\n") if line.startswith(rank)]
        assert lines == [rank + b"\xff\n", rank + b"  0%\r" + rank + b"100%\n", rank + b"last\n"]
    assert job.read_lines(1) == ["[rank 0] first"]  # as they come
    assert job.read_lines(1, job.process.stderr) == ["[rank 0] err"]
    assert job.finish().out == b"[rank 0] last\n"
    master, slave = pty.openpty()
    job = launcher.start(
        "-n", "1", "-q", "sh", "-c", r"printf '50%%\r'; read line; printf '100%%\n'",
        stdin=subprocess.PIPE, stdout=slave, environment={"TERM": "xterm"},
    )  # fmt: skip
    os.close(slave)
    seen = b""
    while b"50%" not in seen:
        seen += os.read(master, 4096)
    assert b"\n" not in seen
    assert job.process.stdin is not None
    job.process.stdin.write(b"\n")
    job.process.stdin.flush()
    while b"100%" not in seen:
        seen += os.read(master, 4096)
    assert job.process.wait(PATIENCE_S) == 0
    os.close(master)
    # The live line is erased before the whole line is printed.
    assert b"\r\x1b[K" in seen[seen.index(b"50%") : seen.index(b"100%")]
    assert b"\x1b[36m[rank 0]\x1b[0m" in seen
    gone, stopped = (launcher.start("-n", "2", "-q", "yes") for _ in range(2))
    assert gone.process.stdout is not None
    assert gone.process.stdout.readline() in (b"[rank 0] y\n", b"[rank 1] y\n")
    gone.process.stdout.close()
    assert gone.process.wait(PATIENCE_S) == 128 + signal.SIGPIPE
    assert gone.process.stderr is not None
    assert gone.process.stderr.read() == b""
    assert stopped.process.stdout is not None
    stopped.process.stdout.read(100)
    # Nothing is read from here on, so the launcher soon waits in a write.
    wait_for(lambda: _has_filled_its_output(stopped) and "R" not in map(processes.state_of, stopped.processes()))
    stopped.process.send_signal(signal.SIGINT)
    stopped.wait_until_gone(PATIENCE_S)
    assert stopped.process.wait(PATIENCE_S) == 130


def _has_filled_its_output(job: RunningJob) -> bool:
    writing = os.open(f"/proc/{job.pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK)
    try:
        return not select.select([], [writing], [], 0)[1]
    finally:
        os.close(writing)


@pytest.mark.long
def test_hundred_thousand_lines_a_rank_are_cheap_and_whole(launcher: Launcher) -> None:
    def used_s() -> float:
        return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])

    before_s = used_s()
    outcome = launcher.run("-n", "8", "-q", "seq", "100000")
    assert (outcome.code, outcome.err) == (0, b"")
    lines = outcome.out.splitlines()
    for rank in range(8):
        prefix = b"[rank %d] " % rank
        mine = [line[len(prefix) :] for line in lines if line.startswith(prefix)]
        assert mine == [b"%d" % number for number in range(1, 100_001)]
    assert len(lines) == 800_000
    assert used_s() - before_s < 12.0


# -- files ---------------------------------------------------------------------------------------------

LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d) (stdout|stderr|phalanx) (.*)")


def content(path: Path) -> list[tuple[str, str]]:
    """The lines of a file without their times, of which each is a time and none is before the one of the line above."""
    found = [LINE.fullmatch(line) for line in path.read_bytes().decode(errors="surrogateescape")[:-1].split("\n")]
    times = [datetime.fromisoformat(line[1]) for line in found if line]
    assert len(times) == len(found)
    assert times == sorted(times)
    return [(line[2], line[3]) for line in found if line]


def written(path: Path) -> list[tuple[str, str]]:
    """What the rank has written, without the launcher's own lines."""
    return [line for line in content(path) if line[0] != "phalanx"]


def test_each_rank_has_a_file_and_options_say_what_is_shown(launcher: Launcher) -> None:
    """Files keep all bytes; another job is refused them; one that cannot be written costs a warning."""
    script = "echo out $RANK; echo err $RANK >&2; printf 'a\\n\\nlast'"
    flood = launcher.script("""
        import os
        os.write(1, b"\\xff\\n  0%\\r100%\\n")
        for number in range(20000):
            os.write(1, b"%d " % number + b"x" * 200 + b"\\n")
    """)
    folder = launcher.directory
    (folder / "file").write_text("")
    (folder / "full").mkdir()
    os.symlink("/dev/full", folder / "full" / "rank-1.log")
    first = launcher.start("-n", "2", "-q", "--log-dir", "mine", "sh", "-c", "echo up; cat", stdin=-1)
    outcome, flooded, refused, lost, shown = launcher.run_all(
        ["-n", "3", "--log-dir", "deep/logs", "sh", "-c", script],
        ["-n", "1", "-q", "--no-preload", "--log-dir", "flood", flood],
        ["-n", "2", "--log-dir", "file/logs", "true"],
        ["-n", "2", "-q", "--log-dir", "full", "echo", "on"],
        ["-n", "3", "-q", "--only", "1", "sh", "-c", "echo $RANK; echo err $RANK >&2"],
    )
    logs = folder / "deep" / "logs"
    assert (outcome.code, outcome.out) == (0, b"")
    assert sorted(os.listdir(logs)) == [f"rank-{rank}.log" for rank in range(3)]
    for rank in range(3):
        lines = content(logs / f"rank-{rank}.log")
        assert lines[0] == ("phalanx", f"rank {rank} of 3: {shlex.join(['sh', '-c', script])}")
        assert [re.fullmatch(r"started on host \S+, pid \d+", text) for _, text in lines].count(None) == len(lines) - 1
        assert sorted(written(logs / f"rank-{rank}.log")) == sorted(
            [("stdout", f"out {rank}"), ("stderr", f"err {rank}"), ("stdout", "a"), ("stdout", ""), ("stdout", "last")]
        )
        assert lines[-1] == ("phalanx", "exit code 0")
    assert "rank-0.log" in outcome.err_text
    assert flooded.code == 0
    expected = ["\udcff", "  0%\r100%", *(f"{number} {'x' * 200}" for number in range(20000))]
    assert [text for _, text in written(folder / "flood" / "rank-0.log")] == expected
    assert (shown.out, shown.err) == (b"[rank 1] 1\n", b"[rank 1] err 1\n")
    assert (refused.code, refused.err_text.count("\n")) == (2, 1)
    assert "cannot be written" in refused.err_text
    assert (lost.code, lost.err_text) == (
        0,
        "phalanx: warning: full/rank-1.log cannot be written: No space left on device; the job goes on, and lines are "
        "lost while that lasts\n",
    )
    assert ("stdout", "on") in content(folder / "full" / "rank-0.log")
    log = folder / "mine" / "rank-0.log"
    wait_for(lambda: log.exists() and b" stdout up\n" in log.read_bytes())
    second = launcher.run("-n", "2", "--log-dir", "mine", "true")
    assert (second.code, len(second.err_text.splitlines())) == (2, 1)
    assert "another job" in second.err_text
    assert first.finish().code == 0
    # A job after it continues its files.
    for options, ranks in ((["--tee"], [0, 1, 2, 3]), (["--only", "0,2-3"], [0, 2, 3])):
        outcome = launcher.run("-n", "4", "-q", "--log-dir", "logs", *options, "sh", "-c", "echo $RANK")
        assert sorted(outcome.out_lines) == [f"[rank {rank}] {rank}" for rank in ranks]
    for rank in range(4):
        path = folder / "logs" / f"rank-{rank}.log"
        assert written(path) == [("stdout", str(rank))] * 2
        assert len(content(path)) == 8


def test_failure_names_the_file_which_has_the_reason(launcher: Launcher) -> None:
    """Or quotes what was not shown. ``phalanx report`` on the folder shows the block again, of the last attempt."""
    script = launcher.script("""
        import os, signal, sys
        rank, attempt = os.environ["RANK"], os.environ["PHALANX_ATTEMPT"]
        print("this is", attempt)
        print("about to fail", rank)
        if rank == "1":
            raise ValueError("one")
        signal.pause()
    """)
    unseen = "seq 20; echo reason >&2; test $RANK = 0 && sleep 60; exit 3"
    once, again, quoted = launcher.run_all(
        ["-n", "3", "-q", "--no-preload", "--log-dir", "once", script],
        ["-n", "3", "--no-preload", "--log-dir", "again", "--restarts", "1", script],
        ["-n", "2", "-q", "--only", "0", "sh", "-c", unseen],
    )
    assert (once.code, once.out) == (1, b"")
    assert "phalanx: rank 1 of 3 failed: ValueError: one\n" in once.err_text
    assert "  its output is in once/rank-1.log\n" in once.err_text
    assert "    about to fail 1\n" in once.err_text
    lines = content(launcher.directory / "once" / "rank-1.log")
    assert ("phalanx", "ValueError: one") in lines
    assert lines[-1] == ("phalanx", "exit code 1")
    assert content(launcher.directory / "once" / "rank-0.log")[-1][1] == "ended by signal 15 (SIGTERM)"
    # Each attempt has its own files.
    assert "output goes to again/attempt-0/rank-0.log to rank-2.log" in again.err_text
    for attempt in (0, 1):
        text = (launcher.directory / f"again/attempt-{attempt}/rank-1.log").read_text()
        assert f"stdout this is {attempt}\n" in text
        assert f"this is {1 - attempt}" not in text
        assert f"its output is in again/attempt-{attempt}/rank-1.log" in again.err_text

    def report(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "phalanx", "report", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=launcher.directory, timeout=240)

    for folder, outcome in (("once", once), ("again", again)):
        block = outcome.err_text[outcome.err_text.rindex("phalanx: rank ") :].partition("\nphalanx: ")[0].rstrip("\n")
        heading, _, shown = report(folder).stdout.partition("\n")
        assert re.fullmatch(rf"{folder}/failure\.txt, written 20\d\d-\S+:", heading)
        assert shown.rstrip("\n") == block
    assert "once has no report" in report("once", "--json").stderr
    assert quoted.code == 3
    told = quoted.err_text[quoted.err_text.index("phalanx: rank 1 of 2 failed") :].splitlines()
    last = told[told.index("  the last lines of its output, which was not shown:") + 1 :]
    assert last[:11] == [f"    {number}" for number in range(11, 21)] + ["    reason"]
