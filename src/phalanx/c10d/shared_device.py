"""A warning where several ranks compute on one device, most often all of them on the first.

``phalanx.init()`` gives each rank a device of its own, and refuses one that two took. A script that calls
``init_process_group`` by itself may forget ``torch.cuda.set_device(local_rank)``: then everything works, on one device,
at the speed of one.
"""

from __future__ import annotations

import json

import torch
from torch._C._distributed_c10d import Store

from phalanx.system.host import this_host
from phalanx.topology.device import find_accelerator, physical_device
from phalanx.words import format_named, tell

__all__ = ["note_device", "refused_by_nccl", "shared_device", "tell_if_shared"]

_NEAR = 64  # a rank looks at so many before and after it: those of a host are mostly close to each other


def shared_device(store: Store, rank: int, size: int, host: str, device: str) -> str:
    """Note in the store where a rank computes; the warning if others compute there too, or nothing. Waits for nobody.

    Of two ranks that share a device, the later one to call this sees the other. One rank for each device says it.

    Args:
        store: the group's, in which the notes stay.
        rank, size: this process's place in the group.
        host: anything that distinguishes this host from others.
        device: :func:`~phalanx.topology.device.physical_device` of the device; empty for one that ranks may share.
    """
    own = json.dumps([host, device])
    store.set(f"device/{rank}", own)
    sharing = _sharing(store, rank, size, own)
    if not device or len(sharing) < 2 or store.add(f"device/told/{own}", 1) > 1:
        return ""
    return (
        f"warning: {format_named('rank', sharing)} compute on the same device ({device}). Did the script forget "
        f"torch.accelerator.set_device_index(local_rank)? phalanx.init() chooses a device for each rank"
    )


def tell_if_shared(store: Store, rank: int, size: int, device: torch.device) -> None:
    """Print the warning of :func:`shared_device` if it is this rank that says it, for a device that this rank uses."""
    said = shared_device(store, rank, size, *_host_and_device(device))
    if said:
        tell(said)


def note_device(store: Store, rank: int, device: torch.device) -> None:
    """Note where a rank computes, for :func:`refused_by_nccl`."""
    store.set(f"device/{rank}", json.dumps(_host_and_device(device)))


def refused_by_nccl(store: Store, rank: int, size: int, device: torch.device) -> str:
    """Say why NCCL has refused a group's first call, if known; each rank has called :func:`note_device` before."""
    own = json.dumps(_host_and_device(device))
    sharing = _sharing(store, rank, size, own)
    if len(sharing) < 2:
        return ""
    return (
        f"{format_named('rank', sharing)} compute on the same device ({json.loads(own)[1]}), which NCCL refuses. Give "
        f"each rank its own: torch.accelerator.set_device_index(local_rank), or phalanx.init(). To share the device, "
        f"send its tensors over Gloo: init_process_group('cpu:gloo,cuda:gloo')"
    )


def _sharing(store: Store, rank: int, size: int, own: str) -> list[int]:
    near = range(max(0, rank - _NEAR), min(size, rank + _NEAR + 1))
    there = [other for other in near if other == rank or store.check([f"device/{other}"])]
    return [other for other in there if store.get(f"device/{other}").decode() == own]


def _host_and_device(device: torch.device) -> tuple[str, str]:
    host = this_host()
    return f"{host.name} {host.boot_id}", physical_device(device, find_accelerator())
