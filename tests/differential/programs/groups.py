"""Groups of ranks: made, divided, meshed, ended and made again; threads, forks, and settings of a group."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.differential.program import program, raised
from tests.support.ranks import Member


def summed(group: Any) -> Any:
    tensor = torch.tensor([float(dist.get_rank()), 1.0])
    dist.all_reduce(tensor, group=group)
    return tensor


@program()
def groups_of_neighbours(member: Member) -> Any:
    results = []
    for first in range(member.size - 1):
        ranks = [first, first + 1]
        group = dist.new_group(ranks)
        if member.rank in ranks:
            results.append((summed(group), dist.get_rank(group), dist.get_world_size(group)))
        else:
            results.append((group is dist.GroupMember.NON_GROUP_MEMBER, dist.get_rank(group), None))
    return results


@program()
def groups_made_by_their_members_only(member: Member) -> Any:
    half = member.size // 2
    ranks = list(range(half)) if member.rank < half else list(range(half, member.size))
    group = dist.new_group(ranks, use_local_synchronization=True)
    return summed(group), dist.get_process_group_ranks(group)


@program()
def names_and_ranks_of_a_group(member: Member) -> Any:
    ranks, reverse = list(range(member.size)), list(reversed(range(member.size)))
    group: Any = dist.new_group(reverse, group_desc="workers", timeout=timedelta(seconds=50))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=40), group)
    return [
        group.group_desc,
        raised(lambda: group.set_timeout(timedelta(seconds=45))),
        dist.get_process_group_ranks(group),
        [dist.get_group_rank(group, rank) for rank in ranks],
        [dist.get_global_rank(group, rank) for rank in ranks],
        summed(group),
    ]


@program()
def new_subgroups(member: Member) -> Any:
    evens, odds = list(range(0, member.size, 2)), list(range(1, member.size, 2))
    group, groups = dist.new_subgroups_by_enumeration([evens, odds])
    if member.size % 2:
        return summed(group), len(groups), raised(lambda: dist.new_subgroups(2))
    pair, pairs = dist.new_subgroups(2)
    return summed(group), len(groups), summed(pair), len(pairs)


@program()
def split_group(member: Member) -> Any:
    half = (member.size + 1) // 2
    ranks = [list(range(half)), list(range(half, member.size))]
    return raised(lambda: summed(dist.split_group(split_ranks=ranks)))


@program()
def meshes(member: Member) -> Any:
    shape = (2, member.size // 2) if member.size % 2 == 0 else (1, member.size)
    line = init_device_mesh("cpu", (member.size,), mesh_dim_names=("all",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
    groups = [line.get_group("all"), *(mesh.get_group(name) for name in ("outer", "inner"))]
    groups.append(mesh["outer", "inner"]._flatten("flat").get_group())
    places = line.get_rank(), line.get_local_rank("all"), line.get_coordinate(), mesh.get_coordinate()
    return places, [summed(group) for group in groups]


@program(differs="A group that was destroyed")
def destroyed_and_made_again(member: Member) -> Any:
    results = []
    for _ in range(3):
        group: Any = dist.new_group(list(range(member.size)))
        results.append(summed(group))
        dist.destroy_process_group(group)
        results.append(raised(lambda group=group: dist.all_reduce(torch.ones(1), group=group)))  # type: ignore[misc]
    return results


@program()
def collectives_from_threads(member: Member) -> Any:
    groups = [dist.new_group(list(range(member.size))) for _ in range(4)]
    results: list[Any] = [None] * len(groups)

    def work(index: int) -> None:
        for _ in range(10):
            results[index] = summed(groups[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@program(alone=True, differs="A group that was destroyed")
def aborted(member: Member) -> Any:
    group: Any = dist.new_group(list(range(member.size)))
    summed(group)
    dist.distributed_c10d._abort_process_group(group)
    return raised(lambda: summed(group)), summed(None)


@program(cases=["none", "cpu", "by_device"])
def backends_by_device(member: Member, spelled: str) -> Any:
    name = dist.get_backend()
    backend = {"none": None, "cpu": name, "by_device": f"cpu:{name}"}[spelled]
    group = dist.new_group(list(range(member.size)), backend=backend)
    return dist.get_backend(group).replace("phalanx", "gloo"), summed(group)
