"""Bind ranks to cores (``--bind``).

By default ranks are not bound, as under torchrun, Hydra and srun: two jobs on one machine would be bound to the same
cores, and the workers of a data loader would crowd onto those of their rank. Bound ranks get whole physical cores as
long as there are enough of them. Neighbouring ranks get neighbouring cores, NUMA node by NUMA node; ranks that compute
on an accelerator get cores next to it, where the kernel says which these are.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from phalanx.errors import LaunchError
from phalanx.topology.device_files import FoundDevice, devices_of_ranks, read_text

Bind = Literal["none", "core", "numa"]


@dataclass(frozen=True, order=True)
class Core:
    """The logical core ``cpu``; ``physical`` is the number of the first one of the same physical core."""

    numa_node: int
    physical: int
    cpu: int


def bind_ranks_here(
    bind: Bind, ranks: int, most: int, device: str | None, environment: Mapping[str, str]
) -> list[tuple[int, ...]]:
    """List the logical cores of each rank of this host; none if ranks are not bound.

    ``most`` is how many cores may be busy at a time; ``environment`` has the variables that hide devices.
    """
    if bind == "none":
        return []
    return bind_ranks(bind, ranks, usable_cpus(), most, cpus_near(devices_of_ranks(ranks, device, environment)))


def cores_per_rank(ranks: int, cores: int, cpus: Sequence[tuple[int, ...]]) -> int:
    """Count the cores that every rank of a host has without taking another's, at least 1.

    ``cores`` is how many may be busy there at a time, ``cpus`` has those of each rank, if ranks are bound.
    """
    return max(1, min([cores // ranks, *(len(own) // sharing for own, sharing in Counter(cpus).items())]))


def usable_cpus(system: str = "/sys/devices/system") -> list[Core]:
    """List the logical cores that this process may run on, sorted, as the kernel describes them in ``system``."""
    node_of: dict[int, int] = {}
    for directory in Path(system, "node").glob("node[0-9]*"):
        for cpu in parse_cpu_list(read_text(directory / "cpulist")):
            node_of[cpu] = int(directory.name.removeprefix("node"))
    found = []
    for cpu in os.sched_getaffinity(0):
        siblings = parse_cpu_list(read_text(Path(system, "cpu", f"cpu{cpu}", "topology", "thread_siblings_list")))
        found.append(Core(node_of.get(cpu, 0), min(siblings, default=cpu), cpu))
    return sorted(found)


def cpus_near(devices: Sequence[FoundDevice], pci: str = "/sys/bus/pci/devices") -> list[frozenset[int]]:
    """List for each rank the logical cores next to its device; empty where that is not known of all."""
    lists = [read_text(Path(pci, device.pci.lower(), "local_cpulist")) for device in devices if device.pci]
    near = [frozenset(parse_cpu_list(text)) for text in lists]
    return near if len(near) == len(devices) and all(near) else []


def bind_ranks(
    bind: Literal["core", "numa"],
    ranks: int,
    cores: Sequence[Core],
    most: int | None = None,
    near: Sequence[frozenset[int]] = (),
) -> list[tuple[int, ...]]:
    """List the logical cores of each rank.

    Args:
        bind: ``core`` divides the cores among the ranks, and no core is given to two. ``numa`` gives a rank all usable
            cores of one NUMA node, and each node as many ranks as its share of the cores.
        most: how many of them may be busy at a time, if a cgroup allows fewer than all.
        near: for each rank the cores next to its device (:func:`cpus_near`). Ranks with the same ones share these. It
            is ignored if some overlap, as where firmware knows the place of some devices only, or if too few are near.
    """
    cores = sorted(cores)
    available = min(len(cores), most or len(cores))
    if bind == "core" and ranks > available:
        raise LaunchError(
            f"--bind core: {ranks} ranks need a core each, and this process may use {available} (its affinity and its "
            f"cgroup say so). Start at most {available} ranks, or let them share: --bind none"
        )
    sharing = Counter(near)
    usable = {own: [core for core in cores if core.cpu in own] for own in sharing}
    apart = len({core for found in usable.values() for core in found}) == sum(map(len, usable.values()))
    enough = all(len(usable[own]) >= (count if bind == "core" else 1) for own, count in sharing.items())
    if near and apart and enough:
        shares = {own: iter(bind_ranks(bind, count, usable[own])) for own, count in sharing.items()}
        return [next(shares[own]) for own in near]
    if bind == "numa":
        # The node in which the middle of the rank's share lies.
        homes = [cores[(2 * rank + 1) * len(cores) // (2 * ranks)].numa_node for rank in range(ranks)]
        return [tuple(core.cpu for core in cores if core.numa_node == home) for home in homes]
    physical: dict[int, list[int]] = {}
    for core in cores:
        physical.setdefault(core.physical, []).append(core.cpu)
    units = list(physical.values()) if ranks <= len(physical) else [[core.cpu] for core in cores]
    bounds = [rank * len(units) // ranks for rank in range(ranks + 1)]
    return [tuple(cpu for unit in units[low:high] for cpu in unit) for low, high in pairwise(bounds)]


def parse_cpu_list(text: str) -> list[int]:
    """Read a list of numbers as the kernel writes it: ``0-3,8`` is 0, 1, 2, 3, 8."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low.isdigit() and (high or low).isdigit():
            numbers += range(int(low), int(high or low) + 1)
    return numbers
