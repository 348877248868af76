"""Under a bare mpiexec a rank that waits says for whom, and where that one is, long before the group's timeout."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest
from tests.mpi.environments import ROOT, SETTINGS, MpiEnvironment
from tests.support.waiting import soon, stop

SCRIPT = """
    import os, sys, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    import phalanx

    backend, folder = sys.argv[1], Path(sys.argv[2])
    phalanx.init(backend=backend, timeout_s=600)
    rank = dist.get_rank()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    dist.barrier()  # before

    def wait_for(name):
        while not (folder / name).exists():
            time.sleep(0.01)  # sleeps

    if rank == 1:
        wait_for("go")
    dist.all_reduce(torch.ones(4))  # call
    phalanx.close()
"""


@pytest.mark.parametrize("backend", ["mpi", "phalanx"])
def test_first_rank_that_waits_says_for_whom_and_that_it_is_stopped(
    mpi: MpiEnvironment, backend: str, tmp_path: Path
) -> None:
    script, err = tmp_path / "script.py", tmp_path / "err"
    script.write_text(dedent(SCRIPT))
    variables = {
        **SETTINGS,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "PHALANX_WARN_AFTER": "0.5",
    }
    with open(err, "wb") as written:
        job = subprocess.Popen(
            [mpi.mpiexec, "-n", "3", mpi.python, "-W", "ignore", str(script), backend, str(tmp_path)],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stderr=written,
        )
    lines = dedent(SCRIPT).splitlines()
    marks = {f"line {line.rpartition('# ')[2]}": at for at, line in enumerate(lines, 1) if "  # " in line}
    # phalanx.init() has called two operations.
    waits = rf"; ranks 0, 2 wait for it in all_reduce #4 at {script}:{marks['line call']}, for [\d.]+ s now$"

    def await_line(does: str) -> None:
        line = re.compile(f"^phalanx: rank 1 is {does}{waits}", re.MULTILINE)
        assert soon(lambda: line.search(err.read_text()) is not None, 300), err.read_text()

    try:
        await_line(rf"at wait_for \({script}:\d+\), in no operation")
        stopped = int((tmp_path / "pid-1").read_text())
        stop(stopped)
        await_line(rf"stopped \(state T\), after barrier #3 at {script}:{marks['line before']}")
        os.kill(stopped, signal.SIGCONT)
        (tmp_path / "go").touch()
        assert job.wait(300) == 0, err.read_text()
    finally:
        job.kill()
        job.wait()
    said = [line for line in err.read_text().splitlines() if line.startswith("phalanx: ")]
    assert [line for line in said if not line.startswith("phalanx: rank 1 is ")] == []
