"""Under ``phalanx run --mpi`` the rank that broke first is named, and not one that MPI ended because of that.

A process that ends loses its memory and its connections before its parent is told. An MPI library that reads from it
then ends the process that reads, and its launcher kills all others; so the keeper of the rank that broke may be the
last to report. Here that order is forced: a rank stops its keeper before it falls, and the keeper goes on when another
rank has been ended for what followed. A program takes the place of the MPI launcher, so these need no MPI.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.hydra import write_mpiexec
from tests.support.waiting import await_end, soon

__all__ = ["launcher"]

ERROR = "Abort(745090447) on node 0 (rank 0 in comm 496): Fatal error in internal_Allreduce_c: Other MPI error"
RANKS = """
    import os, signal, sys, time
    from pathlib import Path

    folder, rank = Path(os.environ["FOLDER"]), int(os.environ["RANK"])

    def put(name, what):
        (folder / f"{name}.part").write_text(str(what))
        (folder / f"{name}.part").rename(folder / name)

    def wait_for(name):
        while not (folder / name).exists():
            time.sleep(0.01)
        return int((folder / name).read_text())

    if rank == 2:
        put("other", os.getpid())
    if rank == 1:
        wait_for("other")
        keeper = os.getppid()
        os.kill(keeper, signal.SIGSTOP)
        while Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        put("keeper", keeper)
        put("first", os.getpid())
        exec(sys.argv[1])
    if rank == 0:
        first = wait_for("first")
        while Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        print(sys.argv[2], file=sys.stderr, flush=True)
        if sys.argv[3] == "kills":
            put("abort", 0)
        os._exit(0x8F)
    time.sleep(600)
"""


def go_on(folder: Path) -> None:
    """Continue the keeper, unless the launcher has: it does so to end the job."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((folder / "keeper").read_text()), signal.SIGCONT)


@pytest.mark.parametrize(
    ("falls", "code", "said", "launcher_then"),
    [
        ("os._exit(3)", 3, "phalanx: rank 1 of 3 failed\n", "kills"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "ended by signal 9 (SIGKILL)\n", "waits"),
        ("raise ValueError('bad thing')", 1, "phalanx: rank 1 of 3 failed: ValueError: bad thing\n", "kills"),
    ],
)
def test_rank_that_broke_first_is_named_though_its_end_is_told_last(
    launcher: Launcher, tmp_path: Path, falls: str, code: int, said: str, launcher_then: str
) -> None:
    arguments = ["-n", "3", "-q", launcher.script(RANKS), falls, ERROR, launcher_then]
    job = launcher.start("--mpi", write_mpiexec(tmp_path), *arguments, environment={"FOLDER": str(tmp_path)})
    assert soon((tmp_path / "keeper").exists, 200)
    # It does nothing wrong, so it is there until it is ended for what rank 0 has done.
    await_end(int((tmp_path / "other").read_text()))
    go_on(tmp_path)
    outcome = job.finish()
    assert outcome.code == code, outcome.err_text
    assert "phalanx: rank 1 of 3 failed" in outcome.err_text
    assert said in outcome.err_text
    assert f"rank 0 then failed: {ERROR}" in outcome.err_text
    assert "rank 2 ended by the launcher" in outcome.err_text


def test_rank_that_mpi_ended_is_named_if_no_rank_broke_before(launcher: Launcher, tmp_path: Path) -> None:
    ends_well = "sys.exit(0)"
    arguments = ["-n", "3", "-q", launcher.script(RANKS), ends_well, ERROR, "kills"]
    job = launcher.start("--mpi", write_mpiexec(tmp_path), *arguments, environment={"FOLDER": str(tmp_path)})
    assert soon((tmp_path / "keeper").exists, 200)
    await_end(int((tmp_path / "other").read_text()))
    go_on(tmp_path)
    outcome = job.finish()
    assert outcome.code == 0x8F, outcome.err_text
    assert f"phalanx: rank 0 of 3 failed: {ERROR}" in outcome.err_text
