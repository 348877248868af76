"""What has to be the same on all hosts of a job: seen by each agent, and compared before any user code runs."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence

from phalanx import settings
from phalanx.errors import InitializationError, LaunchError
from phalanx.launch.job.binding import bind_ranks_here
from phalanx.launch.protocol import Here
from phalanx.launch.starters.invitation import Invitation
from phalanx.system.host import machine_name, this_host
from phalanx.system.interfaces import chosen_interface
from phalanx.system.limits import check_limits, machine_limits, usable_cores
from phalanx.topology.device_files import device_names
from phalanx.words import format_list

__all__ = ["find_differences", "look_around"]


def look_around(invitation: Invitation) -> Here:
    """On a host: what the supervisor has to know of it."""
    here = this_host({})
    cores = usable_cores()
    cpus: list[tuple[int, ...]] = []
    problems = []
    if not os.path.isdir(invitation.directory):
        problems.append(f"{invitation.directory}: {invitation.name} has no such directory")
    elif not invitation.python and not os.access(invitation.path, os.X_OK):
        problems.append(f"{invitation.path}: {invitation.name} has no such program, or it cannot be executed")
    try:
        if invitation.interface:
            chosen_interface({settings.INTERFACE: invitation.interface})
        check_limits(invitation.ranks, machine_limits(python=invitation.python))
        cpus = bind_ranks_here(invitation.bind, invitation.ranks, cores, invitation.device, os.environ)
    except (InitializationError, LaunchError) as error:
        problems.append(f"{invitation.name}: {error}")
    same = {"Python": platform.python_version()}
    if invitation.python:
        same["torch"] = _torch_version()
        same[invitation.path] = _content(invitation.path)
    return Here(
        agent=invitation.host,
        name=machine_name(),
        machine=f"{here.boot_id} {here.pid_namespace}",
        pid=os.getpid(),
        cores=cores,
        cpus=cpus,
        accelerators=list(device_names(os.environ) or ()),
        problems=problems,
        same=same,
    )


def _torch_version() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("torch")
    return ""


def _content(path: str) -> str:
    """Digest a script, or the program's entry in a folder; empty if it is not there."""
    if os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
    return ""


def find_differences(names: Sequence[str], here: Sequence[Here], *, may_share: bool = False) -> list[str]:
    """Name each thing in which the hosts of a job differ and must not; empty if they fit together.

    Args:
        names: the hosts, as the user wrote them.
        here: what the agent of each has said.
        may_share: whether two of them may be one machine.
    """
    lines = [] if may_share else _twice(names, here)
    for name, said in zip(names, here, strict=True):
        if said.same.keys() != here[0].same.keys():
            [script], [other] = (sorted(a.same.keys() - b.same.keys()) for a, b in ((said, here[0]), (here[0], said)))
            return [f"{name} is to run {script}, and {names[0]} {other}; give the same command on every node"]
    lines += dict.fromkeys(problem for said in here for problem in said.problems)
    for thing in here[0].same:
        found: dict[str, list[str]] = {}
        for name, said in zip(names, here, strict=True):
            found.setdefault(said.same[thing], []).append(name)
        if len(found) > 1 or "" in found:
            lines.append(_described(thing, found))
    return lines


def _twice(names: Sequence[str], here: Sequence[Here]) -> list[str]:
    machines: dict[tuple[str, str], list[str]] = {}
    for name, said in zip(names, here, strict=True):
        machines.setdefault((said.machine, said.name), []).append(name)
    return [
        f"{format_list(same)} are one host, which calls itself {machine[1]}; list it once, with the number of its ranks"
        for machine, same in machines.items()
        if len(same) > 1
    ]


def _described(thing: str, found: Mapping[str, Sequence[str]]) -> str:
    if os.path.isabs(thing):
        if "" in found:
            return f"{thing}: there is no such file on {format_list(found[''])}"
        groups = "; other than on ".join(format_list(hosts) for hosts in found.values())
        return f"{thing} is not the same file on {groups}; copy it to all hosts, or use a directory that they share"
    values = [f"{value or 'not installed'} on {format_list(hosts)}" for value, hosts in found.items()]
    return f"{thing} is {'; '.join(values)}; install the same version on all hosts"
