"""Making Phalanx's backends known to torch, in its table of backends and private slots.

Checked on torch 2.13.0, 2.14.1 and 2.15.0.

``register`` is the entry point in the group ``torch.backends``: torch calls it at the end of ``import torch``, so
``init_process_group("phalanx")`` and ``("mpi")`` work in scripts that never import Phalanx. It must be quick and must
never raise: an exception here would make ``import torch`` fail for everybody on the machine. It is also the entry point
of the backend phalanx in the group ``torch.distributed.backends``, which torch >= 2.14 asks for a name that it does not
know: there it serves processes in which TORCH_DEVICE_BACKEND_AUTOLOAD=0 has switched the first one off.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from phalanx import settings
from phalanx.errors import InitializationError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["forget_failed_groups", "has_met", "record_other_backends", "register", "replace_as_asked"]

#: Whether this rank of ``phalanx run`` has opened a store in which ranks meet, for a group or for RPC or by itself.
has_met = False


def register() -> None:
    """Make the backend names known to torch, once. Does nothing where torch has no distributed package."""
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if not dist.is_available() or settings.BACKEND in dist.Backend.backend_list:
            return
        from phalanx.c10d.uncompiled import uncompiled

        dist.Backend.register_backend(settings.BACKEND, uncompiled(_create), extended_api=True, devices=["cpu"])
    with contextlib.suppress(Exception):
        from phalanx.c10d.mpi_slot import fill_mpi_slot

        fill_mpi_slot()
    with contextlib.suppress(Exception):
        from phalanx.membership.launcher_store import open_other_stores

        open_other_stores()
    with contextlib.suppress(Exception):
        _explain_torchcomms()
    with contextlib.suppress(Exception):
        _serve_builtin_hooks()
    recorder = sys.modules.get("phalanx.diagnosis.recorder")
    if recorder is not None and recorder.is_kept():
        record_other_backends()
    replace_as_asked()


def replace_as_asked() -> None:
    """Stand in for the backends, and for RPC, that PHALANX_REPLACE lists now; never raises."""
    if os.environ.get(settings.REPLACE):
        with contextlib.suppress(Exception):
            from phalanx.c10d.replace import OTHERS, replaces
            from phalanx.c10d.replacing import replace_backends

            replace_backends(os.environ[settings.REPLACE], _create)
            for name, module in OTHERS.items():
                if replaces(name):
                    _stand_in(name, module)


def _stand_in(name: str, module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        from phalanx.words import tell

        tell(f"warning: {settings.REPLACE}={name} has no effect, torch's own {name} is used: {error}")


def record_other_backends() -> None:
    """Have the flight recorder see the operations of torch's own backends, from their first group on; never raises.

    DDP on these groups then also names parameters that had no gradient, and ``has_met`` is set by the first store.

    For a rank of ``phalanx run``, once torch has been imported there.
    """
    with contextlib.suppress(Exception):
        from torch._C._distributed_c10d import FileStore, TCPStore

        for kind in (TCPStore, FileStore):

            def note(*arguments: Any, own: Any = kind.__init__, **named: Any) -> None:
                global has_met
                has_met = True
                own(*arguments, **named)

            setattr(kind, "__init__", note)  # noqa: B010
    with contextlib.suppress(Exception):
        from torch.distributed import distributed_c10d as c10d

        own: Any = c10d._new_process_group_helper

        def new_group(*arguments: Any, **named: Any) -> Any:
            with _joining(arguments):
                made = own(*arguments, **named)
            with contextlib.suppress(Exception):
                group = made[0] if isinstance(made, tuple) else made
                if isinstance(group, c10d.ProcessGroup) and not type(group).__module__.startswith("phalanx."):
                    from phalanx.c10d.ddp_parameters import name_parameters
                    from phalanx.c10d.torch_backends import record_methods

                    if c10d._new_process_group_helper is new_group:  # nobody else has wrapped it since
                        setattr(c10d, "_new_process_group_helper", own)  # noqa: B010
                    record_methods()
                    name_parameters(of_any_group=True)
            return made

        setattr(c10d, "_new_process_group_helper", new_group)  # noqa: B010


def _joining(arguments: tuple[Any, ...]) -> contextlib.AbstractContextManager[None]:
    """What lets the launcher see that a group is being made, from the arguments of ``_new_process_group_helper``."""
    with contextlib.suppress(Exception):
        from phalanx.diagnosis.recorder import joining

        size, rank, ranks, backend, _, name = arguments[:6]
        if rank == size == -1:  # of MPI, which says by itself who is who
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if rank >= 0:
            return joining(name if ranks else "", str(backend), ranks or range(size), rank)
    return contextlib.nullcontext()


def forget_failed_groups() -> None:
    """Have torch count its groups from zero again. Call it only while this process has no default group.

    torch names a group by how many groups it has made, and it also counts a default group that could not be made. If
    only some ranks got as far as that, they would give their next group different names and not find each other.
    """
    from torch.distributed import distributed_c10d as c10d

    c10d._world.group_count = 0


def _create(options: Any, backend_options: Any, backend: str = settings.BACKEND) -> dist.ProcessGroup:
    """Make one rank's side of a group. torch calls it on every member, with the group's store, rank and timeout.

    The group says that its backend is ``backend``.
    """
    import torch

    from phalanx.c10d.torch_versions import note_if_newer, refuse_if_older

    refuse_if_older(torch.__version__)
    note_if_newer(torch.__version__, options.group_rank)
    if getattr(options, "enable_reconfigure", False):  # from torch 2.15 on
        from phalanx.c10d.reconfigurable import ReconfigurableProcessGroup

        return ReconfigurableProcessGroup(
            options.store, options.group_rank, options.group_size, options.timeout, options.group_id, backend
        )
    from phalanx.c10d.create import create_process_group

    return create_process_group(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        options.global_ranks_in_group,
        backend,
    )


def _explain_torchcomms() -> None:
    """Say so where torchcomms is asked for our backends, and therefore we are not.

    With TORCH_DISTRIBUTED_USE_TORCHCOMMS=1 torch 2.13 gives every backend's name to torchcomms, if that is installed;
    later releases only the names that torchcomms knows.
    """
    from torch.distributed import distributed_c10d as c10d

    if not c10d._TORCHCOMM_AVAILABLE or hasattr(c10d, "_torchcomms_handles_backend"):
        return
    own = c10d.new_comm

    def new_comm(backend: str, *arguments: Any, **named: Any) -> Any:
        try:
            return own(backend, *arguments, **named)
        except Exception as error:
            if backend not in (settings.BACKEND, "mpi"):
                raise
            raise InitializationError(
                f"backend {backend!r} was asked of torchcomms, which has none of that name ({error}): with "
                "TORCH_DISTRIBUTED_USE_TORCHCOMMS=1 (or torch.distributed.config.use_torchcomms) torch 2.13 asks "
                "torchcomms for every backend. Switch that off, or use torch >= 2.14, which asks it only for its own"
            ) from error

    c10d.new_comm = new_comm


def _serve_builtin_hooks() -> None:
    """Let DDP's built-in hooks have the futures that they need: DDP calls this function by its name in torch."""
    import torch.distributed as dist

    own: Any = dist._register_builtin_comm_hook

    def register_builtin_comm_hook(*arguments: Any) -> None:
        from phalanx.c10d import typed_future

        typed_future.wanted = True
        own(*arguments)

    dist._register_builtin_comm_hook = register_builtin_comm_hook
