"""Make process groups over MPI: the world's, and those that ``new_group`` makes of some of its ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from phalanx.c10d.process_group import PhalanxProcessGroup
from phalanx.errors import InitializationError, PhalanxError
from phalanx.membership.client import kept_store
from phalanx.topology.environment import place_with
from phalanx.transports.hierarchical.gloo import GlooOnDemand, lazy_gloo
from phalanx.transports.mpi.communicator import MpiCommunicator
from phalanx.transports.mpi.runtime import Runtime, running, start
from phalanx.words import format_named

__all__ = ["create_mpi_group"]

NAME = "mpi"
TAGS = 32767  # the largest tag that every library takes
_openings = count(1)  # of worlds in this process, which are as many on every rank


class MpiProcessGroup(PhalanxProcessGroup):
    """A process group over MPI. When the world's is shut down, MPI ends."""

    runtime: Runtime | None = None  # in the world's group only
    store: Store | None = None  # kept alive: Gloo reads it when it connects

    def shutdown(self) -> None:
        """Give back the group. ``destroy_process_group`` does so with the world's after all others."""
        super().shutdown()
        if self.runtime is not None and not self._progress.inherited:
            self.runtime.finish()


class MpiStore(Store):
    """A store for the few entries that the ranks of a Gloo group exchange while they make it.

    The first read of a key that is not there brings all of them by one collective. So every rank must write its keys
    before it reads others', as making a Gloo group does.
    """

    def __init__(self, comm: Any) -> None:
        super().__init__()
        self._comm = comm
        self._entries: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._entries[key] = bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if not self.check(keys):
            for entries in self._comm.allgather(self._entries):
                self._entries.update(entries)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._entries for key in keys)


def create_mpi_group(ranks: Sequence[int], group_name: str, timeout: timedelta) -> MpiProcessGroup:
    """Make one rank's side of a group. Every member calls it; other ranks need not.

    Args:
        ranks: the members' ranks in the world, in the group's order; empty for the world itself.
        group_name: torch's name for the group, equal on every member.
        timeout: for every collective and message of the group.

    Raises:
        InitializationError: MPI cannot be started, or ranks have not come to the world in time.
    """
    if ranks:
        return _create(ranks, group_name, timeout, running())
    meeting = _await_all(timeout)
    group = _create(ranks, group_name, timeout, start())
    del meeting  # to close its connection earlier would look like an end to the others
    return group


def _await_all(timeout: timedelta) -> Store | None:
    """Wait until all ranks of the job are about to start MPI, in which they wait for each other without a timeout.

    That is seen in the launcher's store, which is returned; None where no launcher keeps one.

    Raises:
        InitializationError: ranks did not come in time.
    """
    try:
        place = place_with(None, None, None, None)
    except PhalanxError:
        return None  # the environment is not that of a launcher that keeps a store; MPI knows the ranks by itself
    if not place.keeps_store or place.world_size == 1:
        return None
    store = PrefixStore(f"phalanx/mpi/{place.attempt}/{next(_openings)}", kept_store(place, timeout.total_seconds()))
    keys = [str(rank) for rank in range(place.world_size)]
    store.set(keys[place.rank], "here")
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise InitializationError(f"the store in which the ranks were meeting has failed: {error}") from error
        before = f"rank {place.rank} had joined, but" if place.rank else ""
        ranks = f"{format_named('rank', missing)} of {place.world_size}"
        raise InitializationError.ranks_missing(ranks, timeout.total_seconds(), before=before) from None
    return store


def _create(ranks: Sequence[int], group_name: str, timeout: timedelta, runtime: Runtime | None) -> MpiProcessGroup:
    if runtime is None or not runtime.usable:
        raise InitializationError(
            "a group with backend 'mpi' needs a world with backend 'mpi': MPI starts on all ranks at once. Call "
            "init_process_group('mpi'), or leave out new_group's backend"
        )
    if not ranks:
        runtime.begin()
    try:
        if ranks:
            everybody = runtime.world.Get_group()
            chosen = everybody.Incl(list(ranks))
            # Only the members call this, so a rank cannot count the groups: the tag is made of what all members know.
            comm = runtime.world.Create_group(chosen, zlib.crc32(f"{group_name}{list(ranks)}".encode()) % TAGS)
            chosen.Free()
            everybody.Free()
        else:
            comm = runtime.world.Dup()
    except runtime.mpi.Exception as error:
        raise InitializationError(f"MPI could not make the group {group_name!r}: {error}") from None
    members = list(ranks) or list(range(runtime.world.size))
    key = f"{group_name}/{zlib.crc32(str(members).encode())}"
    communicator = MpiCommunicator(runtime, comm, members, key, timeout)
    store = MpiStore(comm) if comm.size > 1 else HashStore()
    one_host = runtime.peers.one_host(members)
    gloo = GlooOnDemand(lambda limit: lazy_gloo(store, comm.rank, comm.size, limit, one_host=one_host), timeout)
    gloo.on_timeout = communicator.set_timeout
    group = MpiProcessGroup(NAME, communicator, gloo, group_name)
    group.store = store
    group.record(ranks)
    if not ranks:
        group.runtime = runtime
        group.watch_waits(runtime.peers.visible())
    return group
