"""Making Phalanx's backends known to torch, in its backend registry and private slots. Checked on torch 2.13.0.

``register`` is the entry point in the group ``torch.backends``: torch calls it at the end of ``import torch``, so
``init_process_group("phalanx")`` and ``("mpi")`` work in scripts that never import Phalanx. It must be quick and must
never raise: an exception here would make ``import torch`` fail for everybody on the machine.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from phalanx import settings

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["register"]


def register() -> None:
    """Make the backend names known to torch. Does nothing where torch has no distributed package."""
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if dist.is_available() and settings.BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(settings.BACKEND, _create, extended_api=True, devices=["cpu"])
    with contextlib.suppress(Exception):
        from phalanx.c10d.mpi_slot import fill_mpi_slot

        fill_mpi_slot()
    with contextlib.suppress(Exception):
        _serve_builtin_hooks()
    if os.environ.get(settings.REPLACE):
        with contextlib.suppress(Exception):
            _stand_in_for(os.environ[settings.REPLACE])


def _create(options: Any, backend_options: Any) -> dist.ProcessGroup:
    """Make one rank's side of a group. torch calls it on every member, with the group's store, rank and timeout."""
    from phalanx.c10d.create import create_process_group

    return create_process_group(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        options.global_ranks_in_group,
    )


def _serve_builtin_hooks() -> None:
    """Let DDP's built-in hooks have the futures that they need: DDP calls this function by its name in torch."""
    import torch.distributed as dist

    own: Any = dist._register_builtin_comm_hook

    def register_builtin_comm_hook(*arguments: Any) -> None:
        from phalanx.c10d import typed_future

        typed_future.wanted = True
        own(*arguments)

    dist._register_builtin_comm_hook = register_builtin_comm_hook


def _stand_in_for(wanted: str) -> None:
    """Rewrite the names of backends where torch takes them in: every path to a group goes through ``Backend(name)``.

    A list that cannot be used is reported when a name is first used: ``import torch`` must not fail.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    from phalanx.c10d.replace import names_to_replace, stand_in

    own_new, own_barrier = c10d.Backend.__new__, c10d.monitored_barrier

    def new(cls: type[dist.Backend], name: str) -> Any:
        return own_new(cls, stand_in(name, names_to_replace(wanted)) if isinstance(name, str) else name)

    def monitored_barrier(
        group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """As torch's own, which asks whether the backend is named gloo; ours names the missing rank too."""
        if c10d._rank_not_in_group(group) or c10d.get_backend(group) != settings.BACKEND:
            own_barrier(group, timeout, wait_all_ranks)
            return
        served: Any = c10d._get_default_group() if group is None else group
        served.monitored_barrier(
            c10d._get_default_timeout(c10d.Backend(settings.BACKEND)) if timeout is None else timeout,
            wait_all_ranks=wait_all_ranks,
        )

    c10d.Backend.__new__ = new
    c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier
