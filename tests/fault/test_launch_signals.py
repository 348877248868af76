"""How signals, and kills of any one process, end a job, and what it then says of its ranks; nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from tests.launch_support import Launcher, RunningJob, ask_until, launcher, time_for_stacks, wait_for
from tests.support.waiting import soon, stop

from phalanx.system import processes

__all__ = ["launcher"]

# Far less than the 300 s for which the programs here would go on, and than the 250 s of grace that some of them have.
SOON_S = 60.0
PLAIN = ("-q", "--no-preload")
PATIENT = """
import time
print("up", flush=True)
while True:
    time.sleep(300)
"""
# With a grandchild in a session of its own; its first line follows the fork.
PROGRAM = ("sh", "-c", "setsid sleep 300 & echo up; exec sleep 300")


def called(job: RunningJob, name: str) -> list[int]:
    found = []
    for pid in job.processes():
        with contextlib.suppress(OSError):  # it has ended
            if Path(f"/proc/{pid}/comm").read_text() == f"{name}\n":
                found.append(pid)
    return found


def test_signal_ends_everything_that_ignores_it(launcher: Launcher) -> None:
    # A rank that ignores what it can, with a grandchild in a session of its own that does too.
    ignore = "trap '' INT TERM HUP; setsid sleep 300 & echo up; sleep 300; sleep 300"
    cases: list[tuple[signal.Signals, int, list[str]]] = [
        (signal.SIGINT, 130, []),
        (signal.SIGTERM, 143, ["--grace", "1"]),
        (signal.SIGHUP, 129, ["--grace", "1"]),
    ]
    jobs = [launcher.start("-n", "3", "-q", *grace, "sh", "-c", ignore) for _, _, grace in cases]
    for job, (signum, code, _) in zip(jobs, cases, strict=True):
        job.read_lines(3)
        job.process.send_signal(signum)
        job.wait_until_gone(SOON_S)
        outcome = job.finish()
        assert outcome.code == code
        assert outcome.err_text.splitlines() == [
            f"phalanx: {signum.name}: all 3 ranks have been ended",
            "phalanx: ranks 0-2 did not end within 1 s and were killed; --grace gives ranks longer",
        ]


def test_interrupted_ranks_clean_up_and_finished_ones_are_told_apart(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, time
        try:
            print(os.getpid())
            if os.environ['RANK'] != '1':
                time.sleep(300)
        finally:
            print('cleaned up')
    """)
    # By default ranks have one second after Ctrl-C, which a busy machine may let pass.
    job = launcher.start("-n", "3", *PLAIN, "--grace", "250", script)
    lines = job.read_lines(4)
    (finished,) = [line for line in lines if "[rank 1]" in line and "cleaned" not in line]
    assert soon(lambda: not Path(f"/proc/{finished.split()[-1]}").exists())
    job.process.send_signal(signal.SIGINT)
    outcome = job.finish()
    assert outcome.code == 130
    assert sorted(outcome.out_lines) == ["[rank 0] cleaned up", "[rank 2] cleaned up"]
    # Of ranks that a busy machine makes end late it is said before, once, for whom the launcher waits (--grace).
    said = [line for line in outcome.err_text.splitlines() if not line.endswith(" before they are killed (--grace)")]
    assert said == ["phalanx: SIGINT: rank 1 had finished; ranks 0, 2 have been ended"]


def test_interrupt_of_a_rank_that_ends_shows_nothing_of_phalanx(launcher: Launcher) -> None:
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
    # All handlers have run when this object goes, so Ctrl-C has nothing to end any more.
    late = launcher.script(
        """
        import time
        class Late:
            def __del__(self, sleep=time.sleep):
                print("ends", flush=True)
                sleep(2)
        kept = Late()
        """,
        "late.py",
    )
    jobs = [launcher.start("-n", size, "-q", "--grace", "250", target) for size, target in (("3", script), ("1", late))]
    for job in jobs:
        job.read_lines(1)
        job.process.send_signal(signal.SIGINT)
        outcome = job.finish()
        assert outcome.code == 130
        assert not any(word in outcome.err_text for word in ("atexit", "phalanx/", "Traceback", "Exception ignored"))


def test_only_a_second_interrupt_kills_at_once(launcher: Launcher, tmp_path: Path) -> None:
    deaf = launcher.start(
        "-n", "2", "-q", "--grace", "250", "sh", "-c", "trap 'echo asked' INT; echo up; while :; do sleep 1; done"
    )
    script = launcher.script(f"""
        import os, signal, sys, time
        def save(*_):
            with open(os.path.join({str(tmp_path)!r}, 'saved-' + os.environ['RANK']), 'w') as file:
                file.write('first half, ')
                file.flush()
                time.sleep(2)  # longer than ranks have after Ctrl-C
                file.write('second half')
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print('up', flush=True)
        while True:
            time.sleep(300)
    """)
    saving = launcher.start("-n", "2", *PLAIN, script)
    saving.read_lines(2)
    saving.process.send_signal(signal.SIGTERM)
    wait_for(lambda: len(list(tmp_path.glob("saved-*"))) == 2)
    saving.process.send_signal(signal.SIGTERM)  # a batch system may ask twice
    outcome = saving.finish()
    assert outcome.code == 143
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["first half, second half"] * 2
    assert outcome.err_text == "phalanx: SIGTERM: all 2 ranks have been ended\n"
    deaf.read_lines(2)
    deaf.process.send_signal(signal.SIGINT)
    deaf.read_lines(2)
    deaf.process.send_signal(signal.SIGINT)
    assert deaf.finish(SOON_S).code == 130


SLOW_IMPORT = """
    import sys, time
    class Slow:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "torch":
                time.sleep(300)
    sys.meta_path.insert(0, Slow)
"""
# The process that forks does nothing between its last fork and the launcher's end, as on a machine that is busy.
SLOW_FORK = """
    import os, time
    fork, done = os.fork, []
    def slow():
        launcher = os.getppid()
        done.append(1)
        pid = fork()
        if pid and len(done) == 3:  # the process that forks, and two ranks
            while os.getppid() == launcher:
                time.sleep(0.01)
        return pid
    os.fork = slow
"""


def test_end_of_a_launch_that_has_just_begun_leaves_nothing(launcher: Launcher) -> None:
    importing, forking = ({"PYTHONPATH": str(launcher.directory / name)} for name in ("importing", "forking"))
    launcher.script(SLOW_IMPORT, "importing/sitecustomize.py")
    launcher.script(SLOW_FORK, "forking/sitecustomize.py")
    script = launcher.script("print('hello')")
    interrupted, killed = (launcher.start("-n", "2", script, environment=importing) for _ in range(2))
    for job in (interrupted, killed):
        assert job.process.stderr is not None
        job.process.stderr.readline()  # the table's title: torch is being imported
    interrupted.process.send_signal(signal.SIGINT)
    outcome = interrupted.finish()
    assert (outcome.code, outcome.out) == (130, b"")
    assert "nothing had been started" in outcome.err_text
    killed.process.kill()
    # The launcher, the zygote, and two a rank: what the ranks print is read, but they are not known to have started.
    forked = launcher.start("-n", "2", "-q", *PROGRAM, environment=forking)
    wait_for(lambda: len(forked.processes()) == 2 * 2 + 2, SOON_S)
    forked.process.kill()
    for job in (killed, forked):
        job.process.wait()
        job.wait_until_gone(SOON_S)


def test_ranks_get_an_interrupt_before_the_launcher_has_heard_of_them(launcher: Launcher) -> None:
    place = launcher.directory
    script = launcher.script(f"""
        import os, sys, time
        rank = os.environ["RANK"]
        try:
            open({str(place)!r} + f"/runs-{{rank}}", "w").close()
            time.sleep(300)
        except KeyboardInterrupt:
            open({str(place)!r} + f"/saved-{{rank}}", "w").close()
    """)
    job = launcher.start("-n", "2", "-q", "--grace", "250", script)

    def imports_torch() -> bool:
        with contextlib.suppress(OSError):
            return any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in processes.children_of(job.pid))
        return False

    wait_for(imports_torch)  # so the launcher has told it to start
    stop(job.pid)  # before it can read that the ranks have been started
    wait_for(lambda: len(list(place.glob("runs-*"))) == 2)
    job.process.send_signal(signal.SIGINT)
    os.kill(job.pid, signal.SIGCONT)
    assert job.finish().code == 130
    assert {path.name for path in place.glob("saved-*")} == {"saved-0", "saved-1"}


def test_interrupt_while_the_launcher_is_loaded_shows_no_traceback(launcher: Launcher) -> None:
    jobs = []
    for module in ("click", "phalanx.commands.run"):
        launcher.script(
            f"""
            import os, signal, sys
            class Interrupts:
                @staticmethod
                def find_spec(name, path=None, target=None):
                    if name == {module!r}:
                        os.kill(os.getpid(), signal.SIGINT)
            sys.meta_path.insert(0, Interrupts)
            """,
            f"{module}/sitecustomize.py",
        )
        jobs.append(launcher.start("true", environment={"PYTHONPATH": str(launcher.directory / module)}))
    for job in jobs:
        outcome = job.finish()
        assert outcome.code in (130, -signal.SIGINT)
        assert outcome.err_text.strip() == ""


def test_sigkill_of_the_launcher_ends_everything(launcher: Launcher) -> None:
    """Also the store, what ranks have started, and a process that forks the ranks but is stopped."""
    program, stopped = (launcher.start("-n", "3", "-q", *PROGRAM) for _ in range(2))
    python = launcher.start("-n", "3", "-q", launcher.script(PATIENT))
    for job in (program, stopped, python):
        job.read_lines(3)
    # The launcher, the zygote, and two a rank; a process in the middle of an exec shows no environment.
    wait_for(lambda: len(program.processes()) == 2 * 3 + 2, SOON_S)
    stop(stopped.named("phalanx-zygote"))
    assert python.named("phalanx-store")
    assert len(python.ranks()) == 3
    for job in (program, stopped, python):
        job.process.kill()
        job.process.wait()
        job.wait_until_gone(SOON_S)


def test_sigkill_of_another_process_is_reported_and_ends_everything(launcher: Launcher) -> None:
    """Of the process that forks the ranks the job is not started again."""
    zygote = launcher.start("-n", "2", "-q", "--restarts", "3", *PROGRAM)
    rank = launcher.start("-n", "3", *PLAIN, "--grace", "250", launcher.script(PATIENT))
    zygote.read_lines(2)
    os.kill(zygote.named("phalanx-zygote"), signal.SIGKILL)
    outcome = zygote.finish(SOON_S)
    assert outcome.code == 137
    assert "the process that starts and watches the ranks was ended by signal 9 (SIGKILL)" in outcome.err_text
    assert "attempt" not in outcome.err_text
    rank.read_lines(3)
    victim = rank.ranks()[1]
    os.kill(victim, signal.SIGKILL)
    outcome = rank.finish(SOON_S)
    assert outcome.code == 137
    assert "rank 1 of 3 failed" in outcome.err_text
    assert f"pid {victim}" in outcome.err_text
    assert "ranks 0, 2 ended by the launcher" in outcome.err_text


def test_stopped_processes_do_not_keep_a_job_from_ending(launcher: Launcher) -> None:
    rank, zygote = (
        launcher.start("-n", "2", "-q", "--grace", "250", "sh", "-c", "echo up; exec sleep 300") for _ in range(2)
    )
    for job in (rank, zygote):
        job.read_lines(2)
    wait_for(lambda: len(called(rank, "sleep")) == 2)
    stop(called(rank, "sleep")[0])
    rank.process.send_signal(signal.SIGTERM)
    stop(zygote.named("phalanx-zygote"))
    zygote.process.send_signal(signal.SIGINT)
    assert (rank.finish(SOON_S).code, zygote.finish(SOON_S).code) == (143, 130)


def test_user_signals_are_passed_on_to_ranks_and_to_no_worker(launcher: Launcher) -> None:
    script = launcher.script("""
        import signal, subprocess, time
        got = []
        signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
        helper = subprocess.Popen(['sleep', '300'])
        print('up', flush=True)
        while not got:
            time.sleep(0.01)
        print('got it; helper runs:', helper.poll() is None)
    """)
    handled = launcher.start("-n", "2", *PLAIN, script)
    unhandled = launcher.start("-n", "2", "-q", "sh", "-c", "echo up; exec sleep 300")
    for job in (handled, unhandled):
        job.read_lines(2)
        job.process.send_signal(signal.SIGUSR1)
    outcome = handled.finish()
    assert outcome.code == 0, outcome.err_text
    assert sorted(outcome.out_lines) == [f"[rank {rank}] got it; helper runs: True" for rank in (0, 1)]
    outcome = unhandled.finish()
    assert outcome.code == 128 + signal.SIGUSR1
    assert "which the launcher passes on" in outcome.err_text


# -- where the ranks are -------------------------------------------------------------------------------


def test_job_that_hangs_says_where_when_it_is_ended(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, time, torch, torch.distributed as dist
        dist.init_process_group('gloo')
        print('up', flush=True)
        if os.environ['RANK'] == '1':
            time.sleep(300)
        x = torch.ones(3)
        dist.all_reduce(x)
        """,
        "hang.py",
    )
    errors = launcher.directory / "errors"
    with open(errors, "wb") as file:
        job = launcher.start("-n", "3", script, stderr=file, environment=time_for_stacks(launcher.directory / "site"))
    job.read_lines(3)
    there = r"ranks {} at\n(  .*\n)*?  File \".*hang\.py\", line {}, in <module>\n"
    rank_1 = there.replace("ranks", "rank").format("1 is", 5)
    ask_until(job.process, errors.read_text, there.format("0, 2 are", 7) + rf"(.*\n)*.*{rank_1}")
    job.process.send_signal(signal.SIGINT)
    job.finish()
    text = errors.read_text()
    assert "SIGINT: all 3 ranks have been ended; they were at:\n" in text
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
        job = launcher.start("-n", "1", "--no-preload", script, stdin=subprocess.PIPE, stderr=file)
    job.read_lines(1)
    # Asked at once, it may still be in its print().
    frame = r"  File \".*waits\.py\", line {}, in {}\n    .*\n"
    frames = [frame.format(8, "<module>"), frame.format(6, "outer"), frame.format(3, "wait")]
    for _ in range(2):
        ask_until(job.process, errors.read_text, "rank 0 is at\n" + "".join(frames) + r"(?!  )")
    assert "    while not sys.stdin.read(1):\n" in errors.read_text()
    out, _ = job.process.communicate(b"x", timeout=SOON_S)
    assert (job.process.returncode, out) == (0, b"[rank 0] went on\n")


def test_sigquit_names_a_stopped_rank_and_harms_no_other_program(launcher: Launcher) -> None:
    script = launcher.script("import os, time; print(os.getpid(), flush=True); time.sleep(600)", "sleeps.py")
    python = launcher.start("-n", "1", "--no-prefix", *PLAIN, script)
    program = launcher.start("-n", "2", "-q", "sh", "-c", "echo up; read line; echo $line", stdin=subprocess.PIPE)
    pid = int(python.read_lines(1)[0])
    stop(pid)
    program.read_lines(2)
    for job, said in ((python, "rank 0 did not say where: stopped"), (program, "no rank runs Python")):
        job.process.send_signal(signal.SIGQUIT)
        assert job.process.stderr is not None
        assert said in job.process.stderr.readline().decode()
    os.kill(pid, signal.SIGCONT)
    for job in (python, program):
        job.process.send_signal(signal.SIGTERM)
        assert job.finish().code == 143
