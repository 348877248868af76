"""Under ``phalanx run --mpi`` the rank that broke first is named, and not one that MPI ended because of that.

A process that ends loses its memory and its connections before its parent is told. An MPI library that reads from it
then ends the process that reads, and its launcher kills all others; so the agent of the rank that broke may be the
last to report. Here that order is forced: a rank stops its agent before it falls, and the agent goes on when another
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
    import atexit, contextlib, os, signal, sys, time
    from pathlib import Path

    folder, rank = Path(os.environ["FOLDER"]), int(os.environ["RANK"])

    def put(name, what):
        (folder / f"{name}.part").write_text(str(what))
        (folder / f"{name}.part").rename(folder / name)

    def wait_for(name):
        while not (folder / name).exists():
            time.sleep(0.01)
        return int((folder / name).read_text() or 0)

    got = []
    put(f"no-handler-{rank}", 0)
    wait_for("sent")
    time.sleep(0.3)  # a signal that is passed on at once comes now, and ends it
    signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    while not got:
        time.sleep(0.01)
    if rank == 2:
        put("other", os.getpid())
    if rank == 1:
        wait_for("other")
        agent = os.getppid()
        os.kill(agent, signal.SIGSTOP)
        while Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        put("agent", agent)
        put("first", os.getpid())
        exec(sys.argv[1])
    if rank == 0:
        first = wait_for("first")
        with contextlib.suppress(FileNotFoundError):  # the launcher may have continued the agent, which takes the end
            while Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
        print(sys.argv[2], file=sys.stderr, flush=True)
        if sys.argv[3] == "kills":
            put("abort", 0)
        os._exit(0x8F)
    time.sleep(600)
"""
ENDS_WELL = "sys.exit(0)"


@pytest.mark.parametrize(
    ("falls", "code", "said", "launcher_then"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "ended by signal 9 (SIGKILL)\n", "kills"),
        pytest.param("os._exit(3)", 3, "phalanx: rank 1 of 3 failed\n", "waits", marks=pytest.mark.long),
        pytest.param(
            # Its interpreter takes no time to end: the launcher's next ping continues the agent, which reports.
            "atexit.register(os._exit, 1); raise ValueError('bad thing')",
            1,
            "phalanx: rank 1 of 3 failed: ValueError: bad thing\n",
            "kills",
            marks=pytest.mark.long,
        ),
        pytest.param(ENDS_WELL, 0x8F, f"phalanx: rank 0 of 3 failed: {ERROR}", "kills", marks=pytest.mark.long),
    ],
)
def test_rank_that_broke_first_is_named_though_its_end_is_told_last(
    launcher: Launcher, tmp_path: Path, falls: str, code: int, said: str, launcher_then: str
) -> None:
    """And before that a signal of the user's waits for the handler of every rank."""
    arguments = ["-n", "3", "-q", launcher.script(RANKS), falls, ERROR, launcher_then]
    job = launcher.start("--mpi", write_mpiexec(tmp_path), *arguments, environment={"FOLDER": str(tmp_path)})
    assert soon(lambda: all((tmp_path / f"no-handler-{rank}").exists() for rank in range(3)), 200)
    job.process.send_signal(signal.SIGUSR1)
    (tmp_path / "sent").touch()
    assert soon((tmp_path / "agent").exists, 200)
    # It does nothing wrong, so it is there until it is ended for what rank 0 has done.
    await_end(int((tmp_path / "other").read_text()))
    with contextlib.suppress(ProcessLookupError):  # the launcher continues the agent too, to end the job
        os.kill(int((tmp_path / "agent").read_text()), signal.SIGCONT)
    outcome = job.finish()
    assert outcome.code == code, outcome.err_text
    assert said in outcome.err_text
    if falls != ENDS_WELL:
        assert "phalanx: rank 1 of 3 failed" in outcome.err_text
        assert f"rank 0 then failed: {ERROR}" in outcome.err_text
        assert "rank 2 ended by the launcher" in outcome.err_text
