"""From a store and a rank to a process group: choosing the transport for where the ranks are."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from phalanx import settings
from phalanx.c10d.hooked import group_class
from phalanx.c10d.process_group import PhalanxProcessGroup
from phalanx.c10d.quick import quicken
from phalanx.transports.contract import Communicator
from phalanx.transports.gloo.communicator import GlooCommunicator
from phalanx.transports.gloo.engine import GlooOnDemand, lazy_gloo
from phalanx.transports.hosts.choosing import choose_engine
from phalanx.transports.hosts.communicator import HostsCommunicator
from phalanx.transports.hosts.gloo_lane import GlooEngine
from phalanx.transports.hosts.islands import join_islands
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.segment import NotOneHost
from phalanx.transports.solo import SoloCommunicator

__all__ = ["create_process_group"]


def create_process_group(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    group_name: str,
    ranks: Sequence[int],
    backend: str = settings.BACKEND,
) -> PhalanxProcessGroup:
    """Make one rank's side of a group. Every member calls it.

    Args:
        store: the group's own part of the job's store.
        rank: this process's rank within the group.
        size: the number of ranks.
        timeout: for joining, and for every collective of the group.
        group_name: torch's name for the group, equal on every member.
        ranks: the members' ranks in the world; torch gives none for the world itself.
        backend: what the group says its backend is: ``phalanx``, or the one that it replaces.

    A group whose ranks cannot all reach one shared segment (several hosts, or containers with pid namespaces of their
    own) has shared memory among those that can, and an engine between them, Gloo or one that PHALANX_ENGINE names or a
    measurement prefers. If ranks of one machine share no memory, rank 0
    says why as a warning.

    Raises:
        InitializationError: a rank did not come.
    """
    own = PrefixStore(f"phalanx/{group_name}/{','.join(map(str, ranks))}", store)

    def split(members: Sequence[int], timeout: timedelta, name: str) -> PhalanxProcessGroup:
        world_ranks = [ranks[member] if ranks else member for member in members]
        return create_process_group(own, members.index(rank), len(members), timeout, name, world_ranks, backend)

    def group_of(communicator: Communicator, gloo: GlooOnDemand) -> PhalanxProcessGroup:
        arguments = (backend, communicator, gloo, group_name, store, split)
        if not torch.accelerator.is_available():
            return group_class()(*arguments)
        from phalanx.c10d.vendor import Membership, MixedProcessGroup

        member = Membership(own, rank, size, timeout, group_name, ranks)
        return MixedProcessGroup(member, *arguments)

    def gloo_in(meeting_point: Store, one_host: bool = True) -> GlooOnDemand:
        return GlooOnDemand(lambda timeout: lazy_gloo(meeting_point, rank, size, timeout, one_host=one_host), timeout)

    communicator: Communicator
    if size == 1:
        return group_of(SoloCommunicator(), gloo_in(HashStore()))
    # Gloo's keys carry the meeting's name, so that none is read that was left by an earlier group of this name, or by
    # a failed attempt to make one.
    try:
        communicator = SharedMemoryCommunicator(PrefixStore("shm", own), rank, size, timeout)
    except NotOneHost as reason:
        met = PrefixStore(reason.meeting, own)
        layout, local, one_machine = join_islands(PrefixStore("hosts", met), rank, size, timeout)
        if one_machine and rank == 0:
            who = (
                f"{size} ranks share no memory"
                if len(layout.hosts) == size
                else f"not all of {size} ranks share memory"
            )
            warnings.warn(f"backend {backend!r}: {who} ({reason}); they communicate over Gloo", stacklevel=2)
        gloo = gloo_in(PrefixStore("gloo", met), one_host=False)
        lanes = gloo_in(PrefixStore("lanes", met), one_host=False)
        messages = GlooCommunicator(gloo.get())
        chosen = choose_engine(
            PrefixStore("engine", met), layout, rank, lambda: GlooEngine(lanes, timeout), timeout, world=not ranks
        )
        broken = PrefixStore("broken", met)
        hosts = HostsCommunicator(layout, local, chosen.engine, messages, broken, timeout)
        hosts.engine += f" ({chosen.why})" if chosen.why else ""
        return group_of(hosts, gloo)
    try:
        gloo = gloo_in(PrefixStore(f"gloo/{communicator.meeting}", own))
        gloo.on_timeout = communicator.set_timeout
        group = group_of(communicator, gloo)
        quicken(group, communicator)
        return group
    except BaseException:
        communicator.close()
        raise
