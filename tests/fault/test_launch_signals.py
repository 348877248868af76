"""How signals, and kills of any one process, end a job; and nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from tests.launch_support import Launcher, RunningJob, launcher, wait_for
from tests.support.waiting import soon, stop

__all__ = ["launcher"]

# Far less than the 300 s for which the programs here would go on, and than the 250 s of grace that some of them have.
SOON_S = 60.0
PATIENT = """
import time
print("up", flush=True)
while True:
    time.sleep(300)
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_everything_that_ignores_it(launcher: Launcher, signum: int, code: int) -> None:
    # A rank that ignores what it can, with a grandchild in a session of its own that does too.
    grace = [] if signum == signal.SIGINT else ["--grace", "1"]
    job = launcher.start(
        "-n", "3", "-q", *grace, "sh", "-c", "trap '' INT TERM HUP; setsid sleep 300 & echo up; sleep 300; sleep 300"
    )
    job.read_lines(3)
    job.process.send_signal(signum)
    job.wait_until_gone(SOON_S)
    outcome = job.finish()
    assert outcome.code == code
    assert outcome.err_text.splitlines() == [
        f"phalanx: {signal.Signals(signum).name}: all 3 ranks have been ended",
        "phalanx: ranks 0-2 did not end within 1 s and were killed; --grace gives ranks longer",
    ]


def test_interrupted_python_ranks_clean_up_without_a_flood(launcher: Launcher) -> None:
    script = launcher.script("""
        import time
        try:
            print('up')
            time.sleep(300)
        finally:
            print('cleaned up')
    """)
    # By default ranks have one second after Ctrl-C, which a busy machine may let pass.
    job = launcher.start("-n", "3", "-q", "--grace", "250", script)
    job.read_lines(3)
    job.process.send_signal(signal.SIGINT)
    outcome = job.finish()
    assert outcome.code == 130
    assert sorted(outcome.out_lines) == [f"[rank {rank}] cleaned up" for rank in range(3)]
    # Of ranks that a busy machine makes end late it is said before, once, for whom the launcher waits (--grace).
    said = [line for line in outcome.err_text.splitlines() if not line.endswith(" before they are killed (--grace)")]
    assert said == ["phalanx: SIGINT: all 3 ranks have been ended"]


def test_a_rank_that_had_finished_is_not_said_to_have_been_ended(launcher: Launcher) -> None:
    job = launcher.start("-n", "3", "-q", "sh", "-c", "echo $$; test $RANK = 1 || exec sleep 300")
    lines = job.read_lines(3)
    (finished,) = [line for line in lines if "rank 1" in line]
    assert soon(lambda: not Path(f"/proc/{finished.split()[-1]}").exists())
    job.process.send_signal(signal.SIGINT)
    outcome = job.finish()
    assert outcome.code == 130
    assert outcome.err_text == "phalanx: SIGINT: rank 1 had finished; ranks 0, 2 have been ended\n"


def test_ctrl_c_at_a_rank_that_ends_shows_nothing_of_phalanx(launcher: Launcher) -> None:
    """At its end a rank waits for the others' last calls, which is nothing that the user has written."""
    script = launcher.script("""
        import atexit, time, torch, torch.distributed as dist
        dist.init_process_group("phalanx")
        dist.barrier()
        if dist.get_rank():
            time.sleep(300)
        dist.broadcast(torch.zeros(4), 0)
        atexit.register(lambda: print("ends"))  # called before the handlers that are there already
    """)
    job = launcher.start("-n", "3", "-q", "--grace", "250", script)
    job.read_lines(1)
    job.process.send_signal(signal.SIGINT)
    outcome = job.finish()
    assert outcome.code == 130
    assert "atexit" not in outcome.err_text
    assert "phalanx/" not in outcome.err_text


def test_ctrl_c_at_a_rank_whose_exit_handlers_have_run_shows_nothing(launcher: Launcher) -> None:
    """What is left is how the interpreter ends. Ctrl-C comes at both times at which Phalanx does something there."""
    script = launcher.script("""
        import os, signal, threading, time
        import phalanx.launch.rank.preload as preload
        ends = threading.Event()
        def interrupt():
            while True:
                ends.wait()
                ends.clear()
                os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt, daemon=True).start()
        others_rest = preload._others_rest
        def slow():
            ends.set()
            time.sleep(0.5)
            return others_rest()
        preload._others_rest = slow
    """)
    outcome = launcher.run("-n", "2", "-q", script)
    assert (outcome.code, outcome.err_text) == (0, "")


def test_a_second_interrupt_kills_at_once(launcher: Launcher) -> None:
    job = launcher.start(
        "-n", "2", "-q", "--grace", "250", "sh", "-c", "trap 'echo asked' INT; echo up; while :; do sleep 1; done"
    )
    job.read_lines(2)
    job.process.send_signal(signal.SIGINT)
    job.read_lines(2)
    job.process.send_signal(signal.SIGINT)
    assert job.finish(SOON_S).code == 130


def test_an_interrupt_while_torch_is_imported_starts_nothing(launcher: Launcher) -> None:
    # Its import lasts until the job is ended.
    launcher.script(
        """
        import sys, time
        class Slow:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name == "torch":
                    time.sleep(300)
        sys.meta_path.insert(0, Slow)
        """,
        "site/sitecustomize.py",
    )
    environment = {"PYTHONPATH": str(launcher.directory / "site")}
    job = launcher.start("-n", "2", launcher.script("print('hello')"), environment=environment)
    assert job.process.stderr is not None
    job.process.stderr.readline()  # The table's title: the supervisor is up, the zygote imports.
    job.process.send_signal(signal.SIGINT)
    outcome = job.finish()
    assert outcome.code == 130
    assert outcome.out == b""
    assert "nothing had been started" in outcome.err_text


@pytest.mark.parametrize("world", [1, 2, 5])
def test_sigkill_of_the_launcher_ends_everything(launcher: Launcher, world: int) -> None:
    job = launcher.start("-n", str(world), "-q", "sh", "-c", "setsid sleep 300 & echo up; exec sleep 300")
    job.read_lines(world)
    # The launcher, the zygote, and two a rank; a process in the middle of an exec shows no environment.
    wait_for(lambda: len(job.processes()) == 2 * world + 2, SOON_S)
    job.process.kill()
    job.process.wait()
    job.wait_until_gone(SOON_S)


def test_sigkill_of_the_launcher_as_soon_as_the_ranks_are_forked(launcher: Launcher) -> None:
    # The zygote does nothing between its last fork and the launcher's end, as on a machine that is busy.
    launcher.script(
        """
        import os, time
        fork, done = os.fork, []
        def slow():
            launcher = os.getppid()
            done.append(1)
            pid = fork()
            if pid and len(done) == 3:  # the zygote, and two ranks
                while os.getppid() == launcher:
                    time.sleep(0.01)
            return pid
        os.fork = slow
        """,
        "sitecustomize.py",
    )
    job = launcher.start(
        *("-n", "2", "-q", "sh", "-c", "setsid sleep 300 & echo up; exec sleep 300"),
        environment={"PYTHONPATH": str(launcher.directory)},
    )
    # The launcher, the zygote, and two a rank; what the ranks print is read, but they are not known to have started.
    wait_for(lambda: len(job.processes()) == 2 * 2 + 2, SOON_S)
    job.process.kill()
    job.process.wait()
    job.wait_until_gone(SOON_S)


def test_sigkill_of_the_launcher_while_torch_is_imported(launcher: Launcher) -> None:
    job = launcher.start("-n", "2", launcher.script(PATIENT))
    assert job.process.stderr is not None
    job.process.stderr.readline()
    job.process.kill()
    job.process.wait()
    job.wait_until_gone(SOON_S)


def test_sigkill_of_the_launcher_ends_python_ranks_and_the_store(launcher: Launcher) -> None:
    job = launcher.start("-n", "3", "-q", launcher.script(PATIENT))
    job.read_lines(3)
    assert job.named("phalanx-store")
    assert len(job.ranks()) == 3
    job.process.kill()
    job.process.wait()
    job.wait_until_gone(SOON_S)


def test_sigkill_of_the_zygote_ends_everything_and_is_reported(launcher: Launcher) -> None:
    job = launcher.start("-n", "2", "-q", "sh", "-c", "setsid sleep 300 & echo up; exec sleep 300")
    job.read_lines(2)
    os.kill(job.named("phalanx-zygote"), signal.SIGKILL)
    outcome = job.finish(SOON_S)
    assert outcome.code == 137
    assert "SIGKILL" in outcome.err_text
    job.wait_until_gone(SOON_S)


def test_sigkill_of_a_rank_names_it_and_ends_the_others(launcher: Launcher) -> None:
    job = launcher.start("-n", "3", "-q", "--grace", "250", launcher.script(PATIENT))
    job.read_lines(3)
    victim = job.ranks()[1]
    os.kill(victim, signal.SIGKILL)
    outcome = job.finish(SOON_S)
    assert outcome.code == 137
    assert "rank 1 of 3 failed" in outcome.err_text
    assert f"pid {victim}" in outcome.err_text
    assert "ranks 0, 2 ended by the launcher" in outcome.err_text


def test_a_stopped_rank_is_ended_too(launcher: Launcher) -> None:
    job = launcher.start("-n", "2", "-q", "--grace", "250", "sh", "-c", "echo up; exec sleep 300")
    job.read_lines(2)
    wait_for(lambda: len(_called(job, "sleep")) == 2)
    stop(_called(job, "sleep")[0])
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(SOON_S).code == 143


def _called(job: RunningJob, name: str) -> list[int]:
    found = []
    for pid in job.processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == f"{name}\n":
                found.append(pid)
    return found
