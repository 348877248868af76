"""Measure the accelerators of this host; a process of its own, so that no other one makes a context on a device.

It prints one JSON object: ``findings`` about what torch sees and what variables change, and ``devices``, one record for
each (:class:`~phalanx.doctor.device_records.DeviceRecord`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.doctor.device_records import DeviceRecord
from phalanx.doctor.devices import devices
from phalanx.doctor.finding import Finding, Level
from phalanx.doctor.variables import device_variables
from phalanx.topology.device_files import accelerator_files, read_text

__all__ = ["PROBE_S", "driver_events", "probe_devices"]

MEASURE_S = 2.0  # for all devices of the host
_MATRIX, _COPIED_BYTES = 8192, 64 << 20
PROBE_S = 120.0  # the first use of many devices takes a while
_PCI = Path("/sys/bus/pci/devices")


def probe_devices() -> dict[str, Any]:
    """Run this module in a process of its own, and return the object that it printed."""
    command = [sys.executable, "-m", "phalanx.doctor.device_probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        done, why = None, f"it did not end within {PROBE_S:.0f} s"
    if done is not None and done.returncode == 0:
        printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return printed
    remedy = "look at the driver's own tool (nvidia-smi, rocm-smi) and at the kernel's log"
    failure = Finding(Level.FAILURE, "accelerators", f"measuring them failed: {why}", remedy)
    return {"findings": [asdict(failure)], "devices": []}


def _probe() -> dict[str, Any]:
    found = list(devices())
    kind, count = "", 0
    if accelerator_files() and found[0].level is not Level.FAILURE:
        import torch
        from torch.cuda import nccl

        count, current = torch.accelerator.device_count(), torch.accelerator.current_accelerator()
        kind = current.type if current is not None else ""
        if kind == "cuda" and torch.distributed.is_nccl_available():
            version = nccl.version()  # type: ignore[no-untyped-call]
            found.append(Finding(Level.OK, "NCCL", ".".join(map(str, version))))
        found += device_variables(os.environ)
    errors, events = _ecc_errors(), driver_events()
    records = [_record(kind, index, count, errors, events) for index in range(count)]
    return {
        "findings": [asdict(finding) for finding in found],
        "devices": [asdict(record) for record in records],
    }


def _record(
    kind: str, index: int, count: int, errors: dict[str, tuple[int, int]], events: dict[str, list[int]] | None
) -> DeviceRecord:
    import torch

    module = getattr(torch, kind)
    record = DeviceRecord(f"{kind}:{index}", driver=_driver())
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
        _measure(record, torch.device(kind, index), MEASURE_S / count)
    except Exception as error:
        record.error = str(error).strip().partition("\n")[0] or type(error).__name__
    record.ecc_corrected, record.ecc_uncorrected = errors.get(record.pci, (None, None))
    record.xids = None if events is None else events.get(record.pci, [])
    return record


def _measure(record: DeviceRecord, device: Any, seconds: float) -> None:
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
    _describe_link(record)  # now: a link that is idle saves power by being slow
    torch.accelerator.synchronize(device)


def _describe_link(record: DeviceRecord) -> None:
    """Read the link's width and speed, and the most that the device and its slot can do; 0 where that is not known."""
    ends = [_PCI / record.pci, (_PCI / record.pci).resolve().parent] if record.pci else []

    def read(end: Path, name: str) -> float:
        number = re.match(r"[\d.]+", read_text(end / name))
        return float(number.group()) if number else 0.0

    if ends:
        record.lanes, record.gigatransfers = (read(ends[0], f"current_link_{what}") for what in ("width", "speed"))
        record.most_lanes, record.most_gigatransfers = (
            min((most for end in ends if (most := read(end, f"max_link_{what}"))), default=0.0)
            for what in ("width", "speed")
        )


def _driver() -> str:
    found = re.search(r"\d+\.[\d.]+", read_text(Path("/proc/driver/nvidia/version")))
    return found.group() if found else read_text(Path("/sys/module/amdgpu/version")).strip()


def _ecc_errors() -> dict[str, tuple[int, int]]:
    """Return the corrected and uncorrected ECC errors of NVIDIA devices since their last reset, by PCI address."""
    if shutil.which("nvidia-smi") is None:
        return {}
    fields = "pci.bus_id,ecc.errors.corrected.volatile.total,ecc.errors.uncorrected.volatile.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    rows = [line.replace(" ", "").split(",") for line in done.stdout.splitlines()]
    return {  # the kernel writes an address with four digits before the first colon, and the driver with eight
        row[0].lower()[-12:]: (int(row[1]), int(row[2]))
        for row in rows
        if len(row) == 3 and row[1].isdecimal() and row[2].isdecimal()
    }


def driver_events(log: str = "/dev/kmsg") -> dict[str, list[int]] | None:
    """Return the Xids of the NVIDIA driver since the boot, by PCI address; None if the log is unreadable."""
    found: dict[str, list[int]] = {}
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb", buffering=0) as file:
        while True:
            try:
                entry = file.read(1 << 14)
            except BrokenPipeError:  # the kernel has overwritten what was next
                continue
            except OSError:
                return None
            if not entry:  # also where more may come
                return found
            for address, number in re.findall(rb"Xid \(PCI:([0-9a-fA-F:]+)\): (\d+)", entry):
                found.setdefault(f"{address.decode().lower()}.0", []).append(int(number))


if __name__ == "__main__":
    print(json.dumps(_probe()))
