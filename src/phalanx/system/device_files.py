"""Whether this machine can have an accelerator at all, found without importing torch."""

from __future__ import annotations

from glob import glob

__all__ = ["accelerator_files", "count_devices"]

# The device files of accelerators that torch knows: NVIDIA, ROCm and XPU, Ascend, Habana and TPU, WSL.
_PATTERNS = (
    "/dev/nvidia[0-9]*",
    "/dev/kfd",
    "/dev/dri/renderD*",
    "/dev/davinci[0-9]*",
    "/dev/accel*",
    "/dev/vfio/[0-9]*",
    "/dev/dxg",
)


# Those of them of which an accelerator has exactly one.
_ONE_EACH = ("/dev/nvidia[0-9]*", "/dev/davinci[0-9]*", "/dev/accel[0-9]*")


def accelerator_files() -> list[str]:
    """The device files through which a process can reach an accelerator; none if the machine has no accelerator."""
    return [path for pattern in _PATTERNS for path in sorted(glob(pattern))]


def count_devices() -> int:
    """How many accelerators this machine has, as far as each has a device file of its own; 0 if that is not known.

    The files of /dev/dri are not counted: a display adapter has one too.
    """
    return max(len(glob(pattern)) for pattern in _ONE_EACH)
