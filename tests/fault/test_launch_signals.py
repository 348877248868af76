"""How signals, and kills of any one process, end a job, and what it then says of its ranks; nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from tests.launch_support import Launcher, ask_until, changed, launcher, time_for_stacks, wait_for
from tests.support.waiting import soon, stop

from phalanx.system import processes

__all__ = ["launcher"]

# Far less than the 300 s for which the programs here would go on, and than the 250 s of grace that some of them have.
SOON_S = 60.0
PLAIN = ("-q", "--no-preload")
WAITS = ("sh", "-c", "echo up; exec sleep 300")
# With a grandchild in a session of its own; its first line follows the fork.
PROGRAM = ("sh", "-c", "setsid sleep 300 & echo up; exec sleep 300")


def test_interrupted_ranks_clean_up_and_end_without_words_of_phalanx(launcher: Launcher) -> None:
    """Finished ones are told apart. At its end a rank waits for the others' last calls, which no user has written."""
    cleans = launcher.script("""
        import os, time
        try:
            print(os.getpid())
            if os.environ['RANK'] != '1':
                time.sleep(300)
        finally:
            print('cleaned up')
    """)
    ending = launcher.script(
        """
        import atexit, time, torch, torch.distributed as dist
        dist.init_process_group("phalanx")
        dist.barrier()
        if dist.get_rank():
            time.sleep(300)
        dist.broadcast(torch.zeros(4), 0)
        atexit.register(lambda: print("ends"))  # called before the handlers that are there already
        """,
        "ending.py",
    )
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
    # By default ranks have one second after Ctrl-C, which a busy machine may let pass.
    job = launcher.start("-n", "3", *PLAIN, "--grace", "250", cleans)
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
    for words in (["-n", "3", "-q", "--grace", "250", ending], ["-n", "1", *PLAIN, "--grace", "250", late]):
        job = launcher.start(*words)
        job.read_lines(1)
        job.process.send_signal(signal.SIGINT)
        outcome = job.finish()
        assert outcome.code == 130
        assert not any(word in outcome.err_text for word in ("atexit", "phalanx/", "Traceback", "Exception ignored"))


def test_signals_end_all_ranks_in_order_or_are_passed_on(launcher: Launcher, tmp_path: Path) -> None:
    """Also those that ignore it, and stopped ones; at once by a second Ctrl-C. User signals go to no worker."""
    # With a grandchild in a session of its own that ignores it too.
    ignore = "trap '' INT TERM HUP; setsid sleep 300 & echo up; sleep 300; sleep 300"
    interrupted = launcher.start("-n", "3", "-q", "sh", "-c", ignore)
    hung_up = launcher.start("-n", "3", "-q", "--grace", "1", "sh", "-c", ignore)
    rank, agent = (launcher.start("-n", "2", "-q", "--grace", "250", *WAITS) for _ in range(2))
    for job, signum, code in ((interrupted, signal.SIGINT, 130), (hung_up, signal.SIGHUP, 129)):
        job.read_lines(3)
        job.process.send_signal(signum)
        job.wait_until_gone(SOON_S)
        outcome = job.finish()
        assert outcome.code == code
        assert outcome.err_text.splitlines() == [
            f"phalanx: {signum.name}: all 3 ranks have been ended",
            "phalanx: ranks 0-2 did not end within 1 s and were killed; --grace gives ranks longer",
        ]
    for job in (rank, agent):
        job.read_lines(2)
    wait_for(lambda: len(rank.all_named("sleep")) == 2)
    stop(rank.all_named("sleep")[0])
    rank.process.send_signal(signal.SIGTERM)
    stop(agent.named("phalanx-agent"))
    agent.process.send_signal(signal.SIGINT)
    assert (rank.finish(SOON_S).code, agent.finish(SOON_S).code) == (143, 130)
    deaf = launcher.start(
        "-n", "2", "-q", "--grace", "250", "sh", "-c", "trap 'echo asked' INT; echo up; while :; do sleep 1; done"
    )
    script = launcher.script("""
        import os, signal, subprocess, sys, time
        def save(*_):
            with open('saved-' + os.environ['RANK'], 'w') as file:
                file.write('first half, ')
                file.flush()
                time.sleep(1.5)  # longer than ranks have after Ctrl-C
                file.write('second half')
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        def helped(*_):
            open(f"helper-runs-{helper.poll() is None}-{os.environ['RANK']}", 'w').close()
        signal.signal(signal.SIGUSR1, helped)
        helper = subprocess.Popen(['sleep', '300'])
        print('up', flush=True)
        while True:
            time.sleep(300)
    """)
    saving = launcher.start("-n", "2", *PLAIN, script)
    held = "from phalanx.launch import agent\nagent._HANDLERS_S = 0.2\n"
    soon_given_up = changed(tmp_path / "site", held)
    unhandled = launcher.start("-n", "2", "-q", *WAITS, environment=soon_given_up)
    for job in (saving, unhandled):
        job.read_lines(2)
        job.process.send_signal(signal.SIGUSR1)
    wait_for(lambda: len(list(tmp_path.glob("helper-runs-True-*"))) == 2, SOON_S)
    saving.process.send_signal(signal.SIGTERM)
    wait_for(lambda: len(list(tmp_path.glob("saved-*"))) == 2)
    saving.process.send_signal(signal.SIGTERM)
    outcome = saving.finish()
    assert outcome.code == 143
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["first half, second half"] * 2
    assert outcome.err_text == "phalanx: SIGTERM: all 2 ranks have been ended\n"
    deaf.read_lines(2)
    deaf.process.send_signal(signal.SIGINT)
    deaf.read_lines(2)
    deaf.process.send_signal(signal.SIGINT)
    assert deaf.finish(SOON_S).code == 130
    outcome = unhandled.finish()
    assert outcome.code == 128 + signal.SIGUSR1
    assert "which the launcher passes on" in outcome.err_text


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
INTERRUPTS = """
    import os, signal, sys
    class Interrupts:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == {!r}:
                os.kill(os.getpid(), signal.SIGINT)
    sys.meta_path.insert(0, Interrupts)
"""


def test_launch_that_has_just_begun_ends_in_order(launcher: Launcher) -> None:
    """While the launcher is loaded, while torch is, while ranks are forked, and before the launcher knows of them."""
    place = launcher.directory
    importing, forking = (changed(place / name, text) for name, text in (("a", SLOW_IMPORT), ("b", SLOW_FORK)))
    loading = [changed(place / module, INTERRUPTS.format(module)) for module in ("click", "phalanx.commands.run")]
    loaded = [launcher.start("true", environment=environment) for environment in loading]
    script = launcher.script(f"""
        import os, sys, time
        rank = os.environ["RANK"]
        try:
            open({str(place)!r} + f"/runs-{{rank}}", "w").close()
            time.sleep(300)
        except KeyboardInterrupt:
            open({str(place)!r} + f"/saved-{{rank}}", "w").close()
    """)
    early = launcher.start("-n", "2", "-q", "--grace", "250", script)

    def imports_torch() -> bool:
        with contextlib.suppress(OSError):
            return any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in processes.children_of(early.pid))
        return False

    wait_for(imports_torch)
    wait_for(lambda: "poll" in Path(f"/proc/{early.pid}/wchan").read_text())  # the launcher has told it to start
    stop(early.pid)  # before it can read that the ranks have been started
    wait_for(lambda: len(list(place.glob("runs-*"))) == 2)
    early.process.send_signal(signal.SIGINT)
    os.kill(early.pid, signal.SIGCONT)
    assert early.finish().code == 130
    assert {path.name for path in place.glob("saved-*")} == {"saved-0", "saved-1"}
    for job in loaded:
        outcome = job.finish()
        assert outcome.code in (130, -signal.SIGINT)
        assert outcome.err_text.strip() == ""
    interrupted, killed = (launcher.start("-n", "2", script, environment=importing) for _ in range(2))
    for job in (interrupted, killed):
        assert job.process.stderr is not None
        job.process.stderr.readline()  # the table's title: torch is being imported
    interrupted.process.send_signal(signal.SIGINT)
    outcome = interrupted.finish()
    assert (outcome.code, outcome.out) == (130, b"")
    assert "nothing had been started" in outcome.err_text
    # The launcher, the agent, and two a rank: what the ranks print is read, but they are not known to have started.
    forked = launcher.start("-n", "2", "-q", *PROGRAM, environment=forking)
    wait_for(lambda: len(forked.processes()) == 2 * 2 + 2, SOON_S)
    for job in (killed, forked):
        job.process.kill()
        job.process.wait()
        job.wait_until_gone(SOON_S)


def test_sigkill_of_any_process_ends_everything(launcher: Launcher) -> None:
    """Of the process that forks the ranks, which may be stopped, the job is not started again."""
    patient = launcher.script("""
        import os, socket, time
        store = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        print('up', flush=True)
        while True: time.sleep(300)
    """)
    program, stopped = (launcher.start("-n", "3", "-q", *PROGRAM) for _ in range(2))
    python = launcher.start("-n", "3", "-q", patient)
    agent = launcher.start("-n", "2", "-q", "--restarts", "3", *PROGRAM)
    rank = launcher.start("-n", "3", *PLAIN, "--grace", "250", patient)
    agent.read_lines(2)
    os.kill(agent.named("phalanx-agent"), signal.SIGKILL)
    outcome = agent.finish(SOON_S)
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
    for job in (program, stopped, python):
        job.read_lines(3)
    # The launcher, the agent, and two a rank; a process in the middle of an exec shows no environment.
    wait_for(lambda: len(program.processes()) == 2 * 3 + 2, SOON_S)
    stop(stopped.named("phalanx-agent"))
    assert python.named("phalanx-store")
    assert len(python.ranks()) == 3
    for job in (program, stopped, python):
        job.process.kill()
        job.process.wait()
        job.wait_until_gone(SOON_S)


def test_job_says_where_its_ranks_are_when_asked_and_when_ended(launcher: Launcher) -> None:
    """It goes on after it was asked; a stopped rank is named, and a program that is no Python comes to no harm."""
    hang = launcher.script(
        """
        import os, sys, torch, torch.distributed as dist
        dist.init_process_group('gloo')
        print('up', flush=True)
        def wait():
            while not sys.stdin.read(1): pass
        if os.environ['RANK'] == '0':
            wait()
        x = torch.ones(3)
        dist.all_reduce(x)
        """,
        "hang.py",
    )
    errors = launcher.directory / "errors"
    patient = time_for_stacks(launcher.directory / "site")
    with open(errors, "wb") as file:
        job = launcher.start("-n", "3", hang, stdin=subprocess.PIPE, stderr=file, environment=patient)
    sleeps = launcher.script("import os, time; print(os.getpid(), flush=True); time.sleep(600)", "sleeps.py")
    python = launcher.start("-n", "1", "--no-prefix", *PLAIN, sleeps)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # as a shell has it for what it starts with &
    program = launcher.start("-n", "2", "-q", "sh", "-c", "echo up; read line; echo $line", stdin=subprocess.PIPE)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    pid = int(python.read_lines(1)[0])
    stop(pid)
    program.read_lines(2)
    for one, said in ((python, "rank 0 did not say where: stopped"), (program, "no rank runs Python")):
        one.process.send_signal(signal.SIGQUIT)
        assert one.process.stderr is not None
        assert said in one.process.stderr.readline().decode()
    os.kill(pid, signal.SIGCONT)
    python.process.send_signal(signal.SIGTERM)
    assert python.finish().code == 143
    out, _ = program.process.communicate(b"went on\n", timeout=SOON_S)
    assert (program.process.returncode, b"[rank 0] went on\n" in out) == (0, True)
    job.read_lines(3)
    frame = r"  File \".*hang\.py\", line {}, in {}\n    .*\n"
    frames = frame.format(7, "<module>") + frame.format(5, "wait") + r"(?!  )"
    others = r"(.*\n)*.*ranks 1-2 are at\n(  .*\n)*?  File \".*hang\.py\", line 9, in <module>\n"
    for _ in range(2):
        ask_until(job.process, errors.read_text, f"rank 0 is at\n{frames}{others}")
    assert "Traceback" not in errors.read_text()
    job.process.send_signal(signal.SIGINT)
    job.finish()
    text = errors.read_text()
    assert "SIGINT: all 3 ranks have been ended; they were at:\n" in text
    assert "  ranks 1-2: hang.py:9 dist.all_reduce(x)\n" in text
    assert "  rank 0: hang.py:5 while not sys.stdin.read(1): pass\n" in text


def test_a_script_on_a_file_system_that_does_not_answer_delays_no_end(launcher: Launcher) -> None:
    script = launcher.script("import time; print('up', flush=True); time.sleep(300)")
    job = launcher.start("-n", "2", "--no-preload", script)
    job.read_lines(2)
    os.unlink(launcher.directory / script)
    os.mkfifo(launcher.directory / script)  # nobody writes to it, so whoever opens it waits
    job.process.send_signal(signal.SIGQUIT)
    assert job.process.stderr is not None
    while b"ranks 0-1 are at" not in job.process.stderr.readline():
        pass
    job.process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    outcome = job.finish(SOON_S)
    assert time.monotonic() - begun < 3
    assert outcome.code == 130
    assert "ranks 0-1: script.py:1 <module>\n" in outcome.err_text
