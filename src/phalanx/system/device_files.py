"""Whether this machine can have an accelerator at all, found without importing torch."""

from __future__ import annotations

from glob import glob

__all__ = ["accelerator_files"]

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


def accelerator_files() -> list[str]:
    """The device files through which a process can reach an accelerator; none if the machine has no accelerator."""
    return [path for pattern in _PATTERNS for path in sorted(glob(pattern))]
