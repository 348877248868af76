"""The knowledge that an agent on another host needs before it can join: it comes by the standard input of its program.

So no command line shows it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

from phalanx import settings
from phalanx.launch.job.binding import Bind
from phalanx.launch.job.hosts import is_allocated

__all__ = ["OTHER_VERSION", "UNREACHABLE", "Invitation", "carried_variables"]

# The exit codes of an agent that cannot reach the supervisor (EX_UNAVAILABLE), or would not understand it (EX_CONFIG).
# Its last line says why.
UNREACHABLE, OTHER_VERSION = 69, 78
# Variables about a login, a terminal or a place in a batch system: another host has its own, or none.
_OF_A_HOST = re.compile(
    r"SSH_|XDG_|DBUS_|SLURM|PMI|PMIX|PBS_|LSB_|LSF_|TMUX|WT_|WSL|"
    r"(HOME|HOST|HOSTNAME|HOSTTYPE|USER|USERNAME|LOGNAME|SHELL|MAIL|PWD|OLDPWD|SHLVL|_|TTY|GPG_TTY|STY|WINDOW|WINDOWID|"
    r"DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|TMP|TEMP|TMPDIR|SESSION_MANAGER|KUBERNETES_.*|container|"
    rf"{settings.HOST})$"
)
# A batch system gives each host of an allocation devices of its own; elsewhere the user has chosen them.
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


@dataclass(frozen=True)
class Invitation:
    """The first thing that an agent reads.

    Attributes:
        version: that of the supervisor's Phalanx. An agent of another one only says so: it may understand nothing else.
        environment: the user's variables, as far as they are not the other host's own.
        door: where the supervisor listens, with the key, as ``launch/link.py`` takes it.
        host: the number of the host among those of the job.
        name: the host as the user wrote it.
        python: whether the ranks run Python.
        path: the script, module or folder, whose content has to be the same on all hosts; or the program, which only
            has to be there.
        ranks: how many ranks the host gets.
        interface: the network interface that the user chose; empty for none.
        device: the device on which the user wants the ranks to compute; None for none in particular.
        others: the hosts whose agents are started by those of others (``tree.py``): number, name, how many ranks.
    """

    version: str
    environment: Mapping[str, str]
    directory: str
    door: str
    host: int
    name: str
    python: bool
    path: str
    ranks: int
    interface: str
    bind: Bind
    device: str | None
    others: Sequence[tuple[int, str, int]] = ()

    def as_file(self) -> int:
        """Write it, as one line, to a file without a name: the standard input of the program. The caller closes it."""
        file = os.memfd_create("phalanx-invitation")
        os.pwrite(file, json.dumps(asdict(self)).encode() + b"\n", 0)
        return file


def carried_variables(user: Mapping[str, str], named: Collection[str] = ()) -> dict[str, str]:
    """Choose the variables that go to other hosts: those that are no host's own, and those ``named`` with ``-x``."""
    devices = _DEVICES if is_allocated(user) else ()
    return {
        name: value for name, value in user.items() if name in named or not (name in devices or _OF_A_HOST.match(name))
    }
