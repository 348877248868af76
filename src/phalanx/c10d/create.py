"""Make a process group from a store and a rank: choose the transport for where the ranks are."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, _DistributedBackendOptions

from phalanx import settings
from phalanx.c10d.hooked import hooks_are_wanted
from phalanx.c10d.process_group import PhalanxProcessGroup
from phalanx.c10d.quick import quicken, quicken_messages
from phalanx.diagnosis.recorder import open_recorder
from phalanx.errors import InitializationError
from phalanx.membership.abort import GroupAbort, address_key
from phalanx.membership.liveness import Membership, set_world, world_membership
from phalanx.membership.registration import register_rank
from phalanx.membership.rendezvous_store import RendezvousStore, time_left
from phalanx.system.threads import renew_engine
from phalanx.transports.contract import Communicator
from phalanx.transports.hierarchical.communicator import HierarchicalCommunicator
from phalanx.transports.hierarchical.gloo import AttachedGloo, GlooOnDemand, lazy_gloo
from phalanx.transports.hierarchical.layout import find_hosts, said_by_all
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.explanation import process_ids
from phalanx.transports.shm.segment import NotOneHost

__all__ = ["create_process_group"]


@contextlib.contextmanager
def _naming_who_has_gone(meeting: RendezvousStore) -> Iterator[None]:
    """Raise what the meeting knows of a rank that has gone, in place of what the membership finds."""
    try:
        yield
    except InitializationError as error:
        if error.rank < 0 and (found := meeting.await_gone()) is not None:
            raise found from error
        raise


def create_process_group(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    group_name: str,
    ranks: Sequence[int],
    backend: str = settings.BACKEND,
    *,
    recorded: Sequence[int] = (),
    cpu_only: bool = False,
) -> PhalanxProcessGroup:
    """Make one rank's side of a group. Every member calls it.

    Ranks that cannot all reach one shared segment (several hosts, or containers with pid namespaces of their own) have
    shared memory among those that can, and TCP between them.

    Args:
        store: the group's own part of the job's store.
        rank, size: this process's place in the group.
        timeout: for joining, and for every collective of the group.
        group_name: torch's name for the group, equal on every member.
        ranks: the members' ranks in the world; torch gives none for the world itself.
        backend: what the group says its backend is: ``phalanx``, or the one that it replaces.
        recorded: the ranks of the job by which the flight recorder is to know the members; by default ``ranks``.
        cpu_only: whether it serves CPU tensors alone, without torch's hooks.

    Raises:
        InitializationError: a rank did not come, or has gone.
    """
    # Worlds of different sizes meet in different places, since a collective of both would be wrong on each. Their
    # ranks register in one place, so that they hear of each other.
    in_common = f"phalanx/{group_name}"
    name = f"{in_common}/{','.join(map(str, ranks)) or f'of {size}'}"
    own = RendezvousStore(name, store, ranks or range(size), world=not ranks, rank=rank)
    limit = timeout if ranks else time_left(timeout)

    def split(members: Sequence[int], timeout: timedelta, name: str) -> PhalanxProcessGroup:
        world_ranks = [ranks[member] if ranks else member for member in members]
        return create_process_group(own, members.index(rank), len(members), timeout, name, world_ranks, backend)

    def group_of(communicator: Communicator, gloo: GlooOnDemand) -> PhalanxProcessGroup:
        arguments = (backend, communicator, gloo, group_name, store, split)
        if cpu_only or not torch.accelerator.is_available():
            group = PhalanxProcessGroup(*arguments, hooked=not cpu_only and hooks_are_wanted())
        else:
            from phalanx.c10d.vendor import MixedProcessGroup

            member = _DistributedBackendOptions()
            member.store, member.group_rank, member.group_size = own, rank, size
            member.timeout, member.group_id, member.global_ranks_in_group = timeout, group_name, list(ranks)
            group = MixedProcessGroup(member, *arguments)
        group.record(recorded or ranks)
        return group

    def gloo_in(store: Store, own: int | None = None) -> GlooOnDemand:
        return GlooOnDemand(lambda timeout: lazy_gloo(store, rank, size, timeout, one_host=True), timeout, store, own)

    def over_hosts(reason: NotOneHost, made: contextlib.ExitStack) -> PhalanxProcessGroup:
        """The group of ranks that do not all share memory; ``made`` gets what is closed if that fails."""
        met = own.part(reason.meeting)
        layout, local, one_machine = find_hosts(met.part("hosts"), rank, size, limit)
        local.set_timeout(timeout)
        made.callback(local.close)
        if one_machine and rank == 0:
            none_does = len(layout.hosts) == size
            who = f"{size} ranks share no memory" if none_does else f"not all of {size} ranks share memory"
            warnings.warn(f"backend {backend!r}: {who} ({reason}); they communicate as between hosts", stacklevel=3)
        part = met.part("membership")
        membership = world_membership() if ranks else None
        members_of = ranks if membership is not None else range(size)
        if membership is None:
            places = [layout.place(each)[0] for each in range(size)]
            names = [layout.name(each) for each in range(size)]
            membership = Membership.meet(part, rank, places, names, limit)
        members = GroupAbort(membership, f"{name}/{reason.meeting}", members_of)
        made.callback(members.close)

        addresses = members.addresses("gloo")

        def make(timeout: timedelta) -> AttachedGloo:
            made = lazy_gloo(addresses, rank, size, timeout, one_host=False)
            members.say_address("gloo", addresses.get(address_key(rank)))
            return made

        gloo = GlooOnDemand(make, timeout)
        said_by_all(part, "ready", rank, size, limit, "")  # the store ends this wait if one of them has gone
        hosts = HierarchicalCommunicator(layout, rank, local, members, timeout)
        for read in (own.part("shm"), met.part("hosts"), part):
            read.clear()  # all have joined the group, so they have read all of these
        made.pop_all()
        made.callback(gloo.release)
        made.callback(hosts.close)
        gloo.on_timeout = hosts.set_timeout
        group = group_of(hosts, gloo)
        quicken_messages(group, hosts.messages.mailbox)
        if not ranks:
            set_world(hosts, membership)
            here = process_ids(local.handle, local.size)
            group.watch_waits(dict(zip(layout.here, here, strict=True)), membership)
        return group

    renew_engine()  # functions of the program may run in the group's threads
    open_recorder()  # before the ranks meet, because then they begin to hold each other's
    communicator: Communicator
    if size == 1:
        communicator = SharedMemoryCommunicator(HashStore(), 0, 1, timeout)
        group = group_of(communicator, gloo_in(HashStore()))
        quicken(group, communicator)
        return group
    with (
        contextlib.nullcontext() if ranks else register_rank(PrefixStore(in_common, store), rank, size),
        own.explaining(),
    ):
        try:
            communicator = SharedMemoryCommunicator(own.part("shm"), rank, size, limit)
            communicator.set_timeout(timeout)
        except NotOneHost as reason:
            with contextlib.ExitStack() as made, _naming_who_has_gone(own):
                group = over_hosts(reason, made)
                made.pop_all()
                return group
    try:
        # With the meeting's name, so that no key is read that an earlier group of this name has left.
        gloo = gloo_in(PrefixStore(f"gloo/{communicator.meeting}", own), own=rank)
        gloo.on_timeout = communicator.set_timeout
        group = group_of(communicator, gloo)
        quicken(group, communicator)
        if not ranks:
            set_world(communicator)
            group.watch_waits(dict(enumerate(process_ids(communicator.handle, size))))
        return group
    except BaseException:
        communicator.close()
        raise
