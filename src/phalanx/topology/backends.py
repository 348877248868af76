"""Whether a communication backend fits the devices of this machine, and which one does."""

from __future__ import annotations

import torch.distributed as dist

from phalanx.topology.device import Accelerator, find_accelerator
from phalanx.words import format_count

__all__ = ["why_unfit"]

# The kinds of devices that the backends of vendors need.
_DEVICES_OF = {
    "nccl": ("cuda",),
    "xccl": ("xpu",),
    "ccl": ("xpu", "cpu"),
    "hccl": ("npu", "hpu"),
    "mccl": ("musa",),
    "cncl": ("mlu",),
}


def why_unfit(backend: str, accelerator: Accelerator | None = None) -> str:
    """Why none of this machine's devices can be served by a backend, with the one that can; empty if it fits.

    Args:
        backend: as for ``init_process_group``: ``nccl``, or ``cpu:gloo,cuda:nccl``.
        accelerator: the devices that this process sees; found out by default, if the backend needs any.
    """
    for part in backend.lower().split(","):
        name = part.rpartition(":")[2].strip()
        needed = _DEVICES_OF.get(name)
        if needed is None:
            continue
        accelerator = accelerator or find_accelerator()
        if accelerator is None and "cpu" not in needed:
            return (
                f"the backend {name} serves {' and '.join(needed)} devices, and this process sees no accelerator; "
                f"phalanx fits the CPU: phalanx.init() or init_process_group('phalanx')"
            )
        if accelerator is not None and accelerator.type not in needed:
            own = dist.Backend.default_device_backend_map.get(accelerator.type, "")
            fitting = f"{own} fits them, and phalanx fits the CPU" if own else "phalanx fits the CPU"
            return (
                f"the backend {name} serves {' and '.join(needed)} devices, and this process sees "
                f"{format_count(accelerator.count, f'{accelerator.type} device')}; {fitting}"
            )
    return ""
