"""Jobs whose ranks an MPI launcher starts: the same table, prefixes, exit codes and ends; and nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch_support import Launcher, RunningJob, comm, wait_for
from tests.mpi.environments import MpiEnvironment

# Far above what a busy machine needs, and below the 300 s for which the ranks wait if nobody ends them.
SOON_S = 60.0
# Meets over MPI, so that the library has made its shared memory, and says which; then does what the test wants.
MEET = """
import os, signal, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
rank = world.rank
world.allreduce(list(range(20000)))
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps if " /dev/shm/" in line and "deleted" not in line}
print("up", *sorted(files), flush=True)
world.Barrier()
"""
WAIT = MEET + "while True: time.sleep(300)\n"


def shared_memory(lines: list[str]) -> set[Path]:
    """What the ranks of a job said they have mapped."""
    return {Path(word) for line in lines for word in line.split() if word.startswith("/dev/shm/")}


def wait_for_ranks(job: RunningJob, count: int) -> set[Path]:
    lines = job.read_lines(count)
    assert all(" up" in line for line in lines), lines
    return shared_memory(lines)


@contextlib.contextmanager
def nothing_left(files: set[Path]) -> Iterator[None]:
    assert all(path.exists() for path in files)
    yield
    wait_for(lambda: not any(path.exists() for path in files), SOON_S, lambda: f"left: {files}")


def test_table_prefixes_arguments_input_and_output(launcher: Launcher, mpi: MpiEnvironment) -> None:
    script = launcher.script("""
        import os, sys
        from mpi4py import MPI
        e, world = os.environ, MPI.COMM_WORLD
        print(world.rank, world.size, e['RANK'], e['WORLD_SIZE'], e['LOCAL_RANK'], e['GROUP_WORLD_SIZE'],
              sys.argv[1:], sys.path[0], os.getcwd(), e['OWN'], 'PHALANX_MPI_JOIN' in e)
        print(len(sys.stdin.read()))
        for i in range(40000):
            print('x' * 80, i, file=sys.stderr)
    """)
    environment = {"OWN": "line\nbreak = 'x'"}
    outcome = launcher.run("-n", "3", script, "--lr", "a b", environment=environment, data=b"x" * 1_000_000)
    assert outcome.code == 0
    title, *table = outcome.err_text.splitlines()
    assert title.startswith(f"phalanx run: 3 ranks of {script}, started by ")
    assert [line.split()[:4] for line in table[1:4]] == [
        [str(rank), "0", os.uname().nodename, str(rank)] for rank in range(3)
    ]
    here = launcher.directory
    for rank in range(3):
        assert [line for line in outcome.out_lines if line.startswith(f"[rank {rank}]")] == [
            f"[rank {rank}] {rank} 3 {rank} 3 {rank} 1 ['--lr', 'a b'] {here} {here} line",
            f"[rank {rank}] break = 'x' False",
            f"[rank {rank}] {0 if rank else 1_000_000}",
        ]
        mine = [line for line in table if line.startswith(f"[rank {rank}]")]
        assert mine == [f"[rank {rank}] {'x' * 80} {i}" for i in range(40000)]


@pytest.mark.parametrize(
    ("statement", "code", "said"),
    [
        ("raise ValueError('bad thing')", 1, "phalanx: rank 1 of 3 failed: ValueError: bad thing\n"),
        ("sys.exit('some words')", 1, "[rank 1] some words"),
        ("os._exit(4)", 4, "no Python exception"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "signal 9 (SIGKILL)"),
        ("os.abort()", 134, "signal 6 (SIGABRT)"),
        ("world.Abort(5)", 5, "exit code 5"),
    ],
)
def test_exit_codes(launcher: Launcher, statement: str, code: int, said: str) -> None:
    script = launcher.script(f"{MEET}if rank == 1:\n    {statement}\nworld.Barrier()\ntime.sleep(300)\n")
    outcome = launcher.run("-n", "3", "-q", script)
    assert outcome.code == code, outcome.err_text
    assert said in outcome.err_text
    assert "rank 1 of 3 failed" in outcome.err_text
    assert "ranks 0, 2 ended by the launcher" in outcome.err_text
    assert outcome.err_text.count("Traceback") == ("raise" in statement)
    assert not any(word in outcome.err_text for word in ("mpiexec", "prterun"))
    assert not any(path.exists() for path in shared_memory(outcome.out_lines))


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_everything_when_the_grace_is_over(launcher: Launcher, signum: int, code: int) -> None:
    ignore = "for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, signal.SIG_IGN)\n"
    script = launcher.script(
        WAIT.replace("world.allreduce", f"{ignore}os.system('setsid sleep 300 &')\nworld.allreduce")
    )
    job = launcher.start("-n", "3", "-q", "--grace", "1", script)
    with nothing_left(wait_for_ranks(job, 3)):
        job.process.send_signal(signum)
        job.wait_until_gone(SOON_S)
    outcome = job.finish()
    assert outcome.code == code
    assert outcome.err_text.splitlines() == [
        f"phalanx: {signal.Signals(signum).name}: all 3 ranks have been ended",
        "phalanx: ranks 0-2 did not end within 1 s and were killed; --grace gives ranks longer",
    ]


def test_interrupted_ranks_clean_up_and_a_second_interrupt_kills(launcher: Launcher) -> None:
    script = f"{MEET}try:\n    print('in')\n    time.sleep(300)\nfinally:\n    print('cleaned up')\n"
    job = launcher.start("-n", "2", "-q", launcher.script(script))
    job.read_lines(4)  # each is up, and in
    job.process.send_signal(signal.SIGINT)
    outcome = job.finish()
    assert outcome.code == 130
    assert sorted(outcome.out_lines) == ["[rank 0] cleaned up", "[rank 1] cleaned up"]
    assert outcome.err_text == "phalanx: SIGINT: all 2 ranks have been ended\n"
    deaf = WAIT.replace("import os", "import os, signal\nsignal.signal(2, lambda *_: print('asked'))\nimport os")
    job = launcher.start("-n", "2", "-q", "--grace", "250", launcher.script(deaf))
    job.read_lines(2)
    job.process.send_signal(signal.SIGINT)
    assert job.read_lines(2) == ["[rank 0] asked", "[rank 1] asked"]
    job.process.send_signal(signal.SIGINT)
    assert job.finish(SOON_S).code == 130


@pytest.mark.parametrize("victim", ["launcher", "mpiexec", "phalanx-shim", "phalanx-agent", "rank-1"])
def test_sigkill_of_any_process_leaves_nothing(launcher: Launcher, victim: str) -> None:
    job = launcher.start("-n", "3", "-q", launcher.script(WAIT))
    with nothing_left(wait_for_ranks(job, 3)):
        os.kill(find(job, victim), signal.SIGKILL)
        job.wait_until_gone(SOON_S)
    outcome = job.finish()
    if victim == "launcher":
        assert outcome.code == -signal.SIGKILL
        return
    assert outcome.code != 0
    assert outcome.err_text.startswith("phalanx: ")
    assert "Traceback" not in outcome.err_text
    of = {"rank-1": "rank 1 of 3 failed", "mpiexec": "was ended by signal 9 (SIGKILL), and ranks 0-2 with it"}
    if victim in of:
        assert outcome.code == 137
        assert of[victim] in outcome.err_text


def find(job: RunningJob, victim: str) -> int:
    if victim == "launcher":
        return job.pid
    if victim == "mpiexec":
        return int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()[0])
    return next(pid for pid in job.processes() if comm(pid) == victim)


def test_what_does_not_start_is_said_and_a_dry_run_starts_nothing(
    launcher: Launcher, mpi: MpiEnvironment, tmp_path: Path
) -> None:
    """This interpreter needs no MPI of its own."""
    broken = launcher.run("-n", "2", "-q", launcher.script("print('hello')\ndef (\n"))
    assert (broken.code, broken.out, broken.err_text.count("SyntaxError")) == (1, b"", 1)
    mpiexec = "mpiexec --no-such-option" if mpi.is_openmpi else "mpiexec -no-such-option"
    outcome = launcher.run("--mpi", mpiexec, "-n", "2", "true")
    assert outcome.code not in (0, 2)
    assert "before ranks 0-1 had come" in outcome.err_text
    assert "no-such-option" in outcome.err_text
    made = launcher.directory / "made"
    script = launcher.script(f"open({str(made)!r}, 'w')")
    title, _, *rows, command = launcher.run("--hosts", "h1:2,h2:1", "--dry-run", script).out_lines
    assert title == f"phalanx run: 3 ranks of {script}"
    assert [row.split()[:4] for row in rows] == [["0", "0", "h1", "0"], ["1", "0", "h1", "1"], ["2", "1", "h2", "0"]]
    assert "mpiexec" in command
    assert not made.exists()
    launcher.python, launcher.options = sys.executable, ("--mpi", mpi.mpiexec)
    outcome = launcher.run("-n", "2", "-q", "sh", "-c", "echo $RANK")
    assert sorted(outcome.out_lines) == ["[rank 0] 0", "[rank 1] 1"], outcome.err_text


def phalanx(*words: str) -> str:
    command = [sys.executable, "-m", "phalanx", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def test_ranks_are_watched_signalled_and_stopped_like_others(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import signal, time, torch, phalanx
        signal.signal(signal.SIGUSR1, lambda *_: print('usr1', flush=True))
        world = phalanx.init()
        x = torch.ones(4)
        world.all_reduce(x)
        print("ready", flush=True)
        if world.rank == 1:
            while True: time.sleep(300)
        world.barrier()
        """
    )
    job = launcher.start("-n", "2", script)
    job.read_lines(2)
    listed = next(one for one in json.loads(phalanx("list", "--json")) if one["pid"] == job.pid)
    assert listed["mpi"]
    assert listed["ranks"] == 2
    first, second = json.loads(phalanx("top", str(job.pid), "--once", "--json"))["ranks"]
    assert (first["state"], first["operation"]["kind"]) == ("waits", "barrier")
    assert (second["state"], second["last"]["kind"], second["lag"]) == ("sleeps", "all_reduce", 1)
    job.process.send_signal(signal.SIGUSR1)
    assert job.read_lines(2) == ["[rank 0] usr1", "[rank 1] usr1"]
    assert "2 ranks) has ended" in phalanx("stop", str(job.pid))
    outcome = job.finish()
    assert outcome.code == 128 + signal.SIGTERM
    assert "script.py:8 while True: time.sleep(300)\n" in outcome.err_text


def test_ranks_are_started_again_after_a_failure(launcher: Launcher, mpi: MpiEnvironment) -> None:
    script = launcher.script("""
        import os, sys
        from mpi4py import MPI
        world, attempt = MPI.COMM_WORLD, os.environ["PHALANX_ATTEMPT"]
        print(attempt, world.rank, world.allreduce(1), flush=True)
        world.Barrier()
        if (attempt, world.rank) == ("0", 1):
            os._exit(3)
        world.Barrier()
    """)
    outcome = launcher.run("-n", "2", "--no-prefix", "-q", "--restarts", "1", script)
    assert outcome.code == 0, outcome.err_text
    assert sorted(outcome.out_lines) == ["0 0 2", "0 1 2", "1 0 2", "1 1 2"]
    assert "attempt 1 of 2 failed; attempt 2 of 2 starts now" in outcome.err_text
