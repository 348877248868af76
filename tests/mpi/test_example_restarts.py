"""The example over MPI, with ranks that are killed: its model ends with the same bits as if none had been."""

from __future__ import annotations

import json

import pytest
from tests.launch_support import Launcher
from tests.world.test_example_training import DYING, EXAMPLE, SMALL


@pytest.mark.long
def test_a_job_whose_ranks_are_killed_ends_as_one_that_was_left_alone(launcher: Launcher) -> None:
    settings = (*SMALL, "--epochs", "2", "--save-every", "3", "--backend", "mpi")
    first = ("-n", "3", "-q", "--no-prefix")
    cache = str(launcher.directory / "cache")  # which torch makes with DDP, else where nothing may stay
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
    alone = launcher.run(*first, str(EXAMPLE), *settings, "--checkpoint", "whole.pt", environment=threads)
    assert alone.code == 0, alone.err_text
    whole = json.loads(alone.out_lines[-1])
    done = launcher.run(*first, "--restarts", "3", launcher.script(DYING), *settings, environment=threads)
    assert done.code == 0, done.err_text
    results = json.loads(done.out_lines[-1])
    assert (whole["attempt"], results["attempt"]) == (0, 3)
    for name in ("parameters_sha256", "accuracy", "loss"):
        assert results[name] == whole[name]
