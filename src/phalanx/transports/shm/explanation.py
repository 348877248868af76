"""Errors of a group on one host: calls in words, why it broke, which ranks have gone and how."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from phalanx.diagnosis import recorder
from phalanx.diagnosis.call_site import call_text, dtype_name, exchange_text, listed, shown
from phalanx.diagnosis.ends import how_ended
from phalanx.diagnosis.reading import copy_memory, facts_in, read_memory
from phalanx.diagnosis.snapshot import Recording
from phalanx.diagnosis.stacks import place_of_main
from phalanx.errors import CollectiveMismatch, CollectiveTimeout, PeerLost, PhalanxError
from phalanx.lost import rank_of_group
from phalanx.membership.protocol import Way
from phalanx.native.core import TEXT_BYTES, Breakage, Going, Status, library
from phalanx.system import processes
from phalanx.system.host import machine_name
from phalanx.system.processes import state_text
from phalanx.transports.contract import COLLECTIVES
from phalanx.transports.operands import DTYPES

__all__ = [
    "WAYS",
    "MessageEnd",
    "ends_of",
    "exchanged",
    "explain",
    "facts_of",
    "process_ids",
    "text_of_call",
    "unequal_ends",
]

# How long to wait for other ranks' calls. Ranks that wait in the group are woken by the break and write their call down
# within a millisecond or two, unless the machine is busy; a rank that computes is in no call.
PATIENCE_S = 0.3
# The same for the rank that broke the group. It is about to write its call down, so only a busy machine or its end can
# delay that.
NOTICED_PATIENCE_S = 2.0
_MOST_READ = 16  # recorders, of which each takes some milliseconds
_DTYPES = {number: dtype for dtype, number in DTYPES.items()}
WAYS = {Going.LEFT: Way.LEFT, Going.FAILED: Way.FAILED, Going.ENDED: Way.ENDED, Going.REPLACED: Way.REPLACED}

# -- calls in words -----------------------------------------------------------------------------


def text_of_call(name: str, dtype: torch.dtype | None, shape: Sequence[int], op: int | None, root: int | None) -> str:
    """A call of a collective in words; ``op`` is torch's number."""
    return call_text(name, dtype, shape, op, **({} if root is None else {COLLECTIVES[name]: root}))


def exchanged(dtype: torch.dtype, sent: bytes, expected: bytes) -> str:
    """An all_to_all, given its sizes in bytes as the core takes them."""
    return exchange_text(
        dtype, *([n // dtype.itemsize for n in memoryview(sizes).cast("Q")] for sizes in (sent, expected))
    )


# -- messages whose ends differ -----------------------------------------------------------------


class MessageEnd(NamedTuple):
    """One end of a message, as its rank gave it.

    Attributes:
        rank: what the group's errors call that rank.
        nbytes: of its tensor.
        dtype: the core's number for copies of it. A complex tensor travels as pairs of floats, and is named as such.
        line: of its program, as ``file:line``; empty if it is not known.
    """

    rank: int
    nbytes: int
    dtype: int
    line: str

    def text(self, verb: str, other: int | None) -> str:
        """It in words, as ``send to rank 1, float32[8] at train.py:5``, whatever the shape of these 8 elements."""
        dtype = _DTYPES.get(self.dtype)
        what = f"{self.nbytes} bytes" if dtype is None else f"{dtype_name(dtype)}[{self.nbytes // dtype.itemsize}]"
        peer = "any rank" if other is None else f"rank {other}"
        return f"{verb} {peer}, {what}" + (f" at {shown(self.line)}" if self.line else "")


def unequal_ends(sent: MessageEnd, received: MessageEnd) -> CollectiveMismatch:
    """The error, which is the same on every rank."""
    sending, receiving = sent.text("send to", received.rank), received.text("recv from", sent.rank)
    calls = {sent.rank: sending, received.rank: receiving}
    if sent.rank == received.rank:
        calls = {sent.rank: f"{sending}; {receiving}"}
    error = CollectiveMismatch.of_message_ends(
        f"  rank {sent.rank}: {sending}\n  rank {received.rank}: {receiving}", calls
    )
    error.ends = sent, received
    return error


def ends_of(error: BaseException) -> tuple[MessageEnd, MessageEnd] | None:
    """The two ends, if this is such an error."""
    ends = error.ends if isinstance(error, CollectiveMismatch) else ()
    return (MessageEnd(*ends[0]), MessageEnd(*ends[1])) if ends else None


# -- why a group broke --------------------------------------------------------------------------


def explain(comm: int, rank: int, names: Sequence[int], call: str, timeout_s: float) -> PhalanxError:
    """Publish for the other ranks what this one was doing, read what they were doing, and make an error of it.

    Args:
        comm: the core's handle of the broken group.
        rank: this process's rank in the group.
        names: what to call each rank.
        call: what this rank was doing, with the line it was called from.
        timeout_s: the group's timeout.
    """
    core = library()
    core.phx_describe(comm, call.encode()[: TEXT_BYTES - 1])
    why = Breakage()
    core.phx_breakage(comm, ctypes.byref(why))
    if why.status == Status.MISMATCH and why.of_message:
        ends = ((why.peer, why.sent), (why.rank, why.expected))
        sent, received = (
            MessageEnd(names[which], end.nbytes, end.dtype, _line(comm, which, end.site, is_own=which == rank))
            for which, end in ends
        )
        return unequal_ends(sent, received)
    if why.status == Status.MISMATCH:
        calls = _calls(comm, [why.rank], NOTICED_PATIENCE_S) | _calls(comm, range(len(names)), PATIENCE_S)
        calls |= _recorded_calls(comm, rank, call, [each for each in range(len(names)) if each not in calls])
        named = {names[rank]: text for rank, text in calls.items()}
        return CollectiveMismatch.of_calls(listed(named, names), named)
    whose = names[why.rank]
    lost = names[why.peer] if why.peer < len(names) else why.peer
    host = machine_name()
    # A rank that aborts the group, as torch's abort() does, describes nothing.
    patience_s = PATIENCE_S if why.status == Status.INTERRUPTED else NOTICED_PATIENCE_S
    noticed = _calls(comm, [why.rank], patience_s).get(why.rank, "an operation")
    waiting = f"rank {whose} was in {noticed}"
    if why.status == Status.TIMEOUT:
        living, is_stopped = _living(why.peer_pid, is_own=why.peer == rank)
        return CollectiveTimeout.did_not_come(
            f"{rank_of_group(lost, why.peer_pid, host)}, which {living},",
            waiting,
            timeout_s,
            group_rank=lost,
            elapsed_s=timeout_s,
            stopped_pid=why.peer_pid if is_stopped else 0,
            pid=why.peer_pid,
            **facts_of(comm, why.peer),
        )
    if why.status == Status.INTERRUPTED:
        return PeerLost.out_of_step(
            f"{rank_of_group(whose, why.peer_pid, host)} was interrupted in {noticed}",
            group_rank=whose,
            pid=why.peer_pid,
            **facts_of(comm, why.rank),
        )
    way, text, facts = WAYS[why.how], "", facts_of(comm, why.peer)
    if way == Way.FAILED:
        text = _calls(comm, [why.peer], 0.0).get(why.peer, "")
    elif way == Way.ENDED:
        ending = how_ended(why.peer_pid)
        text, facts["signal"] = ending.text, ending.signal
    return PeerLost.gone(way, lost, why.peer_pid, waiting, text, **facts)


def _living(pid: int, *, is_own: bool) -> tuple[str, bool]:
    """Say what a process does that does not come, and if it is stopped. This one, if late, is in the call."""
    state = processes.state_of(pid)
    if state in ("T", "t", "D"):
        return f"is {state_text(state)}", state != "D"
    place = "" if is_own else place_of_main(pid)
    return f"is at {shown(place)}" if place else "is alive", False


def facts_of(comm: int, peer: int) -> dict[str, Any]:
    """Collect what is known of a rank from its flight recorder."""
    facts: dict[str, Any] = {"host": machine_name()}
    recording = _recording(comm, peer)
    if recording is not None:
        facts |= facts_in(recording)
    return facts


def _recording(comm: int, rank: int) -> Recording | None:
    return read_memory(library().phx_recorder_of(comm, rank))


def _line(comm: int, rank: int, number: int, *, is_own: bool) -> str:
    """The line of a rank's program that has this number in its flight recorder; empty if it is not known."""
    if is_own:
        return recorder.place_of(number)
    memory = library().phx_recorder_of(comm, rank) if number else 0
    copy = copy_memory(memory)
    return copy.place(number) if copy is not None else ""


def _recorded_calls(comm: int, rank: int, call: str, silent: Sequence[int]) -> dict[int, str]:
    """The calls that ranks have recorded which wrote none down: they have gone on, as a broadcast's root may.

    Args:
        comm: the core's handle.
        rank: this process's rank in the group.
        call: what it was doing.
        silent: the others' ranks in the group.
    """
    own = read_memory(recorder.own_memory()) if silent else None
    last = own.last if own is not None else None
    if last is None or last.is_message or not last.site:
        return {}
    if not (call.startswith(f"{last.kind}(") and shown(last.site) in call):
        return {}  # this rank's call is an earlier one
    found = {}
    for each in silent[:_MOST_READ]:
        recording = _recording(comm, each)
        for record in recording.records if recording is not None else ():
            if (record.group.name, record.in_group) == (last.group.name, last.in_group) and not record.is_message:
                found[each] = replace(record, site=shown(record.site)).text()
    return found


def _calls(comm: int, ranks: range | list[int], patience_s: float) -> dict[int, str]:
    """The calls that the ranks have written down, once all of them have or patience ends."""
    core, text = library(), ctypes.create_string_buffer(TEXT_BYTES)
    calls: dict[int, str] = {}
    deadline = time.monotonic() + patience_s
    while True:
        for rank in ranks:
            if rank not in calls and core.phx_description(comm, rank, text):
                calls[rank] = text.value.decode(errors="replace")
        if len(calls) == len(ranks) or time.monotonic() > deadline:
            return calls
        time.sleep(0.001)


def process_ids(comm: int, size: int) -> list[int]:
    """List the process ids of the ``size`` ranks of a group, whose handle ``comm`` nobody closes meanwhile."""
    pid, found = ctypes.c_uint32(), []
    for rank in range(size):
        library().phx_going(comm, rank, ctypes.byref(pid))
        found.append(pid.value)
    return found
