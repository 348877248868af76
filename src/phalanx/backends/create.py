"""From a store and a rank to a process group: choosing the communicator for where the ranks are."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.backends.adapter import PhalanxProcessGroup
from phalanx.backends.communicator import Communicator
from phalanx.backends.register import NAME
from phalanx.backends.shm import SharedMemoryCommunicator
from phalanx.backends.solo import SoloCommunicator

__all__ = ["create_process_group"]

# How often this process has made a group of a name. A group that is destroyed and made again meets under new
# keys: what the first one left in the store must not be read by the second. Ranks make groups in the same
# order, so they count alike.
_generations: Counter[str] = Counter()


def create_process_group(
    store: Store, rank: int, size: int, timeout: timedelta, group_name: str
) -> PhalanxProcessGroup:
    """Make one rank's side of a group. Every member calls it.

    Args:
        store: the group's own part of the job's store.
        rank: this process's rank within the group.
        size: the number of ranks.
        timeout: for joining, and for every collective of the group.
        group_name: torch's name for the group, equal on every member.

    Raises:
        NotOneHost: the ranks do not share a host. Communication between hosts is not in this version: use
            ``backend="gloo"`` there.
        InitializationError: a rank did not come.
    """
    _generations[group_name] += 1
    own = PrefixStore(f"phalanx/{_generations[group_name]}", store)
    communicator: Communicator
    if size == 1:
        communicator = SoloCommunicator()
    else:
        communicator = SharedMemoryCommunicator(PrefixStore("shm", own), rank, size, timeout)
    return PhalanxProcessGroup(NAME, communicator, PrefixStore("gloo", own), timeout, group_name)
