"""Which ranks of a group of one host have gone, and how, whether the group is broken or not."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from typing import Any

from phalanx.diagnosis.ends import AT_ONCE_S, how_ended
from phalanx.membership.departures import ENDED, FAILED, LEFT, REPLACED, Gone
from phalanx.native.core import TEXT_BYTES, Going, library
from phalanx.system.host import machine_name
from phalanx.transports.shm.explanation import facts_of
from phalanx.transports.shm.mailbox import Mailbox

__all__ = ["departed", "ended", "process_ids"]

_WAYS = {Going.LEFT: LEFT, Going.FAILED: FAILED, Going.ENDED: ENDED, Going.REPLACED: REPLACED}


def process_ids(comm: int, size: int) -> list[int]:
    """The process ids of the ranks of a group, in their order.

    Args:
        comm: the core's handle of the group, which nobody closes meanwhile.
        size: how many ranks it has.
    """
    pid, found = ctypes.c_uint32(), []
    for rank in range(size):
        library().phx_going(comm, rank, ctypes.byref(pid))
        found.append(pid.value)
    return found


def departed(mailbox: Mailbox, ranks: Collection[int]) -> dict[int, Gone]:
    """Those of these ranks that have gone; it writes nothing, and waits for nobody. Any thread may ask.

    Args:
        mailbox: of the group; of one that this rank has closed nothing is known.
        ranks: in the group.
    """
    found: dict[int, Gone] = {}
    pid = ctypes.c_uint32()
    with mailbox.handle() as comm:
        for rank in ranks if comm else ():
            how = library().phx_going(comm, rank, ctypes.byref(pid))
            if how != Going.HERE:
                found[rank] = _in_words(comm, rank, how, pid.value)
    return found


def ended(mailbox: Mailbox, peer: int, pid: int) -> dict[str, Any]:
    """What this host knows of a rank that has ended: the facts of :class:`PeerLost` that are known, and ``how``.

    Args:
        mailbox: of a group, broken or not; of one that this rank has closed nothing is known.
        peer: the rank in that group.
        pid: its process.
    """
    ending = how_ended(pid)
    with mailbox.handle() as comm:
        facts = facts_of(comm, peer) if comm else {}
    return {**facts, "how": ending.text, "signal": ending.signal}


def _in_words(comm: int, rank: int, how: int, pid: int) -> Gone:
    way, text = _WAYS[how], ""
    if way == ENDED:
        text = how_ended(pid, AT_ONCE_S).text
    elif way == FAILED:
        said = ctypes.create_string_buffer(TEXT_BYTES)
        if library().phx_description(comm, rank, said) and not said.value.startswith(b"{"):
            text = said.value.decode(errors="replace")
    return Gone(pid, machine_name(), way, text)
