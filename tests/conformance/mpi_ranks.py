"""One rank of torch's suite under mpiexec: runs the tests that the suite's own process names, one after another.

Starting MPI for every test would take minutes. The ranks start it once, so that torch may make and destroy the world
for each test, and take their tests from files: ``jobs/<number>`` in a folder, where each rank leaves
``results/<number>.<rank>``. After a failure the whole job ends, since the ranks may be out of step, and the suite
starts another.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

POLL_S = 0.01


def main() -> None:
    """Arguments: the number of the first test."""
    from mpi4py import MPI

    import tests.conformance.torch_suite as suite

    # What torch calls for its own ranks; the options are those of the suite's process.
    case = suite.case_for(os.environ["BACKEND"])
    rank, number = MPI.COMM_WORLD.rank, int(sys.argv[1])
    folder = Path(os.environ["PHALANX_SUITE_FOLDER"])
    while True:
        job = folder / "jobs" / str(number)
        while not job.exists():
            time.sleep(POLL_S)
        name, os.environ["TEMP_DIR"] = json.loads(job.read_text())  # torch makes a new one for each test
        if not name:
            return
        status, text = run(case, name, rank)
        partial = folder / "results" / f"{number}.{rank}.part"
        partial.write_text(json.dumps([status, text]))
        partial.rename(folder / "results" / f"{number}.{rank}")
        if status == "fail":
            MPI.COMM_WORLD.Abort(1)
        number += 1


def run(case: Any, name: str, rank: int) -> tuple[str, str]:
    """One test on this rank: ``pass``, ``skip`` or ``fail``, and why."""
    import torch.distributed as dist
    from torch.testing._internal import common_distributed as common
    from torch.testing._internal import common_utils
    from torch.testing._internal.distributed import distributed_test

    test = case(name)
    test.rank = rank
    distributed_test.Barrier.barrier_id = 0
    try:
        seconds = distributed_test.CUSTOM_PG_TIMEOUT.get(name, distributed_test.default_pg_timeout)
        dist.init_process_group(
            backend=os.environ["BACKEND"],
            world_size=int(os.environ["WORLD_SIZE"]),
            rank=rank,
            timeout=timedelta(seconds=seconds),
        )
        test._barrier()
        common_utils.set_rng_seed()
        outcome = ("pass", "")
        try:
            getattr(test, name)()
        except unittest.SkipTest as skipped:
            outcome = ("skip", str(skipped))
        except SystemExit as ended:
            reasons = {skip.exit_code: skip.message for skip in common.TEST_SKIPS.values()}
            if ended.code not in reasons:
                raise
            outcome = ("skip", reasons[ended.code])
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        return outcome
    except BaseException:
        return "fail", traceback.format_exc()


if __name__ == "__main__":
    main()
