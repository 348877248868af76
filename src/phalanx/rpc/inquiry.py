"""Inquiries into calls without an answer: what the kernel knows of the worker, and what it says itself.

A call whose time is over, or that takes long, is looked into on a thread of its own, because that may wait:

1. The kernel of this host knows at once whether a process here is stopped.
2. The worker is asked how far the calls have come. That takes no handler there, only a thread that can run Python.
3. If it does not answer and is on this host, something holds its interpreter. Its place in the program is found from
   outside (``diagnosis/stacks.py``). Of another host no more can be said.

All calls to one worker whose time is over together are one inquiry.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from phalanx.diagnosis.call_site import shown
from phalanx.diagnosis.stacks import is_there, place_of
from phalanx.errors import CallTimeout, PeerLost, PhalanxError
from phalanx.rpc.codec import FACTS
from phalanx.rpc.connections import Connections, Unreached
from phalanx.rpc.future import Future
from phalanx.rpc.members import Member
from phalanx.rpc.peer import Call
from phalanx.rpc.serving import PROGRESS
from phalanx.system.host import this_host
from phalanx.system.processes import state_of
from phalanx.words import format_count, tell

__all__ = ["LONG_S", "Finding", "Inquiries", "place_name", "tell_of_long"]

LONG_S = 60.0  # after which a call takes long
# How long a worker may take to answer: this part of the time that a call had, within these limits.
_PART, _LEAST_S, _MOST_S = 0.1, 0.25, 1.0
_SILENT_S = 0.4  # a host acknowledges much sooner
_MOST_ASKED = 3
_MOST = 32  # inquiries at a time; what comes beyond is not looked into


class Finding(NamedTuple):
    """Reason for a missing answer.

    Attributes:
        cause: one of those that ``CallTimeout`` lists.
        text: a sentence about the worker.
        at: the function, file and line at which it is; empty if that is not known.
    """

    cause: str
    text: str
    at: str = ""


UNKNOWN = Finding("", "")


def place_name(member: Member) -> str:
    """Return the name by which other processes of its host know a worker (``diagnosis/stacks.py``)."""
    return f"phalanx-rpc-{member.incarnation}-{member.port}"


def tell_of_long(calls: list[Call], findings: list[Finding]) -> None:
    """Tell the user of calls to one worker that take long: of the oldest, with how many others there are."""
    call, finding = min(zip(calls, findings, strict=True), key=lambda pair: pair[0].began)
    others = f" (and {format_count(len(calls) - 1, 'other call')})" if len(calls) > 1 else ""
    tell(f"note: waiting for {call.to}: {call.describe()}{others}. {finding.text}".rstrip())


class Inquiries:
    """The inquiries of one worker.

    Args:
        connections: the ways to the others.
        request: asks a worker for a service (``Worker.request``).
    """

    def __init__(self, connections: Connections, request: Callable[..., Future[Any]]) -> None:
        self._connections, self._request = connections, request
        self._threads: set[threading.Thread] = set()

    def begin(self, calls: Sequence[Call], then: Callable[[list[Call], list[Finding]], None]) -> None:
        """Look into calls, and have ``then`` called for those to each worker, with a finding for each call.

        It returns at once; ``then`` is called within about two seconds, on another thread.
        """
        by_worker: dict[int, list[Call]] = {}
        for call in calls:
            by_worker.setdefault(call.to.incarnation, []).append(call)
        for group in by_worker.values():
            # A question is not asked about in turn.
            if group[0].codec is FACTS or len(self._threads) >= _MOST:
                then(group, [UNKNOWN] * len(group))
                continue
            thread = threading.Thread(target=self._run, args=(group, then), name="phalanx-rpc-inquiry", daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread for it
                self._threads.discard(thread)
                then(group, [UNKNOWN] * len(group))

    def close(self) -> None:
        """Wait for those under way, which are over soon."""
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join()

    def overdue(self, call: Call, timeout_s: float) -> CallTimeout:
        """Make the error for a call that goes on, though its caller has waited for ``timeout_s`` seconds."""
        finding = UNKNOWN
        with contextlib.suppress(PhalanxError, *Unreached):
            finding = self.look(call.to, [call.number], _patience_s(timeout_s))[0]
        return call.late(timeout_s, finding.text, finding.cause, finding.at)

    def why_not_done(self, members: Sequence[Member]) -> str:
        """Say what keeps workers; of many, only a few are asked. It takes up to about a second for each."""
        sentences = []
        for member in members[:_MOST_ASKED]:
            with contextlib.suppress(PhalanxError, *Unreached):
                if text := self.of_worker(member).text:
                    sentences.append(f"{member}: {text[0].lower()}{text[1:]}")
        return " ".join(sentences)

    def of_worker(self, member: Member) -> Finding:
        """Find out what a worker does, or what has become of it; it takes about a second at most."""
        return self.look(member, [0], _LEAST_S)[0]

    def look(self, member: Member, numbers: Sequence[int], patience_s: float) -> list[Finding]:
        """Find out why a worker has not answered these calls; it takes about ``patience_s`` seconds at most."""
        if (seen := self._seen(member)) is not None:
            return [seen] * len(numbers)
        try:
            said = self._request(
                member, PROGRESS, list(numbers), patience_s, asked="how far calls have come", codec=FACTS
            ).wait()
        except CallTimeout:
            return [self._seen(member) or self._silent(member, patience_s)] * len(numbers)
        except PeerLost:
            return [Finding("gone", "It is gone.")] * len(numbers)
        return [_told(entry) for entry in said]

    def _run(self, group: list[Call], then: Callable[[list[Call], list[Finding]], None]) -> None:
        findings = [UNKNOWN] * len(group)
        try:
            patience_s = _patience_s(min(call.timeout_s for call in group))
            with contextlib.suppress(PhalanxError, *Unreached):  # such as that this worker leaves
                findings = self.look(group[0].to, [call.number for call in group], patience_s)
        finally:
            self._threads.discard(threading.current_thread())
            then(group, findings)

    def _seen(self, member: Member) -> Finding | None:
        """Ask the kernel."""
        link = self._connections.link_now(member)
        if link is not None and link.silent_s > _SILENT_S:
            return Finding(
                "cut",
                f"Its host has acknowledged nothing for {link.silent_s:.1f} s: is the link between the hosts cut, or "
                f"that host down?",
            )
        state = state_of(member.pid) if _is_here(member) else ""
        if state not in ("T", "t"):
            return None
        how = "stopped (SIGSTOP)" if state == "T" else "stopped by a debugger"
        return Finding("stopped", f"It is {how}; `kill -CONT {member.pid}` on {member.host} lets it go on.")

    def _silent(self, member: Member, patience_s: float) -> Finding:
        """Find out what can be about a worker that answers no question."""
        if _is_here(member):
            at = place_of(member.pid, place_name(member))
            where = f" It is at {shown(at)}." if at else ""
            return Finding(
                "interpreter",
                f"Its process is there (in the state {state_of(member.pid)}), but runs no Python for others: something "
                f"in it holds the interpreter's lock, or its machine is overloaded.{where}",
                at,
            )
        return Finding(
            "silent",
            f"It has not said within {patience_s:g} s what it does, though its host answers: its process is stopped, "
            f"or something in it holds the interpreter's lock.",
        )


def _is_here(member: Member) -> bool:
    """Return whether this process can see the worker's, on its host."""
    return member.host == this_host().name and is_there(member.pid, place_name(member))


def _patience_s(timeout_s: float) -> float:
    return min(_MOST_S, max(_LEAST_S, _PART * timeout_s))


def _told(entry: dict[str, Any]) -> Finding:
    """Read what a worker says about one call, or about itself."""
    if "main" in entry:
        at = str(entry["main"])
        return Finding("handler", f"It runs; its main thread is at {shown(at)}." if at else "It runs.", at)
    if "behind" in entry:
        others, running = int(entry["behind"]), int(entry["running"])
        return Finding(
            "queued",
            f"It has not begun this one: {format_count(running, 'call')} {'is' if running == 1 else 'are'} under way "
            f"there, and {format_count(others, 'call')} {'waits' if others == 1 else 'wait'} before this one.",
        )
    if "for_s" in entry:
        at = str(entry["at"])
        where = f"and is at {shown(at)}" if at else "and its answer comes later, from other code there"
        return Finding("handler", f"It has worked on this for {entry['for_s']:.1f} s {where}.", at)
    return Finding("on the way", "It does not work on this: the call or its answer is on the way.")
