"""The ranks of one host, as its agent holds them: the zygote that forks them, and what has to go to the head.

This is the supervisor's half towards a zygote, without a person in front of it: output, reports and ends are sent on
instead of being printed. Clocks of two hosts differ, so a time is sent as how long ago something happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

from phalanx.launch.job.job import Share
from phalanx.launch.job.options import Diagnosis
from phalanx.launch.output.failure import describe_lost_zygote
from phalanx.launch.rank.descriptors import Descriptors
from phalanx.launch.rank.operations import last_call, last_operation, last_recording
from phalanx.launch.relay.channel import ERR, OUT, Channel
from phalanx.launch.relay.feed import Feed
from phalanx.launch.relay.observer import Observer, within
from phalanx.launch.remote.protocol import with_rank
from phalanx.launch.remote.tree import Branch
from phalanx.launch.zygote_watch import ZygoteWatch
from phalanx.system import processes
from phalanx.system.host import machine_name

__all__ = ["LocalRanks"]

_BLOCK = 1 << 16
# How much an ended rank may have left in a pipe (its size is at most this); more than that comes from another process.
_LARGEST_REMAINDER = 1 << 20
# How many of its last operations a rank leaves at its end, and how many bytes they may take as JSON.
_RECORDS, _LARGEST_RECORDING = 128, 1 << 16


class LocalRanks:
    """The ranks of this host, from the fork of their zygote until nothing of them is left.

    Args:
        share: which ranks they are.
        descriptors: what joins them, their zygote and this process.
        zygote: the zygote's process id.
        feed: the input of the one that reads, if that is among them.
        channel: where everything is sent.
        branch: the programs that have started the agents of other hosts, which stay until the end of the job.
        diagnosis: when it is said that ranks wait; None if that is not to be said.
        is_python: whether the ranks run Python.

    Attributes:
        outputs: the descriptors of outputs that are open, each with its rank, counted from 0, and its kind.
        feed: as given.
        zygote: the zygote's process id; 0 when it has ended, and everything below it.
        observer: looks at the ranks for the launcher.
        watch: notices that a rank has ended although the zygote does not say so.
        calls: sends what they call.
    """

    def __init__(
        self,
        share: Share,
        descriptors: Descriptors,
        zygote: int,
        feed: Feed,
        channel: Channel,
        branch: Branch,
        diagnosis: Diagnosis | None,
        *,
        is_python: bool,
    ) -> None:
        self.zygote = zygote
        self.feed = feed
        self.outputs: dict[int, tuple[int, bytes]] = {}
        for part, ends in enumerate(descriptors.ranks):
            self.outputs |= {ends.out_read: (part, OUT), ends.err_read: (part, ERR)}
        self._numbers = share.ranks
        self._descriptors = descriptors
        self._channel = channel
        self._branch = branch
        self._started = False
        self._is_python = is_python
        self._ordered = False
        self._reports = [b""] * len(share.ranks)
        self.watch = ZygoteWatch("the ranks of a host", machine_name(), share.ranks)
        self.observer = Observer(descriptors.trace, share.ranks, diagnosis, channel.say)

    def fileno(self) -> int:
        """Where the zygote's messages arrive."""
        return self._descriptors.supervisor.fileno()

    def due_in_s(self) -> float | None:
        """When :meth:`look` has something to do; None for never."""
        due = (self.observer.due_in_s(), self.watch.due_in_s())
        return min((in_s for in_s in due if in_s is not None), default=None)

    def look(self) -> None:
        """Look at the ranks, as far as it is time to, and tell the head what it has to know."""
        self.watch.act(self.zygote)
        self.observer.look()

    # Output and input.

    def read(self, descriptor: int) -> int:
        """Send one block of an output; return its length, 0 when there is nothing now."""
        if descriptor not in self.outputs:
            return 0  # its rank has ended in this very turn
        part, kind = self.outputs[descriptor]
        try:
            data = os.read(descriptor, _BLOCK)
        except BlockingIOError:
            return 0
        if data:
            self._channel.send(kind, with_rank(self._numbers[part], data))
        else:
            self._close(descriptor)
        return len(data)

    def _close(self, descriptor: int) -> None:
        del self.outputs[descriptor]
        os.close(descriptor)

    def _drain(self, part: int) -> None:
        for descriptor in [descriptor for descriptor, (owner, _) in self.outputs.items() if owner == part]:
            taken = 0
            while descriptor in self.outputs and taken < _LARGEST_REMAINDER:
                length = self.read(descriptor)
                if not length:
                    break
                taken += length
            if descriptor in self.outputs:
                self._close(descriptor)

    def give(self, data: bytes) -> None:
        """Hand a block of input on; the empty one is the end."""
        if not data:
            self.feed.close()
        elif self.feed.feed(data):
            self._channel.say(event="wants")

    # Orders.

    def obey(self, order: Mapping[str, Any]) -> None:
        """Carry out an order of the supervisor's."""
        if order["do"] == "end":
            self._ordered = True
            if not self._started:
                # The zygote reads no order while it imports torch; without it, what it has forked ends.
                self.kill()
                return
            spare = [rank - self._numbers.start for rank in order["spare"] if rank in self._numbers]
            order = {**order, "spare": spare}
        elif order["do"] == "ended elsewhere":
            self._descriptors.trace.note_elsewhere(json.dumps(order["known"]).encode())
            return
        elif order["do"] == "stacks":
            self.observer.take_question(None)
        elif order["do"] == "examine":
            parts = self.observer.take_question(order)
            if not parts:
                return
            order = {"do": "stacks", "of": parts}
        self._descriptors.supervisor.send(**order)
        if self.zygote:
            os.kill(self.zygote, signal.SIGCONT)

    def kill(self) -> None:
        """End everything; the end of the zygote is noticed like any other."""
        self._ordered = True
        if self.zygote:
            os.kill(self.zygote, signal.SIGKILL)

    # The zygote's messages.

    def hear(self) -> None:
        """Act on one message of the zygote's, or on its end."""
        message = self._descriptors.supervisor.receive()
        if message is None:
            self._on_zygote_gone()
        elif message["event"] == "started":
            self._started = True
            self.watch.begin(message["pids"])
            self.observer.begin(message["pids"])
            self._channel.say(event="started", now_ns=time.monotonic_ns(), pids=message["pids"])
        elif message["event"] == "overdue":
            self._channel.say(**{**message, "rank": self._numbers[message["rank"]]})
        elif message["event"] == "stacks":
            question = self.observer.take_next()
            if question is not None:
                self.observer.answer(question, self._stacks(range(len(self._numbers))))
                return
            late = [self._numbers[part] for part in message.get("late", ())]
            self._channel.say(event="stacks", stacks=self._stacks(range(len(self._numbers))), late=late)
        elif message["event"] == "reported":
            for part in range(len(self._numbers)):
                self._send_report(part)
        elif message["event"] == "refused":
            self._channel.say(**message)
        elif message["event"] == "exited":
            self._on_exit(message["rank"], message["status"], message["time"], message["out_of_memory"])

    def _on_exit(self, part: int, status: int, when: float, out_of_memory: bool) -> None:
        self.watch.told(part)
        self._drain(part)
        self._send_report(part)
        self.observer.forget(part)
        trace = self._descriptors.trace
        recording = (
            within(_LARGEST_RECORDING, last_recording(trace, part, _RECORDS), _RECORDS) if self._is_python else None
        )
        self._channel.say(
            event="exited",
            now_ns=time.monotonic_ns(),
            recording=recording,
            rank=self._numbers[part],
            status=status,
            age=time.monotonic() - when,
            stage=int(trace.stage(part)),
            asked=trace.asked(part),
            operation=last_operation(trace, part, when) if status != 0 else "",
            call=last_call(trace, part) if status != 0 else {},
            stacks=self._stacks(range(part, part + 1)),
            out_of_memory=out_of_memory,
        )

    def _stacks(self, parts: range) -> dict[int, str]:
        return {self._numbers[part]: text for part, text in self._descriptors.trace.take(parts).items()}

    def _send_report(self, part: int) -> None:
        """Send the report that a rank has written about its failure, unless that has been sent."""
        descriptor = self._descriptors.ranks[part].report
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        if not data or data == self._reports[part]:
            return
        with contextlib.suppress(ValueError):  # it is not complete yet
            report: dict[str, Any] = json.loads(data)
            when = (report.get("phalanx") or {}).get("time")
            age = 0.0 if when is None else max(0.0, time.monotonic() - when)
            self._channel.say(event="reported", rank=self._numbers[part], age=age, report=report)
            self._reports[part] = data

    def _on_zygote_gone(self) -> None:
        self._descriptors.supervisor.close()
        pid, self.zygote = self.zygote, 0  # first: a signal's handler may run as soon as the process is gone
        _, status = os.waitpid(pid, 0)
        self.watch.close()
        # Processes that the zygote could not end have become children of this one, which is a subreaper.
        processes.end_descendants(but=self._branch.pids)
        for part in range(len(self._numbers)):
            self._drain(part)
        self.feed.close()
        code = os.waitstatus_to_exitcode(status)
        if code and not self._ordered:
            lost = describe_lost_zygote(code, pid, machine_name(), "the ranks of a host")
            text, exit_code = self.watch.refusal or lost
            self._channel.say(event="refused", text=text, code=exit_code)
        self._channel.say(event="ended")
