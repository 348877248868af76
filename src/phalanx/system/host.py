"""The host of this process: its name, and the ids by which ranks know whether they share memory and devices."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx import settings


@dataclass(frozen=True)
class Host:
    """A host. Two processes are on one host if all of this is equal.

    Images are cloned with their names, and all containers of a machine share its boot id.
    """

    name: str
    boot_id: str = ""
    pid_namespace: str = ""

    @property
    def machine(self) -> str:
        """Return what distinguishes this host from others of its name."""
        return f"{self.boot_id} {self.pid_namespace}"


def this_host(environment: Mapping[str, str] = os.environ) -> Host:
    """Return the host of this process, or the one that ``PHALANX_HOST`` names."""
    if given := environment.get(settings.HOST):
        return Host(given)
    boot_id = pid_namespace = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = file.read().strip()
    with contextlib.suppress(OSError):
        pid_namespace = os.readlink("/proc/self/ns/pid")
    return Host(machine_name(), boot_id, pid_namespace)


def machine_name() -> str:
    """Return this machine's own name, even where ``PHALANX_HOST`` gives this process another host's."""
    return socket.gethostname()
