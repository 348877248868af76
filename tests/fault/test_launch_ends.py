"""How a job ends by itself: exit codes, the block that explains, what ranks leave behind; and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher, wait_for

__all__ = ["launcher"]

# Says that it runs, then waits for its end; a program, so that nothing waits for torch.
WAIT = ["sh", "-c", "echo up; exec sleep 300"]
# Far less than the 300 s for which the programs here would go on.
SOON_S = 60.0


def test_success_is_silent_but_for_the_table(launcher: Launcher) -> None:
    outcome = launcher.run("-n", "2", "true")
    assert (outcome.code, outcome.out) == (0, b"")
    assert outcome.err_text.splitlines()[0] == "phalanx run: 2 ranks of true"
    assert len(outcome.err_text.splitlines()) == 4


def test_quiet_prints_nothing_of_its_own(launcher: Launcher) -> None:
    outcome = launcher.run("-n", "5", "--quiet", "true")
    assert (outcome.code, outcome.out, outcome.err) == (0, b"", b"")


def test_an_exception_is_shown_once_with_the_traceback_of_the_script(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, time
        def work():
            raise ValueError('bad thing')
        if os.environ['RANK'] == '1':
            work()
        time.sleep(300)
    """)
    outcome = launcher.run("-n", "3", "-q", script)
    text = outcome.err_text
    assert outcome.code == 1
    assert text.startswith("phalanx: rank 1 of 3 failed: ValueError: bad thing\n")
    assert text.count("Traceback") == 1
    assert text.count("bad thing") == 3  # the headline, the source line and the last line
    lines = text.splitlines()
    first_frame = lines[lines.index("Traceback (most recent call last):") + 1]
    assert first_frame == f'  File "{script}", line 5, in <module>'
    assert "/launch/" not in text
    assert "exit code 1" in text
    assert "ranks 0, 2 ended by the launcher" in text
    assert outcome.elapsed_s < SOON_S


def test_torchs_exception_hook_does_not_show_it_a_second_time(launcher: Launcher) -> None:
    script = launcher.script("""
        import torch.distributed as dist
        dist.init_process_group('gloo')
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError('bad thing')
        while True:
            dist.barrier()
    """)
    outcome = launcher.run("-n", "2", "-q", script)
    assert outcome.code == 1
    assert outcome.err_text.count("bad thing") == 3
    assert "rank 1 of 2 failed: ValueError: bad thing" in outcome.err_text
    assert "[rank1]: ValueError" not in outcome.err_text
    assert "phalanx/launch" not in outcome.err_text


def test_the_cause_is_distinguished_from_its_consequences(launcher: Launcher) -> None:
    # Rank 1 fails first but takes its time to end; rank 0 notices, fails too and is gone first.
    script = launcher.script("""
        import atexit, os, socket, time
        rank = int(os.environ['RANK'])
        path = os.path.join(os.path.dirname(__file__), 'meet')
        if rank == 1:
            server = socket.socket(socket.AF_UNIX); server.bind(path); server.listen()
            peer, _ = server.accept()
            atexit.register(lambda: (peer.close(), time.sleep(1)))
            raise ValueError('the cause')
        while True:
            try:
                client = socket.socket(socket.AF_UNIX); client.connect(path); break
            except OSError: pass
        client.recv(1)
        raise ConnectionResetError('lost rank 1')
    """)
    outcome = launcher.run("-n", "2", "-q", "--grace", "0.2", script)
    text = outcome.err_text
    assert text.startswith("phalanx: rank 1 of 2 failed: ValueError: the cause")
    assert "rank 0 then failed: ConnectionResetError: lost rank 1" in text
    assert outcome.code == 1


def test_a_death_is_the_cause_although_its_consequence_is_known_before(launcher: Launcher) -> None:
    """The kernel takes long to take a process apart that had much memory; the others have long known that it went."""
    script = launcher.script("""
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
    """)
    outcome = launcher.run("-n", "2", "-q", script)
    assert outcome.err_text.startswith("phalanx: rank 1 of 2 failed\n"), outcome.err_text
    assert "signal 9 (SIGKILL)" in outcome.err_text
    assert "rank 0 then failed: phalanx.errors.PeerLost: rank 1 of the group" in outcome.err_text
    assert outcome.code == 137


@pytest.mark.parametrize(
    ("statement", "code", "said"),
    [
        ("sys.exit(3)", 3, "exit code 3"),
        ("sys.exit('some words')", 1, "[rank 1] some words"),
        ("os._exit(4)", 4, "no Python exception"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "signal 9 (SIGKILL)"),
        ("os.abort()", 134, "line 3 in <module>"),
    ],
)
def test_exit_codes(launcher: Launcher, statement: str, code: int, said: str) -> None:
    script = launcher.script(f"""
        import os, signal, sys, time
        if os.environ['RANK'] == '1':
            {statement}
        time.sleep(300)
    """)
    outcome = launcher.run("-n", "2", "-q", script)
    assert outcome.code == code
    assert said in outcome.err_text
    assert "rank 1 of 2 failed" in outcome.err_text
    assert "Traceback" not in outcome.err_text


def test_the_interpreter_ends_as_it_always_does(launcher: Launcher) -> None:
    script = launcher.script("""
        import atexit, sys, threading, time
        hooked = threading.Event()
        atexit.register(print, 'exit handler')
        threading.Thread(target=lambda: (hooked.wait(), time.sleep(0.1), print('thread'))).start()
        def hook(kind, error, trace):
            print('own hook', error, trace.tb_frame.f_code.co_filename)
            hooked.set()
        sys.excepthook = hook
        raise ValueError('x')
    """)
    outcome = launcher.run("-n", "1", "-q", script)
    assert outcome.out_lines == [f"[rank 0] own hook x {script}", "[rank 0] thread", "[rank 0] exit handler"]
    assert "printed by the script itself" in outcome.err_text
    assert "Traceback" not in outcome.err_text
    assert outcome.code == 1


def test_what_the_script_left_open_is_written_and_finalised(launcher: Launcher, tmp_path: Path) -> None:
    """In the script and in a module of its own. Finalisers that use torch still find it."""
    launcher.script(
        """
        import atexit, torch, weakref
        class Told:
            def __init__(self, name): self.name, self.tensor = name, torch.ones(2)
            def __del__(self): print(self.name, self.tensor.sum().item(), flush=True)
        log = open('helper.log', 'w')
        log.write('helper')
        kept = Told('object of the module')
        class Plain: pass
        plain = Plain()
        weakref.finalize(plain, print, 'finaliser')
        """,
        "helper.py",
    )
    script = launcher.script(f"""
        import os, sys
        os.chdir({str(tmp_path)!r})
        sys.path.insert(0, {str(tmp_path)!r})
        import helper, torch.distributed
        log = open('script.log', 'w')
        log.write('script')
        kept = helper.Told('object of the script')
    """)
    outcome = launcher.run("-n", "1", "-q", "--no-prefix", script)
    assert (outcome.code, outcome.err_text) == (0, "")
    assert sorted(outcome.out.decode().splitlines()) == [
        "finaliser",
        "object of the module 2.0",
        "object of the script 2.0",
    ]
    assert (tmp_path / "helper.log").read_text() == "helper"
    assert (tmp_path / "script.log").read_text() == "script"


def test_a_rank_that_failed_but_cannot_end_does_not_hold_the_job(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, threading, time
        if os.environ['RANK'] == '1':
            threading.Thread(target=time.sleep, args=(300,)).start()
            raise ValueError('stuck')
        time.sleep(300)
    """)
    outcome = launcher.run("-n", "2", "-q", script)
    assert outcome.code == 1
    assert outcome.elapsed_s < SOON_S
    assert "rank 1 of 2 failed: ValueError: stuck" in outcome.err_text
    assert "rank 0 ended by the launcher" in outcome.err_text


def test_a_fork_that_fails_half_way_leaves_nothing(launcher: Launcher) -> None:
    launcher.script(
        """
        import os
        fork, done = os.fork, []
        def limited():
            done.append(1)
            if len(done) == 4:
                raise BlockingIOError(11, 'Resource temporarily unavailable')
            return fork()
        os.fork = limited
        """,
        "sitecustomize.py",
    )
    outcome = launcher.run("-n", "5", "-q", *WAIT, environment={"PYTHONPATH": str(launcher.directory)})
    assert outcome.code == 1
    assert "only 2 of 5 ranks could be started: Resource temporarily unavailable" in outcome.err_text


def test_torchs_record_works(launcher: Launcher) -> None:
    script = launcher.script("""
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            raise ValueError('recorded')
        main()
    """)
    direct = launcher.run("-n", "1", "-q", script)
    assert direct.err_text.count("ValueError: recorded") == 2
    assert direct.err_text.count("Traceback") == 1
    nested = launcher.run("-n", "1", "-q", "sh", "-c", f"{sys.executable} {script}; exit 5")
    assert nested.code == 5
    assert "rank 0 of 1 failed: ValueError: recorded" in nested.err_text
    assert nested.err_text.count("Traceback") == 1


def test_a_syntax_error_is_printed_once_and_nothing_is_started(launcher: Launcher) -> None:
    outcome = launcher.run(
        "-n",
        "3",
        "-q",
        launcher.script("""
        print('hello')
        def (
    """),
    )
    assert outcome.code == 1
    assert outcome.out == b""
    assert outcome.err_text.count("SyntaxError") == 1
    assert "line 2" in outcome.err_text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n", "0", "true"], "-n 0"),
        (["-n", "-1", "true"], "-n -1"),
        (["missing.py"], "missing.py: no such file"),
        (["-m", "no.such.module"], "no module of that name"),
        (["."], "without a __main__.py"),
        (["-n", "10000000", "true"], "10000000 ranks need about"),
        (["--json", "true"], "--dry-run"),
    ],
)
def test_mistakes_cost_one_line(launcher: Launcher, arguments: list[str], said: str) -> None:
    outcome = launcher.run(*arguments)
    assert outcome.code == 2
    assert outcome.out == b""
    assert len(outcome.err_text.splitlines()) == 1
    assert outcome.err_text.startswith("phalanx: ")
    assert said in outcome.err_text


@pytest.mark.parametrize(
    "leave",
    [
        "sleep 300 &",
        "setsid sleep 300 &",
        "(setsid sh -c 'sleep 300 & sleep 300' & ) &",
    ],
)
def test_a_grandchild_that_holds_the_output_is_ended_with_its_rank(launcher: Launcher, leave: str) -> None:
    # Rank 1 stays until rank 0's grandchildren have gone, so it is the rank's end that ends them, not the job's.
    os.mkfifo(launcher.directory / "fifo")
    job = launcher.start(
        "-n", "2", "-q", "sh", "-c",
        f'if [ $RANK = 0 ]; then {leave} echo left; else echo waits; read line < $FIFO; fi',
        environment={"FIFO": str(launcher.directory / "fifo")},
    )  # fmt: skip
    job.read_lines(2)
    # The supervisor, the zygote and rank 1.
    wait_for(lambda: len(job.processes()) == 3, SOON_S)
    with open(launcher.directory / "fifo", "w") as fifo:
        fifo.write("go\n")
    assert job.finish(SOON_S).code == 0


def test_children_that_the_launcher_inherited_are_left_alone(launcher: Launcher) -> None:
    shell = f"sleep 300 & echo $!; exec {sys.executable} -m phalanx run -q true"
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        stranger = int(process.stdout.readline())
        assert process.wait(SOON_S) == 0
        os.kill(stranger, signal.SIGKILL)  # Raises if it has gone.


def test_a_forked_daemon_is_ended_with_its_rank(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(300)
            os._exit(0)
        os.wait()
    """)
    outcome = launcher.run("-n", "2", "-q", script)
    assert outcome.code == 0
    assert outcome.elapsed_s < SOON_S


def test_a_child_that_the_script_forks_does_not_speak_for_the_rank(launcher: Launcher) -> None:
    script = launcher.script("""
        import os, sys
        if os.fork() == 0:
            raise ValueError('in the child')
        _, status = os.wait()
        sys.exit(os.waitstatus_to_exitcode(status) + 10)
    """)
    outcome = launcher.run("-n", "1", "-q", script)
    assert outcome.code == 11
    assert outcome.err_text.count("ValueError: in the child") == 1
    assert "rank 0 of 1 failed\n" in outcome.err_text


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
        {end}
        time.sleep(300)
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)", "sys.exit(0)", "input()"])
def test_what_multiprocessing_keeps_in_memory_goes_with_its_rank(launcher: Launcher, end: str) -> None:
    """Python's resource tracker removes semaphores and memory of a rank that cannot do so any more."""
    job = launcher.start("-n", "1", "-q", launcher.script(SEMAPHORES.replace("{end}", end)))
    names = job.read_lines(1)[0].split()[-2:]
    if end == "input()":
        job.process.send_signal(signal.SIGINT)
    job.finish()
    assert not set(names) & set(os.listdir("/dev/shm"))
