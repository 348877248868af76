"""The one file that touches torch's backend registry and private slots. Checked on torch 2.13.0.

``register`` is the entry point in the group ``torch.backends``: torch calls it at the end of ``import torch``, so
``init_process_group("phalanx")`` and ``("mpi")`` work in scripts that never import Phalanx. It must be quick and must
never raise: an exception here would make ``import torch`` fail for everybody on the machine.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["NAME", "register"]

NAME = "phalanx"


def register() -> None:
    """Make the backend names known to torch. Does nothing where torch has no distributed package."""
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if dist.is_available() and NAME not in dist.Backend.backend_list:
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    with contextlib.suppress(Exception):
        _fill_mpi_slot()
    with contextlib.suppress(Exception):
        _name_successors()


def _create(options: Any, backend_options: Any) -> dist.ProcessGroup:
    """What torch calls on every member of a new group, with the group's store, rank, size and timeout."""
    from phalanx.backends.create import create_process_group

    return create_process_group(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        options.global_ranks_in_group,
    )


# -- MPI -----------------------------------------------------------------------------------------------


class ProcessGroupMPI:
    """What torch's wheel leaves out. Of it, ``init_process_group`` and ``new_group`` call ``create`` alone."""

    @staticmethod
    def create(ranks: list[int]) -> dist.ProcessGroup:
        """Make this rank's side of a group: of these ranks of the world, or of the world where there are none.

        torch asks its own MPI backend for no name and no timeout, so they are looked up where it calls.
        """
        from torch.distributed.distributed_c10d import _get_default_timeout

        from phalanx.backends.mpi_create import create_mpi_group

        caller = sys._getframe(1).f_locals
        timeout, name = caller.get("timeout"), caller.get("group_name")
        if not isinstance(timeout, timedelta):
            timeout = _get_default_timeout("mpi")  # type: ignore[arg-type]
        return create_mpi_group(ranks, name if isinstance(name, str) else "mpi", timeout)


def _fill_mpi_slot() -> None:
    """Stand in where torch was built without MPI. ``Backend.register_backend("mpi")`` would never be consulted.

    Whether mpi4py is there is looked up, not tried: importing it loads MPI.
    """
    from torch.distributed import distributed_c10d as c10d

    if c10d._MPI_AVAILABLE or hasattr(c10d, "ProcessGroupMPI"):
        return  # built with its own
    c10d.ProcessGroupMPI = ProcessGroupMPI  # type: ignore[misc]
    if importlib.util.find_spec("mpi4py") is not None:
        c10d._MPI_AVAILABLE = True
        return

    def is_mpi_available() -> bool:
        """No; but where torch asks in order to say that it should be built anew, let ``create`` say what to install."""
        return sys._getframe(1).f_code.co_name == "_new_process_group_helper"

    c10d.is_mpi_available = is_mpi_available


# -- names that torch has removed ----------------------------------------------------------------------

# What tutorials still call, and what it is called now. `dist.reduce_op` is not among them: torch has kept it.
_SUCCESSORS = {
    "all_reduce_multigpu": "all_reduce, with one tensor per rank",
    "all_gather_multigpu": "all_gather, with one tensor per rank",
    "broadcast_multigpu": "broadcast, with one tensor per rank",
    "reduce_multigpu": "reduce, with one tensor per rank",
    "reduce_scatter_multigpu": "reduce_scatter, with one tensor per rank",
    "gather_send": "gather(tensor, dst=...)",
    "gather_recv": "gather(tensor, gather_list, dst=...)",
    "scatter_send": "scatter(tensor, scatter_list, src=...)",
    "scatter_recv": "scatter(tensor, src=...)",
}


def _name_successors() -> None:
    """Let the error for a name that ``torch.distributed`` no longer has say what to call instead."""
    import torch.distributed as dist

    if "__getattr__" in vars(dist):
        return  # torch answers for missing names itself

    def __getattr__(name: str) -> Any:  # noqa: N807 - Python's name for a module's missing attributes
        successor = _SUCCESSORS.get(name)
        hint = f"; torch has removed it: call torch.distributed.{successor}" if successor else ""
        raise AttributeError(f"module 'torch.distributed' has no attribute {name!r}{hint}")

    dist.__getattr__ = __getattr__
