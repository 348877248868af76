"""Joining and leaving: ``init()`` gives a process its place among the ranks, ``close()`` ends it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from phalanx import settings
from phalanx.c10d.process_group import PhalanxProcessGroup
from phalanx.c10d.register import forget_failed_groups, register, replaces
from phalanx.c10d.torch_versions import new_group
from phalanx.diagnosis.recorder import joining
from phalanx.errors import ArgumentError, ClosedError, DeviceError, InitializationError, PhalanxError
from phalanx.group import Group, Session
from phalanx.membership.registration import register_rank
from phalanx.membership.rendezvous import leave, meet
from phalanx.membership.rendezvous_store import RendezvousStore, meeting_within, time_left
from phalanx.system.host import this_host
from phalanx.system.threads import AwakeClock
from phalanx.topology import device as devices
from phalanx.topology.device import why_unfit
from phalanx.topology.environment import place_with
from phalanx.topology.frameworks import announce, cpu_settings, second_meeting_point, withdraw
from phalanx.topology.place import Place
from phalanx.topology.table import RankRow, format_rank_table
from phalanx.topology.topology import Topology, gather
from phalanx.training.calls import TrainingCalls
from phalanx.transports.mpi.runtime import mpi_broadcast
from phalanx.words import format_count, tell
from phalanx.wrong_arguments import explained

__all__ = ["World", "close", "init"]

_world: World | None = None
# How many worlds this process has opened. The number is part of this world's keys in the store, as the attempt is,
# because a launcher's store keeps the keys of earlier worlds and attempts. A world that refused this process is not
# counted, since the other ranks go on waiting in it.
_openings = 0
# The store in which the ranks of the open world met. torch keeps only the C++ part of a store written in Python alive.
_store: Store | None = None


class World(TrainingCalls):
    """All ranks of the job. It is the default group: every method of :class:`Group` works on it.

    ``with phalanx.init() as world:`` closes it at the end of the block.

    Attributes:
        rank, world_size: this process's place among all ranks (``size`` is the same as ``world_size``).
        local_rank, local_world_size: its place among the ranks of its host.
        node_rank, num_nodes: its host's index among the hosts.
        device: the device this rank computes on.
        backend: the name of the communication backend.
        launcher: the launcher that started the process, named as by ``phalanx env``: ``torchrun``, ``mpich``,
            ``slurm``, …; ``none`` for a process that was started without one.
        attempt: how often the launcher has started the ranks again after a failure: 0 in the first attempt. ``phalanx
            run --restarts`` and torchrun's ``--max-restarts`` count so, and Slurm's requeueing.
        nodes: every host with its ranks, by node rank: ``world.nodes[1].ranks``.

    Every rank reports its host. Hosts are numbered in the order of their lowest ranks.
    """

    def __init__(self, place: Place, topology: Topology, device: torch.device, session: Session) -> None:
        super().__init__(_default_group(), range(place.world_size), session)
        self.world_size = place.world_size
        self.nodes = topology.nodes
        node = topology.node_of(place.rank)
        self.local_rank = node.ranks.index(place.rank)
        self.local_world_size = len(node.ranks)
        self.node_rank = node.node_rank
        self.num_nodes = len(topology.nodes)
        self.device = device
        self.backend = _backend_name()
        self.launcher = place.launcher
        self.attempt = place.attempt
        self._node_group: Group | None = None
        self._peers_group: Group | None = None
        self._changed: dict[str, str | None] = {}  # the environment variables that close() sets back

    def _announce(self, store: Store) -> None:
        """Set torchrun's variables, in which frameworks search for the world because they know few launchers."""
        where = second_meeting_point(store, self.rank, one_host=self.num_nodes == 1)
        variables = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            **where,
        }
        if self.device.type == "cpu":
            variables |= cpu_settings({**os.environ, **variables, settings.DEVICE: "cpu"})
        self._changed = announce(variables)

    @property
    def node_group(self) -> Group:
        """The ranks on this host, counted by local rank.

        The group is made at its first use. Every rank of the world must use it then, in the same order among the calls
        that make groups (:meth:`subgroup`, :meth:`split`, :attr:`peers_group`). Later uses cost nothing and need no
        other rank.
        """
        if self._node_group is None:
            self._node_group = self._own_part([node.ranks for node in self.nodes])
        return self._node_group

    @property
    def peers_group(self) -> Group:
        """The ranks of all hosts that have the same local rank as this one, in the order of their hosts.

        The group is made at its first use, as :attr:`node_group` is.
        """
        if self._peers_group is None:
            most = max(len(node.ranks) for node in self.nodes)
            self._peers_group = self._own_part(
                [
                    [node.ranks[local_rank] for node in self.nodes if local_rank < len(node.ranks)]
                    for local_rank in range(most)
                ]
            )
        return self._peers_group

    def _own_part(self, parts: Sequence[Sequence[int]]) -> Group:
        """Make all groups of a division that has every rank, and return the one of this rank."""
        return self._parts(parts)  # type: ignore[return-value]

    def _process_group_of(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """As for any group; of the world every rank calls it, so torch can name the group."""
        group = new_group(ranks, self._session.timeout)
        if group is None:
            return super()._process_group_of(ranks)
        return group if self.rank in ranks else None

    @contextlib.contextmanager
    def local_main_first(self) -> Iterator[None]:
        """As :meth:`main_first`, with one rank going first on each host: the one with local rank 0.

        Every rank must enter it. It uses :attr:`node_group`.
        """
        with self.node_group.main_first():
            yield

    def __enter__(self) -> World:
        """``with phalanx.init() as world:`` closes the world at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if _world is self:
            close()

    def describe(self) -> str:
        """The rank table of the whole world as text. Every rank must call it; all get the same."""
        rows: list[Any] = [None] * self.size
        self.all_gather_object(
            rows,
            RankRow(
                rank=self.rank,
                node_rank=self.node_rank,
                host=self.nodes[self.node_rank].host,
                local_rank=self.local_rank,
                device=str(self.device),
                pid=os.getpid(),
                cores=len(os.sched_getaffinity(0)),
                threads=torch.get_num_threads(),
            ),
        )
        rehearsed = ", rehearsed on one host in shared memory" if os.environ.get(settings.REHEARSAL) else ""
        title = f"{format_count(self.size, 'rank')}{rehearsed}, started by {self.launcher}"
        engine = getattr(_default_group(), "engine", "")
        return format_rank_table(rows, title=title, backend=f"{self.backend} over {engine}" if engine else self.backend)


@explained
def init(
    backend: str | None = None,
    *,
    device: str | torch.device | None = None,
    timeout_s: float = 1800.0,
    quiet: bool = False,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> World:
    """Join the world of this process's launcher, or a world of one if no launcher started it.

    Every rank calls it once. The launcher is recognised by its variables (``phalanx env`` shows them): torchrun,
    ``mpiexec``, ``srun`` and others need no arguments here. Rank 0 prints the rank table; ``phalanx run`` has printed
    it already.

    From here to ``close()`` this process's environment has the variables that torchrun sets (RANK, WORLD_SIZE,
    LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), under any launcher, and
    ACCELERATE_USE_CPU if the ranks compute on the CPU. Hugging Face Trainer, Accelerate and Lightning find the world by
    them. Processes that the script starts meanwhile inherit them, as they do under torchrun. A world of one changes
    nothing.

    Args:
        backend: any backend name that torch knows; by default ``phalanx`` for the CPU, else the device's own.
        device: the device on which this rank computes. The default is ``PHALANX_DEVICE``; without that variable it is
            the accelerator with the index of the local rank, or the CPU if the machine has no accelerator.
        timeout_s: how long to wait for the other ranks, now and in every collective, in seconds.
        quiet: print no table and no notes.
        init_method: ``tcp://host:port`` of rank 0, for scripts that are their own launcher; by default the launcher's
            address.
        rank, world_size: this process's rank and the number of ranks, for the same scripts. Under a launcher they must
            agree with its variables.

    Returns:
        The world. In a world of one every collective is the identity, so a script needs no ``if``.

    Raises:
        LauncherEnvironmentError: the launcher's variables contradict each other, or some of them are missing.
        DeviceError: a device is missing, cannot be opened, or is taken by two ranks.
        InitializationError: called twice without ``close()``, after ``init_process_group``, or a rank did not
            come.
    """
    global _world, _openings, _store
    if _world is not None:
        raise InitializationError(
            "this process has joined the world already: call phalanx.init() once, before rpc.init(), and keep what it "
            "returns, or call phalanx.close() first"
        )
    if dist.is_initialized():
        raise InitializationError(
            "torch.distributed was initialised before phalanx.init(); call phalanx.init() instead of "
            "init_process_group (torch.distributed works after it too)"
        )
    place = place_with(None, init_method, rank, world_size)
    accelerator = devices.find_accelerator()
    if backend and (unfit := why_unfit(backend, accelerator)):
        raise DeviceError(f"rank {place.rank}: {unfit}")
    timeout = timedelta(seconds=timeout_s)
    _openings += 1
    clock = AwakeClock()
    try:
        _store = meet(place, timeout_s, _openings, mpi_broadcast(place), quiet)
        store = PrefixStore(f"phalanx/{place.attempt}/world/{_openings}", _store)
        alone = place.world_size == 1
        with (
            meeting_within(clock, timeout_s),
            contextlib.nullcontext() if alone else register_rank(store, place.rank, place.world_size),
        ):
            with joining("", settings.BACKEND, range(place.world_size), place.rank):
                reports = RendezvousStore(
                    f"phalanx/topology/of {place.world_size}", store, range(place.world_size), True, place.rank
                )
                topology = gather(reports, place, this_host(), time_left(timeout).total_seconds())
            neighbours = topology.node_of(place.rank).ranks
            chosen = devices.choose_device(
                place.rank, neighbours.index(place.rank), len(neighbours), device, accelerator
            )
            devices.open_device(chosen, place.rank)
            register()  # torch has done it, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0
            dist.init_process_group(
                backend or devices.default_backend(chosen),
                store=store,
                rank=place.rank,
                world_size=place.world_size,
                timeout=timeout,
            )
            served = frozenset(entry.partition(":")[0] for entry in dist.get_backend_config().split(","))
            session = Session(served, timeout)
            _world = world = World(place, topology, chosen, session)
            if place.world_size > 1:
                world._announce(store)
            if chosen.type != "cpu":
                wanted = device is not None or ":" in os.environ.get(settings.DEVICE, "")
                _refuse_shared_devices(world, devices.physical_device(chosen, accelerator), wanted=wanted)
            if place.rank == 0 and not quiet:
                hint = devices.hint_for_one_process(place.launcher, chosen, accelerator)
                for note in (*place.notes, *topology.notes, *([hint] if hint else [])):
                    tell(f"note: {note}")
            if place.world_size > 1 and not quiet and settings.TABLE_SHOWN not in os.environ:
                table = world.describe()
                if world.rank == 0:
                    print(f"{table}\n", end="", file=sys.stderr, flush=True)
    except BaseException as error:
        # A store fails because rank 0, or the launcher, has ended.
        reason = InitializationError(str(error)) if isinstance(error, DistError) else error
        if backend and isinstance(error, AssertionError):  # torch's: it does not know the backend
            reason = ArgumentError(f"{error}. It is one of {', '.join(dist.Backend.backend_list)}")
        if isinstance(error, InitializationError) and error.was_refused:
            _openings -= 1
        # The caller gets no world, so nothing may remain that would prevent another attempt.
        if _world is not None:
            withdraw(_world._changed)
        _world = None
        if dist.is_initialized():
            dist.destroy_process_group()
        else:
            forget_failed_groups()
        _leave_store()
        if reason is error:
            raise
        raise reason from None
    return world


def close() -> None:
    """Leave the world: finish queued operations, destroy every group. Does nothing if there is no world.

    Every rank should call it at the end of its work. Groups of this world raise ``ClosedError`` afterwards,
    and ``init()`` may be called again.

    Raises:
        CollectiveMismatch, PeerLost: the ranks' last calls differ, which no call before could find: a broadcast's
            source waits for nobody. The world is left all the same.
    """
    global _world
    world, _world = _world, None
    if world is None:
        return
    world._session.close()
    withdraw(world._changed)
    try:
        if dist.is_initialized():
            _destroy_groups()
    finally:
        _leave_store()


def _destroy_groups() -> None:
    """Destroy every group; an error from one of them does not keep the others, and torch's records of them."""
    try:
        dist.destroy_process_group()
    except PhalanxError:
        dist.destroy_process_group()  # those that are left
        raise


def _leave_store() -> None:
    global _store
    store, _store = _store, None
    if store is not None:
        leave(store)


def _refuse_shared_devices(world: World, physical: str, *, wanted: bool) -> None:
    """Refuse a device that two ranks took, since that is a mistake; only warn if every rank asked for its device."""
    taken: list[Any] = [None] * world.size
    world.all_gather_object(taken, (physical, wanted))
    hosts = {rank: f"node {node.node_rank} ({node.host})" for node in world.nodes for rank in node.ranks}
    shared = devices.shared_devices([hosts[rank] for rank in range(world.size)], [device for device, _ in taken])
    if not shared:
        return
    text = "; ".join(f"ranks {', '.join(map(str, ranks))} on {host}: {device}" for host, device, ranks in shared)
    if all(asked for _, asked in taken):
        if world.rank == 0:
            nccl = "nccl" in dist.get_backend_config()
            advice = "; NCCL refuses that: send CUDA tensors with phalanx.init(backend='cpu:phalanx,cuda:gloo')"
            tell(f"warning: ranks share a device ({text}){advice * nccl}")
        return
    raise DeviceError(
        f"several ranks took the same device: {text}. Does the launcher give each rank its local rank, or does a "
        f"variable like CUDA_VISIBLE_DEVICES hide the others? If the ranks should share it, ask for it: "
        f"--device {world.device} or phalanx.init(device='{world.device}')"
    )


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise ClosedError(
            "the script has called torch.distributed.destroy_process_group(); call phalanx.close() in its place"
        )
    return group


def _backend_name() -> str:
    """Return what serves the world: the backend, or torch's list ``device:backend,...`` if there are several.

    Where ``phalanx`` serves a program that asked for ``gloo``, torch says ``gloo``, and this says ``phalanx``.
    """
    entries = dict(entry.split(":") for entry in dist.get_backend_config().split(","))
    if isinstance(dist.group.WORLD, PhalanxProcessGroup) and replaces(entries.get("cpu", "")):
        entries = {device: settings.BACKEND if name == entries["cpu"] else name for device, name in entries.items()}
    names = set(entries.values())
    return names.pop() if len(names) == 1 else ",".join(f"{device}:{name}" for device, name in entries.items())
