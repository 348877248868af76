"""A rank that ends badly after its script has come to its end in order: another rank's own failure comes first."""

from __future__ import annotations

import re

import pytest
from tests.launch_support import Launcher
from tests.support.golden import block_of

# In MPI_Finalize rank 0 waits for the others, whose failure then aborts the job; MPICH ends rank 0 by SIGSEGV often.
LEAVES = """
    import sys
    import torch.distributed as dist
    dist.init_process_group("mpi")
    dist.barrier()
    if dist.get_rank() == 0:
        sys.exit(0)
    dist.barrier()
"""
CRASHES = """
    import ctypes
    import torch.distributed as dist
    dist.init_process_group("mpi")
    dist.barrier()
    libc = ctypes.CDLL(None)
    if dist.get_rank() == 0:
        libc["__cxa_atexit"](libc.abort, None, None)
"""


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.long)])
def test_rank_that_anothers_abort_ends_in_finalize_has_not_failed(launcher: Launcher, ranks: int) -> None:
    done = launcher.run("-n", str(ranks), "-q", launcher.script(LEAVES))
    assert done.code == 1, done.err_text
    first = block_of(done.err_text).splitlines()[0]
    assert re.search(rf"rank [1-{ranks - 1}] of {ranks} failed: phalanx\.errors\.PeerLost: rank 0 .* has left", first)


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.long)])
def test_a_rank_that_crashes_by_itself_after_its_script_is_named(launcher: Launcher, ranks: int) -> None:
    done = launcher.run("-n", str(ranks), "-q", launcher.script(CRASHES))
    assert done.code == 134, done.err_text
    first = block_of(done.err_text).splitlines()[0]
    assert first.startswith(f"phalanx: rank 0 of {ranks} failed: SIGABRT ended it after its script had come to its end")
