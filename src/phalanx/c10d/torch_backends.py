"""The operations of torch's own backends, such as Gloo and NCCL, in the flight recorder of a rank of ``phalanx run``.

These backends are C++. When the first such group is made, the methods of ``ProcessGroup`` are replaced by functions
that note the call and make it.

- A *collective* begins with its call, so that ranks count them alike. It ends when ``wait`` returns, when its handle is
  dropped, or when a thread that looks twice a second finds it completed. On a device that is when the program may go
  on, which is before the device has done it.
- A *message* begins when it is waited for: nobody but Gloo knows how far one is that was only started.
- A collective that *C++ calls* (the reducer of DDP, functional collectives, what is compiled) is found when it stalls,
  in torch's own flight recorder, a ring of all operations. Its counts of a group (which collective was called last,
  which has ended last) are read at each look. The ring, which takes a tenth of a second, is read once when a group has
  stood still for two seconds. The collective in which it stands gets the number of the group's next one, and its record
  is taken back when it is over: ranks that went through theirs without a stall have counted none.

Recording must not change what a program does. So the result of each call is passed on as it is, no ``Work`` is held,
and an error in here is swallowed, since the call has to be made in any case.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import pickle
import re
import threading
import time
import weakref
from collections.abc import Callable
from ctypes import addressof
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as core
from torch.distributed import distributed_c10d as c10d

from phalanx.c10d.collectives import Collectives
from phalanx.c10d.dispatcher import OPERATIONS, tensors_in
from phalanx.c10d.torch_versions import OLDER_METHODS
from phalanx.diagnosis import recorder
from phalanx.diagnosis.snapshot import KIND_NUMBERS
from phalanx.diagnosis.stacks import Frame
from phalanx.native.core import FOUND_LATE, RecordedGroup
from phalanx.system.threads import start
from phalanx.transports.operands import DTYPES, OP_NUMBERS, REDUCIBLE

__all__ = ["record_methods"]

_LOOK_S = 0.5
# The kinds of the methods of torch's groups, under their present and older names.
_KINDS = {
    method: re.sub("_single|_coalesced", "", known.title)
    for name, known in OPERATIONS.items()
    for method in (name, OLDER_METHODS.get(name, name))
} | {"monitored_barrier": "barrier"}
# Which argument has this rank's tensors, if it is not the first.
_OWN_AT = {"all_gather": 1, "gather": 1, "all_to_all": 1, "barrier": -1}
_REDUCING = frozenset(KIND_NUMBERS[name] for name in ("all_reduce", "reduce", "reduce_scatter"))
_ROOTED = frozenset(KIND_NUMBERS[name] for name in ("broadcast", "reduce", "gather", "scatter"))
# In these torch and Phalanx want the tensors of all ranks alike; in an all_to_all they may have any shapes.
_SHAPED = _REDUCING | _ROOTED | {KIND_NUMBERS["all_gather"]}


@dataclass
class _UnderWay:
    """A collective that has begun, or a message that nobody has waited for."""

    work: weakref.ref[Any]
    group: str  # torch's name
    ticket: int  # the record's; 0 for a message, which has none so far
    begin: Callable[[], int] | None = None  # for a message: begins the record, and gives the ticket


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
    for name, kind in _KINDS.items():
        own = getattr(dist.ProcessGroup, name, None)  # no torch has all of them
        if own is not None and kind in ("send", "recv"):
            _replace(name, _message(own, KIND_NUMBERS[kind], has_peer=name != "recv_anysource"))
        elif own is not None:
            _replace(name, _collective(own, KIND_NUMBERS[kind], _OWN_AT.get(kind, 0)))
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
    own = tensors_in([tensors])
    for tensor in own:
        nbytes += tensor.nbytes
        what = kind | DTYPES.get(tensor.dtype, 0) << 8
    if len(own) == 1 and kind in _SHAPED and not own[0].is_nested and own[0].dim() > 1:
        nbytes = recorder.shaped(nbytes, own[0].shape)
    return what, nbytes


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
    stalls: dict[tuple[Any, str], _Stall] = {}
    while True:
        time.sleep(_LOOK_S)
        with contextlib.suppress(Exception):
            _look_for_stalls(stalls)
        for identity, found in list(_under_way.items()):
            with contextlib.suppress(Exception):
                work = found.work() if found.begin is None else None
                if work is not None and work.is_completed():
                    _end(identity, failed=False)
            del found
            work = None  # not to be kept until the next look


# -- collectives that C++ calls, which torch's own recorder has ------------------------------------

_STALLS_S = 2.0
_NUMBERS = (*REDUCIBLE, torch.complex64, torch.complex128)
# By torch's names in C++, which are those of its types of tensors: "Float".
_SCALAR_TYPES = {torch.empty(0, dtype=dtype).type()[len("torch.") : -len("Tensor")]: dtype for dtype in _NUMBERS}
# "all_reduce_barrier" is a barrier, and "_reduce_scatter_base" no reduce.
_LONGEST_FIRST = sorted(KIND_NUMBERS.items(), key=lambda kind: -len(kind[0]))
# One ring for Gloo and others, one for NCCL: the functions that give the operations, and counts.
_RINGS = [
    (getattr(core, name), getattr(core, f"{name}_json"))
    for name in ("_dump_fr_trace", "_dump_nccl_trace")
    if hasattr(core, name) and hasattr(core, f"{name}_json")
]


@dataclass
class _Stall:
    """A group in a ring: which collective ended last, since when, and the one that is recorded since it lasts."""

    ended: int | None = None
    since: float = 0.0
    was_read: bool = False
    ticket: int = 0
    number: int = 0


def _look_for_stalls(stalls: dict[tuple[Any, str], _Stall]) -> None:
    """Record what has stalled since the last look, and take back the records of what is over or has failed."""
    for dump, dump_json in _RINGS:
        counts = json.loads(dump_json(includeCollectives=False, onlyActive=True))["pg_status"]
        for identity, status in counts.items():
            stall = stalls.setdefault((dump, identity), _Stall())
            called, ended = int(status["last_enqueued_collective"]), int(status["last_completed_collective"])
            if stall.ticket and ended >= stall.number:
                recorder.drop(stall.ticket)
                stall.ticket = 0
            if called <= ended or stall.ended != ended:
                stall.ended, stall.since, stall.was_read = ended, time.monotonic(), False
            elif not stall.was_read and time.monotonic() - stall.since >= _STALLS_S:
                stall.was_read = True
                _record_stall(stall, identity, dump)


def _record_stall(stall: _Stall, identity: str, dump: Callable[..., bytes]) -> None:
    entry = _first_after(stall.ended or 0, identity, dump, with_stack=False)
    if entry is None:
        return
    name = entry["process_group"][0]
    kind = next((number for text, number in _LONGEST_FIRST if text in entry["profiling_name"]), 0)
    group = next((group for group, own in c10d._world.pg_names.items() if own == name), None)
    is_seen = any(found.group == name and found.ticket for found in list(_under_way.values()))
    known = None if is_seen or group is None or isinstance(group, Collectives) else _group(group)
    if not kind or known is None:
        return
    # To look up stacks torch imports its compiler, which takes seconds: C++ that calls a collective comes of DDP or of
    # functional collectives, which have imported it, but most programs have no need of it.
    entry = _first_after(stall.ended or 0, identity, dump, with_stack=True) or entry
    dtype, nbytes = None, 0
    for shape, type_name in zip(entry["input_sizes"], entry["input_dtypes"], strict=False):
        dtype = _SCALAR_TYPES.get(type_name)
        nbytes += math.prod(map(int, shape)) * (dtype.itemsize if dtype is not None else 1)
    what = FOUND_LATE | kind | (DTYPES[dtype] << 8 if dtype is not None else 0)
    entered_ns = time.monotonic_ns() - max(0, time.time_ns() - int(entry["time_created_ns"]))
    line = _users_line(entry.get("frames", ()))
    stall.ticket = recorder.begin_at(known.recorded, what, nbytes, line=line, entered_ns=entered_ns)
    stall.number = int(entry["collective_seq_id"])


def _first_after(ended: int, identity: str, dump: Callable[..., bytes], *, with_stack: bool) -> dict[str, Any] | None:
    """The first collective of a group after that with the number ``ended``; None if the ring has lost it."""
    found = pickle.loads(dump(includeCollectives=True, includeStackTraces=with_stack, onlyActive=True))
    entries: list[dict[str, Any]] = [
        entry
        for entry in found["entries"]
        if str(entry["pg_id"]) == identity
        and not entry["is_p2p"]
        and not entry["retired"]
        and entry["collective_seq_id"] > ended
    ]
    return min(entries, key=lambda entry: int(entry["collective_seq_id"]), default=None)


def _users_line(frames: Any) -> str:
    """The innermost line of the user's program in a stack of torch's; empty if there is none."""
    with contextlib.suppress(Exception):
        for found in frames:
            frame = Frame(found["filename"], int(found["line"]), found["name"])
            if not frame.is_librarys:
                return f"{frame.file}:{frame.line}"
    return ""
