"""One rank fails in Python: the whole job ends at once, and that traceback is shown once.

MPI alone hangs there: the rank that failed waits in MPI_Finalize for ranks that wait for it. No grace may have to pass
either, so it is as long here as the other ranks wait.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.launch_support import MARK, Launcher, marked, wait_for
from tests.mpi.environments import SETTINGS, MpiEnvironment

WAIT_S = 300  # for which the other ranks wait if nobody ends them
SOON_S = 200.0  # for the whole job, with its start
FAIL = f"""
import time
import torch, torch.distributed as dist
dist.init_process_group("mpi")
dist.barrier()
with open("/proc/self/maps") as maps:
    print(*sorted({{line.split()[5] for line in maps if " /dev/shm/" in line}}), flush=True)
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("bad thing")
dist.all_reduce(torch.ones(1000))
time.sleep({WAIT_S})
"""


def test_under_phalanx_run(launcher: Launcher) -> None:
    outcome = launcher.start("-n", "3", "-q", "--grace", str(WAIT_S), launcher.script(FAIL)).finish(SOON_S)
    assert outcome.code == 1, outcome.err_text
    assert outcome.err_text.count("Traceback") == 1, outcome.err_text
    assert "phalanx: rank 1 of 3 failed: ValueError: bad thing" in outcome.err_text
    files = [Path(word) for line in outcome.out_lines for word in line.split() if word.startswith("/dev/shm/")]
    assert files  # Intel MPI has removed their names by then
    assert not any(path.exists() for path in files)


def test_under_mpiexec(mpi: MpiEnvironment, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAIL)
    ended = subprocess.run(
        [mpi.mpiexec, "-n", "3", mpi.python, str(script)],
        env={**os.environ, **SETTINGS, MARK: str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
    )
    assert ended.returncode != 0
    line = FAIL.splitlines().index('    raise ValueError("bad thing")') + 1
    assert f'[rank1]:   File "{script}", line {line}, in <module>\n' in ended.stderr
    assert ended.stderr.count("ValueError: bad thing") == 1
    wait_for(lambda: not marked(str(tmp_path)), WAIT_S / 2)
