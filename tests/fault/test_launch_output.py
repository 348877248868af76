"""The output of the ranks, and their standard input."""

from __future__ import annotations

import os
import pty
import resource
import select
import signal
import subprocess
import sys
from textwrap import dedent

from tests.launch_support import PATIENCE_S, Launcher, RunningJob, launcher, wait_for

__all__ = ["launcher"]


def test_lines_are_prefixed_and_streams_kept_apart(launcher: Launcher) -> None:
    outcome = launcher.run("-n", "3", "-q", "sh", "-c", "echo out $RANK; echo err $RANK >&2")
    assert sorted(outcome.out_lines) == [f"[rank {rank}] out {rank}" for rank in range(3)]
    assert sorted(outcome.err_text.splitlines()) == [f"[rank {rank}] err {rank}" for rank in range(3)]


def test_no_prefix(launcher: Launcher) -> None:
    assert launcher.run("-n", "2", "-q", "--no-prefix", "echo", "hi").out == b"hi\nhi\n"


def test_bytes_arrive_unharmed_and_a_last_line_without_newline_comes_whole(launcher: Launcher) -> None:
    outcome = launcher.run("-n", "2", "-q", "printf", r"\377\n  0%%\r100%%\nlast")
    for rank in (b"[rank 0] ", b"[rank 1] "):
        lines = [line + b"\n" for line in outcome.out.split(b"\n") if line.startswith(rank)]
        assert lines == [rank + b"\xff\n", rank + b"  0%\r" + rank + b"100%\n", rank + b"last\n"]
    assert outcome.out.count(b"\n") == 6


def test_python_ranks_print_lines_as_they_come(launcher: Launcher) -> None:
    script = launcher.script(
        dedent("""
        import sys
        print("first")
        print("err", file=sys.stderr)
        sys.stdin.read()
        print("last", end="")
        """)
    )
    job = launcher.start("-n", "1", "-q", script, stdin=subprocess.PIPE)
    assert job.read_lines(1) == ["[rank 0] first"]
    assert job.read_lines(1, job.process.stderr) == ["[rank 0] err"]
    assert job.finish().out == b"[rank 0] last\n"


def test_rank_0_reads_the_launchers_input_and_the_others_nothing(launcher: Launcher) -> None:
    outcome = launcher.run("-n", "3", "-q", "sh", "-c", "wc -c", data=b"12345")
    assert sorted(" ".join(line.split()) for line in outcome.out_lines) == [
        "[rank 0] 5",
        "[rank 1] 0",
        "[rank 2] 0",
    ]


def test_the_writer_notices_when_rank_0_ends(launcher: Launcher) -> None:
    job = launcher.start("-n", "2", "-q", "sh", "-c", "[ $RANK = 0 ] || exec sleep 1000", stdin=subprocess.PIPE)
    assert job.process.stdin is not None
    pipe = job.process.stdin.fileno()
    os.set_blocking(pipe, False)

    def refused() -> bool:
        try:
            os.write(pipe, b"x" * 4096)
        except BrokenPipeError:
            return True
        except BlockingIOError:
            pass
        return False

    wait_for(refused)
    job.process.send_signal(signal.SIGTERM)
    job.process.wait(PATIENCE_S)


def test_the_job_ends_by_sigpipe_if_its_reader_has_closed_the_pipe(launcher: Launcher) -> None:
    job = launcher.start("-n", "2", "-q", "yes")
    assert job.process.stdout is not None
    assert job.process.stdout.readline() in (b"[rank 0] y\n", b"[rank 1] y\n")
    job.process.stdout.close()
    assert job.process.wait(PATIENCE_S) == 128 + signal.SIGPIPE
    assert job.process.stderr is not None
    assert job.process.stderr.read() == b""


def test_an_interrupt_gets_through_to_ranks_while_the_reader_has_stopped(launcher: Launcher) -> None:
    job = launcher.start("-n", "2", "-q", "yes")
    assert job.process.stdout is not None
    job.process.stdout.read(100)
    # Nothing is read from here on, so the launcher soon waits in a write.
    wait_for(lambda: _has_filled_its_output(job) and all(_is_waiting(pid) for pid in job.processes()))
    job.process.send_signal(signal.SIGINT)
    job.wait_until_gone(PATIENCE_S)
    assert job.process.wait(PATIENCE_S) == 130


def _has_filled_its_output(job: RunningJob) -> bool:
    writing = os.open(f"/proc/{job.pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK)
    try:
        return not select.select([], [writing], [], 0)[1]
    finally:
        os.close(writing)


def _is_waiting(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "S"
    except OSError:
        return True


def test_a_hundred_thousand_lines_a_rank_are_cheap(launcher: Launcher) -> None:
    before_s = _processor_time_of_children_s()
    outcome = launcher.run("-n", "8", "-q", "seq", "100000")
    used_s = _processor_time_of_children_s() - before_s
    assert (outcome.code, outcome.err) == (0, b"")
    lines = outcome.out.splitlines()
    assert len(lines) == 800_000
    for rank in range(8):
        prefix = b"[rank %d] " % rank
        mine = [line[len(prefix) :] for line in lines if line.startswith(prefix)]
        assert mine == [b"%d" % number for number in range(1, 100_001)]
    assert used_s < 10.0


def _processor_time_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_on_a_terminal_there_are_colours_and_a_live_line(launcher: Launcher) -> None:
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
    job.process.wait(PATIENCE_S)
    os.close(master)
    # The live line is erased before the whole line is printed.
    assert b"\r\x1b[K" in seen[seen.index(b"50%") : seen.index(b"100%")]
    assert b"\x1b[36m[rank 0]\x1b[0m" in seen


def test_the_table_comes_before_anything_the_ranks_print(launcher: Launcher) -> None:
    job = launcher.start("-n", "3", "sh", "-c", "echo up >&2", stderr=subprocess.PIPE)
    lines = job.finish().err_text.splitlines()
    assert lines[0] == "phalanx run: 3 ranks of sh"
    assert all(line.endswith("] up") for line in lines[-3:])


def test_a_launcher_without_standard_streams(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, sys
        print('x')
        open(os.environ['MADE'], 'w').write('ran')
    """)
    made = launcher.directory / "made"
    job = launcher.start("-n", "1", "-q", "true")
    job.finish()
    code = subprocess.call(
        ["sh", "-c", f"exec {sys.executable} -m phalanx run -q {script} <&- >&- 2>&-"],
        env={**os.environ, "MADE": str(made)},
        timeout=600,
    )
    assert code == 0
    assert made.read_text() == "ran"
