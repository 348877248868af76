"""Check and measure accelerators, in a process of its own, so that no other one makes a context on a device."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from phalanx.doctor.finding import Finding, failure, ok, warning
from phalanx.doctor.variables import device_variables
from phalanx.topology.device_files import accelerator_files, count_devices, read_text
from phalanx.topology.table import format_table
from phalanx.words import format_count, format_gib, format_list

DEVICES_S = 120.0  # the first use of many devices takes a while
MEASURE_S = 2.0  # for all devices of the host
_MATRIX, _COPIED_BYTES = 8192, 64 << 20
_PCI = Path("/sys/bus/pci/devices")
SLOW = 0.8  # of the median
# The rates of a record: field, title, and how much of the field is one of the title's unit.
_RATES = (
    ("teraflops", "product TFLOP/s", 1.0),
    ("to_bytes_per_s", "to it GB/s", 1e9),
    ("from_bytes_per_s", "from it GB/s", 1e9),
)
_HIDING = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES"),
)


@dataclass
class DeviceRecord:
    """One accelerator, as it was measured; None or 0 is not known.

    Attributes:
        device: torch's name of it on its host, as ``cuda:0``; ``name`` is its model, ``pci`` its address on the bus.
        ecc_corrected, ecc_uncorrected: errors of its memory since the last reset.
        xids: the numbers of the driver's errors since the boot.
        lanes, gigatransfers: of its PCIe link now, the speed in GT/s; ``most`` is what it and its slot can do.
        peers: how many devices of the host it reaches without the host's memory.
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


Records = Mapping[str, Sequence[DeviceRecord]]  # by host


def devices(ranks: int | None = None) -> Iterator[Finding]:
    """Check whether torch sees this machine's accelerators; import it only where there is a device file.

    Args:
        ranks: how many ranks are to run on this host, if that is known.
    """
    subject = "accelerators"
    if not accelerator_files():
        yield ok(subject, "none on this machine: ranks compute on the CPU")
        return
    hiding = ", ".join(f"{name}={os.environ[name]}" for name in _HIDING if name in os.environ)
    try:
        import torch
    except ImportError as error:
        yield failure(subject, f"torch cannot be imported: {error}", "install torch again")
        return
    kind = torch.accelerator.current_accelerator(check_available=True)
    seen, there = torch.accelerator.device_count() if kind else 0, count_devices()
    if kind is None or not seen:
        if not there:
            yield ok(subject, "none that torch can use: ranks compute on the CPU")
            return
        why = hiding or f"torch {torch.__version__} was built for another kind of device, or the driver is missing"
        said = f"this machine has {there}, and torch sees none ({why})"
        yield warning(subject, said, "ranks would compute on the CPU; mend it if they should not")
    elif ranks is not None and ranks > seen:
        said = f"{format_count(seen, 'device')} for {format_count(ranks, 'rank')}: some would share one"
        yield warning(subject, said, f"start {seen} ranks here" + f" ({hiding})" * bool(hiding))
    else:
        yield ok(subject, f"{seen} of {max(there, seen)} ({kind.type})" + f", {hiding}" * bool(hiding))


# -- measuring -----------------------------------------------------------------------------------------


def probe_devices() -> dict[str, Any]:
    """Measure this host's accelerators in a process of its own.

    Returns:
        ``findings`` about what torch sees and about variables, and ``devices``, a record of each.
    """
    command = [sys.executable, "-m", "phalanx.doctor.accelerators"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEVICES_S, check=False)
        if done.returncode == 0:
            printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return printed
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        why = f"it did not end within {DEVICES_S:.0f} s"
    remedy = "look at the driver's own tool (nvidia-smi, rocm-smi) and at the kernel's log"
    return {"findings": [asdict(failure("accelerators", f"measuring them failed: {why}", remedy))], "devices": []}


def main() -> None:
    """Print what :func:`probe_devices` returns."""
    found, records = list(devices()), []
    if "torch" in sys.modules:  # there is a device file, and torch could be imported
        import torch
        from torch.cuda import nccl

        kind = torch.accelerator.current_accelerator()
        if kind is not None:
            if kind.type == "cuda" and torch.distributed.is_nccl_available():
                version = nccl.version()  # type: ignore[no-untyped-call]
                found.append(ok("NCCL", ".".join(map(str, version))))
            count = torch.accelerator.device_count()
            records = [_measured_record(kind.type, index, count) for index in range(count)]
        found += device_variables(os.environ)
    errors, log = _ecc_errors(), _kernel_log()
    for record in records:
        record.ecc_corrected, record.ecc_uncorrected = errors.get(record.pci, (None, None))
        record.xids = None if log is None else parse_xids(log).get(record.pci, [])
    made = {"findings": [asdict(finding) for finding in found], "devices": [asdict(record) for record in records]}
    print(json.dumps(made))


def _measured_record(kind: str, index: int, count: int) -> DeviceRecord:
    import torch

    module = getattr(torch, kind)
    driver = re.search(r"\d+\.[\d.]+", read_text(Path("/proc/driver/nvidia/version")))
    amd = read_text(Path("/sys/module/amdgpu/version")).strip()
    record = DeviceRecord(f"{kind}:{index}", driver=driver.group() if driver else amd)
    try:
        properties = module.get_device_properties(index)
        record.name = properties.name.removeprefix("NVIDIA ")
        with contextlib.suppress(AttributeError):  # an older torch, or another kind of device
            domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
            record.pci = f"{domain:04x}:{bus:02x}:{device:02x}.0"
        free, record.total_bytes = module.mem_get_info(index)
        record.used_bytes = record.total_bytes - free
        if kind == "cuda":
            record.peers = sum(module.can_device_access_peer(index, other) for other in range(count) if other != index)
        _measure_rates(record, torch.device(kind, index), MEASURE_S / count)
    except Exception as error:
        record.error = str(error).strip().partition("\n")[0] or type(error).__name__
    return record


def _measure_rates(record: DeviceRecord, device: Any, seconds: float) -> None:
    import torch

    left, right = (torch.randn(_MATRIX, _MATRIX, dtype=torch.float16, device=device) for _ in range(2))
    product = torch.empty_like(left)
    here = torch.empty(_COPIED_BYTES, dtype=torch.uint8).pin_memory()
    there = here.to(device)

    def rate(work: Callable[[], Any], share: float) -> float:
        """Return how often it is done in a second."""
        done, began = -1, 0.0  # the first time is not counted
        while done < 1 or time.perf_counter() - began < share * seconds:
            work()
            torch.accelerator.synchronize(device)
            done += 1
            began = began or time.perf_counter()
        return done / (time.perf_counter() - began)

    record.teraflops = rate(lambda: torch.mm(left, right, out=product), 0.5) * 2 * _MATRIX**3 / 1e12
    record.to_bytes_per_s = rate(lambda: there.copy_(here, non_blocking=True), 0.25) * _COPIED_BYTES
    record.from_bytes_per_s = rate(lambda: here.copy_(there, non_blocking=True), 0.25) * _COPIED_BYTES
    there.copy_(here, non_blocking=True)
    _describe_link(record)  # under load: an idle link saves power by being slow
    torch.accelerator.synchronize(device)


def _describe_link(record: DeviceRecord) -> None:
    """Read the PCIe link's width and speed, and the most that the device and its slot can do."""
    if not record.pci:
        return
    device = _PCI / record.pci
    slot = device.resolve().parent

    def read(end: Path, name: str) -> float:
        number = re.match(r"[\d.]+", read_text(end / name))
        return float(number.group()) if number else 0.0

    def most(name: str) -> float:
        return min(filter(None, (read(device, name), read(slot, name))), default=0.0)

    record.lanes, record.gigatransfers = read(device, "current_link_width"), read(device, "current_link_speed")
    record.most_lanes, record.most_gigatransfers = most("max_link_width"), most("max_link_speed")


def _ecc_errors() -> dict[str, tuple[int, int]]:
    """Return the corrected and uncorrected ECC errors of NVIDIA devices since their last reset, by PCI address."""
    if shutil.which("nvidia-smi") is None:
        return {}
    fields = "pci.bus_id,ecc.errors.corrected.volatile.total,ecc.errors.uncorrected.volatile.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    # The kernel writes an address with four digits before the first colon, and the driver with eight.
    rows = re.findall(r"^\w{4}(\S{12}), (\d+), (\d+)$", done.stdout, re.MULTILINE)
    return {address.lower(): (int(corrected), int(uncorrected)) for address, corrected, uncorrected in rows}


def _kernel_log() -> str | None:
    """Return the kernel's log; None where this user may not read it."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except OSError:
        return None
    return None if done.returncode else done.stdout


def parse_xids(log: str) -> dict[str, list[int]]:
    """Return the Xids that the NVIDIA driver has written into the kernel's log, by PCI address."""
    found: dict[str, list[int]] = {}
    for address, number in re.findall(r"Xid \(PCI:([0-9a-fA-F:]+)\): (\d+)", log):
        found.setdefault(f"{address.lower()}.0", []).append(int(number))
    return found


# -- judging -------------------------------------------------------------------------------------------


def device_findings(records: Records) -> list[Finding]:
    """Find devices that are slow or broken."""
    return [replace(said, host=host) for host, own in records.items() for one in own for said in _complaints(one, own)]


def _complaints(one: DeviceRecord, own: Sequence[DeviceRecord]) -> Iterator[Finding]:
    subject = one.device
    if one.error:
        remedy = "look which processes use it (nvidia-smi, rocm-smi); if none does, reset it"
        yield failure(subject, f"could not be measured: {one.error}", remedy)
    if one.ecc_uncorrected:
        remedy = "reset it when no job uses it (nvidia-smi --gpu-reset), and have it replaced if they come again"
        yield failure(subject, f"{one.ecc_uncorrected} uncorrected ECC errors since the last reset", remedy)
    if one.xids:
        numbers = format_list([str(number) for number in sorted(set(one.xids))])
        remedy = "https://docs.nvidia.com/deploy/xid-errors says what they mean"
        yield warning(subject, f"the driver has reported Xid {numbers} since the boot", remedy)
    if 0 < one.lanes < one.most_lanes or 0 < one.gigatransfers < one.most_gigatransfers:
        width, speed = f"{one.lanes:g} of {one.most_lanes:g}", f"{one.gigatransfers:g} of {one.most_gigatransfers:g}"
        remedy = "seat the card and its riser anew, and look at the firmware's settings"
        yield warning(subject, f"its PCIe link has {width} lanes, at {speed} GT/s", remedy)
    if (one.peers or 0) < max(other.peers or 0 for other in own):
        said = f"it reaches {one.peers} devices of this host directly, and others reach more"
        yield warning(subject, said, "compare nvidia-smi topo -m, and look for a broken NVLink")
    for name, title, _ in _RATES:
        if share := _slow(one, name, own):
            said = f"{title}: {share:.0%} of the median of this host's devices of its kind"
            yield warning(subject, said, "look at its temperature, power limit and clocks, and for another job")


def _slow(one: DeviceRecord, name: str, own: Sequence[DeviceRecord]) -> float:
    """Return its share of the median of its host's devices of its model; 0 if it is not slow, or not measured."""
    measured = [getattr(other, name) for other in own if other.name == one.name and not other.error]
    share: float = 0.0 if one.error else getattr(one, name) / statistics.median(measured)
    return share if share < SLOW else 0.0


def devices_as_text(records: Records) -> str:
    """Format a row for each device of all hosts, slow ones marked; empty if there is none."""
    rows = [_row(host, one, own) for host, own in records.items() for one in own]
    texts = ("host", "device", "model", "driver", "memory used", "ECC errors", "Xids", "PCIe", "peers")
    return format_table(rows, title="accelerators", text_columns=texts, color=True) if rows else ""


def _row(host: str, one: DeviceRecord, own: Sequence[DeviceRecord]) -> dict[str, str]:
    unknown = one.ecc_corrected is None
    row = {
        "device": one.device,
        "model": one.name,
        "driver": one.driver or "unknown",
        "memory used": f"{format_gib(one.used_bytes)} of {format_gib(one.total_bytes)}",
        "ECC errors": "unknown" if unknown else f"{one.ecc_corrected}, {one.ecc_uncorrected} fatal",
        "Xids": "unreadable" if one.xids is None else str(len(one.xids)),
        "PCIe": f"x{one.lanes:g} {one.gigatransfers:g} GT/s" if one.lanes else "unknown",
        "peers": "unknown" if one.peers is None else f"{one.peers} of {len(own) - 1}",
    }
    for name, title, unit in _RATES:
        row[title] = f"{getattr(one, name) / unit:.3g}{' slow' if _slow(one, name, own) else ''}"
    return {"host": host, **row} if host else row


if __name__ == "__main__":
    main()
