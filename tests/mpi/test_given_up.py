"""What is left unfinished over MPI: operations given up, interrupted by a signal handler, messages nobody waits for."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

import pytest
from tests.mpi.environments import SETTINGS, MpiEnvironment

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300

LATE = """
import os, sys, time, torch, torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from phalanx.errors import CollectiveTimeout

dist.init_process_group("mpi")
rank, size = dist.get_rank(), dist.get_world_size()
dist.barrier()
dist.group.WORLD.set_timeout(timedelta(seconds=3))  # now: a busy machine brings some ranks seconds later

def until_told(others):
    until = time.monotonic() + 100
    while len(list(Path(sys.argv[1]).glob("told-*"))) < others and time.monotonic() < until:
        time.sleep(0.01)

if rank == size - 1:
    until_told(size - 1)
began = time.monotonic()
try:
    dist.all_reduce(torch.ones(4))
except CollectiveTimeout as error:
    print(rank, "in time" if time.monotonic() - began < 20 else "late", error, flush=True)
    print("blames itself" if (error.rank, error.pid) == (rank, os.getpid()) else "blames another", flush=True)
    Path(sys.argv[1], f"told-{rank}").touch()
until_told(size)  # nobody ends the job for the others
"""

INTERRUPTED = """
import signal, sys, time, torch, torch.distributed as dist
from pathlib import Path

def until_there(name):
    until = time.monotonic() + 100
    while not Path(sys.argv[2], name).exists() and time.monotonic() < until:
        time.sleep(0.01)

class Alarm(Exception): pass
def raises(*_): raise Alarm
signal.signal(signal.SIGALRM, raises)
dist.init_process_group("mpi")
rank = dist.get_rank()
def call(): dist.all_reduce(torch.ones(1))
call()  # the first call from a line looks the line up, which takes longer than the signal: it would never come further
dist.barrier()
if rank == 0:
    begun = dist.group.WORLD._communicator._agreement.sequence
    # On a busy machine the signal may fall before the call begins, where it does no harm.
    while dist.group.WORLD._communicator._agreement.sequence == begun:
        try:
            signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
            call()
        except Alarm:
            print(0, "interrupted", flush=True)
    try:
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        print(0, "then", type(error).__name__, error, flush=True)
    dist.destroy_process_group()
    print(0, "destroyed", flush=True)
    Path(sys.argv[2], "destroyed").touch()
    until_there("told")  # its end aborts the job
else:
    until_there("destroyed")
    try:
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        print(rank, type(error).__name__, error, flush=True)
    Path(sys.argv[2], "told").touch()
"""

STOPPED = """
import os, signal, sys, time, torch, torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from phalanx.errors import CollectiveTimeout

def is_stopped(pid):
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] == "T"

dist.init_process_group("mpi")
rank, folder = dist.get_rank(), Path(sys.argv[1])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
dist.barrier()
dist.group.WORLD.set_timeout(timedelta(seconds=3))
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
if rank == 2:  # cannot answer, like a rank that waits for rank 1 in MPI itself
    while not (folder / "told").exists():
        time.sleep(0.01)
if rank == 0:
    while not is_stopped((folder / "pid-1").read_text()):
        time.sleep(0.01)
    try:
        if sys.argv[2] == "recv":
            dist.recv(torch.ones(4), 1)
        else:
            dist.all_reduce(torch.ones(4))
    except CollectiveTimeout as error:
        print(error, error.group_rank, error.rank, flush=True)
        (folder / "told").touch()
"""

NOT_WAITED_FOR = """
import sys, time, torch, torch.distributed as dist

dist.init_process_group("mpi")
rank, numbers = dist.get_rank(), 1 << 22
dist.barrier()
if rank == 0:
    work = dist.isend(torch.full((numbers,), 7.0), 1)
    if sys.argv[1] == "destroy":
        dist.destroy_process_group()
elif rank == 1:
    time.sleep(1)
    got = torch.zeros(numbers)
    dist.recv(got, 0)
    print(got.min().item(), got.max().item())
"""

EXIT_HANDLER = """
import atexit, sys, torch, torch.distributed as dist

atexit.register(dist.destroy_process_group)
dist.init_process_group("mpi")
dist.barrier()
if dist.get_rank() == 1:
    sys.exit(3)
dist.all_reduce(torch.ones(1000))
"""


EXITS_WITHIN = """
import signal, sys, time, torch, torch.distributed as dist

dist.init_process_group("mpi")
dist.barrier()
if dist.get_rank() == 1:
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(0))
    signal.setitimer(signal.ITIMER_REAL, 1.0)
else:
    time.sleep(300)  # so that nobody else says it
dist.all_reduce(torch.ones(4))
"""


def run(mpi: MpiEnvironment, ranks: int, folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text)
    own = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [mpi.mpiexec, "-n", str(ranks), mpi.python, script, *arguments],
        env={**own, **SETTINGS, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.long)])
def test_a_rank_that_comes_when_others_have_given_up_is_told_at_once(
    mpi: MpiEnvironment, ranks: int, tmp_path: Path
) -> None:
    ended = run(mpi, ranks, tmp_path, LATE, str(tmp_path))
    for rank in range(ranks):
        assert f"{rank} in time" in ended.stdout, ended.stdout + ended.stderr
    who = rf"rank {ranks - 1} of the group \(pid \d+ on \S+\), which is at until_told \(\S+:\d+\),"
    assert re.search(rf"{who} did not come within 3 s", ended.stdout)
    assert f"given up when rank {ranks - 1} came to all_reduce(float32[4], sum)" in ended.stdout
    assert ended.stdout.count("blames itself") == 1
    assert ended.stdout.count("blames another") == ranks - 1
    assert ended.returncode == 1  # an operation is unanswered, and MPI could not end in order


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_of_ranks_that_do_not_come_one_that_is_stopped_is_named_as_that(
    mpi: MpiEnvironment, call: str, tmp_path: Path
) -> None:
    ended = run(mpi, 3, tmp_path, STOPPED, str(tmp_path), call)
    pid = (tmp_path / "pid-1").read_text()
    who = f"rank 1 of the group (pid {pid} on {platform.node()})"
    words = f"{who}, which was stopped (state T), did not come within 3 s while rank 0 was in {call}"
    assert words in ended.stdout, ended.stdout + ended.stderr
    assert ended.stdout.rstrip().endswith(" 1 1")
    assert ended.returncode != 0


@pytest.mark.parametrize("after_s", ["0.00006", "0.0001", "0.01"])
def test_group_that_a_signal_handler_interrupts_is_broken_everywhere(
    mpi: MpiEnvironment, after_s: str, tmp_path: Path
) -> None:
    ended = run(mpi, 2, tmp_path, INTERRUPTED, after_s, str(tmp_path))
    for said in (
        "0 interrupted",
        "0 then PeerLost",
        "0 destroyed",
        "1 PeerLost rank 0 of the group (pid ",
        ") was interrupted in",
    ):
        assert said in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.parametrize("end", ["destroy", "end"])
@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.long)])
def test_a_message_that_nobody_waits_for_arrives_whole(
    mpi: MpiEnvironment, ranks: int, end: str, tmp_path: Path
) -> None:
    ended = run(mpi, ranks, tmp_path, NOT_WAITED_FOR, end)
    assert (ended.returncode, ended.stdout.split()) == (0, ["7.0", "7.0"]), ended.stdout + ended.stderr


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.long)])
def test_a_rank_that_exits_within_a_call_says_in_which(mpi: MpiEnvironment, ranks: int, tmp_path: Path) -> None:
    """MPI cannot end in order, so its end is a failure, although the exit code was 0."""
    ended = run(mpi, ranks, tmp_path, EXITS_WITHIN)
    assert ended.returncode != 0, ended.stdout + ended.stderr
    why = r"all_reduce\(float32\[4\], sum\) at \S*script\.py:11 was interrupted by SystemExit"
    words = rf"rank 1: MPI cannot end in order, .* may still answer \({why}\); the job is aborted when this rank ends"
    assert re.search(words, ended.stderr + ended.stdout), ended.stdout + ended.stderr


def test_an_exit_handler_that_destroys_the_group_keeps_the_exit_code(mpi: MpiEnvironment, tmp_path: Path) -> None:
    ended = run(mpi, 3, tmp_path, EXIT_HANDLER)
    assert ended.returncode == 3, ended.stdout + ended.stderr
