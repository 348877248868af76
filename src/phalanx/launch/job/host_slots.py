"""The hosts a job runs on, as the user wrote them, and which rank goes where.

Every MPI launcher has options of its own for this, and the same words mean different placements: without counts one
deals ranks out in turn where another fills the first host, and one applies ``a:1,b:3`` to the hosts in another order.
So there is one rule here (hosts in the order they are written, each filled before the next), and every launcher gets
the exact counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import LaunchError

__all__ = ["HostSlots", "fill_hosts", "parse_hosts", "read_hostfile"]


@dataclass(frozen=True)
class HostSlots:
    """A host and how many ranks it takes.

    Attributes:
        name: the host's name or address, as the launcher gets it.
        slots: how many ranks; None if the user did not say.
    """

    name: str
    slots: int | None = None


def parse_hosts(text: str) -> list[HostSlots]:
    """Read ``--hosts``: names separated by commas, each with the number of its ranks after a colon.

    Neighbours of the same name are added up, as MPI launchers do.

    Raises:
        LaunchError: a name is missing or listed twice, or a number of ranks is not at least 1. The message shows it.
    """
    hosts: list[HostSlots] = []
    for part in text.split(","):
        _add(hosts, _entry(part.strip(), f"--hosts {text}"))
    return _unique(hosts, f"--hosts {text}")


def read_hostfile(path: str) -> list[HostSlots]:
    """Read ``--hostfile``: one host a line, as ``h1``, ``h1:4`` or ``h1 slots=4``; # begins a comment.

    These are the forms of MPICH, Intel MPI, Open MPI (whose ``max_slots`` says nothing here), DeepSpeed and PBS.
    Consecutive lines with the same name are added up, since batch systems write a line for each slot.

    Raises:
        LaunchError: the file cannot be read, names no host, or has a line of another form.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--hostfile {path}: cannot be read: {error}") from error
    hosts: list[HostSlots] = []
    for number, line in enumerate(lines, 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        where = f"{path}, line {number}"
        host = _entry(words[0], where)
        for word in words[1:]:
            key, _, value = word.partition("=")
            if key in ("max_slots", "max-slots"):
                continue
            if key != "slots":
                raise LaunchError(f"{where}: {word!r} is not understood; write h1, h1:4 or h1 slots=4")
            host = _entry(f"{host.name}:{value}", where)
        _add(hosts, host)
    if not hosts:
        raise LaunchError(f"--hostfile {path}: names no host")
    return _unique(hosts, f"--hostfile {path}")


def _add(hosts: list[HostSlots], host: HostSlots) -> None:
    if hosts and hosts[-1].name == host.name:
        host = HostSlots(host.name, (hosts.pop().slots or 1) + (host.slots or 1))
    hosts.append(host)


def _entry(text: str, where: str) -> HostSlots:
    name, colon, count = text.rpartition(":") if text.count(":") == 1 else (text, "", "")
    if not name or any(letter.isspace() for letter in name):
        raise LaunchError(f"{where}: {text!r} names no host; write h1:4,h2:4")
    if not colon:
        return HostSlots(name)
    if not count.isdecimal() or int(count) < 1:
        raise LaunchError(f"{where}: {text!r}: the number after the colon is how many ranks the host takes, at least 1")
    return HostSlots(name, int(count))


def _unique(hosts: list[HostSlots], where: str) -> list[HostSlots]:
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LaunchError(f"{where}: {twice[0]} is listed twice; list each host once, with the number of its ranks")
    return hosts


def fill_hosts(hosts: Sequence[HostSlots], ranks: int | None, ppn: int | None = None) -> list[HostSlots]:
    """Distribute the ranks: each host is filled before the next one, in the order they were written.

    Args:
        hosts: where ranks may run.
        ranks: how many; None for as many as there are slots.
        ppn: the most ranks that a host may take, and how many it takes if the user did not say.

    Returns:
        The hosts that get a rank, each with the number it gets.

    Raises:
        LaunchError: there are more ranks than slots.
    """
    slots = [host.slots or ppn or 1 for host in hosts]
    if ppn is not None:
        slots = [min(count, ppn) for count in slots]
    left = sum(slots) if ranks is None else ranks
    if left > sum(slots):
        room = ", ".join(f"{host.name}:{count}" for host, count in zip(hosts, slots, strict=True))
        raise LaunchError(
            f"-n {ranks}: the hosts take {sum(slots)} ranks ({room}); write how many each takes, as in "
            f"--hosts {hosts[0].name}:{-(-left // len(hosts))}, or give --ppn"
        )
    filled = []
    for host, count in zip(hosts, slots, strict=True):
        here = min(count, left)
        left -= here
        if here:
            filled.append(HostSlots(host.name, here))
    return filled
