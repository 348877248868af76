"""The backend of an accelerator's vendor beside ours, for groups like ``cpu:phalanx,cuda:nccl``.

torch takes a process group that is written in Python as the whole group, and makes no other backend of such a list. So
this group makes the others itself, when the first tensor of their device comes. It is a class of its own, so that a
machine without accelerators pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, _DistributedBackendOptions

from phalanx.c10d.collectives import Collectives
from phalanx.c10d.dispatcher import tensors_in
from phalanx.c10d.process_group import PhalanxProcessGroup, serve_operations
from phalanx.c10d.register import replaces
from phalanx.c10d.torch_versions import OLDER_METHODS
from phalanx.errors import ArgumentError, DeviceMismatch
from phalanx.transports.hierarchical.gloo import lazy_gloo

__all__ = ["MixedProcessGroup"]


class MixedProcessGroup(PhalanxProcessGroup):
    """Our group for CPU tensors, and the vendor's backend, made of ``member``, for those of the accelerator."""

    def __init__(self, member: _DistributedBackendOptions, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._member = member
        self._meeting = member.store
        self._vendors: dict[str, Any] = {}

    def _vendor(self, device: torch.device) -> Any:
        """The backend that the group's backend list names for ``device``, made when it is first asked for."""
        found = self._vendors.get(device.type)
        if found is None:
            name = _name(self, device, self._rank)
            self._member.store = PrefixStore(f"vendor/{device.type}", self._meeting)
            found, kind = _make(name, self._member)
            self.serve(torch.device(device.type), kind, found)
            self._vendors[device.type] = found
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        for vendor in self._vendors.values():
            vendor._set_default_timeout(timeout)
        self._member.timeout = timeout
        super().set_timeout(timeout)

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self._vendor(device)._start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        return super()._end_coalescing(device) if device.type == "cpu" else self._vendor(device)._end_coalescing()

    def shutdown(self) -> None:
        if not self._progress.inherited:
            for vendor in self._vendors.values():
                vendor.shutdown()
        super().shutdown()

    def abort(self) -> None:
        for vendor in self._vendors.values():
            vendor.abort()
        super().abort()


# Methods that take many tensors here, and one in the backends of vendors.
_ONE_BY_ONE = {
    "all_gather_single_coalesced": "_allgather_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
}


def _routed(name: str) -> Callable[..., Any]:
    """The operation ``name``, done by the backend of its tensors' device."""
    ours, theirs_name = getattr(Collectives, name), OLDER_METHODS.get(name, name)

    def call(self: MixedProcessGroup, *arguments: Any) -> Any:
        device = _device(arguments)
        if device is None or device.type == "cpu":
            return ours(self, *arguments)
        vendor = self._vendor(device)
        if name in _ONE_BY_ONE:
            return _one_by_one(vendor, _ONE_BY_ONE[name], *arguments)
        theirs = getattr(vendor, theirs_name, None)
        if theirs is None:
            raise ArgumentError(f"{name}: backend {vendor.name()!r}, which serves {device}, has no such operation")
        return theirs(*arguments)

    call.__doc__ = ours.__doc__
    return call


serve_operations(MixedProcessGroup, _routed)


def _one_by_one(vendor: Any, name: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *options: Any) -> Any:
    if vendor.supports_coalescing:
        vendor._start_coalescing()
    works = [getattr(vendor, name)(*pair, *options) for pair in zip(outputs, inputs, strict=True)]
    if vendor.supports_coalescing:
        return vendor._end_coalescing()
    for work in works[:-1]:
        work.wait()
    return works[-1]


def _device(arguments: Sequence[Any]) -> torch.device | None:
    """The device of the first tensor among the arguments, which are tensors, lists of them, or lists of lists."""
    return next((tensor.device for tensor in tensors_in(arguments)), None)


def _name(group: dist.ProcessGroup, device: torch.device, rank: int) -> str:
    names = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    name = names.get(device.type)
    if device.type == "cuda" and replaces("gloo") and name in (None, names.get("cpu")):
        return "gloo"  # the script asked for it, and Phalanx stands in for it on the CPU only
    if name is None or name == names.get("cpu"):
        own = dist.Backend.default_device_backend_map.get(device.type, "BACKEND")
        ours = names.get("cpu")
        raise DeviceMismatch(
            f"the group's backend {ours!r} moves CPU tensors; rank {rank} gave one on {device}. Move it with "
            f".cpu(), or make the group with the device's own backend beside it: cpu:{ours},{device.type}:{own}"
        )
    return name


def _make(name: str, member: _DistributedBackendOptions) -> tuple[Any, Any]:
    c10d: Any = dist.distributed_c10d
    kinds = dist.ProcessGroup.BackendType
    place = (member.store, member.group_rank, member.group_size)
    if name in ("nccl", "xccl"):
        owner = c10d.ProcessGroupNCCL if name == "nccl" else c10d.ProcessGroupXCCL
        options = owner.Options()
        options._timeout = member.timeout
        options.global_ranks_in_group = member.global_ranks_in_group
        options.group_name = member.group_id
        backend = owner(*place, options)
        if name == "nccl":
            backend._set_sequence_number_for_group()
        return backend, kinds.NCCL if name == "nccl" else kinds.XCCL
    if name == "gloo":
        return lazy_gloo(*place, member.timeout, one_host=False), kinds.GLOO
    plugin = dist.Backend._plugins[name.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(*place, member.timeout), kinds.CUSTOM
    return plugin.creator_fn(member, None), kinds.CUSTOM
