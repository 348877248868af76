"""Differences between releases of torch: those that the tests have run on, names that differ, and private functions.

docs/compatibility.md has the results. ``phalanx doctor`` reads this module where there may be no torch, so only the
functions import it.
"""

from __future__ import annotations

import importlib
import os
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from inspect import signature, unwrap
from types import CodeType, FunctionType
from typing import Any, TypeVar

from phalanx import settings
from phalanx.errors import InitializationError

__all__ = [
    "OLDER_FUNCTIONS",
    "OLDER_METHODS",
    "OLDEST",
    "TRIED",
    "adopt_older_names",
    "function",
    "group_among",
    "method_name",
    "name_holder",
    "new_group",
    "note_if_newer",
    "open_other_stores",
    "refuse_if_older",
    "uncompiled",
]

OLDEST = (2, 9)
TRIED = tuple((2, minor) for minor in range(9, 16))

# Methods of a process group since torch 2.13, and the names under which torch called them before.
OLDER_METHODS = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
# Likewise functions of torch.distributed.
OLDER_FUNCTIONS = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}

_noted = False
_Owner = TypeVar("_Owner")


def refuse_if_older(version: str) -> None:
    """Raise InitializationError for a torch that is older than the oldest release that the tests have run on."""
    release = _release(version)
    if release is not None and release < OLDEST:
        oldest = _text(OLDEST)
        raise InitializationError(
            f"torch {version} is too old: Phalanx needs torch >= {oldest}, the oldest release that its tests run on. "
            f"Upgrade it: pip install 'torch>={oldest}'"
        )


def note_if_newer(version: str, rank: int) -> None:
    """Warn once, on rank 0 alone, of a torch newer than every release that was tried; 2.15.1 is not, after 2.15."""
    global _noted
    release = _release(version)
    if release is None or release <= max(TRIED) or rank or _noted:
        return
    _noted = True
    warnings.warn(
        f"torch {version} is newer than every release that this Phalanx was tried on "
        f"({', '.join(map(_text, TRIED))}). If something does not work, look for a newer Phalanx",
        stacklevel=2,
    )


def method_name(name: str) -> str:
    """Return the name by which this torch calls a method of a process group, given its name in torch 2.13."""
    import torch.distributed as dist

    return name if hasattr(dist.ProcessGroup, name) else OLDER_METHODS.get(name, name)


def adopt_older_names(kind: type) -> None:
    """Give a class of process groups its methods under the names by which this torch calls them, if they are older.

    From torch 2.13 on it must not have these: torch's own methods of the older names call the newer ones.
    """
    for name, older in OLDER_METHODS.items():
        if method_name(name) == older and name in vars(kind):
            setattr(kind, older, vars(kind)[name])


def name_holder(rank: int, size: int) -> Any:
    """A backend that holds a group's name, as torch keeps it in the backends; each collective of it raises.

    torch 2.15 asks for a backend of each device when a group is made. Before 2.10 its collectives do nothing.
    """
    from torch._C._distributed_c10d import FakeProcessGroup

    fake: Any = FakeProcessGroup
    if not hasattr(fake, "_create_internal"):
        return fake(rank, size)
    options = fake.Options()
    options.error_on_collective = True
    return fake._create_internal(rank, size, options)


def function(name: str) -> Callable[..., Any]:
    """Return a function of ``torch.distributed`` by its name in torch 2.13."""
    import torch.distributed as dist

    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, OLDER_FUNCTIONS[name])
    return found


def new_group(ranks: Sequence[int], timeout: timedelta) -> Any:
    """Make a group by ``new_group`` with its ranks in this order; None if torch, before 2.12, would sort them."""
    import torch.distributed as dist

    if "sort_ranks" in signature(unwrap(dist.new_group)).parameters:
        return dist.new_group(list(ranks), timeout=timeout, sort_ranks=False)
    return dist.new_group(list(ranks), timeout=timeout) if list(ranks) == sorted(ranks) else None


def group_among(ranks: Sequence[int], name: str, timeout: timedelta) -> Any:
    """Make a process group of these ranks of the world. Exactly those call this.

    ``dist.new_group`` names a group by the number of groups that the rank has made, which differs among ranks that are
    not in the same groups. ``name`` is the same on all members, and no other group's, also of the past.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    world: Any = dist.group.WORLD
    backend, store = c10d._world.pg_map[world]
    group: Any
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        c10d.Backend(backend),
        store,
        name,  # type: ignore[arg-type]  # GroupName, which torch 2.9 lacks
        timeout=timeout,
        device_id=world.bound_device_id,
    )
    c10d._world.pg_group_ranks[group] = {world_rank: rank for rank, world_rank in enumerate(ranks)}
    return group


def _skip(code: CodeType) -> None:
    """Have dynamo run the frames of ``code``, and those that they call, as they are.

    ``torch.compiler.disable`` does the same with a wrapper, which every call would pay for, and imports dynamo, which
    takes seconds. On a torch where this name has moved dynamo reports the first of our lines that it cannot compile.
    """
    import torch

    eval_frame: Any = getattr(torch._C, "_dynamo", None)
    try:
        inner = eval_frame.eval_frame
        inner.set_code_exec_strategy(code, inner._FrameExecStrategy(inner._FrameAction.SKIP, inner._FrameAction.SKIP))
    except AttributeError:
        return


def uncompiled(owner: _Owner) -> _Owner:
    """Decorate a class or a function so that ``torch.compile`` neither compiles it nor traces into it.

    torch passes its own distributed functions over by name and compiles whatever frame comes next, which would be ours.
    They hold locks, pointers and thread-local state, of which a compiler can make nothing.
    """
    for value in vars(owner).values() if isinstance(owner, type) else (owner,):
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(function, FunctionType):
            _skip(function.__code__)
            function._torchdynamo_disable = True  # a graph ends before a call of it
    return owner


def _release(version: str) -> tuple[int, int] | None:
    """The major and the minor number; None for a version that is written otherwise."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def open_other_stores() -> None:
    """Have torch's rank 0 listen on every port that is not that of the launcher's store.

    ``phalanx run`` says by the variable of torchrun's agent (TORCHELASTIC_USE_AGENT_STORE) that it keeps a store, on
    which torch makes every rank a client, for every port. So a script that names another one (``init_method="tcp://…"``,
    or a MASTER_PORT of its own, as scripts do that start processes themselves) would wait there for half an hour.
    """
    # The package has a function of the module's name.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    own_create, own_question = rendezvous._create_c10d_store, rendezvous._torchelastic_use_agent_store
    here = threading.local()

    def create(hostname: str, port: int, *arguments: Any, **options: Any) -> Any:
        here.other = os.environ.get(settings.STORE_PORT, str(port)) != str(port)
        try:
            return own_create(hostname, port, *arguments, **options)
        finally:
            here.other = False

    rendezvous._create_c10d_store = create
    rendezvous._torchelastic_use_agent_store = lambda: not getattr(here, "other", False) and own_question()
