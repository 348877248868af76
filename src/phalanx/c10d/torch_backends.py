"""The operations of torch's own backends, such as Gloo and NCCL, in the flight recorder of a rank of ``phalanx run``.

These backends are C++. Their groups are called from Python by the methods of ``ProcessGroup``, which are replaced by
functions that note the call and make it, when the first such group is made. A call that C++ makes (the reducer of DDP,
functional collectives, what is compiled) does not come by them; one that lasts is found where torch keeps it
(``stalled_calls.py``).

- A *collective* begins with its call, so that ranks count them alike. It ends when ``wait`` returns, when its handle is
  dropped, or when a thread that looks twice a second finds it completed. The thread runs in Python: while a rank holds
  the interpreter's lock in C, an operation that nobody waits for ends late.
- A *message* begins when it is waited for: nobody but Gloo knows how far one is that was only started.
- On a device an operation ends when the program may go on, which is before the device has done it.

Recording must not change what a program does. So the result of each call is passed on as it is, no ``Work`` is held,
and an error in here is swallowed, since the call has to be made in any case.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from ctypes import addressof
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx.c10d.collectives import Collectives
from phalanx.c10d.stalled_calls import StalledCalls
from phalanx.diagnosis import recorder
from phalanx.diagnosis.snapshot import KIND_NUMBERS
from phalanx.native.core import RecordedGroup
from phalanx.system.threads import start
from phalanx.transports.shm.numbers import DTYPE_NUMBERS, OP_NUMBERS

__all__ = ["record_methods"]

_LOOK_S = 0.5
# The methods of torch's groups by their kind, and which of the arguments has this rank's tensors (-1: none).
_METHODS = {
    "all_reduce": (0, "allreduce allreduce_coalesced"),
    "broadcast": (0, "broadcast"),
    "reduce": (0, "reduce"),
    "all_gather": (
        1,
        "allgather allgather_coalesced allgather_into_tensor_coalesced _allgather_base all_gather_single "
        "all_gather_single_coalesced",
    ),
    "gather": (1, "gather"),
    "scatter": (0, "scatter"),
    "reduce_scatter": (
        0,
        "reduce_scatter reduce_scatter_tensor_coalesced _reduce_scatter_base reduce_scatter_single "
        "reduce_scatter_single_coalesced",
    ),
    "all_to_all": (1, "alltoall alltoall_base all_to_all_single"),
    "barrier": (-1, "barrier monitored_barrier"),
}
_REDUCING = frozenset(KIND_NUMBERS[name] for name in ("all_reduce", "reduce", "reduce_scatter"))
_ROOTED = frozenset(KIND_NUMBERS[name] for name in ("broadcast", "reduce", "gather", "scatter"))
# In these torch and Phalanx want the tensors of all ranks alike; in an all_to_all they may have any shapes.
_SHAPED = frozenset(KIND_NUMBERS[name] for name in _METHODS if name not in ("all_to_all", "barrier"))
_MESSAGES = {"send": "send", "recv": "recv", "recv_anysource": "recv"}


@dataclass
class _UnderWay:
    """A collective that has begun, or a message that nobody has waited for.

    Attributes:
        work: gives its ``Work``; None if that is gone.
        group: torch's name of the group.
        ticket: the record's; 0 for a message, which has none so far.
        begin: for a message, begins the record, and gives the ticket.
    """

    work: weakref.ref[Any]
    group: str
    ticket: int
    begin: Callable[[], int] | None = None


# By the identity of the Work. An entry goes when the Work does, so no identity stands for two of them.
_under_way: dict[int, _UnderWay] = {}


@dataclass
class _Group:
    """A group of torch's: its object, the members' ranks in the world, and what the core counts in."""

    object: weakref.ref[Any]
    ranks: list[int]
    recorded: RecordedGroup


_groups: dict[str, _Group] = {}  # by torch's name
_looker: threading.Thread | None = None
_locked = threading.RLock()  # for both; a signal handler that interrupts its holder may call an operation too


# -- the methods that are replaced -----------------------------------------------------------------


def record_methods() -> None:
    """Record the operations of all groups that are not Phalanx's from now on, in this process. Once is enough."""
    if getattr(dist.Work.wait, "__module__", "") == __name__:
        return
    for kind, (tensors_at, names) in _METHODS.items():
        for name in names.split():
            own = getattr(dist.ProcessGroup, name, None)  # torch 2.13 has not all of them
            if own is not None:
                _replace(name, _collective(own, KIND_NUMBERS[kind], tensors_at))
    for name, kind in _MESSAGES.items():
        own = getattr(dist.ProcessGroup, name)
        _replace(name, _message(own, KIND_NUMBERS[kind], has_peer=name != "recv_anysource"))
    setattr(dist.Work, "wait", _waiting(dist.Work.wait))  # noqa: B010
    _look_after_them()


def _replace(name: str, call: Any) -> None:
    # A method of C++ that may be overridden looks for an override, and knows that it is called by one from the name of
    # the function that calls it. Without that it would call this one again, without end.
    call.__code__ = call.__code__.replace(co_name=name)
    setattr(dist.ProcessGroup, name, call)


def _collective(own: Callable[..., Any], kind: int, tensors_at: int) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(group: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(group, Collectives):
            return own(group, *arguments, **named)
        ticket = 0
        with contextlib.suppress(Exception):
            ticket = _begin(group, kind, tensors_at, arguments, named)
        try:
            work = own(group, *arguments, **named)
        except BaseException:
            recorder.end(ticket, True)
            raise
        with contextlib.suppress(Exception):
            if ticket and work is None:
                recorder.end(ticket, False)  # the call has waited for it
            elif ticket:
                _note(work, group.group_name, ticket)
        return work

    return call


def _message(own: Callable[..., Any], kind: int, *, has_peer: bool) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(group: Any, tensors: Any, *arguments: Any, **named: Any) -> Any:
        work = own(group, tensors, *arguments, **named)
        if work is None or isinstance(group, Collectives):
            return work
        with contextlib.suppress(Exception):
            peer = int(arguments[0] if arguments else next(iter(named.values()))) if has_peer else -1
            what, nbytes = _described(kind, tensors)
            known = _group(group)
            if known is not None:
                recorded = known.recorded  # which the function keeps
                begin = lambda: recorder.begin(addressof(recorded), what, nbytes, peer)  # noqa: E731
                _note(work, group.group_name, 0, begin)
        return work

    return call


def _waiting(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def wait(work: Any, *arguments: Any, **named: Any) -> Any:
        found = _under_way.get(id(work))
        if found is None:
            return own(work, *arguments, **named)
        if found.begin is not None:
            with contextlib.suppress(Exception):
                found.ticket = found.begin()
        try:
            result = own(work, *arguments, **named)
        except BaseException:
            _end(id(work), failed=True)
            raise
        _end(id(work), failed=False)
        return result

    wait.__module__ = __name__
    return wait


# -- records ---------------------------------------------------------------------------------------


def _begin(group: Any, kind: int, tensors_at: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> int:
    """Begin the record of a collective."""
    known = _group(group)
    if known is None:
        return 0
    what, nbytes = kind, 0
    if tensors_at >= 0:
        tensors = arguments[tensors_at] if len(arguments) > tensors_at else list(named.values())
        what, nbytes = _described(kind, tensors)
    options: Any = arguments[-1] if arguments else None
    root = -1
    if kind in _REDUCING and hasattr(options, "reduceOp"):
        what |= OP_NUMBERS.get(options.reduceOp.op.value, 0) << 16
    if kind in _ROOTED and hasattr(options, "rootRank"):
        root = options.rootRank
    return recorder.begin(addressof(known.recorded), what, nbytes, root)


def _described(kind: int, tensors: Any) -> tuple[int, int]:
    """Kind and dtype, bytes and shape of these tensors, as the core records them."""
    what, nbytes = kind, 0
    plain = type(tensors) is list and len(tensors) == 1 and isinstance(tensors[0], torch.Tensor)
    own = tensors if plain else list(_flat(tensors))
    for tensor in own:
        nbytes += tensor.nbytes
        what = kind | DTYPE_NUMBERS.get(tensor.dtype, (0, 0))[1] << 8
    if len(own) == 1 and kind in _SHAPED and not own[0].is_nested and own[0].dim() > 1:
        nbytes = recorder.shaped(nbytes, own[0].shape)
    return what, nbytes


def _flat(tensors: Any) -> Iterator[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        yield tensors
    elif isinstance(tensors, (list, tuple)):
        for part in tensors:
            yield from _flat(part)


def _group(group: Any) -> _Group | None:
    """The entry of a group, made at its first call; None without a recorder."""
    with _locked:  # the program's threads and the one that looks may be first at once
        name = group.group_name
        known = _groups.get(name)
        if known is not None and known.object() is group:
            return known
        ranks = c10d.get_process_group_ranks(group)
        recorded: RecordedGroup | None = None
        if known is not None and known.ranks == ranks:
            recorded = known.recorded  # another object for the same group: the operations count on
        elif recorder.open_recorder(*((dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else ())):
            recorded = recorder.group(name, str(c10d.get_backend(group)), ranks, group.rank())
        if recorded is None:
            return None
        made = _groups[name] = _Group(weakref.ref(group), ranks, recorded)
        return made


def _note(work: Any, group: str, ticket: int, begin: Callable[[], int] | None = None) -> None:
    """End the record of an operation when that has ended, or its handle is gone."""
    identity = id(work)
    gone = weakref.ref(work, lambda _: _end(identity, failed=False))
    _under_way[identity] = _UnderWay(gone, group, ticket, begin)
    _look_after_them()


def _end(identity: int, *, failed: bool) -> None:
    found = _under_way.pop(identity, None)
    if found is not None and found.ticket:
        recorder.end(found.ticket, failed)


# -- the thread that looks -------------------------------------------------------------------------


def _look_after_them() -> None:
    global _looker
    with _locked:
        if _looker is None or not _looker.is_alive():
            looker = threading.Thread(target=_look, name="phalanx-recorder", daemon=True)
            with contextlib.suppress(RuntimeError):  # the operation itself needs no thread of Phalanx's
                start(looker)
                _looker = looker


def _look() -> None:
    """End the records of collectives that are completed, though nobody waits for them; find those of C++ that stall."""
    stalled = StalledCalls(_group_of_name, _is_under_way)
    while True:
        time.sleep(_LOOK_S)
        with contextlib.suppress(Exception):
            stalled.look()
        for identity, found in list(_under_way.items()):
            with contextlib.suppress(Exception):
                work = found.work() if found.begin is None else None
                if work is not None and work.is_completed():
                    _end(identity, failed=False)
            del found
            work = None


def _group_of_name(name: str) -> RecordedGroup | None:
    """The recorded group of torch's name; None if it is Phalanx's, which records by itself, or gone."""
    group = next((group for group, own in c10d._world.pg_names.items() if own == name), None)
    known = None if group is None or isinstance(group, Collectives) else _group(group)
    return None if known is None else known.recorded


def _is_under_way(name: str) -> bool:
    return any(found.group == name and found.ticket for found in list(_under_way.values()))
