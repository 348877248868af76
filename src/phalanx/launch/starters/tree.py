"""The tree in which the agents of many hosts are started by ssh: the supervisor starts the first, which start others.

A login costs the host that asks for it tens of milliseconds of a core, so one host that logs in to hundreds is what all
the others wait for. Only the starting goes along the tree: every agent joins the supervisor itself, and nothing of the
job passes through another host. A host that another one cannot log in to, because keys or names are known to the
supervisor alone, is started by the supervisor after all; such a cluster only starts later.

Programs of the user's, srun and blaunch are always called by the supervisor: they may work nowhere else, or share the
work out by themselves.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from typing import TYPE_CHECKING

from phalanx.errors import LaunchError
from phalanx.launch.protocol import Unstarted
from phalanx.launch.starters.invitation import Invitation
from phalanx.launch.starters.ssh import command_for

if TYPE_CHECKING:
    from phalanx.launch.agent import Agent

__all__ = ["FAN", "start_others", "starting_host"]

# How many hosts the supervisor starts itself, and each host of the tree at most as long as fewer than FAN² more wait.
FAN = 16


def starting_host(number: int) -> int | None:
    """Find the host whose agent starts that of a host, both by their numbers; None for the supervisor.

    The first ``FAN`` hosts are started by the supervisor, the next ``FAN`` times as many are dealt out in turn to
    those, and so on.
    """
    first, size, before = 0, FAN, None
    while number >= first + size:
        before = first, size
        first, size = first + size, size * FAN
    return None if before is None else before[0] + (number - first) % before[1]


def start_others(agent: Agent, invitation: Invitation) -> None:
    """Start the agents that the one of this host is to start. What ssh prints is dropped.

    Args:
        agent: the one of this host, which tells the supervisor of hosts that it could not log in to.
        invitation: its own, which differs from theirs only in the host.
    """
    for number, name, ranks in invitation.others:
        if starting_host(number) != invitation.host:
            continue
        file = dataclasses.replace(invitation, host=number, name=name, ranks=ranks).as_file()
        try:
            program = subprocess.Popen(
                command_for(name, ()), stdin=file, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
            )
        except (OSError, LaunchError):
            agent.say(Unstarted(agent=number))
            continue
        finally:
            os.close(file)
        program.returncode = 0  # the agent waits for it, so Popen need not
        agent.logins[program.pid] = number
