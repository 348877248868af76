"""Make Phalanx's backends known to torch, and stand in for torch's own where PHALANX_REPLACE says so.

torch calls ``register`` at the end of ``import torch`` (entry point ``torch.backends``), or from 2.14 on for a name
that it does not know (``torch.distributed.backends``). It must be quick and must never raise: an exception here would
make ``import torch`` fail for everybody on the machine.

With ``phalanx run --replace gloo`` (PHALANX_REPLACE) unmodified scripts that ask for ``gloo`` get ``phalanx``:
``init_process_group("gloo")``, ``"cpu:gloo,cuda:nccl"``, torch's default without accelerators, ``new_group``.

- ``dist.get_backend()`` says the name that the program asked for, because programs branch on it. The class of the group
  and ``World.backend`` say the truth.
- Only names are replaced, never classes: a ``ProcessGroupGloo`` that a program makes itself is Gloo.
- ``rpc`` is torch's RPC, which has no backends to choose: ``torch.distributed.rpc`` then runs over Phalanx.
- nccl, xccl and the like move tensors between devices, and are not replaced. CUDA tensors in a group that asked for
  gloo go over Gloo, as they would have (``vendor.py``).

This module imports nothing of torch: the launcher, which never loads it, checks ``--replace`` with it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from phalanx import settings
from phalanx.errors import ArgumentError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = [
    "forget_failed_groups",
    "has_met",
    "names_to_replace",
    "record_other_backends",
    "register",
    "replace_as_asked",
    "replaces",
]

#: Whether this rank of ``phalanx run`` has opened a store in which ranks meet, for a group or for RPC or by itself.
has_met = False

BACKENDS = ("gloo", "mpi")
RPC = "rpc"
REPLACEABLE = (*BACKENDS, RPC)
# What torch makes in place of each backend, and the other way round.
_SERVED = {name: f"{settings.BACKEND}-as-{name}" for name in BACKENDS}
_ASKED = {served: name for name, served in _SERVED.items()}
_can_replace = False  # whether torch's names have been replaced


def register() -> None:
    """Make the backend names known to torch, once. Does nothing where torch has no distributed package."""
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if not dist.is_available() or settings.BACKEND in dist.Backend.backend_list:
            return
        from phalanx.c10d.torch_versions import uncompiled

        dist.Backend.register_backend(settings.BACKEND, uncompiled(_create), extended_api=True, devices=["cpu"])
    with contextlib.suppress(Exception):
        from phalanx.c10d.mpi_slot import fill_mpi_slot

        fill_mpi_slot()
    with contextlib.suppress(Exception):
        from phalanx.c10d.torch_versions import open_other_stores

        open_other_stores()
    recorder = sys.modules.get("phalanx.diagnosis.recorder")
    if recorder is not None and recorder.is_kept():
        record_other_backends()
    replace_as_asked()


def replace_as_asked() -> None:
    """Stand in for the backends, and for RPC, that PHALANX_REPLACE lists now; never raises."""
    if os.environ.get(settings.REPLACE):
        with contextlib.suppress(Exception):
            _replace_backends()
            if replaces(RPC):
                _stand_in_for_rpc()


def _replace_backends() -> None:
    """Have our groups made in place of the backends that PHALANX_REPLACE lists when they are made.

    Where torch is about to make the backends of a group it reads another name, ``phalanx-as-gloo``. It treats ``mpi``
    in a way of its own before that, so that name is rewritten where torch takes it in. If the variable cannot be used
    the first group says so, not ``import torch``.
    """
    global _can_replace
    if _can_replace:
        return
    _can_replace = True
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    for asked, served in _SERVED.items():
        dist.Backend.register_backend(served, partial(_create, backend=asked), extended_api=True, devices=["cpu"])
    own_config: Any = c10d.BackendConfig
    own_new, own_get_backend = c10d.Backend.__new__, c10d.get_backend

    class ReplacingConfig(own_config):  # type: ignore[misc]
        """The backend of each device: ours for those replaced, where torch reads which ones to make."""

        def get_device_backend_map(self) -> dict[str, Any]:
            replaced = names_to_replace(os.environ.get(settings.REPLACE, ""))
            return {
                device: _SERVED[name] if name in replaced else name for device, name in self.device_backend_map.items()
            }

        def __repr__(self) -> str:
            return ",".join(f"{device}:{_ASKED.get(name, name)}" for device, name in self.device_backend_map.items())

    def new(cls: type[dist.Backend], name: str) -> Any:
        found = own_new(cls, name)
        return _SERVED["mpi"] if found == "mpi" and replaces("mpi") else found

    def get_backend(group: dist.ProcessGroup | None = None) -> Any:
        name = own_get_backend(group)
        return _ASKED.get(name, name)

    setattr(c10d, "BackendConfig", ReplacingConfig)  # noqa: B010
    c10d.Backend.__new__ = new
    c10d.get_backend = dist.get_backend = get_backend


def _stand_in_for_rpc() -> None:
    try:
        importlib.import_module("phalanx.rpc.torch_api")  # by name, because RPC is built on this room
    except Exception as error:
        from phalanx.words import tell

        tell(f"warning: {settings.REPLACE}={RPC} has no effect, torch's own {RPC} is used: {error}")


def names_to_replace(text: str, *, source: str = settings.REPLACE) -> tuple[str, ...]:
    """The names that ``text`` lists, separated by commas, in any case; none if it is empty.

    Raises:
        ArgumentError: a name is not one that Phalanx can stand in for; ``source`` is the option or variable.
    """
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in REPLACEABLE:
            raise ArgumentError(
                f"{source} {text}: {name!r} is not something that Phalanx stands in for; choose "
                f"{', '.join(BACKENDS)} or {RPC}. Backends that move tensors between devices, such as nccl, stay what "
                f"they are: of cpu:gloo,cuda:nccl only gloo is replaced"
            )
    return names


def replaces(name: str, environment: Mapping[str, str] | None = None) -> bool:
    """Return whether PHALANX_REPLACE lists this backend. Other entries, which may be wrong, are not checked here."""
    environment = os.environ if environment is None else environment
    return name in {part.strip().lower() for part in environment.get(settings.REPLACE, "").split(",")}


def record_other_backends() -> None:
    """Have the flight recorder see the operations of torch's own backends, from their first group on; never raises.

    For a rank of ``phalanx run``, once torch has been imported there. DDP on these groups then also names parameters
    that had no gradient, and ``has_met`` is set by the first store.
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
                    from phalanx.c10d.ddp import serve_reducers
                    from phalanx.c10d.torch_backends import record_methods

                    if c10d._new_process_group_helper is new_group:  # nobody else has wrapped it since
                        setattr(c10d, "_new_process_group_helper", own)  # noqa: B010
                    record_methods()
                    serve_reducers()
            return made

        setattr(c10d, "_new_process_group_helper", new_group)  # noqa: B010


def _joining(arguments: tuple[Any, ...]) -> contextlib.AbstractContextManager[None]:
    """Show the launcher that a group is being made, from the arguments of ``_new_process_group_helper``."""
    with contextlib.suppress(Exception):
        from phalanx.diagnosis.recorder import joining

        size, rank, ranks, backend, _, name = arguments[:6]
        if rank == size == -1:  # of MPI, which says by itself who is who
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if rank >= 0:
            return joining(name if ranks else "", str(backend), ranks or range(size), rank)
    return contextlib.nullcontext()


def forget_failed_groups() -> None:
    """Have torch count its groups, by which it names them, from zero again. Call it while there is no default group.

    torch also counts a default group that could not be made: ranks that got as far as that would give their next group
    another name than the others, and not find them.
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
