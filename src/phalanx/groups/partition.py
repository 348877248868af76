"""A process group of some members of another group, made by these alone. Checked on torch 2.13.0."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

__all__ = ["group_among"]


def group_among(ranks: Sequence[int], name: str, timeout: timedelta) -> dist.ProcessGroup:
    """Make a process group. Exactly the ranks in it call this.

    ``dist.new_group`` cannot make it: torch names a group by the number of groups that the rank has made, which differs
    among the ranks that are not in the same groups, and ranks with different names wait for each other.

    Args:
        ranks: the members' ranks in the world, in the group's order.
        name: the group's name: the same on all members, and no other group's, also of the past.
        timeout: for joining, and for every collective of the group.
    """
    world: Any = dist.group.WORLD
    backend, store = c10d._world.pg_map[world]
    group: Any
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        c10d.Backend(backend),
        store,
        name,  # type: ignore[arg-type]  # GroupName, which torch 2.9 lacks
        timeout=timeout,
        device_id=world.bound_device_id,
    )
    c10d._world.pg_group_ranks[group] = {world_rank: rank for rank, world_rank in enumerate(ranks)}
    return group  # type: ignore[no-any-return]
