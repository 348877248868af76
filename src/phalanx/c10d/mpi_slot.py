"""``backend="mpi"`` on torch's wheels, which are built without MPI.

Up to 2.13 torch calls a class that its wheels lack, ``ProcessGroupMPI``, and gives it only the ranks; from 2.14 on it
asks its table of backends, whose entry gets the group's name and timeout too. This module fills whichever of the two
torch has. It is loaded by ``import torch``, so it imports nothing that is not needed there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from phalanx.errors import InitializationError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["ProcessGroupMPI", "fill_mpi_slot"]


class ProcessGroupMPI:
    """The class that torch's wheels lack. torch calls nothing of it but ``create``."""

    @staticmethod
    def create(ranks: list[int]) -> dist.ProcessGroup:
        """Make a group of these ranks (none: all), with the name and the timeout in the frame of the caller."""
        from torch.distributed.distributed_c10d import _get_default_timeout

        caller = sys._getframe(1).f_locals
        timeout, name = caller.get("timeout"), caller.get("group_name")
        if not isinstance(timeout, timedelta):
            timeout = _get_default_timeout("mpi")  # type: ignore[arg-type]
        return _group_of(ranks, name if isinstance(name, str) else "mpi", timeout)


def _create(options: Any, backend_options: Any) -> dist.ProcessGroup:
    """Make this rank's side of a group, as the entry in the table of backends of torch >= 2.14."""
    return _group_of(options.global_ranks_in_group, options.group_id, options.timeout)


def _group_of(ranks: list[int], group_name: str, timeout: timedelta) -> dist.ProcessGroup:
    import torch

    from phalanx.c10d.torch_versions import note_if_newer, refuse_if_older

    refuse_if_older(torch.__version__)
    from phalanx.c10d.create_mpi import create_mpi_group

    group = create_mpi_group(ranks, group_name, timeout)
    note_if_newer(torch.__version__, group.rank())
    return group


def fill_mpi_slot() -> None:
    """Let ``backend="mpi"`` be ours, unless torch was built with MPI."""
    from torch.distributed import distributed_c10d as c10d

    if c10d._MPI_AVAILABLE or hasattr(c10d, "ProcessGroupMPI"):
        return  # built with its own
    import torch.distributed as dist

    installed = importlib.util.find_spec("mpi4py") is not None  # to import it would load MPI
    c10d._MPI_AVAILABLE = installed
    from_table = hasattr(c10d, "_create_mpi_process_group")
    if from_table:
        devices = dist.Backend.backend_capability[dist.Backend.MPI]
        kind = dist.ProcessGroup.BackendType.MPI
        register: Any = dist.Backend.register_backend
        register("mpi", _create, extended_api=True, devices=devices, _backend_type=kind)
    else:
        c10d.ProcessGroupMPI = ProcessGroupMPI  # type: ignore[misc]

    def is_mpi_available() -> bool:
        """Tell whether mpi4py is installed and this rank can be one of MPI's: Accelerate then uses MPI on the CPU.

        Up to 2.13 torch asks here before it calls ``create``, which has a better error.
        """
        if not from_table and sys._getframe(1).f_code.co_name == "_new_process_group_helper":
            return True
        return installed and not _is_rank_without_mpi()

    c10d.is_mpi_available = dist.is_mpi_available = is_mpi_available
    own: Any = c10d._new_process_group_helper

    def new_group(*arguments: Any, **named: Any) -> Any:
        from phalanx.c10d.register import replaces  # not before torch is asked for a group

        of_mpi = c10d.is_initialized() and dist.get_backend() == "mpi" and not replaces("mpi")
        if of_mpi and arguments[3:4] not in ((), ("mpi",)):
            raise InitializationError(
                f"a world with backend 'mpi' has no store, by which ranks would meet in a group with backend "
                f"{str(arguments[3])!r}: leave out new_group's backend, or make the world by phalanx.init()"
            )
        return own(*arguments, **named)

    setattr(c10d, "_new_process_group_helper", new_group)  # noqa: B010


def _is_rank_without_mpi() -> bool:
    world_size = os.environ.get("WORLD_SIZE", "").strip()
    if not world_size.isdigit() or int(world_size) < 2:
        return False
    # Imported here, because this module is loaded by every `import torch`.
    from phalanx.topology.launchers import MPI_RANKS

    return not any(name in os.environ for name in MPI_RANKS)
