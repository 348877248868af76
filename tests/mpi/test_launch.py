"""Jobs whose ranks an MPI launcher starts: the same table, prefixes, exit codes and ends; and nothing left."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch_support import Launcher, RunningJob, wait_for
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


def test_table_prefixes_arguments_and_places(launcher: Launcher, mpi: MpiEnvironment) -> None:
    script = launcher.script(
        "import os, sys\n"
        "from mpi4py import MPI\n"
        "e, world = os.environ, MPI.COMM_WORLD\n"
        "print(world.rank, world.size, e['RANK'], e['WORLD_SIZE'], e['LOCAL_RANK'], e['GROUP_WORLD_SIZE'],\n"
        "      sys.argv[1:], sys.path[0], os.getcwd(), e['OWN'], 'PHALANX_MPI_JOIN' in e)\n"
    )
    outcome = launcher.run("-n", "3", script, "--lr", "a b", environment={"OWN": "line\nbreak = 'x'"})
    assert outcome.code == 0, outcome.err_text
    title, *table = outcome.err_text.splitlines()
    assert title.startswith(f"phalanx run: 3 ranks of {script}, started by ")
    assert [line.split()[:4] for line in table[1:]] == [
        [str(rank), "0", os.uname().nodename, str(rank)] for rank in range(3)
    ]
    here = launcher.directory
    expected = []
    for rank in range(3):
        expected += [
            f"[rank {rank}] {rank} 3 {rank} 3 {rank} 1 ['--lr', 'a b'] {here} {here} line",
            f"[rank {rank}] break = 'x' False",
        ]
    assert sorted(outcome.out_lines) == sorted(expected)


def test_rank_0_reads_the_input(launcher: Launcher) -> None:
    script = launcher.script("import sys; print(repr(sys.stdin.read()))")
    outcome = launcher.run("-n", "2", "-q", script, data=b"one\ntwo\n")
    assert sorted(outcome.out_lines) == ["[rank 0] 'one\\ntwo\\n'", "[rank 1] ''"], outcome.err_text
    count = launcher.script("import sys; print(len(sys.stdin.read()))")
    much = launcher.run("-n", "2", "-q", count, data=b"x" * 1_000_000)
    assert sorted(much.out_lines) == ["[rank 0] 1000000", "[rank 1] 0"]


def test_much_output_comes_whole(launcher: Launcher) -> None:
    script = launcher.script(
        "import sys\n"
        "for i in range(40000):\n"
        "    print('x' * 80, i)\n"
        "    if i % 4 == 0: print('y' * 80, i, file=sys.stderr)\n"
    )
    outcome = launcher.run("-n", "2", "-q", script)
    assert outcome.code == 0
    for rank in range(2):
        mine = [line for line in outcome.out_lines if line.startswith(f"[rank {rank}]")]
        assert mine == [f"[rank {rank}] {'x' * 80} {i}" for i in range(40000)]
    assert len(outcome.err_text.splitlines()) == 20000


def test_an_exception_is_shown_once(launcher: Launcher) -> None:
    script = launcher.script(MEET + "if rank == 1: raise ValueError('bad thing')\nworld.Barrier()\n")
    outcome = launcher.run("-n", "3", "-q", script)
    text = outcome.err_text
    assert outcome.code == 1
    assert text.startswith("phalanx: rank 1 of 3 failed: ValueError: bad thing\n")
    assert text.count("Traceback") == 1
    assert "ranks 0, 2 ended by the launcher" in text
    assert "mpiexec" not in text
    assert "prterun" not in text
    assert not any(path.exists() for path in shared_memory(outcome.out_lines))


@pytest.mark.parametrize(
    ("statement", "code", "said"),
    [
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
    assert "Traceback" not in outcome.err_text
    assert not any(path.exists() for path in shared_memory(outcome.out_lines))


def test_a_syntax_error_is_told_once_and_nothing_is_started(launcher: Launcher) -> None:
    outcome = launcher.run("-n", "2", "-q", launcher.script("print('hello')\ndef (\n"))
    assert (outcome.code, outcome.out) == (1, b"")
    assert outcome.err_text.count("SyntaxError") == 1


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything_when_the_grace_is_over(launcher: Launcher, signum: int, code: int) -> None:
    ignore = "for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, signal.SIG_IGN)\n"
    script = launcher.script(
        MEET.replace("world.allreduce", f"{ignore}os.system('setsid sleep 300 &')\nworld.allreduce")
        + "while True: time.sleep(300)\n"
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


def test_interrupted_ranks_clean_up_without_a_flood(launcher: Launcher) -> None:
    script = f"{MEET}try:\n    print('in')\n    time.sleep(300)\nfinally:\n    print('cleaned up')\n"
    job = launcher.start("-n", "2", "-q", launcher.script(script))
    job.read_lines(4)  # each is up, and in
    job.process.send_signal(signal.SIGINT)
    outcome = job.finish()
    assert outcome.code == 130
    assert sorted(outcome.out_lines) == ["[rank 0] cleaned up", "[rank 1] cleaned up"]
    assert outcome.err_text == "phalanx: SIGINT: all 2 ranks have been ended\n"


def test_a_second_interrupt_kills_at_once(launcher: Launcher) -> None:
    script = launcher.script(
        WAIT.replace("import os", "import os, signal\nsignal.signal(2, lambda *_: print('asked'))\nimport os")
    )
    job = launcher.start("-n", "2", "-q", "--grace", "250", script)
    wait_for_ranks(job, 2)
    job.process.send_signal(signal.SIGINT)
    assert job.read_lines(2) == ["[rank 0] asked", "[rank 1] asked"]
    job.process.send_signal(signal.SIGINT)
    assert job.finish(SOON_S).code == 130


@pytest.mark.parametrize("victim", ["launcher", "phalanx-relay", "mpiexec", "phalanx-shim", "phalanx-keeper", "rank-1"])
def test_sigkill_of_any_process_leaves_nothing(launcher: Launcher, victim: str) -> None:
    job = launcher.start("-n", "3", "-q", launcher.script(WAIT))
    with nothing_left(wait_for_ranks(job, 3)):
        os.kill(find(job, victim), signal.SIGKILL)
        job.wait_until_gone(SOON_S)
    outcome = job.finish()
    if victim == "launcher":
        assert outcome.code == -signal.SIGKILL
    else:
        assert outcome.code != 0
        assert outcome.err_text.startswith("phalanx: ")
        assert "Traceback" not in outcome.err_text
    if victim == "rank-1":
        assert outcome.code == 137
        assert "rank 1 of 3 failed" in outcome.err_text
    if victim == "mpiexec":
        assert outcome.code == 137
        assert "was ended by signal 9 (SIGKILL), and ranks 0-2 with it" in outcome.err_text


def find(job: RunningJob, victim: str) -> int:
    if victim == "launcher":
        return job.pid
    found = {}
    for pid in job.processes():
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            found[pid] = stat[stat.index("(") + 1 : stat.rindex(")")], int(stat.rpartition(")")[2].split()[1])
    if victim == "mpiexec":
        relay = next(pid for pid, (name, _) in found.items() if name == "phalanx-relay")
        return next(pid for pid, (_, parent) in found.items() if parent == relay)
    return next(pid for pid, (name, _) in found.items() if name == victim)


def test_a_grandchild_that_holds_the_output_is_ended_with_its_rank(launcher: Launcher) -> None:
    outcome = launcher.run("-n", "2", "-q", "sh", "-c", "(setsid sh -c 'sleep 300 & sleep 300' & ) & echo left")
    assert outcome.code == 0
    assert sorted(outcome.out_lines) == ["[rank 0] left", "[rank 1] left"]
    assert outcome.elapsed_s < 250  # not as long as the grandchildren sleep


def test_ranks_follow_the_order_of_the_hosts(launcher: Launcher, mpi: MpiEnvironment, tmp_path: Path) -> None:
    # Stands in for ssh: starts what it is told here, where every process learns which host it was meant for.
    stand_in = tmp_path / "ssh"
    stand_in.write_text(
        "#!/bin/sh\n"
        "while :; do case $1 in -o|-l|-p) shift 2;; -*) shift;; *) break;; esac; done\n"
        'host=$1; shift; export MEANT_FOR=$host; exec sh -c "$*"\n'
    )
    stand_in.chmod(0o755)
    if mpi.is_openmpi:
        mpiexec = f"mpiexec --prtemca plm_ssh_agent {stand_in}"
    elif mpi.is_mpich:
        mpiexec = f"mpiexec -launcher ssh -launcher-exec {stand_in}"
    else:
        mpiexec = f"mpiexec -bootstrap ssh -bootstrap-exec {stand_in}"
    for hosts, expected in (
        (["--hosts", "b,a", "--ppn", "1"], ["b", "a"]),
        (["--hosts", "a:3,b:2", "-n", "4"], ["a", "a", "a", "b"]),
    ):
        outcome = launcher.run("--mpi", mpiexec, *hosts, "sh", "-c", "echo $MEANT_FOR $MASTER_ADDR")
        assert outcome.code == 0, outcome.err_text
        assert sorted(outcome.out_lines) == [f"[rank {rank}] {host} 127.0.0.1" for rank, host in enumerate(expected)]
        # The truth is that they are all on one host, and that is what is said.
        assert "phalanx: note: mpiexec was asked for rank" in outcome.err_text


def test_what_the_mpi_launcher_says_is_shown_when_nothing_comes_of_it(launcher: Launcher, mpi: MpiEnvironment) -> None:
    mpiexec = "mpiexec --no-such-option" if mpi.is_openmpi else "mpiexec -no-such-option"
    outcome = launcher.run("--mpi", mpiexec, "-n", "2", "true")
    assert outcome.code not in (0, 2)
    assert "before ranks 0-1 had come" in outcome.err_text
    assert "no-such-option" in outcome.err_text


def test_dry_run_shows_the_command_and_starts_nothing(launcher: Launcher) -> None:
    made = launcher.directory / "made"
    script = launcher.script(f"open({str(made)!r}, 'w')")
    outcome = launcher.run("--hosts", "h1:2,h2:1", "--dry-run", script)
    title, _, *rows, command = outcome.out.decode().splitlines()
    assert title == f"phalanx run: 3 ranks of {script}"
    assert [row.split()[:4] for row in rows] == [["0", "0", "h1", "0"], ["1", "0", "h1", "1"], ["2", "1", "h2", "0"]]
    assert "mpiexec" in command
    assert not made.exists()


def test_this_interpreter_needs_no_mpi_of_its_own(tmp_path: Path, mpi: MpiEnvironment) -> None:
    made = Launcher(tmp_path, sys.executable)
    try:
        outcome = made.run("--mpi", mpi.mpiexec, "-n", "2", "-q", "sh", "-c", "echo $RANK")
        assert sorted(outcome.out_lines) == ["[rank 0] 0", "[rank 1] 1"], outcome.err_text
        made.check()
    finally:
        made.close()


def test_signals_and_stacks_reach_the_ranks_and_come_back(launcher: Launcher) -> None:
    script = launcher.script("""
        import signal, time
        signal.signal(signal.SIGUSR1, lambda *_: print('usr1', flush=True))
        print('up', flush=True)
        while True:
            time.sleep(300)
    """)
    job = launcher.start("-n", "2", script)
    job.read_lines(2)
    job.process.send_signal(signal.SIGUSR1)
    assert job.read_lines(2) == ["[rank 0] usr1", "[rank 1] usr1"]
    job.process.send_signal(signal.SIGTERM)
    outcome = job.finish()
    assert outcome.code == 143
    assert outcome.err_text.endswith(":5 time.sleep(300)\n"), outcome.err_text
    assert "  ranks 0-1: " in outcome.err_text


# MPICH and Intel MPI set a handler for SIGUSR1 when MPI starts, which calls only one that was there before.
@pytest.mark.parametrize(("signum", "mpi_starts"), [(signal.SIGUSR1, "after"), (signal.SIGUSR2, "before")])
def test_a_signal_waits_for_the_handler_of_a_rank_that_uses_mpi(
    launcher: Launcher, tmp_path: Path, signum: int, mpi_starts: str
) -> None:
    sent = tmp_path / "sent"
    script = launcher.script(f"""
        import os, signal, time
        got = []
        if {mpi_starts!r} == "before":
            from mpi4py import MPI
        print('no handler yet', flush=True)
        while not os.path.exists({str(sent)!r}):
            time.sleep(0.01)
        time.sleep(0.5)  # a signal that is passed on at once comes now, and ends it
        signal.signal({int(signum)}, lambda *_: got.append(1))
        from mpi4py import MPI
        while not got:
            time.sleep(0.01)
        MPI.COMM_WORLD.Barrier()
    """)
    job = launcher.start("-n", "2", "-q", script)
    job.read_lines(2)
    job.process.send_signal(signum)
    sent.touch()
    outcome = job.finish()
    assert outcome.code == 0, outcome.err_text


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
