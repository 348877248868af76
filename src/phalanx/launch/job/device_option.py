"""``--device`` and PHALANX_DEVICE: whether torch can know a device of that name, found without importing torch."""

from __future__ import annotations

import re

from phalanx.errors import DeviceError, LaunchError

__all__ = ["check_device"]

# What people call devices for which torch has another name.
_OTHER_NAMES = {
    "gpu": "cuda (NVIDIA and AMD), xpu (Intel), mps (Apple), or by its vendor's own name, such as npu",
    "nvidia": "cuda",
    "amd": "cuda, too",
    "rocm": "cuda, too",
    "hip": "cuda, too",
    "intel": "xpu",
    "ascend": "npu",
    "tpu": "xla",
}


def check_device(device: str, said: str) -> None:
    """Refuse a name that cannot be a device's.

    Args:
        device: the name, with an index or without.
        said: how the user gave it, as ``--device gpu``.

    Raises:
        LaunchError: it is not one, or torch has another name for what it means.
    """
    if not re.fullmatch(r"[a-z]+[0-9]?(:[0-9]+)?", device):
        raise LaunchError(DeviceError.not_a_device(said))
    other = _OTHER_NAMES.get(device.partition(":")[0])
    if other is not None:
        raise LaunchError(f"{said}: torch calls such a device {other}; write that")
