"""Judge measurements of accelerators: findings about those that are slow or broken, and a table of all."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.doctor.finding import Finding, Level
from phalanx.topology.table import format_table
from phalanx.words import format_gib, format_list

__all__ = ["DeviceRecord", "device_findings", "devices_as_text"]

SLOW = 0.8  # of the median
# What is measured: the field of a record, its title, and how much of it makes one of the unit in the title.
_MEASURED = (
    ("teraflops", "product TFLOP/s", 1.0),
    ("to_bytes_per_s", "to it GB/s", 1e9),
    ("from_bytes_per_s", "from it GB/s", 1e9),
)


@dataclass
class DeviceRecord:
    """One accelerator, as it was measured. What is None or 0 is not known.

    Attributes:
        device: torch's name of it on its host, as ``cuda:0``.
        name: its model.
        pci: its address on the PCI bus.
        driver: the version of its driver.
        used_bytes, total_bytes: of its memory. Measuring itself uses about half a GiB.
        ecc_corrected, ecc_uncorrected: errors of its memory since the last reset.
        xids: the numbers of the driver's errors since the boot.
        lanes, most_lanes: of its PCIe link now, and as many as it and its slot have.
        gigatransfers, most_gigatransfers: the speed of a lane, in GT/s.
        peers: how many devices of the host's it reaches without the host's memory; None if that cannot be asked.
        teraflops: of a product of matrices of float16.
        to_bytes_per_s, from_bytes_per_s: from the host's pinned memory, and back.
        error: why it could not be measured; empty if it was.
    """

    device: str
    name: str = ""
    pci: str = ""
    driver: str = ""
    used_bytes: int = 0
    total_bytes: int = 0
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    xids: list[int] | None = field(default_factory=list)
    lanes: float = 0
    most_lanes: float = 0
    gigatransfers: float = 0
    most_gigatransfers: float = 0
    peers: int | None = None
    teraflops: float = 0
    to_bytes_per_s: float = 0
    from_bytes_per_s: float = 0
    error: str = ""


Records = Mapping[str, Sequence[DeviceRecord]]


def device_findings(records: Records) -> list[Finding]:
    """List findings about devices that are slow or broken.

    Args:
        records: those of each host, by its name.
    """
    return [
        Finding(level, one.device, said, remedy, host)
        for host, own in records.items()
        for one in own
        for level, said, remedy in _complaints(one, own)
    ]


def _complaints(one: DeviceRecord, own: Sequence[DeviceRecord]) -> list[tuple[Level, str, str]]:
    found = []
    if one.error:
        remedy = "look which processes use it (nvidia-smi, rocm-smi); if none does, reset it"
        found.append((Level.FAILURE, f"could not be measured: {one.error}", remedy))
    if one.ecc_uncorrected:
        remedy = "reset it when no job uses it (nvidia-smi --gpu-reset), and have it replaced if they come again"
        found.append((Level.FAILURE, f"{one.ecc_uncorrected} uncorrected ECC errors since the last reset", remedy))
    if one.xids:
        numbers = format_list([str(number) for number in sorted(set(one.xids))])
        remedy = "https://docs.nvidia.com/deploy/xid-errors says what they mean"
        found.append((Level.WARNING, f"the driver has reported Xid {numbers} since the boot", remedy))
    if 0 < one.lanes < one.most_lanes or 0 < one.gigatransfers < one.most_gigatransfers:
        said = (
            f"its PCIe link has {one.lanes:g} of {one.most_lanes:g} lanes, at {one.gigatransfers:g} of "
            f"{one.most_gigatransfers:g} GT/s"
        )
        found.append((Level.WARNING, said, "seat the card and its riser anew, and look at the firmware's settings"))
    if (one.peers or 0) < max(other.peers or 0 for other in own):
        said = f"it reaches {one.peers} devices of this host directly, and others reach more"
        found.append((Level.WARNING, said, "compare nvidia-smi topo -m, and look for a broken NVLink"))
    for name, title, _ in _MEASURED:
        if share := _slow(one, name, own):
            said = f"{title}: {share:.0%} of the median of this host's devices of its kind"
            found.append((Level.WARNING, said, "look at its temperature, power limit and clocks, and for another job"))
    return found


def _slow(one: DeviceRecord, name: str, own: Sequence[DeviceRecord]) -> float:
    """Return its share of the median of this model's devices on its host; 0 if it is not slow, or not measured."""
    measured = [getattr(other, name) for other in own if other.name == one.name and not other.error]
    share: float = 0.0 if one.error else getattr(one, name) / statistics.median(measured)
    return share if share < SLOW else 0.0


def devices_as_text(records: Records, *, color: bool = False) -> str:
    """Format a row for each device of all hosts, slow ones marked; empty if there is none."""
    lines = [
        {
            **({"host": host} if host else {}),
            "device": one.device,
            "model": one.name,
            "driver": one.driver or "unknown",
            "memory used": f"{format_gib(one.used_bytes)} of {format_gib(one.total_bytes)}",
            "ECC errors": "unknown"
            if one.ecc_corrected is None
            else f"{one.ecc_corrected}, {one.ecc_uncorrected} fatal",
            "Xids": "unreadable" if one.xids is None else str(len(one.xids)),
            "PCIe": f"x{one.lanes:g} {one.gigatransfers:g} GT/s" if one.lanes else "unknown",
            "peers": "unknown" if one.peers is None else f"{one.peers} of {len(own) - 1}",
            **{
                title: f"{getattr(one, name) / unit:.3g}{' slow' if _slow(one, name, own) else ''}"
                for name, title, unit in _MEASURED
            },
        }
        for host, own in records.items()
        for one in own
    ]
    texts = ("host", "device", "model", "driver", "memory used", "ECC errors", "Xids", "PCIe", "peers")
    return format_table(lines, title="accelerators", text_columns=texts, color=color) if lines else ""
