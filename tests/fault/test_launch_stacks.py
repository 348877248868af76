"""Where the ranks are, as the launcher says it: when a job that hangs is ended, and at Ctrl-\\."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from tests.launch_support import Launcher, ask_until, launcher, time_for_stacks
from tests.support.waiting import stop

__all__ = ["launcher"]

HANG = """
import os, time, torch, torch.distributed as dist
dist.init_process_group('gloo')
print('up', flush=True)
if os.environ['RANK'] == '1':
    time.sleep(300)
x = torch.ones(3)
dist.all_reduce(x)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_job_that_hangs_says_where_when_it_is_ended(launcher: Launcher, signum: int) -> None:
    errors = launcher.directory / "errors"
    environment = time_for_stacks(launcher.directory / "site")
    with open(errors, "wb") as file:
        job = launcher.start("-n", "3", launcher.script(HANG, "hang.py"), stderr=file, environment=environment)
    job.read_lines(3)
    there = r"ranks {} at\n(  .*\n)*?  File \".*hang\.py\", line {}, in <module>\n"
    rank_1 = there.replace("ranks", "rank").format("1 is", 5)
    ask_until(job.process, errors.read_text, there.format("0, 2 are", 7) + rf"(.*\n)*.*{rank_1}")
    job.process.send_signal(signum)
    job.finish()
    text = errors.read_text()
    assert f"{signal.Signals(signum).name}: all 3 ranks have been ended; they were at:\n" in text
    assert "  ranks 0, 2: hang.py:7 dist.all_reduce(x)\n" in text
    assert "  rank 1: hang.py:5 time.sleep(300)\n" in text
    assert "Traceback" not in text.partition("SIG")[0]


def test_sigquit_prints_stacks_and_the_job_goes_on(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import sys, time
        def wait():
            while not sys.stdin.read(1):
                time.sleep(0.05)
        def outer():
            wait()
        print('up', flush=True)
        outer()
        print('went on')
        """,
        "waits.py",
    )
    errors = launcher.directory / "errors"
    with open(errors, "wb") as file:
        job = launcher.start("-n", "1", script, stdin=subprocess.PIPE, stderr=file)
    job.read_lines(1)
    # Asked at once, it may still be in its print().
    frame = r"  File \".*waits\.py\", line {}, in {}\n    .*\n"
    frames = [frame.format(8, "<module>"), frame.format(6, "outer"), frame.format(3, "wait")]
    for _ in range(2):
        ask_until(job.process, errors.read_text, "rank 0 is at\n" + "".join(frames) + r"(?!  )")
    assert "    while not sys.stdin.read(1):\n" in errors.read_text()
    stdin = job.process.stdin
    assert stdin is not None
    stdin.write(b"x")
    stdin.close()
    job.process.stdin = None
    assert job.process.wait(60) == 0
    assert job.process.stdout is not None
    assert job.process.stdout.read() == b"[rank 0] went on\n"


def test_sigquit_names_a_rank_that_is_stopped(launcher: Launcher) -> None:
    script = launcher.script("import os, time; print(os.getpid(), flush=True); time.sleep(600)", "sleeps.py")
    job = launcher.start("-n", "1", "--no-prefix", "-q", script)
    (line,) = job.read_lines(1)
    pid = int(line)
    stop(pid)
    job.process.send_signal(signal.SIGQUIT)
    assert job.process.stderr is not None
    assert b"rank 0 did not say where: stopped" in job.process.stderr.readline()
    os.kill(pid, signal.SIGCONT)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish().code == 143


def test_sigquit_harms_no_program_that_is_not_python(launcher: Launcher) -> None:
    job = launcher.start("-n", "2", "-q", "sh", "-c", "echo up; read line; echo $line", stdin=subprocess.PIPE)
    job.read_lines(2)
    job.process.send_signal(signal.SIGQUIT)
    assert job.process.stderr is not None
    assert b"no rank runs Python" in job.process.stderr.readline()
    job.process.send_signal(signal.SIGTERM)
    assert job.finish().code == 143
