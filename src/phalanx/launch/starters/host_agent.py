"""The agent of a host that the supervisor reaches by ssh or another program."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from typing import NoReturn

from phalanx import settings
from phalanx.errors import InitializationError, LaunchError
from phalanx.launch.agent import Agent
from phalanx.launch.job.binding import bind_ranks_here
from phalanx.launch.link import join
from phalanx.launch.protocol import Here
from phalanx.launch.rank.start import RankStart
from phalanx.launch.starters.invitation import OTHER_VERSION, UNREACHABLE, Invitation
from phalanx.launch.starters.tree import start_others
from phalanx.system import processes
from phalanx.system.host import machine_name, this_host
from phalanx.system.interfaces import chosen_interface
from phalanx.system.limits import check_limits, machine_limits, raise_file_limit, usable_cores
from phalanx.topology.device_files import device_names

__all__ = ["be_agent", "look_around", "read_invitation"]

# How long it tries to reach the supervisor, and as long again for the handshake.
_JOIN_S = 4.0


def read_invitation(descriptor: int) -> Invitation:
    """Read the invitation from a file, which is closed; end if it is of another version of Phalanx."""
    with open(descriptor, "rb") as file:
        invited = json.load(file)
    if invited["version"] != settings.VERSION:
        _decline(
            f"Phalanx is {settings.VERSION} there and {invited['version']} here; install the same version on all hosts",
            OTHER_VERSION,
        )
    return Invitation(**invited)


def be_agent(invitation: Invitation) -> RankStart:
    """Join the supervisor, and be the agent of this host. Returns in each rank its start; the agent never returns."""
    processes.set_name("phalanx-agent")
    file_limit = raise_file_limit()
    try:
        link = join(invitation.door, _JOIN_S)
    except OSError as error:
        where = invitation.door.rpartition(":")[0]
        _decline(
            f"it could not reach phalanx run at {where}: {error}; is that address reachable from there? --interface or "
            f"--address choose another",
            UNREACHABLE,
        )
    agent = Agent(link, file_limit, invitation.name)
    agent.say(look_around(invitation))
    start_others(agent, invitation)
    return agent.run()


def _decline(why: str, code: int) -> NoReturn:
    """End before joining; the supervisor shows the last line of this process."""
    sys.stderr.write(f"{why}\n")
    sys.stderr.flush()
    os._exit(code)


def look_around(invitation: Invitation) -> Here:
    """Find what the supervisor has to know of this host."""
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
        same |= {"torch": "", invitation.path: ""}
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            same["torch"] = importlib.metadata.version("torch")
        file_path = os.path.join(invitation.path, "__main__.py") if os.path.isdir(invitation.path) else invitation.path
        with contextlib.suppress(OSError), open(file_path, "rb") as file:
            same[invitation.path] = hashlib.sha256(file.read()).hexdigest()
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
