"""The end of a job on several hosts: agents leave, and so do the programs that have started them."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Sequence

from phalanx.launch.rank.descriptors import Control
from phalanx.launch.relay.channel import Channel, Lost
from phalanx.launch.relay.program import Program
from phalanx.launch.remote.host import Host
from phalanx.launch.remote.sweeping import Sweeps

__all__ = ["see_out"]

# How long agents that are there may take to leave, and programs to end once their agents have left.
_LEAVE_S = 3.0
# How long the program of a host that is lost, or has never come, may take after each signal.
_ASKED_S = 0.5


def see_out(hosts: Sequence[Host], sweeps: Sweeps, control: Control | None) -> None:
    """Tell every agent to leave, and wait until it and the program that has started it have ended.

    Args:
        hosts: all hosts.
        sweeps: the programs that end what is left on hosts that are lost.
        control: where the supervisor sends orders; a second Ctrl-C, or its end, ends the wait. None if it has gone.
    """
    channels = {}
    for host in hosts:
        if host.channel is not None:
            host.channel.say(do="leave")
            channels[host.number] = host.channel
    programs = {host.number: host.program for host in hosts if host.program is not None and host.program.code is None}
    for started in programs.values():
        started.send(signal.SIGCONT)  # nsenter stops with what it has started, and does not go on with it
    _wait(channels, [programs[number] for number in programs if number in channels], control, _LEAVE_S)
    _wait({}, sweeps.programs, control, sweeps.until - time.monotonic())
    for signum in (signal.SIGTERM, signal.SIGKILL):
        left = [program for program in (*programs.values(), *sweeps.programs) if program.code is None]
        for program in left:
            program.send(signum)
        _wait({}, left, control, _ASKED_S)
    for channel in channels.values():
        channel.close()


def _wait(
    channels: dict[int, Channel], programs: Sequence[Program], control: Control | None, patience_s: float
) -> None:
    until = time.monotonic() + patience_s
    with selectors.DefaultSelector() as selector:
        for number, channel in channels.items():
            selector.register(channel, selectors.EVENT_READ, number)
        for program in programs:
            selector.register(program.handle, selectors.EVENT_READ, program)
        if control is not None:
            selector.register(control, selectors.EVENT_READ, control)
        waiting = len(channels) + len(programs)
        while waiting and time.monotonic() < until:
            for key, _ in selector.select(max(0.0, until - time.monotonic())):
                if isinstance(key.data, Program):
                    selector.unregister(key.data.handle)
                    key.data.reap()
                    waiting -= 1
                elif isinstance(key.data, Control):
                    order = key.data.receive()
                    if order is None:
                        selector.unregister(key.data)
                    elif order.get("signal") == signal.SIGKILL:
                        return
                elif not _goes_on(channels[key.data]):
                    selector.unregister(channels[key.data])
                    channels.pop(key.data).close()
                    waiting -= 1


def _goes_on(channel: Channel) -> bool:
    """Whether an agent is still there; what it says is not wanted any more."""
    try:
        channel.flush()
        channel.receive()
    except Lost:
        return False
    return True
