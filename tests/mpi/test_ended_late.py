"""A rank that ends badly after its script has come to its end in order: another rank's own failure comes first."""

from __future__ import annotations

import re

from tests.launch_support import Launcher

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


def test_rank_that_anothers_abort_ends_in_finalize_has_not_failed(launcher: Launcher) -> None:
    done = launcher.run("-n", "3", "-q", launcher.script(LEAVES))
    assert done.code == 1, done.err_text
    first = re.search(r"^phalanx: rank \d of 3 failed.*", done.err_text, re.MULTILINE)
    assert first, done.err_text
    assert re.search(r"rank [12] of 3 failed: phalanx\.errors\.PeerLost: rank 0 .* has left", first[0]), first


def test_rank_that_crashes_by_itself_after_its_script_is_named(launcher: Launcher) -> None:
    done = launcher.run("-n", "3", "-q", launcher.script(CRASHES))
    assert done.code == 134, done.err_text
    said = "phalanx: rank 0 of 3 failed: SIGABRT ended it after its script had come to its end"
    assert said in done.err_text
