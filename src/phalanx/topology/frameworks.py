"""Set variables that training frameworks read and launchers do not set.

Hugging Face Trainer, Accelerate and Lightning understand the variables of torchrun. In two cases those do not suffice:
Accelerate takes several processes without an accelerator for as many jobs of one process each, unless
ACCELERATE_USE_CPU is set; and ranks that an MPI or a batch system started have none of torchrun's variables.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phalanx import settings
from phalanx.system.interfaces import LOOPBACK, outward_address
from phalanx.topology.device_files import accelerator_files

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def cpu_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables by which frameworks see that several ranks compute on the CPU; empty if that is not so.

    ``environment`` is the rank's, with WORLD_SIZE and PHALANX_DEVICE. ACCELERATE_USE_CPU in it is the user's.
    """
    alone = environment.get("WORLD_SIZE", "1") == "1"
    on_cpu = environment.get(settings.DEVICE, "").partition(":")[0] == "cpu" or not accelerator_files()
    return {} if alone or not on_cpu or "ACCELERATE_USE_CPU" in environment else {"ACCELERATE_USE_CPU": "true"}


def second_meeting_point(store: Store, rank: int, *, one_host: bool) -> dict[str, str]:
    """Agree on MASTER_ADDR and MASTER_PORT for libraries that open a store beside the world's (torch's RPC).

    Every rank calls it. A rank that has both in its environment keeps them. The others get rank 0's host and a port
    that is free there now, and so is not that of the world's own store. On one host loopback is enough.
    """
    given = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if os.environ.get(name)}
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            free = str(probe.getsockname()[1])
        own = given.get("MASTER_ADDR") or (LOOPBACK if one_host else outward_address())
        store.set("second", f"{given.get('MASTER_PORT', free)} {own}")
    if len(given) == 2:
        return given
    port, _, address = store.get("second").decode().partition(" ")
    return {"MASTER_ADDR": address, "MASTER_PORT": port}


def announce(values: Mapping[str, str]) -> dict[str, str | None]:
    """Put these variables into this process's environment; return their former values, for :func:`withdraw`."""
    before = {name: os.environ.get(name) for name, value in values.items() if os.environ.get(name) != value}
    os.environ.update(values)
    return before


def withdraw(before: Mapping[str, str | None]) -> None:
    """Undo :func:`announce`."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
