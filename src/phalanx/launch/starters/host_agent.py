"""The agent of a host that the supervisor reaches by ssh or another program."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import NoReturn

from phalanx import settings
from phalanx.launch.agent import Agent
from phalanx.launch.link import join
from phalanx.launch.rank.start import RankStart
from phalanx.launch.starters.agreement import look_around
from phalanx.launch.starters.invitation import OTHER_VERSION, UNREACHABLE, Invitation
from phalanx.launch.starters.tree import Branch
from phalanx.system import processes
from phalanx.system.limits import raise_file_limit

__all__ = ["be_agent"]

# How long it tries to reach the supervisor, and as long again for the handshake.
_JOIN_S = 4.0


def be_agent(descriptor: int) -> RankStart:
    """Be the agent of this host.

    Args:
        descriptor: a file with the invitation.

    Returns:
        In each rank, its start. The agent itself never returns.
    """
    with open(descriptor, "rb") as file:
        invited = json.load(file)
    if invited["version"] != settings.VERSION:
        _decline(
            f"Phalanx is {settings.VERSION} there and {invited['version']} here; install the same version on all hosts",
            OTHER_VERSION,
        )
    invitation = Invitation(**invited)
    with contextlib.suppress(PermissionError):  # the starter has made it the leader of a session already
        os.setsid()
    processes.set_name("phalanx-agent")
    processes.adopt_orphans()
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
    branch = Branch(invitation)
    agent = Agent(link, file_limit, invitation.name, branch)
    branch.say, branch.selector = agent.say, agent.selector
    agent.say(look_around(invitation))
    return agent.run()


def _decline(why: str, code: int) -> NoReturn:
    """End before joining; the supervisor shows the last line of this process."""
    sys.stderr.write(f"{why}\n")
    sys.stderr.flush()
    os._exit(code)
