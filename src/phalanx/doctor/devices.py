"""Whether torch sees the accelerators that this machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator

from phalanx.doctor.finding import Finding, Level
from phalanx.topology.device_files import accelerator_files, count_devices
from phalanx.words import format_count

__all__ = ["devices"]

# By these variables a launcher or a user hides accelerators from a process.
_HIDING = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
)


def devices(ranks: int | None = None) -> Iterator[Finding]:
    """Findings about accelerators. torch is imported only where there is a device file.

    Args:
        ranks: how many ranks are to run on this host, if that is known.
    """
    if not accelerator_files():
        yield Finding(Level.OK, "accelerators", "none on this machine: ranks compute on the CPU")
        return
    hiding = ", ".join(f"{name}={os.environ[name]}" for name in _HIDING if name in os.environ)
    try:
        import torch
    except ImportError as error:
        yield Finding(Level.FAILURE, "accelerators", f"torch cannot be imported: {error}", "install torch again")
        return
    kind = torch.accelerator.current_accelerator(check_available=True)
    seen = torch.accelerator.device_count() if kind is not None else 0
    there = count_devices()
    if not seen and there:
        why = hiding or f"torch {torch.__version__} was built for another kind of device, or the driver is missing"
        said = f"this machine has {there}, and torch sees none ({why})"
        yield Finding(Level.WARNING, "accelerators", said, "ranks would compute on the CPU; mend it if they should not")
    elif not seen:
        yield Finding(Level.OK, "accelerators", "none that torch can use: ranks compute on the CPU")
    elif ranks is not None and ranks > seen:
        said = f"{format_count(seen, 'device')} for {format_count(ranks, 'rank')}: some would share one"
        yield Finding(Level.WARNING, "accelerators", said, f"start {seen} ranks here" + f" ({hiding})" * bool(hiding))
    else:
        hidden = f", {hiding}" if hiding else ""
        yield Finding(Level.OK, "accelerators", f"{seen} of {max(there, seen)} ({kind.type if kind else ''}){hidden}")
