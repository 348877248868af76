"""Which ranks of a group share memory: found by trying, since neither names nor kernels say.

Ranks that believe to be on one host try to share memory. Where that fails, as between containers of one machine, each
of them is a host of its own.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import timedelta

from torch._C._distributed_c10d import Store

from phalanx.membership.rendezvous_store import part_of
from phalanx.system.host import this_host
from phalanx.transports.contract import Communicator
from phalanx.transports.hierarchical.layout import Layout
from phalanx.transports.hierarchical.said import said_by_all
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.segment import NotOneHost
from phalanx.transports.solo import SoloCommunicator

__all__ = ["join_islands"]


def join_islands(store: Store, rank: int, size: int, timeout: timedelta) -> tuple[Layout, Communicator, bool]:
    """Find the ranks that share memory with this one. Every rank of the group calls it.

    Args:
        store: where they meet, and nobody has met before.
        rank, size: this process's place in the group.
        timeout: for all of them to come.

    Returns:
        Where all ranks are; a communicator of those on this host; and whether ranks of one machine share no memory.

    Raises:
        InitializationError: a rank did not come.
    """
    believed = said_by_all(store, "host", rank, size, timeout, json.dumps(asdict(this_host()), sort_keys=True))
    here = [other for other in range(size) if believed[other] == believed[rank]]
    local: Communicator = SoloCommunicator()
    found = f"rank {rank}"
    if len(here) > 1:
        own = part_of(store, f"memory/{here[0]}")
        try:
            local = SharedMemoryCommunicator(own, here.index(rank), len(here), timeout, names=here)
            found = f"island {here[0]}"
        except NotOneHost:
            pass
    try:
        islands = said_by_all(store, "island", rank, size, timeout, found)
    except BaseException:
        local.close()
        raise
    hosts = [json.loads(host) for host in believed]
    layout = Layout(islands, rank, [host["name"] for host in hosts])
    machines = [{hosts[member]["boot_id"] for member in members} - {""} for members in layout.hosts]
    return layout, local, len(frozenset().union(*machines)) < sum(map(len, machines))
