"""The agent: the one process of a job on each of its hosts that talks to the head (``protocol.py``).

It joins the head, says what the host is like, waits for the order to start, and forks the host's zygote. From then on
it moves orders one way, and output, reports and ends the other way. It holds nothing that has to outlive it: its zygote
notices its end and kills the ranks, and the kernel closes its connection, so the head notices as well.

Nobody but the head ends it in order. A signal that asks it to end (a batch system's, or that of a login session which
is over) ends the ranks of this host, and with them the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import traceback
from typing import Any, NoReturn

from phalanx import settings
from phalanx.launch.job.job import Share
from phalanx.launch.output.failure import signal_name
from phalanx.launch.rank.descriptors import open_descriptors
from phalanx.launch.rank.start import RankStart
from phalanx.launch.relay.channel import Channel, Lost, join
from phalanx.launch.relay.feed import Feed
from phalanx.launch.remote.agreement import look_around
from phalanx.launch.remote.local_ranks import LocalRanks
from phalanx.launch.remote.protocol import OTHER_VERSION, UNREACHABLE, Invitation, received_job
from phalanx.launch.remote.tree import Branch
from phalanx.launch.zygote import Inheritance, serve
from phalanx.store.torch_server import is_own
from phalanx.system import processes
from phalanx.system.limits import raise_file_limit
from phalanx.topology.table import RankRow

__all__ = ["be_agent"]

# How long it tries to reach the head, and as long again for the handshake.
_JOIN_S = 4.0
# How many bytes of the ranks' output may wait for the network before the ranks have to.
_MOST_WAITING = 1 << 20
# How long what has been said may take to leave this host once the job is over.
_LAST_WORDS_S = 1.0
_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


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
    handlers: dict[int, Any] = {
        signum: signal.getsignal(signum) or signal.SIG_DFL for signum in (*_ASKED, *_IGNORED, signal.SIGCHLD)
    }
    with contextlib.suppress(PermissionError):  # the starter has made it the leader of a session already
        os.setsid()
    processes.set_name("phalanx-agent")
    processes.adopt_orphans()
    inheritance = Inheritance(handlers, raise_file_limit())
    try:
        channel = join(invitation.door, _JOIN_S)
    except OSError as error:
        where = invitation.door.rpartition(":")[0]
        _decline(
            f"it could not reach phalanx run at {where}: {error}; is that address reachable from there? --interface or "
            f"--address choose another",
            UNREACHABLE,
        )
    channel.continue_when_called()
    agent = _Agent(channel, invitation, inheritance)
    pid = os.getpid()
    try:
        while True:
            start = agent.turn()
            if start is not None:
                return start
    except BaseException:
        if os.getpid() == pid:
            sys.stderr.write(f"phalanx: the agent itself failed\n{traceback.format_exc()}")
            sys.stderr.flush()
            agent.leave(70)
        raise


def _decline(why: str, code: int) -> NoReturn:
    """End before joining; the head shows the last line of this process."""
    sys.stderr.write(f"{why}\n")
    sys.stderr.flush()
    os._exit(code)


class _Agent:
    """An agent that has joined; making this object says so to the head."""

    def __init__(self, channel: Channel, invitation: Invitation, inheritance: Inheritance) -> None:
        self.channel = channel
        self.invitation = invitation
        self.inheritance = inheritance
        self.ranks: LocalRanks | None = None
        self.branch = Branch(channel, invitation)
        self.wakeup = os.pipe()
        self.asked = 0
        for end in self.wakeup:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self.wakeup[1], warn_on_full_buffer=False)
        for signum in (*_ASKED, *_IGNORED):
            signal.signal(signum, self._on_signal)
        here = look_around(invitation)
        self.cpus = tuple(here["cpus"])
        channel.say(**here)

    def _on_signal(self, signum: int, _frame: object) -> None:
        if signum in _ASKED:
            self.asked = signum

    def turn(self) -> RankStart | None:
        """Wait for something, and act on it. Returns a rank's start in that rank only."""
        channel, ranks = self.channel, self.ranks
        poll = select.poll()
        poll.register(self.wakeup[0], select.POLLIN)
        poll.register(channel, select.POLLIN | (select.POLLOUT if channel.waiting else 0))
        self.branch.register(poll)
        if ranks is not None:
            if ranks.zygote:
                poll.register(ranks, select.POLLIN)
                poll.register(ranks.watch, select.POLLIN)
            for descriptor in ranks.outputs if channel.waiting < _MOST_WAITING else ():
                poll.register(descriptor, select.POLLIN)
            if ranks.feed.descriptor >= 0:
                # With nothing to write, this reports only that the reader has gone.
                poll.register(ranks.feed.descriptor, select.POLLOUT if ranks.feed.hungry else 0)
        due_in_s = ranks.due_in_s() if ranks is not None else None
        ready = dict(poll.poll(None if due_in_s is None else due_in_s * 1000 + 1))
        if self.wakeup[0] in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wakeup[0], 4096)
        if self.asked:
            self._give_up()
        self.branch.serve(ready)
        if ranks is not None:
            if ranks.feed.descriptor in ready and ranks.feed.feed():
                channel.say(event="wants")
            for descriptor in [descriptor for descriptor in ranks.outputs if descriptor in ready]:
                ranks.read(descriptor)
            if ranks.zygote and ranks.fileno() in ready:
                ranks.hear()
            ranks.look()
        return self._read_orders(ready.get(channel.fileno(), 0))

    def _read_orders(self, events: int) -> RankStart | None:
        try:
            orders = self.channel.serve(events)
        except Lost:
            self.leave(1)
        for order in orders:
            if isinstance(order, bytes):
                if self.ranks is not None:
                    self.ranks.give(order)
            elif order["do"] == "start":
                start = self._start(order)
                if start is not None:
                    return start
            elif order["do"] == "invite":
                self.branch.start([(number, name, ranks) for number, name, ranks in order["hosts"]])
            elif order["do"] == "look":
                # Of a connection to the job's store: may it be this user's?
                if is_own(tuple(order["end"]), tuple(order["other_end"])):
                    self.channel.say(event="owns", number=order["number"])
            elif order["do"] == "leave":
                self.leave(0)
            elif self.ranks is not None and self.ranks.zygote:
                self.ranks.obey(order)
        return None

    def _start(self, order: dict[str, Any]) -> RankStart | None:
        """Fork the zygote. Returns in each rank its start; None in the agent, and if there can be no ranks."""
        rows = [RankRow(**row) for row in order["rows"]]
        numbers = range(order["first"], order["first"] + self.invitation.ranks)
        key, threads = self.invitation.door.rpartition(":")[2], str(rows[numbers.start].threads or 1)
        threads = order["job"]["threads"] or threads
        job = received_job(order["job"], address=self.channel.peer, key=key, cpus=self.cpus, threads=threads)
        share = Share(numbers, rows, order["port"], None, order["terminal"])
        descriptors = open_descriptors(len(numbers), job.run_id)
        fed, feed = os.pipe() if order["input"] else (os.open(os.devnull, os.O_RDONLY), -1)
        agent = os.getpid()
        zygote = os.fork()
        if zygote == 0:
            # The connection is the agent's alone, so that its end is the connection's.
            self.channel.close()
            self.branch.forget()
            for descriptor in (*self.wakeup, *([feed] if feed >= 0 else [])):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            os.dup2(fed, 0)
            os.close(fed)
            return serve(job, share, descriptors, self.inheritance, agent)
        os.close(fed)
        if feed >= 0:
            os.set_blocking(feed, False)
        descriptors.keep_supervisor_ends()
        ranks, is_python = len(rows), job.target.is_python
        watched = not job.diagnosis.why_unwatched(is_python=is_python, ranks=ranks)
        diagnosis = job.diagnosis if watched else None
        self.ranks = LocalRanks(
            share, descriptors, zygote, Feed(feed), self.channel, self.branch, diagnosis, is_python=is_python
        )
        descriptors.supervisor.send(do="start")
        if feed >= 0:
            self.channel.say(event="wants")
        return None

    def _give_up(self) -> NoReturn:
        """Somebody but the head wants this process to end."""
        text = f"the agent on {self.invitation.name} was ended by {signal_name(self.asked)}"
        self.channel.say(event="refused", text=f"phalanx: {text}; the job ended with it\n", code=128 + self.asked)
        self.leave(128 + self.asked)

    def leave(self, code: int) -> NoReturn:
        """Kill what is left of the job on this host, and end."""
        signal.set_wakeup_fd(-1)
        if self.ranks is not None:
            self.ranks.kill()
        processes.end_descendants()
        self.channel.finish(_LAST_WORDS_S)
        os._exit(code)
