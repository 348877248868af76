"""Answer ``phalanx top`` in the supervisor, on a socket of its own.

The socket is abstract: it lies in no folder, and goes with the launcher. The kernel says who is at its other end
(SO_PEERCRED), and only this user and root are answered. A client that connects gets one line of JSON: ``looks`` at the
ranks whose agents answered (``rank_look.py``), the ranks of agents that did not (``silent``), and how long to wait
before the next question (``pause_s``). Then the connection ends.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence

from phalanx.launch.protocol import Look, Looked, Order
from phalanx.launch.roster import AgentState

#: How long agents are waited for, in seconds.
ANSWER_S = 1.0


def address_of(run_id: str) -> str:
    """Return the address of a job's socket."""
    return f"\0{run_id}-look"


def peer_uid(sock: socket.socket) -> int:
    """Return the user of the process at the other end of a unix socket."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


class LookServer:
    """Asks all agents for a look when a client connects. Others that connect meanwhile get the same answer.

    ``selector`` calls what is registered as data, as the supervisor does. ``due_at`` is until when answers are waited
    for; None if nobody has asked.
    """

    def __init__(
        self,
        run_id: str,
        selector: selectors.BaseSelector,
        agents: Sequence[AgentState],
        send: Callable[[AgentState, Order], None],
    ) -> None:
        self._selector, self._agents, self._send = selector, agents, send
        self._clients: set[socket.socket] = set()
        self._waiting: list[socket.socket] = []  # those of them that have no answer yet
        self._number = 0
        self._awaited: dict[int, AgentState] = {}
        self._found: list[Looked] = []
        self.due_at: float | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        with contextlib.suppress(OSError):  # the name is taken; a job runs as well without
            self._listener.bind(address_of(run_id))
            self._listener.listen()
            selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Close all sockets: in a fork, and before the next attempt."""
        for sock in (self._listener, *self._clients):
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if peer_uid(sock) not in (0, os.geteuid()):
                sock.close()
                return
            sock.setblocking(False)
            self._clients.add(sock)
            self._waiting.append(sock)
            if self.due_at is None:
                self._ask()

    def _ask(self) -> None:
        self.due_at = time.monotonic() + ANSWER_S
        self._number += 1
        self._found = []
        asked = [agent for agent in self._agents if agent.link is not None and agent.started and not agent.over]
        self._awaited = {agent.number: agent for agent in asked}
        for agent in asked:
            self._send(agent, Look(number=self._number))

    def hear(self, agent: AgentState, answer: Looked) -> None:
        """Take an agent's answer."""
        if answer.number == self._number and self._awaited.pop(agent.number, None) is not None:
            self._found.append(answer)

    def lose(self, agent: AgentState) -> None:
        """An agent has gone, or has no rank any more."""
        self._awaited.pop(agent.number, None)

    def act(self, now: float) -> None:
        """Answer the clients once all agents have answered, or the time is up."""
        if self.due_at is None or (self._awaited and now < self.due_at):
            return
        said = {
            "looks": [look for found in self._found for look in found.looks],
            "silent": [rank for agent in self._awaited.values() for rank in agent.numbers],
            "pause_s": max((found.pause_s for found in self._found), default=0.0),
        }
        answer = json.dumps(said).encode() + b"\n"
        for sock in self._waiting:
            write = functools.partial(self._write, sock, bytearray(answer))
            self._selector.register(sock, selectors.EVENT_WRITE, write)
        self.due_at, self._awaited, self._waiting = None, {}, []

    def _write(self, sock: socket.socket, left: bytearray) -> None:
        try:
            del left[: sock.send(left)]
        except BlockingIOError:
            return
        except OSError:
            left.clear()  # it has hung up
        if not left:
            self._clients.discard(sock)
            self._selector.unregister(sock)
            sock.close()
