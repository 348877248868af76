"""Answer ``phalanx top`` in the supervisor, on a socket of its own.

The socket is abstract: it lies in no folder, and goes with the launcher. The kernel says who is at its other end
(SO_PEERCRED), and only this user and root are answered. A client sends one line of JSON, ``{"do": "look"}``, and gets
one: ``looks`` of each agent that answered, with what its times lack on this host's clock (``later_ns``), the ranks of
agents that did not (``silent``), and how long to wait before the next question (``pause_s``). Then the connection ends.
To ``{"do": "stop"}`` the answer is whether the ranks can stop in step, and do (``stops``).
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
from phalanx.system.foreign_values import read_json

__all__ = ["ANSWER_S", "LookServer", "address_of", "peer_uid"]

#: How long agents are waited for, in seconds.
ANSWER_S = 1.0
# For how long an answer serves further clients: rates over a shorter time would say nothing.
_FRESH_S = 0.2
_LONGEST_QUESTION = 4096


def address_of(run_id: str) -> str:
    """Return the address of a job's socket."""
    return f"\0{run_id}-look"


def peer_uid(sock: socket.socket) -> int:
    """Return the user of the process at the other end of a unix socket."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


class LookServer:
    """Asks all agents for a look when a client does. Others that ask soon get the same answer.

    Args:
        run_id: the job's.
        selector: calls what is registered as data, as the supervisor does.
        agents: they.
        send: sends an agent an order.
        stop: has the ranks stop in step, if they can; returns whether they do.

    Attributes:
        due_at: until when answers are waited for; None if nobody has asked.
    """

    def __init__(
        self,
        run_id: str,
        selector: selectors.BaseSelector,
        agents: Sequence[AgentState],
        send: Callable[[AgentState, Order], None],
        stop: Callable[[], bool],
    ) -> None:
        self._selector, self._agents, self._send, self._stop = selector, agents, send, stop
        self._clients: dict[socket.socket, bytes] = {}  # what is still to be sent to each
        self._waiting: set[socket.socket] = set()
        self._number = 0
        self._awaited: dict[int, AgentState] = {}
        self._found: list[tuple[float, Looked]] = []
        self._answer, self._answered_at = b"", float("-inf")
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

    # Clients.

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if peer_uid(sock) not in (0, os.geteuid()):
                sock.close()
                return
            sock.setblocking(False)
            self._clients[sock] = b""
            self._selector.register(sock, selectors.EVENT_READ, functools.partial(self._read, sock))

    def _hang_up(self, sock: socket.socket) -> None:
        del self._clients[sock]
        self._waiting.discard(sock)
        self._selector.unregister(sock)
        sock.close()

    def _read(self, sock: socket.socket) -> None:
        try:
            question = read_json(sock.recv(_LONGEST_QUESTION))
        except (OSError, ValueError):  # among them the end
            question = None
        if question == {"do": "look"}:
            self._ask(sock)
        elif question == {"do": "stop"}:
            self._answer_client(sock, json.dumps({"stops": self._stop()}).encode() + b"\n")
        else:
            self._hang_up(sock)

    def _write(self, sock: socket.socket) -> None:
        try:
            self._clients[sock] = self._clients[sock][sock.send(self._clients[sock]) :]
        except BlockingIOError:
            return
        except OSError:
            self._clients[sock] = b""
        if not self._clients[sock]:
            self._hang_up(sock)

    # Agents.

    def _ask(self, sock: socket.socket) -> None:
        self._waiting.add(sock)
        if time.monotonic() - self._answered_at < _FRESH_S:
            self._tell()
        elif self.due_at is None:
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
            self._found.append((agent.later, answer))

    def lose(self, agent: AgentState) -> None:
        """An agent has gone, or has no rank any more."""
        self._awaited.pop(agent.number, None)

    def act(self, now: float) -> None:
        """Answer the clients once all agents have answered, or the time is up."""
        if self.due_at is None or (self._awaited and now < self.due_at):
            return
        said = {
            "looks": [{"later_ns": round(later * 1e9), "looks": found.looks} for later, found in self._found],
            "silent": [rank for agent in self._awaited.values() for rank in agent.numbers],
            "pause_s": max((found.pause_s for _, found in self._found), default=0.0),
        }
        self._answer, self._answered_at = json.dumps(said).encode() + b"\n", now
        self.due_at, self._awaited = None, {}
        self._tell()

    def _tell(self) -> None:
        while self._waiting:
            self._answer_client(self._waiting.pop(), self._answer)

    def _answer_client(self, sock: socket.socket, answer: bytes) -> None:
        self._clients[sock] = answer
        self._selector.modify(sock, selectors.EVENT_WRITE, functools.partial(self._write, sock))
