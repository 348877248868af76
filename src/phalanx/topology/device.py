"""Choose the device on which a rank computes, through ``torch.accelerator``, so without any vendor's functions.

A rank takes the device with the index of its local rank. If its launcher has hidden all devices but the rank's own
(srun with ``--gpus-per-task``), that one is number 0, whatever the local rank is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.distributed as dist

from phalanx import settings
from phalanx.errors import DeviceError
from phalanx.topology.launchers import OWN_DEVICES
from phalanx.words import format_count

# Packages that must be imported for torch to know their devices; newer versions of them are loaded by `import torch`.
_PLUGINS = ("torch_npu", "torch_xla", "intel_extension_for_pytorch", "torch_mlu", "torch_musa")
# Variables that hide devices from a process, in the order in which they are read.
_MASKS = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    *("ASCEND_RT_VISIBLE_DEVICES", "MLU_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"),
)
# The kinds of devices that the backends of vendors need.
_DEVICES_OF = {
    "nccl": ("cuda",),
    "xccl": ("xpu",),
    "ccl": ("xpu", "cpu"),
    "hccl": ("npu", "hpu"),
    "mccl": ("musa",),
    "cncl": ("mlu",),
}


@dataclass(frozen=True)
class Accelerator:
    """The accelerators that this process sees, of torch's type ``cuda`` (also for ROCm), ``xpu``, ``mps``, ``npu``, …

    ``mask`` is the variable that hides other devices from this process, and its value.
    """

    type: str
    count: int
    mask: tuple[str, str] | None = None

    @property
    def counted(self) -> str:
        return format_count(self.count, f"{self.type} device")

    @property
    def visible(self) -> str:
        return self.counted + (f" ({self.mask[0]}={self.mask[1]})" if self.mask else "")


def find_accelerator(environment: Mapping[str, str] = os.environ) -> Accelerator | None:
    """Find the accelerators that this process sees, with the masks in ``environment``; None if it sees none."""
    for plugin in _PLUGINS:
        if find_spec(plugin) is not None:
            with contextlib.suppress(Exception):  # a plugin may not fit this torch; its devices cannot be used then
                import_module(plugin)
    if not torch.accelerator.is_available():
        return None
    kind, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    if kind is None or count == 0:
        return None
    return Accelerator(
        kind.type, count, next(((name, environment[name]) for name in _MASKS if environment.get(name)), None)
    )


def choose_device(
    rank: int,
    local_rank: int,
    local_world_size: int,
    wanted: str | torch.device | None = None,
    accelerator: Accelerator | None = None,
    environment: Mapping[str, str] = os.environ,
) -> torch.device:
    """Choose the device of one rank; DeviceError if it does not exist, or this host has more ranks than devices.

    If a host has too few devices, all of its ranks raise, so none waits for one that has raised. ``wanted`` is
    ``"cpu"``, ``"cuda"``, ``"cuda:1"``, …; None takes what ``PHALANX_DEVICE`` says, else the accelerator.
    """
    asked = wanted if wanted is not None else environment.get(settings.DEVICE)
    try:
        device = torch.device(asked or (accelerator.type if accelerator is not None else "cpu"))
    except RuntimeError as error:
        raise DeviceError(f"{DeviceError.not_a_device(repr(asked))} ({_first_line(error)})") from error
    if device.type in ("cpu", "meta"):
        return device
    asked_for = f"rank {rank}: the device {device} was asked for, but this process sees"
    if accelerator is None or accelerator.type != device.type:
        seen = "no accelerator" if accelerator is None else f"{accelerator.count} of type {accelerator.type}"
        raise DeviceError(f"{asked_for} {seen}. {_why_none(device.type, environment)}")
    if device.index is not None:
        if device.index >= accelerator.count:
            raise DeviceError(f"{asked_for} only {accelerator.visible}")
        return device
    if any(environment.get(name) for name in OWN_DEVICES) or (accelerator.count == 1 and accelerator.mask):
        return torch.device(device.type, 0)
    if local_world_size > accelerator.count or local_rank >= accelerator.count:
        raise DeviceError(
            f"{local_world_size} ranks on this host, but only {accelerator.visible}. Start at most "
            f"{format_count(accelerator.count, 'rank')} on this host, or compute on the CPU: phalanx.init(device='cpu')"
        )
    return torch.device(device.type, local_rank)


def _why_none(kind: str, environment: Mapping[str, str]) -> str:
    for name in _MASKS:
        if name in environment and environment[name].strip() in ("", "-1", "NoDevFiles"):
            return f"{name}={environment[name]!r} hides them"
    if kind == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        return f"This torch ({torch.__version__}) was built without CUDA and ROCm; install a build that has it"
    return "Is its driver loaded, and is its torch plugin installed?"


def open_device(device: torch.device, rank: int) -> None:
    """Make ``device`` the current one, and fail now if it cannot be used, with the vendor's reason."""
    if device.type in ("cpu", "meta"):
        return
    try:
        torch.accelerator.set_device_index(device.index or 0)
        torch.empty(1, device=device)
    except RuntimeError as error:
        raise DeviceError(
            f"rank {rank} could not open {device}: {_first_line(error)}. Another process may use it exclusively, or it "
            f"is broken; the vendor's tool (nvidia-smi, rocm-smi, npu-smi) shows which processes use it"
        ) from error


def physical_device(device: torch.device, accelerator: Accelerator | None) -> str:
    """Name a device by its id, its entry in the mask, or its index; empty for the CPU, which ranks share."""
    if device.type in ("cpu", "meta") or accelerator is None:
        return ""
    index = device.index or 0
    with contextlib.suppress(Exception):
        if identity := str(getattr(getattr(torch, device.type).get_device_properties(index), "uuid", "")):
            return f"{device.type} {identity}"
    entries = [entry.strip() for entry in accelerator.mask[1].split(",")] if accelerator.mask else []
    return f"{device.type} {entries[index] if index < len(entries) == accelerator.count else index}"


def shared_devices(hosts: Sequence[str], devices: Sequence[str]) -> list[tuple[str, str, list[int]]]:
    """Find the devices that several ranks took, by host and :func:`physical_device` of each: host, device, ranks."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, (host, device) in enumerate(zip(hosts, devices, strict=True)):
        if device:
            ranks_of.setdefault((host, device), []).append(rank)
    return [(host, device, ranks) for (host, device), ranks in ranks_of.items() if len(ranks) > 1]


def hint_for_one_process(launcher: str, device: torch.device, accelerator: Accelerator | None) -> str:
    """Return a hint for users who started one process on a machine with several devices; empty for all others."""
    if launcher != "none" or accelerator is None or accelerator.count < 2 or device.type == "cpu":
        return ""
    return (
        f"this process uses {device}, one of {accelerator.count}; to use all of them start the script with: "
        f"phalanx run -n {accelerator.count} SCRIPT"
    )


def default_backend(device: torch.device) -> str:
    """Return the backend for tensors on ``device``: ``phalanx`` on the CPU, the device's own elsewhere."""
    if device.type == "cpu":
        return settings.BACKEND
    return f"cpu:{settings.BACKEND},{device.type}:{dist.get_default_backend_for_device(device)}"


def why_unfit(backend: str, accelerator: Accelerator | None = None) -> str:
    """Say why a backend (``nccl``, ``cpu:gloo,cuda:nccl``) serves no device here, and which one does; empty if it does.

    ``accelerator`` is found out by default, if the backend needs any.
    """
    for part in backend.lower().split(","):
        name = part.rpartition(":")[2].strip()
        needed = _DEVICES_OF.get(name)
        if needed is None:
            continue
        accelerator = accelerator or find_accelerator()
        serves = f"the backend {name} serves {' and '.join(needed)} devices, and this process sees"
        if accelerator is None and "cpu" not in needed:
            return f"{serves} no accelerator; phalanx fits the CPU: phalanx.init() or init_process_group('phalanx')"
        if accelerator is not None and accelerator.type not in needed:
            own = dist.Backend.default_device_backend_map.get(accelerator.type, "")
            fitting = f"{own} fits them, and phalanx fits the CPU" if own else "phalanx fits the CPU"
            return f"{serves} {accelerator.counted}; {fitting}"
    return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
