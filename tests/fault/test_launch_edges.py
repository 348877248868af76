"""The launcher at its edges: full disks, terminals that close, variables, debuggers, what ranks joined by."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
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


# As a shell's job on a terminal: the leader of a session whose controlling terminal is its standard output.
ON_TERMINAL = f"""#!{sys.executable}
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
"""


JOINS = {
    "torch": "import torch.distributed as d\nd.init_process_group('gloo')\nd.barrier()",
    "phalanx": "import phalanx\nphalanx.init()\nphalanx.close()",
    "a store": "import os, torch.distributed as d\nrank = int(os.environ['RANK'])\n"
    "d.TCPStore('127.0.0.1', int(os.environ['MASTER_PORT']), 2, False).set(f'{rank}', '')",
    "phalanx's RPC": "from phalanx import rpc\nrpc.init()\nassert len(rpc.workers()) == 2\nrpc.shutdown()",
    "torch's RPC": "import os, torch.distributed.rpc as rpc\nrank = int(os.environ['RANK'])\n"
    "rpc.init_rpc(str(rank), rank=rank, world_size=2)\nrpc.shutdown()",
}


def joined_somehow(launcher: Launcher, *ways: str) -> None:
    commands = [["-n", "2", launcher.script(JOINS[way], f"{number}.py")] for number, way in enumerate(ways)]
    for outcome in launcher.run_all(*commands):
        assert outcome.code == 0, outcome.err_text
        assert "ranks joined" not in outcome.err_text


@pytest.mark.long
def test_ranks_that_joined_by_torch_or_rpc_are_not_said_to_be_alone(launcher: Launcher) -> None:
    joined_somehow(launcher, "torch", "phalanx's RPC", "torch's RPC")


def test_ranks_that_never_joined_and_variables_too_late_are_noticed(launcher: Launcher) -> None:
    alone = launcher.script(
        """
        import os, sys
        os.environ.update(OMP_NUM_THREADS='2', TORCH_DISTRIBUTED_DEBUG='DETAIL', OMP_PROC_BIND='true')
        before = 'torch' in sys.modules
        import torch.nn as nn
        import torch, torch.distributed as dist
        print(before, torch.get_num_threads(), dist.get_debug_level().name, nn is torch.nn, torch.__spec__.name)
        """,
        "alone.py",
    )
    outcome = launcher.run("-n", "2", alone, environment={"OMP_NUM_THREADS": "1"})
    assert outcome.code == 0, outcome.err_text
    assert "none of the 2 ranks joined" in outcome.err_text
    assert "--pass-local-rank" in outcome.err_text
    assert sorted(outcome.out_lines) == [f"[rank {rank}] False 2 DETAIL True torch" for rank in (0, 1)]
    (line,) = [line for line in outcome.err_text.splitlines() if "OMP_PROC_BIND" in line]
    assert line.startswith("[rank 0] phalanx: note: the script sets OMP_PROC_BIND before it imports torch")
    assert "--no-preload" in line
    joined_somehow(launcher, "phalanx", "a store")


def test_input_goes_to_one_rank_and_a_debugged_one_has_the_terminal(launcher: Launcher) -> None:
    """The writer notices the end; a second Ctrl-C does not wait for the rank that is debugged."""
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
    script = launcher.script("""
        import os, sys
        if os.environ['RANK'] != '2':
            print('other', sys.stdin.read() == '', flush=True)
            sys.exit()
        print(f'terminal {sys.stdin.isatty()} {sys.stdout.isatty()}', flush=True)  # in one piece, between others
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


@pytest.mark.long
def test_output_or_place_of_which_there_is_none_ends_the_job(launcher: Launcher, tmp_path: Path) -> None:
    """A full disk; a folder that was deleted; no network; a closed terminal, which sends SIGHUP to its own session."""
    ranks = ("-q", "--grace", "250", "sh", "-c")
    with open("/dev/full", "wb") as full:
        on_disk = [launcher.start(*place, *ranks, "echo up; exec sleep 300", stdout=full) for place in PLACES]
    program = launcher.directory / "on-terminal"
    program.write_text(ON_TERMINAL)
    program.chmod(0o755)
    printing = "while :; do echo on; sleep 0.01; done"
    on_terminal = []
    for own, place, then in (
        (True, PLACES[0], "exec sleep 300"),
        (True, PLACES[1], printing),
        (False, PLACES[0], printing),
        (False, PLACES[1], printing),
    ):
        launcher.python = str(program) if own else sys.executable
        master, slave = pty.openpty()
        streams = {"stdin": slave, "stdout": slave, "stderr": slave} if own else {"stdout": slave}
        job = launcher.start(*place, *ranks, f"echo up; {then}", **streams)  # type: ignore[arg-type]
        os.close(slave)
        on_terminal.append((job, master, 128 + (signal.SIGHUP if own else signal.SIGPIPE)))
    for job in on_disk:
        outcome = job.finish(SOON_S)
        assert outcome.code == 74
        assert outcome.err_text == (
            "phalanx: standard output cannot be written: No space left on device; the job was ended\n"
        )
    for job, master, code in on_terminal:
        read_until(master, b"up\r\n", 3)
        os.close(master)
        assert job.process.wait(SOON_S) == code
        if job.process.stderr is not None:
            assert job.process.stderr.read() == b""
        job.wait_until_gone(SOON_S)
    gone = tmp_path / "gone"
    shell = f"mkdir {gone} && cd {gone} && rmdir {gone} && exec {sys.executable} -m phalanx run -q -m json.tool"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "phalanx: the working directory has been deleted; change to one that exists\n"
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "phalanx", "run", "-n", "2", "--dry-run", "true"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    expected = "phalanx: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (74, expected)
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not make a network namespace")
    command = ["unshare", "--net", sys.executable, "-m", "phalanx", "run", "-n", "2", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "could not reach each other at 127.0.0.1" in done.stderr
