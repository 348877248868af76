"""How many ranks ``-n`` asks for: a number, or ``auto``, ``gpu`` or ``cpu``, for which this machine is asked."""

from __future__ import annotations

import subprocess
import sys

from phalanx.errors import LaunchError
from phalanx.system.limits import usable_cores
from phalanx.topology.device_files import accelerator_files

__all__ = ["COUNTED_HERE", "count_ranks"]

#: The words for which the accelerators or cores of this machine are counted.
COUNTED_HERE = ("auto", "gpu", "cpu")


def count_ranks(given: str) -> int:
    """The number of ranks that the user means.

    Args:
        given: a number; ``gpu``, one rank for each accelerator that torch sees here; ``cpu``, one for each core that
            this process may use, by its affinity and by the quota of its cgroup; ``auto``, as ``gpu`` if there is an
            accelerator, and else as ``cpu``. torchrun means the same, but does not look at the quota.

    Raises:
        LaunchError: it is none of these, or there is no accelerator.
    """
    if given in COUNTED_HERE:
        devices = 0 if given == "cpu" or not accelerator_files() else _accelerators()
        if given == "gpu" and not devices:
            raise LaunchError("-n gpu: torch sees no accelerator on this machine; -n cpu starts a rank for each core")
        return devices or usable_cores()
    try:
        return int(given)
    except ValueError:
        raise LaunchError(f"-n {given}: is not a number of ranks; give one, or auto, gpu or cpu") from None


def _accelerators() -> int:
    """How many accelerators torch sees; asked in another process, because the launcher never imports torch."""
    code = "import torch; print(torch.accelerator.device_count())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return int(asked.stdout) if asked.returncode == 0 else 0
