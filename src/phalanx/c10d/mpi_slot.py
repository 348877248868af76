"""``backend="mpi"`` on torch's wheel, which is built without MPI: what fills the place that it leaves empty.

Checked on torch 2.13.0. This module is loaded by ``import torch``, so it imports nothing that is not needed there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["ProcessGroupMPI", "fill_mpi_slot"]

# An MPI launcher gives a process its rank in one of these.
_MPI_RANKS = ("PMI_RANK", "PMI_ID", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


class ProcessGroupMPI:
    """The class that torch's wheel leaves out. ``init_process_group`` and ``new_group`` call only its ``create``."""

    @staticmethod
    def create(ranks: list[int]) -> dist.ProcessGroup:
        """Make this rank's side of a group: of these ranks of the world, or of the world where there are none.

        torch asks its own MPI backend for no name and no timeout, so they are looked up where it calls.
        """
        from torch.distributed.distributed_c10d import _get_default_timeout

        from phalanx.c10d.create_mpi import create_mpi_group

        caller = sys._getframe(1).f_locals
        timeout, name = caller.get("timeout"), caller.get("group_name")
        if not isinstance(timeout, timedelta):
            timeout = _get_default_timeout("mpi")  # type: ignore[arg-type]
        return create_mpi_group(ranks, name if isinstance(name, str) else "mpi", timeout)


def fill_mpi_slot() -> None:
    """Stand in where torch was built without MPI. ``Backend.register_backend("mpi")`` would never be consulted.

    Whether mpi4py is there is looked up, not tried: importing it loads MPI.
    """
    from torch.distributed import distributed_c10d as c10d

    if c10d._MPI_AVAILABLE or hasattr(c10d, "ProcessGroupMPI"):
        return  # built with its own
    import torch.distributed as dist

    installed = importlib.util.find_spec("mpi4py") is not None
    c10d.ProcessGroupMPI = ProcessGroupMPI  # type: ignore[misc]
    c10d._MPI_AVAILABLE = installed

    def is_mpi_available() -> bool:
        """Whether mpi4py is installed and this rank can be one of MPI's.

        Frameworks choose by the answer: Accelerate takes MPI for the CPU wherever it is available. Ranks that were not
        started by an MPI would each get a world of one.

        Where torch asks in order to say that it should be built anew, yes: ``create`` says what is missing.
        """
        if sys._getframe(1).f_code.co_name == "_new_process_group_helper":
            return True
        return installed and not _is_rank_without_mpi()

    c10d.is_mpi_available = dist.is_mpi_available = is_mpi_available


def _is_rank_without_mpi() -> bool:
    world_size = os.environ.get("WORLD_SIZE", "").strip()
    return world_size.isdigit() and int(world_size) > 1 and not any(name in os.environ for name in _MPI_RANKS)
