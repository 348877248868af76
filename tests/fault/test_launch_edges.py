"""The launcher at its edges: full disks, terminals that close, variables, debuggers, what ranks joined by."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.launch_support import Launcher, launcher, wait_for

__all__ = ["launcher"]

PLAIN = ("-q", "--no-preload")
SOON_S = 100.0  # far below the time for which the ranks wait if nobody ends them
PLACES = (("-n", "3"), ("-H", "localhost:3"))


def read_until(source: int, wanted: bytes, times: int = 1) -> bytes:
    """Read a terminal until some text has come so many times."""
    seen = b""
    while seen.count(wanted) < times:
        try:
            seen += os.read(source, 4096)
        except OSError as error:  # nobody has the terminal any more
            raise AssertionError(f"no {wanted!r} in {seen!r}") from error
    return seen


def test_full_disk_ends_the_job_with_a_code_of_its_own(launcher: Launcher) -> None:
    wait = ("sh", "-c", "echo up; exec sleep 300")
    with open("/dev/full", "wb") as full:
        jobs = [launcher.start(*place, "-q", "--grace", "250", *wait, stdout=full) for place in PLACES]
        shown = launcher.start("-n", "2", "--dry-run", "true", stdout=full)
    for job in jobs:
        outcome = job.finish(SOON_S)
        assert outcome.code == 74
        assert outcome.err_text == (
            "phalanx: standard output cannot be written: No space left on device; the job was ended\n"
        )
    outcome = shown.finish()
    assert (outcome.code, outcome.err_text) == (74, "phalanx: the output cannot be written: No space left on device\n")


# As a shell's job on a terminal: the leader of a session whose controlling terminal is its standard output.
ON_TERMINAL = f"""#!{sys.executable}
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
"""
QUIET, PRINTING = "exec sleep 300", "while :; do echo on; sleep 0.01; done"


@pytest.mark.parametrize("own", [True, False], ids=["own", "of-another-session"])
def test_terminal_that_is_closed_ends_the_job(launcher: Launcher, own: bool) -> None:
    """The kernel sends SIGHUP to a terminal's own session, and writing fails; of another one there is no signal."""
    if own:
        program = launcher.directory / "on-terminal"
        program.write_text(ON_TERMINAL)
        program.chmod(0o755)
        launcher.python = str(program)
    jobs = []
    for place in PLACES:
        for then in (QUIET, PRINTING) if own else (PRINTING,):
            master, slave = pty.openpty()
            streams = {"stdin": slave, "stdout": slave, "stderr": slave} if own else {"stdout": slave}
            job = launcher.start(*place, "-q", "--grace", "250", "sh", "-c", f"echo up; {then}", **streams)  # type: ignore[arg-type]
            os.close(slave)
            jobs.append((job, master))
    for job, master in jobs:
        read_until(master, b"up\r\n", 3)
        os.close(master)
        assert job.process.wait(SOON_S) == 128 + (signal.SIGHUP if own else signal.SIGPIPE)
        if job.process.stderr is not None:
            assert job.process.stderr.read() == b""
        job.wait_until_gone(SOON_S)


JOINS = {
    "torch": "import torch.distributed as d\nd.init_process_group('gloo')\nd.barrier()\nd.destroy_process_group()",
    "phalanx": "import phalanx\nphalanx.init()\nphalanx.close()",
    "phalanx's RPC": "from phalanx import rpc\nrpc.init()\nassert len(rpc.workers()) == 2\nrpc.shutdown()",
    "torch's RPC": "import os, torch.distributed.rpc as rpc\nrank = int(os.environ['RANK'])\n"
    "rpc.init_rpc(str(rank), rank=rank, world_size=2)\nrpc.shutdown()",
    "a store": "import os, torch.distributed as d\nrank = int(os.environ['RANK'])\n"
    "d.TCPStore('127.0.0.1', int(os.environ['MASTER_PORT']), 2, False).set(f'{rank}', '')",
}


def test_ranks_that_never_joined_are_noticed_and_others_are_not(launcher: Launcher) -> None:
    alone = launcher.script("import torch\nprint(torch.ones(2).sum())", "alone.py")
    for options in (["-n", "2", alone], ["-n", "2", sys.executable, "-u", alone]):
        outcome = launcher.run(*options)
        assert outcome.code == 0, outcome.err_text
        assert "none of the 2 ranks joined" in outcome.err_text
        assert "--pass-local-rank" in outcome.err_text
    joining = [["-n", "2", launcher.script(text, f"{number}.py")] for number, text in enumerate(JOINS.values())]
    plain = launcher.script("print('x')")  # it never imports torch
    for outcome in launcher.run_all(*joining, ["-n", "2", plain], ["-n", "1", alone], ["-n", "2", "-q", alone]):
        assert outcome.code == 0, outcome.err_text
        assert "ranks joined" not in outcome.err_text


VARIABLES = """
import os, sys
os.environ.update(OMP_NUM_THREADS='2', TORCH_DISTRIBUTED_DEBUG='DETAIL', OMP_PROC_BIND='true')
before = 'torch' in sys.modules
import torch.nn as nn
import torch, torch.distributed as dist
print(before, torch.get_num_threads(), dist.get_debug_level().name, nn is torch.nn, torch.__spec__.name)
"""


def test_variables_that_a_script_sets_count_or_are_said_to_come_too_late(launcher: Launcher) -> None:
    script = launcher.script(VARIABLES)
    threads = {"OMP_NUM_THREADS": "1"}
    shown, *others = launcher.run_all(
        *(["-n", "2", *option, script] for option in ([], ["--quiet"], ["--no-preload"])), environment=threads
    )
    for outcome in (shown, *others):
        assert outcome.code == 0, outcome.err_text
        assert sorted(outcome.out_lines) == [f"[rank {rank}] False 2 DETAIL True torch" for rank in (0, 1)]
    assert not any("OMP_PROC_BIND" in outcome.err_text for outcome in others)
    (line,) = [line for line in shown.err_text.splitlines() if "OMP_PROC_BIND" in line]
    assert line.startswith("[rank 0] phalanx: note: the script sets OMP_PROC_BIND before it imports torch")
    assert "--no-preload" in line


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_backend_that_does_not_fit_names_one_that_does(launcher: Launcher) -> None:
    script = launcher.script("""
        import torch.distributed as dist, phalanx
        try:
            phalanx.init(backend='nccl')
        except phalanx.PhalanxError as error:
            print(error)
        dist.init_process_group('nccl')
    """)
    outcome = launcher.run("-n", "2", "-q", script)
    said = "the backend nccl serves cuda devices, and this process sees no accelerator; phalanx fits the CPU"
    assert outcome.code == 1
    assert said in outcome.err_text.partition("of 2 failed")[2]
    assert said in outcome.out.decode()


def test_rank_that_is_debugged_has_the_terminal(launcher: Launcher) -> None:
    """A second Ctrl-C does not wait for it."""
    script = launcher.script("""
        import os, sys
        if os.environ['RANK'] != '2':
            print('other', sys.stdin.read() == '', flush=True)
            sys.exit()
        print('terminal', sys.stdin.isatty(), sys.stdout.isatty(), flush=True)
        print('answer', input('what? '), flush=True)
        while True:
            try: input('in ')
            except KeyboardInterrupt: pass
    """)
    master, slave = pty.openpty()
    options = ("-n", "3", "--debug", "2", *PLAIN, "--grace", "250")
    environment = {"TERM": "xterm"}
    job = launcher.start(*options, script, stdin=slave, stdout=slave, stderr=slave, environment=environment)
    os.close(slave)
    assert b"terminal True True" in read_until(master, b"what? ")
    os.write(master, b"forty-two\n")
    seen = read_until(master, b"answer forty-two")
    if b"in " not in seen.partition(b"answer")[2]:
        read_until(master, b"in ")
    job.process.send_signal(signal.SIGINT)
    read_until(master, b"in ")
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(SOON_S) == 130
    os.close(master)


def test_input_goes_to_one_rank_and_its_writer_notices_the_end(launcher: Launcher) -> None:
    counted = launcher.run("-n", "3", "-q", "--stdin", "1", "sh", "-c", "wc -c", data=b"12345")
    assert sorted(" ".join(line.split()) for line in counted.out_lines) == [
        "[rank 0] 0", "[rank 1] 5", "[rank 2] 0",
    ]  # fmt: skip
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
    assert job.process.wait(SOON_S) == 143
    scripts = [
        launcher.script(f"import os, time\nif os.environ['RANK'] == '1':\n    {statement}\ntime.sleep(300)\n", name)
        for statement, name in (("breakpoint()", "debugs.py"), ("input()", "asks.py"))
    ]
    debugs, asks = launcher.run_all(*(["-n", "2", *PLAIN, script] for script in scripts))
    assert "phalanx run --debug 1 " in debugs.err_text
    assert "phalanx run --stdin 1 " in asks.err_text


def test_places_in_which_no_job_can_start_are_named(launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script("print('x')")
    gone = tmp_path / "gone"
    shell = f"mkdir {gone} && cd {gone} && rmdir {gone} && exec {sys.executable} -m phalanx run -q "
    for target in (script, "-m json.tool", "script.py"):
        done = subprocess.run(["sh", "-c", shell + target], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr == "phalanx: the working directory has been deleted; change to one that exists\n"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not make a network namespace")
    command = ["unshare", "--net", sys.executable, "-m", "phalanx", "run", "-n", "2", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "could not reach each other at 127.0.0.1" in done.stderr
