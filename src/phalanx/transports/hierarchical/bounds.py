"""How many bytes must cross each host's link in a collective, by what the operation means.

These are the figures that measurements are compared with, so nothing here looks at how the operations are made. Two
things decide: what a host has to learn or to tell cannot be less than this, and the busiest link, in its busier
direction, cannot carry less. Where hosts could share the work differently at the same cost, as in a broadcast to three
hosts, in which one of two must pass the tensor on, one such way is stated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LinkBytes", "busiest", "link_bytes"]


@dataclass(frozen=True)
class LinkBytes:
    """What one host's link carries, in bytes of tensors; packets have headers besides.

    Attributes:
        sent: to other hosts.
        received: from other hosts.
    """

    sent: int
    received: int


def link_bytes(operation: str, nbytes: int, ranks: Sequence[int], root: int = 0) -> list[LinkBytes]:
    """The bytes of one call on the link of each host.

    Args:
        operation: a name as in ``torch.distributed``; forms with one tensor for all ranks count as those with lists.
        nbytes: the size of the whole tensor of a rank in ``all_reduce``, ``reduce`` and ``broadcast``. Elsewhere it is
            that of one block: what one rank gives in ``all_gather`` and ``gather``, what it gets in ``scatter`` and
            ``reduce_scatter``, and what it gives to one other rank in ``all_to_all``.
        ranks: how many ranks each host has, in the order of the hosts.
        root: the number of the root's host.

    Returns:
        One entry for each host.

    Raises:
        ValueError: there is no such collective.
    """
    hosts, world = len(ranks), sum(ranks)
    everything = nbytes * world
    if hosts < 2:
        return [LinkBytes(0, 0)] * hosts
    name = operation.removesuffix("_single")
    if name == "barrier":
        return [LinkBytes(0, 0)] * hosts
    if name == "all_reduce":
        # Each host has an H-th of the sums: it learns the others' parts of it, and tells them the result.
        each = 2 * (hosts - 1) * nbytes // hosts
        return [LinkBytes(each, each)] * hosts
    if name == "reduce":
        if hosts == 2:
            return [LinkBytes(0, nbytes) if host == root else LinkBytes(nbytes, 0) for host in range(hosts)]
        # Sums are added in the order of the hosts, so the parts of all hosts have to come together somewhere. On the
        # root's host these would be H-1 times the tensor; so the other hosts add, and the root's host sends its part.
        return [LinkBytes(nbytes, nbytes)] * hosts
    if name == "broadcast":
        # Every host but the root's learns the tensor. The last one of the chain need not pass it on.
        last = (root - 1) % hosts
        return [LinkBytes(nbytes * (host != last), nbytes * (host != root)) for host in range(hosts)]
    if name == "all_gather":
        # A host learns all that it has not, and passes on, around a circle, all that the next host has not.
        after = [ranks[(host + 1) % hosts] for host in range(hosts)]
        return [
            LinkBytes(everything - nbytes * beyond, everything - nbytes * own)
            for own, beyond in zip(ranks, after, strict=True)
        ]
    if name == "reduce_scatter":
        # Each host's part of what a rank gets goes there by itself, since they are added in the order of the hosts.
        return [LinkBytes(everything - nbytes * own, (hosts - 1) * nbytes * own) for own in ranks]
    if name in ("gather", "scatter"):
        inner, outer = everything - nbytes * ranks[root], [nbytes * own for own in ranks]
        if name == "gather":
            return [LinkBytes(0, inner) if host == root else LinkBytes(outer[host], 0) for host in range(hosts)]
        return [LinkBytes(inner, 0) if host == root else LinkBytes(0, outer[host]) for host in range(hosts)]
    if name == "all_to_all":
        return [LinkBytes(*[nbytes * own * (world - own)] * 2) for own in ranks]
    raise ValueError(f"{operation!r} is not a collective whose bytes between hosts are known")


def busiest(links: Sequence[LinkBytes]) -> int:
    """The most that one link carries in one direction: the call cannot take less time than that at the link's rate."""
    return max((max(link.sent, link.received) for link in links), default=0)
