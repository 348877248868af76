"""A program that takes the place of MPICH's launcher, so that tests of ``phalanx run --mpi`` need no MPI."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

__all__ = ["write_mpiexec"]

# It starts the processes, and kills them all once the job's folder has a file "abort", as MPI_Abort would.
_PROGRAM = """
    import os, subprocess, sys, time
    from pathlib import Path

    if "--version" in sys.argv:
        print("HYDRA build details:\\n    Version: 5.0.2")
        sys.exit()
    size = int(sys.argv[sys.argv.index("-n") + 1])
    program = sys.argv[sys.argv.index("-n") + 2 :]
    own = {**os.environ, "PMI_SIZE": str(size), "MPI_LOCALNRANKS": str(size)}
    started = []
    for rank in range(size):
        started.append(subprocess.Popen(program, env={**own, "PMI_RANK": str(rank)}))
    while any(process.poll() is None for process in started):
        if "FOLDER" in os.environ and Path(os.environ["FOLDER"], "abort").exists():
            for process in started:
                process.kill()
        time.sleep(0.01)
"""


def write_mpiexec(folder: Path) -> str:
    """Write the program.

    Its environment may have FOLDER, the job's folder.

    Args:
        folder: where to.

    Returns:
        Its path, for ``--mpi``.
    """
    path = folder / "mpiexec"
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(_PROGRAM)}")
    path.chmod(0o755)
    return str(path)
