"""The accelerators of this machine as the drivers' files show them, found without torch and without opening one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

# The device files of which an accelerator has exactly one: NVIDIA, Ascend, TPU and Habana.
_ONE_EACH = ("/dev/nvidia[0-9]*", "/dev/davinci[0-9]*", "/dev/accel[0-9]*")
# Those of all accelerators that torch knows; the further ones are of ROCm, XPU, TPU and WSL.
_PATTERNS = (*_ONE_EACH, "/dev/accel", "/dev/kfd", "/dev/dri/renderD*", "/dev/vfio/[0-9]*", "/dev/dxg")


def accelerator_files() -> list[str]:
    """List the device files through which a process can reach an accelerator; none if the machine has none."""
    return [path for pattern in _PATTERNS for path in sorted(glob(pattern))]


def count_devices() -> int:
    """Count this machine's accelerators, as far as each has a device file of its own; 0 if that is not known.

    The files of /dev/dri are not counted: a display adapter has one too.
    """
    return max(len(glob(pattern)) for pattern in _ONE_EACH)


@dataclass(frozen=True)
class FoundDevice:
    """An accelerator that a process may use; what the files do not say is empty.

    Attributes:
        kind: torch's name of the kind: ``cuda`` (also for ROCm) or ``npu``.
        name: its model, as ``H200``.
        identity: what its vendor calls it, as ``GPU-1f2e…``.
        pci: its address on the PCI bus, as ``0000:19:00.0``.
    """

    kind: str
    name: str = ""
    identity: str = ""
    pci: str = ""


def visible_devices(environment: Mapping[str, str], root: str = "/") -> list[FoundDevice] | None:
    """List the accelerators that a process with these variables sees, in torch's order; None if no file tells of any.

    Intel's have no files that tell them from display adapters. /proc, /sys and /dev are looked for in ``root``.
    """
    for found, variables in (
        (_nvidia(Path(root)), ("CUDA_VISIBLE_DEVICES",)),
        (_rocm(Path(root)), ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")),
        (_ascend(Path(root)), ("ASCEND_RT_VISIBLE_DEVICES",)),
    ):
        if not found:
            continue
        for variable in variables:
            if variable in environment:
                found = _masked(found, environment[variable])
        return found
    return None


def devices_of_ranks(ranks: int, asked: str | None, environment: Mapping[str, str]) -> list[FoundDevice]:
    """List the accelerator of each rank of this host; empty if they compute on the CPU, or it is not known of all.

    ``asked`` is the device that the user has asked for, as ``cuda`` or ``cuda:1``.
    """
    found = [] if asked == "cpu" else visible_devices(environment) or []
    index = (asked or "").partition(":")[2]
    chosen = found[int(index) : int(index) + 1] * ranks if index else found[:ranks]
    return chosen if len(chosen) == ranks else []


def device_names(environment: Mapping[str, str]) -> list[str] | None:
    """Name the accelerators that a process sees, as ``cuda:0 H200``; None if there may be some, and no file tells."""
    if not accelerator_files():
        return []
    found = visible_devices(environment)
    if found is None:
        return None
    return [f"{device.kind}:{index} {device.name}".strip() for index, device in enumerate(found)]


def device_of_rank(local_rank: int, asked: str | None, names: Sequence[str] | None) -> str:
    """Name the device of a rank, as the rank table does; ``?`` if it is not known.

    ``asked`` is the device that the user has asked for, ``names`` are :func:`device_names` on the rank's host.
    """
    if asked == "cpu" or (asked is None and names == []):
        return "cpu"
    if asked is None:
        return names[local_rank] if names is not None and local_rank < len(names) else "?"
    device = asked if ":" in asked else f"{asked}:{local_rank}"
    return next((name for name in names or () if name.split()[0] == device), device)


def _nvidia(root: Path) -> list[FoundDevice]:
    found = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):  # by address, as with CUDA_DEVICE_ORDER
        fields = dict(line.split(":", 1) for line in read_text(folder / "information").splitlines() if ":" in line)
        said = {name.strip(): value.strip() for name, value in fields.items()}
        if (root / f"dev/nvidia{said.get('Device Minor', '')}").exists():  # a container has files of some alone
            model = said.get("Model", "").removeprefix("NVIDIA ").removeprefix("Tesla ")
            found.append(FoundDevice("cuda", model, said.get("GPU UUID", ""), folder.name))
    if len({device.name for device in found}) > 1:  # CUDA puts the fastest first, by a measure of its own
        return [FoundDevice(device.kind) for device in found]
    return found


def _rocm(root: Path) -> list[FoundDevice]:
    found = []
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*")
    for node in sorted(nodes, key=lambda node: int(node.name)):
        fields = dict(line.split(None, 1) for line in read_text(node / "properties").splitlines() if " " in line)
        if int(fields.get("simd_count", "0")):  # a processor has none
            bus, domain = int(fields.get("location_id", "0")), int(fields.get("domain", "0"))
            # The highest four bits of the location number the parts of an MI300 that is divided.
            pci = f"{domain:04x}:{bus >> 8 & 255:02x}:{bus >> 3 & 31:02x}.{bus & 7:x}"
            found.append(
                FoundDevice("cuda", read_text(node / "name").strip(), f"GPU-{int(fields.get('unique_id', '0')):x}", pci)
            )
    return found


def _ascend(root: Path) -> list[FoundDevice]:
    return [FoundDevice("npu") for file in (root / "dev").glob("davinci*") if re.fullmatch(r"davinci\d+", file.name)]


def _masked(devices: list[FoundDevice], mask: str) -> list[FoundDevice]:
    """Choose what a mask names, by number or by the beginning of its identity; the mask ends at what names none."""
    chosen = []
    for entry in (part.strip() for part in mask.split(",")):
        if entry.isdecimal():
            named = devices[int(entry) : int(entry) + 1]
        else:
            named = [device for device in devices if entry and device.identity.startswith(entry)]
            if entry.startswith("MIG-"):
                named = [FoundDevice("cuda", "MIG")]
        if len(named) != 1:
            break
        chosen += named
    return chosen


def read_text(path: Path) -> str:
    """Return what is in a file of the kernel's or a driver's; nothing if there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
