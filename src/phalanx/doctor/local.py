"""Everything that can be said about one host from a process on it."""

from __future__ import annotations

from phalanx.doctor.devices import devices
from phalanx.doctor.finding import Finding
from phalanx.doctor.machine import machine
from phalanx.doctor.names import names
from phalanx.doctor.software import software
from phalanx.doctor.variables import variables

__all__ = ["examine"]


def examine(ranks: int | None = None, *, several_hosts: bool = False) -> list[Finding]:
    """All findings about this host, in the order in which they should be read.

    Args:
        ranks: how many ranks are to run here; as many as there are usable cores by default.
        several_hosts: whether the job is to have other hosts.
    """
    return [
        *software(),
        *machine(ranks),
        *devices(ranks),
        *names(several_hosts=several_hosts),
        *variables(),
    ]
