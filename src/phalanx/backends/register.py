"""The one file that touches torch's backend registry and private slots. Checked on torch 2.13.0.

``register`` is the entry point in the group ``torch.backends``: torch calls it at the end of ``import torch``, so
``init_process_group("phalanx")`` and ``("mpi")`` work in scripts that never import Phalanx. It must be quick and must
never raise: an exception here would make ``import torch`` fail for everybody on the machine.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["NAME", "REPLACE_VARIABLE", "register"]

NAME = "phalanx"
REPLACE_VARIABLE = "PHALANX_REPLACE"  # see replace.py, which is loaded only where it is set


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
    if os.environ.get(REPLACE_VARIABLE):
        with contextlib.suppress(Exception):
            _stand_in_for(os.environ[REPLACE_VARIABLE])


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

# By one of these an MPI launcher tells a process its rank.
_MPI_RANKS = ("PMI_RANK", "PMI_ID", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


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


# -- other backends' names --------------------------------------------------------------------------------


def _stand_in_for(wanted: str) -> None:
    """Rewrite the names of backends where torch takes them in: every path to a group goes through ``Backend(name)``.

    A list that makes no sense is told when a name is first used: ``import torch`` must not fail.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    from phalanx.backends.replace import names_to_replace, stand_in

    own_new, own_barrier = c10d.Backend.__new__, c10d.monitored_barrier

    def new(cls: type[dist.Backend], name: str) -> Any:
        return own_new(cls, stand_in(name, names_to_replace(wanted)) if isinstance(name, str) else name)

    def monitored_barrier(
        group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """As torch's own, which asks whether the backend is named gloo; ours says who is missing too."""
        if c10d._rank_not_in_group(group) or c10d.get_backend(group) != NAME:
            own_barrier(group, timeout, wait_all_ranks)
            return
        served: Any = c10d._get_default_group() if group is None else group
        served.monitored_barrier(
            c10d._get_default_timeout(c10d.Backend(NAME)) if timeout is None else timeout,
            wait_all_ranks=wait_all_ranks,
        )

    c10d.Backend.__new__ = new
    c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier


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
