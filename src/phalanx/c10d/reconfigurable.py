"""A process group whose ranks change: ``torch.distributed._reconfigure``, which torch has from 2.15 on.

``init_process_group(enable_reconfigure=True)`` waits for nobody, and the group that it makes has no ranks yet. The
program (torchft, or a loop of its own) collects a handle from each process that is to belong to it, and all of those
call ``reconfigure`` with the same handles and a number that was not used before. Under that number they meet as the
ranks of any new group do. Processes that are not listed are not asked, and may be gone.

Each constellation is a :class:`PhalanxProcessGroup`, to which this one hands every call. The new one is made before the
old one is given up: where that fails, the old one stays, and the program may try again with another number. An
operation of the old one that is still under way ends with an error; its memory, connections and threads are given back
before ``reconfigure`` returns. torch's hooks do not see these groups, which serve CPU tensors alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from phalanx import settings
from phalanx.c10d.create import create_process_group
from phalanx.c10d.ddp import serve_reducers
from phalanx.c10d.dispatcher import OPERATIONS
from phalanx.c10d.hooked import PythonBackend
from phalanx.c10d.process_group import PhalanxProcessGroup
from phalanx.c10d.torch_versions import uncompiled
from phalanx.c10d.work import DoneWork
from phalanx.errors import ArgumentError, ClosedError, InitializationError

__all__ = ["ReconfigurableProcessGroup"]

# What the present group does; all others of torch's methods are about the name, or go to the backend below.
_HANDED_ON = (
    *OPERATIONS,
    "_start_coalescing",
    "_end_coalescing",
    "split_group",
)
# A handle names a process's side of a group: by the rank that it was given first, which others may have been given too,
# and by what no other process has.
_HANDLE = re.compile(r"phalanx:(0|[1-9][0-9]{0,9}):[0-9a-f]{16}", re.ASCII)


def new_handle(rank: int) -> str:
    """The handle of this process's side of a group that it makes now; the same until the group is destroyed."""
    return f"phalanx:{rank}:{secrets.token_hex(8)}"


def rank_in(handle: str) -> int:
    """The rank in a handle of another process; raises ArgumentError if the text is none."""
    match = _HANDLE.fullmatch(handle)
    if match is None:
        raise ArgumentError(
            f"{handle[:80]!r} is not a handle of a group of Phalanx: give what "
            "torch.distributed._get_reconfigure_handle() returned on each process, unchanged"
        )
    return int(match[1])


def ordered(handles: Collection[str]) -> list[str]:
    """The members of a group in the order of their new ranks: that of a list, and of a set that of the ranks in them.

    Raises:
        ArgumentError: there is none, one stands there twice, or a text is not a handle.
    """
    by_rank = sorted((rank_in(handle), handle) for handle in handles)
    if not by_rank:
        raise ArgumentError("reconfigure: a group has one rank at least; got no handle")
    for handle, count in Counter(handles).items():
        if count > 1:
            raise ArgumentError(
                f"reconfigure: the handle {handle} is listed twice; give that of each process once (a process that was "
                "started anew has a new one)"
            )
    return list(handles) if isinstance(handles, (list, tuple)) else [handle for _, handle in by_rank]


def digest(handles: Sequence[str]) -> str:
    """A short text that is the same on all processes that give the same members in the same order."""
    return hashlib.sha256(" ".join(handles).encode()).hexdigest()[:32]


class _Backend(PythonBackend):
    """The group itself, as torch's dispatcher and programs that ask for the group's backend call it.

    torch keeps the backends of a group for good, and so each constellation's own cannot be given to it.
    """

    supports_reconfigure = True

    def __init__(self, group: ReconfigurableProcessGroup) -> None:
        super().__init__(group.getRank(), group.getSize())
        self._of = weakref.ref(group)  # which holds this one

    @property
    def group(self) -> ReconfigurableProcessGroup:
        group = self._of()
        if group is None:
            raise ClosedError("the backend of a process group was used after the group was gone")
        return group


@uncompiled
class ReconfigurableProcessGroup(dist.ProcessGroup):
    """A process group whose ranks :meth:`reconfigure` sets. Made by ``init_process_group``, not by hand.

    ``rank`` and ``size`` count until then. All processes that may belong to the group reach the store, which must
    outlive them.
    """

    supports_reconfigure = True

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, group_name: str, backend: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store, self._timeout, self._backend_name = store, timeout, backend
        self._rank, self._size = rank, size
        self._handle = new_handle(rank)
        self._pid = os.getpid()
        self._present: PhalanxProcessGroup | None = None
        self._used: set[int] = set()
        self._closed = False
        self._backend = _Backend(self)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, self._backend)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self._set_group_name(group_name)  # type: ignore[arg-type]  # GroupName, which torch 2.9 lacks
        serve_reducers()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return settings.BACKEND if self._backend_name == "gloo" else self._backend_name

    def name(self) -> str:
        return self._backend_name

    _get_backend_name = name

    def getRank(self) -> int:  # noqa: N802 - torch's name
        return self._rank

    def getSize(self) -> int:  # noqa: N802 - torch's name
        return self._size

    def get_group_store(self) -> Store:
        """The store in which the ranks meet, at every :meth:`reconfigure` the same."""
        return self._store

    @property
    def engine(self) -> str:
        """What carries the bytes between the hosts of the present ranks; empty on one host."""
        return "" if self._present is None else self._present.engine

    # -- the ranks ---------------------------------------------------------------------------------

    def get_reconfigure_handle(self) -> str:
        """The name of this process for the others. It stays the same until the group is destroyed."""
        return self._handle

    def reconfigure(self, opts: Any) -> Any:
        """Give the group the ranks of ``opts.handles``. All of those call it, and no others.

        Args:
            opts: torch's ``ReconfigureOptions``. ``handles``: see :func:`ordered`. ``uuid``: a number that this group
                has not used yet, equal on all. ``timeout``: how long to wait for the others.

        Raises:
            ArgumentError: the handles cannot be right, this process's own is not among them, or the number was used.
            InitializationError: not all came in time. The group is as it was before; try again with another number.
            ClosedError: the group was destroyed, or belongs to the process that this one was forked from.
        """
        if self._pid != os.getpid():
            raise ClosedError.of_parent(f"process group {self.group_name!r}", os.getpid())
        if self._closed:
            raise ClosedError(f"process group {self.group_name!r} was reconfigured after it had been destroyed")
        members = ordered(opts.handles)
        if self._handle not in members:
            raise ArgumentError(
                f"reconfigure: none of the {len(members)} handles is this process's own, {self._handle}: only the "
                "processes that are to belong to the group call it"
            )
        if opts.uuid in self._used:
            raise ArgumentError(
                f"reconfigure: the uuid {opts.uuid} was already used by this group; give each call a new one, also "
                "after one that failed"
            )
        self._used.add(opts.uuid)
        made = self._meet(members, opts.uuid, self._timeout if opts.timeout is None else opts.timeout)
        before, self._present = self._present, made
        self._rank, self._size = made.rank(), made.size()
        vars(self).update({name: getattr(made, name) for name in _HANDED_ON})
        if before is not None:
            before.retire()
        return DoneWork([])

    def _meet(self, members: list[str], uuid: int, timeout: timedelta) -> PhalanxProcessGroup:
        """Make the group of these members, each of which does so now."""
        given = [rank_in(member) for member in members]
        try:
            made = create_process_group(
                # Those who name others, or in another order, are in another meeting.
                PrefixStore(f"reconfigure/{uuid}/{digest(members)}", self._store),
                members.index(self._handle),
                len(members),
                timeout,
                self.group_name,
                [],
                self._backend_name,
                recorded=given if len(set(given)) == len(given) else range(len(members)),
                cpu_only=True,
            )
        except InitializationError as error:
            raise InitializationError(
                f"process group {self.group_name!r} could not be reconfigured to {len(members)} ranks: {error}. All of "
                f"these must call it with the same handles in the same order and with the uuid {uuid}; the group is "
                "as it was before, and the next attempt needs a new uuid"
            ) from error
        made.set_timeout(self._timeout)
        return made

    # -- lifetime ----------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """The timeout of every operation that starts from now on, also when the ranks have changed."""
        self._timeout = timeout
        if self._present is not None:
            self._present.set_timeout(timeout)

    def abort(self) -> None:
        """End operations under way on every rank with an error. :meth:`reconfigure` makes the group usable again."""
        if self._present is not None:
            self._present.abort()

    def shutdown(self) -> None:
        """Give the group back, as :meth:`PhalanxProcessGroup.shutdown`; it cannot be reconfigured afterwards."""
        self._closed = True
        if self._present is not None:
            self._present.shutdown()


def _before_the_first(name: str) -> Callable[..., Any]:
    def call(self: ReconfigurableProcessGroup, *arguments: Any, **named: Any) -> Any:
        raise InitializationError(
            f"process group {self.group_name!r} has no ranks yet, so it cannot {name.strip('_')}: it was made with "
            "enable_reconfigure=True. Call torch.distributed._reconfigure() first, with a handle of each rank"
        )

    call.__name__ = name
    return call


def _of_backend(name: str) -> Callable[..., Any]:
    def call(self: _Backend, *arguments: Any, **named: Any) -> Any:
        answer = getattr(self.group, name)(*arguments, **named)
        return DoneWork([]) if answer is None and name in OPERATIONS else answer

    call.__name__ = name
    return call


for _name in _HANDED_ON:
    setattr(ReconfigurableProcessGroup, _name, _before_the_first(_name))
uncompiled(ReconfigurableProcessGroup)
for _name in (*OPERATIONS, "rank", "size", "get_reconfigure_handle", "reconfigure", "set_timeout", "abort", "shutdown"):
    setattr(_Backend, _name, _of_backend(_name))
