"""The head of a job on several hosts: the relay between the supervisor and the hosts' agents (``protocol.py``).

Towards the supervisor it acts as a zygote does (``relay/announcer.py``), over the same control socket, pipes and report
files; so the table, the prefixes, the failure block, the exit codes and the signals are the same code as on one host.

All agents have to come before any rank runs: only then are the hosts compared (``agreement.py``), the ranks placed, and
the table shown. A host that is lost later counts as the failure of its ranks, and the supervisor ends the others.
"""

from __future__ import annotations

import functools
import math
import os
import selectors
import signal
import socket
import time
from dataclasses import asdict
from typing import Any

from phalanx.launch.job.job import Job
from phalanx.launch.job.target import Refusal, prepare_target
from phalanx.launch.output.report import Report
from phalanx.launch.rank.descriptors import Descriptors
from phalanx.launch.relay.announcer import Announcer
from phalanx.launch.relay.channel import IN, Channel, open_door
from phalanx.launch.relay.crew import Member, Pipe
from phalanx.launch.relay.exchange import Exchange
from phalanx.launch.relay.services import Input, StoreOnDemand
from phalanx.launch.relay.survey import Survey
from phalanx.launch.remote.agreement import find_differences
from phalanx.launch.remote.arrivals import Arrivals
from phalanx.launch.remote.farewell import see_out
from phalanx.launch.remote.host import Host, place_ranks
from phalanx.launch.remote.protocol import agent_name, attempt_name, job_as_sent
from phalanx.launch.remote.sweeping import Sweeps
from phalanx.system import processes
from phalanx.words import format_count

__all__ = ["serve_hosts"]

# Agents end their ranks within the grace; one that reports nothing for this much longer is given up.
_SILENCE_S = 6.0


class _Head:
    """A job whose agents are being started, which is what making this object does."""

    def __init__(self, job: Job, descriptors: Descriptors, listener: socket.socket) -> None:
        self.job = job
        self.descriptors = descriptors
        self.ranks = [Member(number, Pipe.pair(ends)) for number, ends in enumerate(descriptors.ranks)]
        self.announcer = Announcer(descriptors, self.ranks)
        self.selector = selectors.DefaultSelector()
        self.hosts: list[Host] = []
        first = 0
        for slots in job.hosts:
            count = slots.slots or 1
            self.hosts.append(Host(len(self.hosts), slots, self.ranks[first : first + count]))
            first += count
        self.host_of = {rank.number: host for host in self.hosts for rank in host.ranks}
        self.exchange: Exchange[Host] = Exchange(self.selector, self._on_first, self._on_message, self._on_lost)
        self.reader = self.host_of[job.reader or 0]
        self.terminal = os.isatty(0)
        offered = job.reads(job.reader or 0, terminal=self.terminal)
        deliver = functools.partial(self.exchange.send, self.reader, IN)
        self.input = Input(self.selector, deliver, offered=offered)
        for ends in descriptors.ranks:
            os.set_blocking(ends.out_write, False)
            os.set_blocking(ends.err_write, False)
        self.port = listener.getsockname()[1]
        self.store = StoreOnDemand(descriptors, listener, self.selector, self._look_up, self.announcer.lose_store)
        self.selector.register(descriptors.zygote, selectors.EVENT_READ, self._on_order)
        self.door, invitation = open_door(job.addresses, self.selector, self.exchange.welcome, job.key)
        self.arrivals = Arrivals(job, self.hosts, self.selector, invitation)
        self.sweeps = Sweeps(job.starter)
        self.going = self.ordered = False
        self.called_off = False  # the head has ended the job's start by itself, because a host was lost during it
        self.connected = True
        self.give_up_at: float | None = None
        self.stacks: dict[int, str] = {}
        self.late: list[int] = []
        self.asked: set[int] = set()  # the hosts whose stacks are awaited
        self.survey = Survey(lambda host, order: self.exchange.say(self.hosts[host], **order), descriptors.zygote.send)

    def run(self) -> None:
        """Relay until all ranks have ended, and clean up."""
        try:
            self.arrivals.start()
            while self.connected and not all(rank.announced for rank in self.ranks):
                self.turn()
        except Refusal as refusal:
            self.dismiss()
            self.announcer.refuse(f"{str(refusal).rstrip()}\n", refusal.code)
            return
        self.dismiss()

    def turn(self) -> None:
        """Wait for something, and act on it."""
        due = (self.give_up_at, self.arrivals.due_at(), self.survey.due_at)
        times = [when for when in due if when is not None]
        until = min([self.door.tend(time.monotonic()), self.exchange.due_at, *times])
        patience_s = max(0.0, until - time.monotonic()) if until < math.inf else None
        for key, events in self.selector.select(patience_s):
            if isinstance(key.data, Host):
                self.exchange.serve(key.data, events)
            else:
                key.data()
        now = time.monotonic()
        self.exchange.look(now)
        for line in self.arrivals.act(now, failing=self.failing):
            self.announcer.say(line)
        self.survey.act(now)
        if self.give_up_at is not None and now >= self.give_up_at:
            self.give_up_at = None
            for host in self.hosts:
                self._lose(host)
        self.announcer.end()

    @property
    def failing(self) -> bool:
        """Whether the job is ending for a known reason; everything that is said after it is about the consequences."""
        return self.ordered or any(rank.status or rank.reported for rank in self.ranks)

    # The supervisor.

    def _on_order(self) -> None:
        order = self.descriptors.zygote.receive()
        if order is None:
            self.connected = False
        elif order["do"] == "go":
            self._release()
        elif order["do"] == "end":
            self.ordered = True
            if not self.going:
                self.connected = False
                return
            self._end_ranks(order)
        elif order["do"] == "examine":
            asked = {host for host in self.hosts if not host.done and host.channel is not None}
            self.survey.begin(order, {host.number: [rank.number for rank in host.ranks] for host in asked})
        else:
            if order["do"] == "stacks":
                self.asked = {host.number for host in self.hosts if not host.done and host.channel is not None}
            self._tell_all(order)

    def _end_ranks(self, order: dict[str, Any]) -> None:
        self._tell_all(order)
        until = time.monotonic() + order["grace_s"] + _SILENCE_S
        self.give_up_at = until if self.give_up_at is None else min(until, self.give_up_at)

    def _tell_all(self, order: dict[str, Any]) -> None:
        for host in self.hosts:
            if not host.done:
                self.exchange.say(host, **order)

    def _release(self) -> None:
        """Let every agent start its ranks."""
        self.going = True
        self.exchange.continue_when_called(self.hosts)
        rows = [asdict(row) for row in place_ranks(self.job, self.hosts)]
        job = job_as_sent(self.job)
        for host in self.hosts:
            self.exchange.say(
                host,
                do="start",
                job=job,
                rows=rows,
                first=host.first,
                port=self.port,
                terminal=self.terminal,
                input=host is self.reader and self.input.offered,
            )

    # The agents.

    def _on_first(self, channel: Channel, here: dict[str, Any]) -> Host:
        """An agent has come, and said of which host it is."""
        host: Host = self.hosts[here["host"]]
        if host.here:
            raise Refusal(f"phalanx: two agents say that they are the one of {host.name}; its starter ran twice", 1)
        host.channel, host.here = channel, here
        children = self.arrivals.came(host)
        if children:
            hosts = [[child.number, child.name, len(child.ranks)] for child in children]
            self.exchange.say(host, do="invite", hosts=hosts)
        if self.arrivals.complete:
            self._compare()
        return host

    def _compare(self) -> None:
        """All agents have come: place the ranks, unless the hosts do not fit together."""
        differences = find_differences([host.name for host in self.hosts], [host.here for host in self.hosts])
        if differences:
            raise Refusal("\n".join(f"phalanx: {line}" for line in differences), 1)
        crowded = [host for host in self.hosts if len(host.ranks) > host.here["cores"]]
        note = ""
        if crowded:
            host = crowded[0]
            note = (
                f"{format_count(len(host.ranks), 'rank')} share {format_count(host.here['cores'], 'core')} on "
                f"{host.name}; they will take turns, and a timing says little about a machine with a core for each"
            )
        self.announcer.place(place_ranks(self.job, self.hosts), note)

    def _on_message(self, host: Host, message: dict[str, Any]) -> None:
        event = message["event"]
        if "now_ns" in message:
            host.hear_clock(message["now_ns"])
        if event == "started":
            for rank, pid in zip(host.ranks, message["pids"], strict=True):
                rank.pid = pid
            self.announcer.start()
        elif event == "reported":
            rank = self.ranks[message["rank"]]
            self.announcer.report(rank, message["report"], time.monotonic() - message["age"])
        elif event == "exited":
            self._on_exit(self.ranks[message["rank"]], message)
        elif event == "wants":
            self.input.want()
        elif event == "overdue":
            self.announcer.overdue(self.ranks[message["rank"]], message["patience_s"])
        elif event == "stacks":
            self.stacks |= message["stacks"]
            self.late += message["late"]
            self._has_answered(host)
        elif event == "waits":
            self.announcer.wait(host.number, message)
        elif event == "examined":
            self.survey.hear(host.number, message)
        elif event == "owns":
            self.store.found(message["number"])
        elif event == "printed":
            self.arrivals.heard(self.hosts[message["host"]], message["text"])
        elif event == "unstarted":
            self.arrivals.take_over(self.hosts[message["host"]])
        elif event == "refused":
            raise Refusal(message["text"], message["code"])
        elif event == "ended":
            host.done = True
            self._has_answered(host)
            self.survey.lose(host.number)
            self.announcer.wait(host.number, {"waited_s": 0.0, "still_s": 0.0, "stopped": []})
            for rank in host.ranks:
                if rank.status is None:
                    # It never began: its zygote was ended before.
                    self._end(rank, -signal.SIGKILL, time.monotonic(), by_others=True)

    def _on_exit(self, rank: Member, message: dict[str, Any]) -> None:
        if rank.number == (self.job.reader or 0):
            self.input.release()
        self.descriptors.trace.note(rank.number, message["stage"], message["asked"], message.get("operation", ""))
        rank.out_of_memory = message["out_of_memory"]
        if message["status"] == 0:
            host = self.host_of[rank.number]
            self.store.ended(rank.number, host.here.get("name", host.name))
        if message["stacks"]:
            self.announcer.keep_stacks(message["stacks"])
        if message["recording"] is not None:
            self.announcer.recorded(rank, message["recording"], self.host_of[rank.number].later_ns)
        if message["status"] != 0 and not self.ordered:
            self._tell_elsewhere(rank, message)
        self._end(rank, message["status"], time.monotonic() - message["age"], by_others=self.called_off)

    def _tell_elsewhere(self, rank: Member, message: dict[str, Any]) -> None:
        """Tell the ranks of other hosts how one has ended, who cannot see it."""
        own = self.host_of[rank.number]
        end = {"host": own.here["name"], "pid": rank.pid, "status": message["status"]}
        for host in self.hosts:
            if host is not own and not host.done:
                self.exchange.say(host, do="ended elsewhere", known={**end, **message["call"]})

    def _look_up(self, number: int, end: Any, other_end: Any) -> None:
        """Ask each host of the job whether a connection to the store is its user's."""
        self._tell_all({"do": "look", "number": number, "end": end, "other_end": other_end})

    def _on_lost(self, host: Host, silent: bool) -> None:
        """An agent's connection has ended."""
        if host.done:
            return
        if not self.going:
            raise Refusal(f"phalanx: {_lost(host)}; nothing had been started", 1)
        self._lose(host)

    def _has_answered(self, host: Host) -> None:
        """Show the stacks of all hosts at once, when the last one has sent its own or will not do so any more."""
        if host.number in self.asked:
            self.asked.discard(host.number)
            if not self.asked:
                self.announcer.show_stacks(self.stacks, self.late)
                self.stacks, self.late = {}, []

    def _lose(self, host: Host) -> None:
        self._has_answered(host)
        if self.ordered:
            self.survey.lose(host.number)
        else:
            self.survey.drop()
        if not host.done:
            self.sweeps.begin(host.name, agent_name(attempt_name(self.job), host.number))
        now = time.monotonic()
        for rank in host.ranks:
            if rank.status is None:
                own_fault = not self.ordered
                if own_fault and not rank.reported:
                    self.announcer.report(rank, Report("", _lost(host), "", False, now, 1).to_record(), now)
                self._end(rank, -signal.SIGKILL, now, by_others=not own_fault)
        if not (self.announcer.started or self.ordered or self.called_off):
            # The supervisor ends ranks when all have started, and other hosts may be importing torch for long.
            self.called_off = True
            grace_s = self.job.patience_s(None)
            self._end_ranks({"do": "end", "signal": signal.SIGTERM, "grace_s": grace_s, "spare": [], "where": False})

    def _end(self, rank: Member, status: int, when: float, *, by_others: bool) -> None:
        rank.status, rank.ended_at, rank.by_others = status, when, by_others
        rank.pid = rank.pid or self.host_of[rank.number].here["pid"]
        self.announcer.start()

    # The end.

    def dismiss(self) -> None:
        """Have agents end what is left, and wait until they have, or can no longer be waited for."""
        self.door.close()
        see_out(self.hosts, self.sweeps, self.descriptors.zygote if self.connected else None)
        processes.end_descendants()


def _lost(host: Host) -> str:
    called = "" if host.here.get("name", host.name) == host.name else f" ({host.here['name']})"
    return f"host {host.name}{called} is lost: it has failed, its network has, or Phalanx's process there was killed"


def serve_hosts(job: Job, descriptors: Descriptors, listener: socket.socket) -> None:
    """Check, wait for the order to start, start, and relay until the end.

    Args:
        job: the job.
        descriptors: its descriptors.
        listener: the listening socket of its store.
    """
    try:
        prepare_target(job.target)
    except Refusal as refusal:
        descriptors.zygote.send(event="refused", text=f"{str(refusal).rstrip()}\n", code=refusal.code)
        return
    if descriptors.zygote.receive() is not None:
        _Head(job, descriptors, listener).run()
