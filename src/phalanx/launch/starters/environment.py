"""Which variables of the user's environment a rank on another host gets: all but those that differ between hosts."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from phalanx import settings
from phalanx.launch.job.hosts import is_allocated

__all__ = ["carried_variables"]

# Variables about a login, a terminal or a place in a batch system: another host has its own, or none.
_OF_A_HOST = re.compile(
    r"SSH_|XDG_|DBUS_|SLURM|PMI|PMIX|PBS_|LSB_|LSF_|TMUX|WT_|WSL|"
    r"(HOME|HOST|HOSTNAME|HOSTTYPE|USER|USERNAME|LOGNAME|SHELL|MAIL|PWD|OLDPWD|SHLVL|_|TTY|GPG_TTY|STY|WINDOW|WINDOWID|"
    r"DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|TMP|TEMP|TMPDIR|SESSION_MANAGER|KUBERNETES_.*|container|"
    rf"{settings.HOST})$"
)
# A batch system gives each host of an allocation devices of its own; elsewhere the user has chosen them.
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def carried_variables(user: Mapping[str, str], named: Collection[str] = ()) -> dict[str, str]:
    """Choose the variables that go with a job to other hosts.

    Args:
        user: the environment of ``phalanx run``.
        named: the variables that the user has named with ``-x``, which go whatever they are.
    """
    devices = _DEVICES if is_allocated(user) else ()
    return {
        name: value for name, value in user.items() if name in named or not (name in devices or _OF_A_HOST.match(name))
    }
