"""The thread of this process that watches processes of other hosts, for all its groups.

Between two processes there is one connection (``contact.py``), whichever groups they share. Of the two, the one with
the lower id dials, as soon as a group of it wants to watch the other, and again if that fails. It also dials while the
other's host is silent: after a long silence a new connection works sooner than the old one, which TCP tries ever more
seldom. If nobody comes, the one with the higher id asks from time to time whether there is still somebody. A process
listens at one address, the one by which other hosts reach it, and lets in who proves the job's key.

That a connection ends says nothing of the other process, since networks end connections too. So it is dialled, or
asked, at once, and it has gone if nothing listens there any more. Whoever dials speaks first: it may have given up
before the answer came, and a connection that nobody uses must not take the place of the one that both do.

A message reaches a group only if it is watched there, and only over a connection that is open. A group may break before
either is so. So what a group has to say is repeated: to each process that begins to watch for it (``joined``), over
each connection that opens, and, while the thread runs, also after the group was left. The thread ends with the last
group; what was said then stands in the job's store (``breaking.py``).

Only the thread touches contacts, targets and the selector. Other threads hand it work by ``_do``. A group is called
back on the thread, so it must not wait. What it raises is printed, and the thread watches on for the other groups.
``_bell`` and ``_orders`` are written by any thread under ``_ringing``: what rings the bell may not be another file that
has got its number. At its end the thread sets the bell to -1, and then does what was ordered until then, so nothing is
ordered of a thread that has ended.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from phalanx.system.exit_order import Stage, at_exit
from phalanx.system.foreign_values import read_json
from phalanx.system.interfaces import outward_address
from phalanx.system.threads import start
from phalanx.transports.hierarchical.contact import Contact, Sign
from phalanx.transports.hierarchical.reaching import (
    AGAIN_S,
    HERE,
    KEEP_ALIVE,
    NO,
    ROLE,
    WELCOME,
    Target,
    has_gone,
    reach,
)
from phalanx.transports.hierarchical.watcher import Endpoint, Watcher
from phalanx.wire.dial import Line
from phalanx.wire.door import Arrival, Door
from phalanx.wire.key import job_key
from phalanx.wire.sockets import listen

__all__ = ["LOOK_S", "Lookout", "lookout"]

LOOK_S = 0.25
# The other one has been given the group at the same time, and dials at once, unless it has ended before it could.
_FIRST_PROBE_S = 0.25
_ENDING_S = 2.0  # as long as the aborts of two groups take
_LONGEST_STEP_S = 2 * LOOK_S
_MOST_LAST_WORDS = 256


@dataclass(frozen=True)
class _Watch:
    """A group, and whom it watches."""

    watcher: Watcher
    watched: tuple[Endpoint, ...]


class Lookout:
    """See above. :func:`lookout` gives this process's.

    Attributes:
        endpoint: this process's own.
    """

    def __init__(self) -> None:
        self._key = job_key()
        self._selector = selectors.DefaultSelector()
        listener = listen(outward_address(), 0)
        address, port = listener.getsockname()[:2]
        self.endpoint = Endpoint(secrets.token_hex(8), address, port, os.getpid())
        self._door = Door(listener, self._key, ROLE, KEEP_ALIVE, self._selector, self._admit)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._bell, selectors.EVENT_READ, self._on_bell)
        self._ringing = threading.RLock()  # a signal handler may order something while its thread does
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._contacts: dict[str, Contact] = {}
        self._unused: dict[str, Contact] = {}  # those over which the process that dialled has not spoken yet
        self._targets: dict[str, Target] = {}
        self._watches: dict[str, _Watch] = {}
        # What the groups said that have been left; the newest last, and no more than ``_MOST_LAST_WORDS``.
        self._last_words: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._failed: set[str] = set()  # the groups of which an error has been printed
        self._now, self._read_at = 0.0, time.monotonic()
        self._ended = ""  # how, once it is so
        self._thread = threading.Thread(target=self._run, name="phalanx-lookout", daemon=True)
        start(self._thread)

        self._users = 1

    # -- from any thread ---------------------------------------------------------------------------

    def release(self) -> None:
        """A caller of :func:`lookout` needs it no longer; with the last one it ends."""
        global _made
        with _making:
            self._users -= 1
            if self._users:
                return
            if _made is self:
                _made = None
        self.end("close")

    def join(self, watcher: Watcher, watched: Iterable[Endpoint]) -> None:
        """Watch these processes for a group."""
        self._do(lambda: self._join(watcher, tuple(watched)))

    def leave(self, watcher: Watcher, message: dict[str, Any]) -> None:
        """Tell whom a group watches a last message, and watch them for it no longer. Waits until that is done."""
        done = threading.Event()

        def leave() -> None:
            self._leave(watcher, message)
            done.set()

        if self._do(leave) and self._thread is not threading.current_thread():
            done.wait(1.0)

    def send(self, watcher: Watcher, to: Iterable[Endpoint], message: dict[str, Any]) -> None:
        """Send processes a message of a group."""
        if self._thread is threading.current_thread():
            self._send(watcher, to, message)  # before the group's waits are ended, which may take a while
        else:
            self._do(lambda: self._send(watcher, list(to), message))

    def has_gone(self, there: Endpoint) -> bool:
        """Ask, without the lookout's thread, whether a process has no lookout any more; see ``reaching.has_gone``."""
        return has_gone(there, self.endpoint.identity, self._key)

    def wake(self) -> None:
        """Have the groups judge now."""
        self._do(self._look)

    def end(self, how: str) -> None:
        """Tell the other processes that this one leaves, and stop."""

        def stop() -> None:
            self._ended = how

        self._do(stop)
        if self._thread is not threading.current_thread():
            self._thread.join(_ENDING_S)

    def let_go(self) -> None:
        """In a forked child: close the parent's connections, whose end must show when the parent ends."""
        self._door.let_go()
        for contact in (*self._contacts.values(), *self._unused.values()):
            contact.sock.close()
        self._selector.close()
        self._ringing = threading.RLock()
        self._unhang_bell()

    def _do(self, order: Callable[[], None]) -> bool:
        """Have the thread do it; whether it will."""
        with self._ringing:
            if self._bell < 0:
                return False
            self._orders.put(order)
            os.eventfd_write(self._bell, 1)
            return True

    def _unhang_bell(self) -> None:
        with self._ringing:
            bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._selector.unregister(self._bell)
            self._unhang_bell()
            self._carry_out_orders()
            self._door.close()
            for contact in (*self._contacts.values(), *self._unused.values()):
                if self._ended:
                    contact.send({"leaves": self._ended})
                contact.close()
            self._selector.close()

    def _serve(self) -> None:
        look_at = 0.0
        while not self._ended:
            wait_s = max(0.0, min(look_at, self._door.tend(time.monotonic())) - time.monotonic())
            ready = self._selector.select(min(wait_s, LOOK_S))
            self._tick()
            for key, _ in ready:
                if key.fd in self._selector.get_map():  # else one that came before has closed it
                    key.data()
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + LOOK_S
                self._dial()
                self._look()

    def _tick(self) -> None:
        real = time.monotonic()
        self._now += min(real - self._read_at, _LONGEST_STEP_S)
        self._read_at = real

    def _on_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        self._carry_out_orders()

    def _carry_out_orders(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._orders.get_nowait()()

    def _look(self) -> None:
        for contact in self._contacts.values():
            contact.look(self._now)
        for watch in list(self._watches.values()):
            self._ask(watch.watcher, lambda each=watch.watcher: each.look(self._now, self._sign_of))  # type: ignore[misc]

    def _ask(self, watcher: Watcher, question: Callable[[], None]) -> None:
        try:
            question()
        except Exception:
            if watcher.name not in self._failed:
                self._failed.add(watcher.name)
                with contextlib.suppress(Exception):  # nobody may read what is printed
                    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self._thread)))

    def _sign_of(self, endpoint: Endpoint) -> tuple[Sign | None, float]:
        contact = self._contacts.get(endpoint.identity)
        if contact is not None:
            return contact.sign, contact.signed_at
        target = self._targets[endpoint.identity]
        return (Sign.GONE if target.gone else None), target.fails_since

    def _join(self, watcher: Watcher, watched: tuple[Endpoint, ...]) -> None:
        self._watches[watcher.name] = _Watch(watcher, watched)
        for endpoint in watched:
            dials = endpoint.identity > self.endpoint.identity
            again_at = 0.0 if dials else self._now + _FIRST_PROBE_S
            self._targets.setdefault(endpoint.identity, Target(endpoint, again_at=again_at)).groups += 1
        self._send(watcher, watched, {"joined": True, **watcher.says()})
        self._dial()

    def _leave(self, watcher: Watcher, message: dict[str, Any]) -> None:
        watch = self._watches.get(watcher.name)
        if watch is None or watch.watcher is not watcher:
            return
        del self._watches[watcher.name]
        self._failed.discard(watcher.name)
        if said := watcher.says():
            self._last_words[watcher.name] = said
            if len(self._last_words) > _MOST_LAST_WORDS:
                self._last_words.popitem(last=False)
        self._send(watcher, watch.watched, {**message, **said})
        for endpoint in watch.watched:
            self._targets[endpoint.identity].groups -= 1

    def _send(self, watcher: Watcher, to: Iterable[Endpoint], message: dict[str, Any]) -> None:
        for endpoint in to:
            if (contact := self._contacts.get(endpoint.identity)) is not None:
                contact.send({**message, "group": watcher.name})

    # -- connections -------------------------------------------------------------------------------

    def _dial(self) -> None:
        for identity, target in self._targets.items():
            dials = identity > self.endpoint.identity
            contact = self._contacts.get(identity)
            if (
                target.groups
                and (contact is None or (dials and contact.sign is Sign.SILENT))
                and not (target.dialling or target.gone)
                and self._now >= target.again_at
            ):
                target.dialling = True
                thread = threading.Thread(
                    target=self._reach, args=(target, not dials), name="phalanx-lookout-dial", daemon=True
                )
                try:
                    start(thread)
                except RuntimeError:  # there are too many; or the interpreter ends
                    target.dialling, target.again_at = False, self._now + AGAIN_S

    def _reach(self, target: Target, probes: bool) -> None:
        """On a thread of its own."""
        line, why = reach(target.endpoint, self.endpoint.identity, self._key, probes=probes)
        if not self._do(lambda: self._reached(target, line, why)) and line is not None:
            line.close()

    def _reached(self, target: Target, line: Line | None, why: Exception | None) -> None:
        if line is None:
            if target.failed(why, self._now):
                if (silent := self._contacts.pop(target.endpoint.identity, None)) is not None:
                    self._close(silent)
                self._look()
            return
        target.reached()
        contact = Contact(line.sock, line.session, target.endpoint.identity, b"", self._now)
        contact.send({"dialled": True})
        self._add(contact)
        self._listen_to(contact)

    def _admit(self, arrival: Arrival) -> None:
        try:
            claim = read_json(arrival.proven.claim)
            peer, to, probes = str(claim["from"]), claim["to"], claim["probes"]
        except (ValueError, KeyError, TypeError):
            peer, to, probes = "", "", False
        if to != self.endpoint.identity or probes:
            arrival.answer(HERE if probes and to == self.endpoint.identity else NO)
            arrival.sock.close()
            return
        arrival.answer(WELCOME)
        if (earlier := self._unused.get(peer)) is not None:
            self._close(earlier)
        contact = Contact(arrival.sock, arrival.proven.session(), peer, arrival.rest, self._now)
        self._unused[peer] = contact
        self._listen_to(contact)

    def _add(self, contact: Contact) -> None:
        if (earlier := self._contacts.get(contact.peer)) is not None:
            self._close(earlier)
        self._contacts[contact.peer] = contact
        for name, watch in self._watches.items():
            if any(endpoint.identity == contact.peer for endpoint in watch.watched):
                contact.send({"joined": True, **watch.watcher.says(), "group": name})

    def _listen_to(self, contact: Contact) -> None:
        self._selector.register(contact.sock, selectors.EVENT_READ, lambda: self._hear(contact))
        self._hear(contact)

    def _hear(self, contact: Contact) -> None:
        for message in contact.read(self._now):
            if self._unused.get(contact.peer) is contact:
                del self._unused[contact.peer]
                self._add(contact)
            if "leaves" in message:
                contact.leaves(self._now)
            if "group" in message:
                self._hear_of(str(message["group"]), contact, message)
        if contact.sign is Sign.LEFT:
            self._close(contact)
        elif contact.ended:
            self._close(contact)
            self._lose(contact)

    def _lose(self, contact: Contact) -> None:
        for contacts in self._unused, self._contacts:
            if contacts.get(contact.peer) is contact:
                del contacts[contact.peer]
        target = self._targets.get(contact.peer)
        if target is not None and contact.peer not in self._contacts:
            target.lost(self._now)
            self._dial()

    def _hear_of(self, name: str, contact: Contact, message: dict[str, Any]) -> None:
        watch = self._watches.get(name)
        if watch is not None:
            self._ask(watch.watcher, lambda: watch.watcher.told(contact.peer, message))
        if "joined" in message:
            said = self._last_words.get(name, {}) if watch is None else watch.watcher.says()
            if said:
                contact.send({**said, "group": name})

    def _close(self, contact: Contact) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(contact.sock)
        contact.close()


_made: Lookout | None = None
_making = threading.RLock()  # a signal handler may close a group while its thread makes one


def lookout() -> Lookout:
    """This process's; whoever has called this calls :meth:`Lookout.release` in the end.

    Raises:
        OSError: there can be none, as for want of descriptors.
    """
    global _made
    with _making:
        if _made is None:
            _made = Lookout()
        else:
            _made._users += 1
        return _made


def _at_exit() -> None:
    if _made is not None:
        _made.end("exit")


def _after_fork() -> None:
    global _made, _making
    _making = threading.RLock()
    if _made is not None:
        _made.let_go()
        _made = None


at_exit(Stage.END_LOOKOUT, _at_exit)
os.register_at_fork(after_in_child=_after_fork)
