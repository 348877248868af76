"""How a job ends by itself: exit codes, the block that explains, what ranks leave behind; and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tests.launch_support import Launcher, launcher, wait_for

__all__ = ["launcher"]

SOON_S = 60.0  # far less than the 300 s for which the programs here would go on
PLAIN = ("-q", "--no-preload")  # nothing imports torch that the script does not import


def test_exit_codes_of_jobs_and_what_they_print(launcher: Launcher) -> None:
    ends = [
        ("sys.exit('some words')", 1, "phalanx: rank 1 of 2 failed: some words\n"),
        ("os._exit(4)", 4, "no Python exception"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "signal 9 (SIGKILL)"),
        ("os.abort()", 134, "line 3 in <module>"),
        ("raise KeyboardInterrupt", 130, "rank 1 of 2 failed"),
        # A child that the script forks does not speak for the rank.
        ("sys.exit(os.waitstatus_to_exitcode(os.wait()[1]) + 10 if os.fork() else 1 / 0)", 11, "rank 1 of 2 failed\n"),
    ]
    script = """
        import os, signal, sys, time
        if os.environ['RANK'] == '1':
            {}
        time.sleep(300)
    """
    failing = [
        ["-n", "2", *PLAIN, launcher.script(script.format(statement), f"script-{number}.py")]
        for number, (statement, _, _) in enumerate(ends)
    ]
    table = ["-n", "2", "sh", "-c", "echo up >&2"]
    shown, inner, *outcomes = launcher.run_all(table, ["-q", "sh", "-c", "yes | head -n 1"], *failing)
    title, *lines = shown.err_text.splitlines()
    assert (shown.code, shown.out, title, len(lines)) == (0, b"", "phalanx run: 2 ranks of sh", 5)
    assert sorted(lines[-2:]) == ["[rank 0] up", "[rank 1] up"]  # after the whole table
    assert (inner.code, inner.out, inner.err) == (0, b"[rank 0] y\n", b"")  # SIGPIPE is what it is under a shell
    for (statement, code, said), outcome in zip(ends, outcomes, strict=True):
        assert outcome.code == code, (statement, outcome.err_text)
        assert said in outcome.err_text, statement
        assert "rank 1 of 2 failed" in outcome.err_text
        if "KeyboardInterrupt" not in statement:
            assert outcome.err_text.count("Traceback") == ("fork" in statement), outcome.err_text


@pytest.mark.long
def test_torchs_record_reports_the_failure(launcher: Launcher) -> None:
    script = launcher.script("""
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            raise ValueError('recorded')
        main()
    """)
    direct, nested = launcher.run_all(["-q", script], ["-q", "sh", "-c", f"{sys.executable} {script}; exit 5"])
    assert direct.err_text.count("ValueError: recorded") == 2
    assert direct.err_text.count("Traceback") == nested.err_text.count("Traceback") == 1
    assert nested.code == 5
    assert "rank 0 of 1 failed: ValueError: recorded" in nested.err_text


def test_exception_is_shown_once_and_the_cause_told_from_consequences(launcher: Launcher) -> None:
    """Also under torch's exception hook, and if the rank cannot end since one of its threads does not."""
    script = launcher.script("""
        import threading, time
        import torch.distributed as dist
        dist.init_process_group('gloo')
        def work():
            threading.Thread(target=time.sleep, args=(300,)).start()
            raise ValueError('bad thing')
        dist.barrier()
        if dist.get_rank() == 1:
            work()
        time.sleep(300)
    """)
    raised = launcher.run("-n", "3", "-q", "--grace", "0.2", script)
    text = raised.err_text
    assert raised.code == 1
    assert text.startswith("phalanx: rank 1 of 3 failed: ValueError: bad thing\n")
    assert (text.count("Traceback"), text.count("bad thing")) == (1, 3)  # headline, source line, last line
    lines = text.splitlines()
    first_frame = lines[lines.index("Traceback (most recent call last):") + 1]
    assert first_frame == f'  File "{script}", line 9, in <module>'
    assert "/launch/" not in text
    assert "exit code 1" in text
    assert "ranks 0, 2 ended by the launcher" in text
    # Rank 1 fails first but takes its time to end; rank 0 notices, fails too and is gone first.
    first = launcher.script(
        """
        import atexit, os, pathlib, select, time
        failing, first = [pathlib.Path(__file__).with_name(name) for name in ('failing', 'first')]
        def outlive():
            ends = os.pidfd_open(int(first.read_text()))
            failing.touch()
            select.select([ends], [], [])
        if os.environ['RANK'] == '0':
            first.write_text(str(os.getpid()))
        while not (first.exists() and first.read_text()):
            time.sleep(0.01)
        if os.environ['RANK'] == '1':
            atexit.register(outlive)
            raise ValueError('the cause')
        while not failing.exists():
            time.sleep(0.01)
        raise ConnectionResetError('lost rank 1')
        """,
        "first.py",
    )
    # The kernel takes long to take a process apart that had much memory; the others have long known that it went.
    late = launcher.script(
        """
        import os, signal, time
        from phalanx.errors import PeerLost
        ready = os.path.join(os.path.dirname(__file__), 'ready')
        if os.environ['RANK'] == '0':
            while not os.path.exists(ready):
                time.sleep(0.01)
            raise PeerLost('rank 1 of the group (pid 7) has ended')
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as is every signal to a process that is being taken apart
        open(ready, 'w').close()
        time.sleep(0.4)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        "late.py",
    )
    raised, killed = launcher.run_all(["-n", "2", *PLAIN, "--grace", "0.2", first], ["-n", "2", "-q", late])
    assert raised.err_text.startswith("phalanx: rank 1 of 2 failed: ValueError: the cause")
    assert "rank 0 then failed: ConnectionResetError: lost rank 1" in raised.err_text
    assert raised.code == 1
    assert killed.err_text.startswith("phalanx: rank 1 of 2 failed\n"), killed.err_text
    assert "signal 9 (SIGKILL)" in killed.err_text
    assert "rank 0 then failed: phalanx.errors.PeerLost: rank 1 of the group" in killed.err_text
    assert killed.code == 137


def test_interpreter_of_a_rank_ends_as_it_always_does(launcher: Launcher) -> None:
    """The script's own hook, threads, handlers, finalisers and open files; also of a world that was closed."""
    launcher.script(
        """
        import torch, weakref
        class Told:
            def __init__(self, name): self.name, self.tensor = name, torch.ones(2)
            def __del__(self): print(self.name, self.tensor.sum().item(), flush=True)
        log = open('helper.log', 'w')
        log.write('helper')
        kept = Told('object of the module')
        """,
        "helper.py",
    )
    failing = launcher.script(
        """
        import atexit, sys, threading, time
        hooked = threading.Event()
        atexit.register(print, 'exit handler')
        threading.Thread(target=lambda: (hooked.wait(), time.sleep(0.1), print('thread'))).start()
        def hook(kind, error, trace):
            print('own hook', error, trace.tb_frame.f_code.co_filename)
            hooked.set()
        sys.excepthook = hook
        raise ValueError('x')
        """,
        "failing.py",
    )
    closing = launcher.script(
        """
        import atexit, os, weakref
        import torch, phalanx, helper
        kept = helper.Told('object of the script')
        library = torch.library.Library("phalanx_test", "DEF")
        weakref.finalize(library, print, "library finaliser")
        atexit.register(lambda: print(len(os.listdir("/proc/self/task")), "thread"))
        world = phalanx.init(quiet=True)
        world.all_reduce(torch.ones(3))
        inner = world.subgroup(range(world.size))
        inner.barrier()
        phalanx.close()
        """,
        "closing.py",
    )
    failed, closed = launcher.run_all([*PLAIN, failing], ["-n", "2", "-q", "--no-prefix", closing])
    assert failed.out_lines == [f"[rank 0] own hook x {failing}", "[rank 0] thread", "[rank 0] exit handler"]
    assert "printed by the script itself" in failed.err_text
    assert "Traceback" not in failed.err_text
    assert failed.code == 1
    assert (closed.code, closed.err_text) == (0, "")
    said = ["library finaliser", "object of the module 2.0", "object of the script 2.0", "1 thread"]
    assert sorted(closed.out_lines) == sorted(said * 2)
    assert (launcher.directory / "helper.log").read_text() == "helper"


LIMITED_FORK = """
    import os
    fork, done = os.fork, []
    def limited():
        done.append(1)
        if len(done) == 4:
            raise BlockingIOError(11, 'Resource temporarily unavailable')
        return fork()
    os.fork = limited
"""
SEMAPHORES = """
    import multiprocessing, os, signal, sys, time
    from multiprocessing import shared_memory

    def work(queue, memory):
        queue.put(f"sem.{queue._rlock._semlock.name[1:]} {memory.name}")
        time.sleep(300)

    if __name__ == "__main__":
        spawn = multiprocessing.get_context("spawn")
        queue, memory = spawn.Queue(), shared_memory.SharedMemory(create=True, size=1)
        process = spawn.Process(target=work, args=(queue, memory), daemon=True)
        process.start()
        print(queue.get(), flush=True)
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)
"""


def test_what_a_rank_has_started_ends_with_it_and_nothing_else(launcher: Launcher) -> None:
    """Its descendants; what a fork that fails half way had started; the semaphores of multiprocessing."""
    launcher.script(LIMITED_FORK, "limited/sitecustomize.py")
    script = launcher.script(SEMAPHORES)
    jobs = [launcher.start("-n", "1", *PLAIN, script, end) for end in ("killed", "interrupted")]
    half = launcher.start(
        "-n", "5", "-q", "sh", "-c", "exec sleep 300", environment={"PYTHONPATH": f"{launcher.directory}/limited"}
    )
    # Rank 1 stays until rank 0's grandchildren have gone, so it is the rank's end that ends them, not the job's.
    os.mkfifo(launcher.directory / "fifo")
    leave = "sleep 300 & setsid sleep 300 & (setsid sh -c 'sleep 300 & sleep 300' & ) & echo left"
    job = launcher.start(
        "-n", "2", "-q", "sh", "-c", f'if [ $RANK = 0 ]; then {leave}; else echo waits; read line < $FIFO; fi',
        environment={"FIFO": str(launcher.directory / "fifo")},
    )  # fmt: skip
    job.read_lines(2)
    wait_for(lambda: len(job.processes()) == 3, SOON_S)  # the supervisor, the agent and rank 1
    with open(launcher.directory / "fifo", "w") as fifo:
        fifo.write("go\n")
    assert job.finish(SOON_S).code == 0
    outcome = half.finish(SOON_S)
    assert outcome.code == 1
    assert "only 2 of 5 ranks could be started: Resource temporarily unavailable" in outcome.err_text
    names = {name for job in jobs for name in job.read_lines(1)[0].split()[-2:]}
    assert len(names) == 4
    jobs[1].process.send_signal(signal.SIGINT)
    assert [job.finish().code for job in jobs] == [137, 130]
    assert not names & set(os.listdir("/dev/shm"))
    # A child that the launcher's process had before is not its to end.
    shell = f"sleep 300 & echo $!; exec {sys.executable} -m phalanx run -q true"
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        stranger = int(process.stdout.readline())
        assert process.wait(SOON_S) == 0
        os.kill(stranger, signal.SIGKILL)  # raises if it has gone
