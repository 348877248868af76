"""A bound rank runs on those cores next to the device that its launcher may use, if there are any."""

import os
from pathlib import Path

from phalanx.topology.device_files import visible_devices

(device,) = visible_devices(os.environ) or []
near: set[int] = set()
for part in Path("/sys/bus/pci/devices", device.pci.lower(), "local_cpulist").read_text().split(","):
    first, _, last = part.strip().partition("-")
    near |= set(range(int(first), int(last or first) + 1))
own, usable = os.sched_getaffinity(0), os.sched_getaffinity(os.getppid())
print(f"cores {sorted(own)} of {sorted(usable)}; next to {device.pci}: {sorted(near)}")
assert own == near & usable or not near & usable
print("all right")
