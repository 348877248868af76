"""How ranks find rank 0's store when no port is given: one line each way, before torch's store is touched.

Rank 0 binds one of the job's derived ports and answers there until every rank has come; the store itself listens on
another port, which the answer names. The others go through the derived ports. A line that does not carry the job's word
gets no answer, so another job's rank 0, or anything else that listens there, is passed by. torch's own client cannot do
this: it takes whatever store answers, and waits for its whole timeout on what does not.

A rank says ``phalanx WORD RANK WORLD_SIZE PID HOST``; rank 0 answers ``store PORT ADDRESS``, or ``refused WHY``.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import InitializationError
from phalanx.topology.table import format_spans

__all__ = ["answer_ranks", "ask"]

LONGEST_LINE = 1024
# Who has connected and says nothing, or is no rank 0, is not waited for longer.
ANSWER_S = 2.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.25
REMIND_S = 5.0


@dataclass
class _Caller:
    """A connection, and what it has said so far."""

    line: bytes
    deadline: float


def answer_ranks(listener: socket.socket, word: str, world_size: int, store: tuple[str, int], timeout_s: float) -> None:
    """Rank 0: tell every other rank where the store is. Returns when all have come, and closes the listener.

    While ranks are missing it says so every 5 seconds on standard error.

    Args:
        listener: the socket that is bound to one of the job's ports.
        word: the job's.
        world_size: how many ranks there are, with this one.
        store: address and port of the store.
        timeout_s: how long to wait, in seconds.

    Raises:
        InitializationError: ranks are missing at the end of the timeout; the message says which.
    """
    arrived: dict[int, str] = {0: _own_name()}
    start = time.monotonic()
    remind = start + REMIND_S
    with selectors.DefaultSelector() as selector:
        try:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
            while len(arrived) < world_size:
                now = time.monotonic()
                if now > start + timeout_s:
                    raise InitializationError(
                        f"after {timeout_s:.0f} s {_missing(arrived, world_size)} had not come to rank 0 on "
                        f"{socket.gethostname()}; look whether they were started, and what they print"
                    )
                if now > remind:
                    remind += REMIND_S
                    missing = f"phalanx: waiting for {_missing(arrived, world_size)} of {world_size}"
                    print(f"{missing}, {now - start:.0f} s so far", file=sys.stderr, flush=True)
                for key, _ in selector.select(min(0.2, max(0.0, start + timeout_s - now))):
                    if key.fileobj is listener:
                        with contextlib.suppress(OSError):
                            connection, _ = listener.accept()
                            connection.setblocking(False)
                            caller = _Caller(b"", time.monotonic() + ANSWER_S)
                            selector.register(connection, selectors.EVENT_READ, caller)
                    elif isinstance(key.fileobj, socket.socket) and _hear(key.fileobj, key.data):
                        selector.unregister(key.fileobj)
                        _answer(key.fileobj, key.data.line, word, world_size, store, arrived)
                for key in list(selector.get_map().values()):
                    if isinstance(key.data, _Caller) and time.monotonic() > key.data.deadline:
                        selector.unregister(key.fileobj)
                        _close(key.fileobj)
        finally:
            for key in list(selector.get_map().values()):
                _close(key.fileobj)
            listener.close()


def _hear(connection: socket.socket, caller: _Caller) -> bool:
    """Read what has come; whether that is all."""
    try:
        data = connection.recv(LONGEST_LINE)
    except BlockingIOError:
        return False
    except OSError:
        data = b""
    caller.line += data
    return not data or b"\n" in caller.line or len(caller.line) >= LONGEST_LINE


def _answer(
    connection: socket.socket,
    line: bytes,
    word: str,
    world_size: int,
    store: tuple[str, int],
    arrived: dict[int, str],
) -> None:
    words = line.decode("utf-8", "replace").split()
    with contextlib.suppress(OSError), connection:
        if len(words) != 6 or words[:2] != ["phalanx", word]:
            return
        rank, size = (int(text) if text.isdigit() else -1 for text in words[2:4])
        name = f"pid {words[4]} on {words[5]}"
        if size != world_size:
            said = f"rank {rank} ({name}) was started for a world of {size}, rank 0 ({arrived[0]}) for {world_size}"
        elif not 0 < rank < world_size:
            said = f"there are two of rank {rank}: {name} and {arrived.get(rank, 'nobody')}"
        elif rank in arrived:
            said = f"there are two of rank {rank}: {name} and {arrived[rank]}"
        else:
            arrived[rank] = name
            connection.sendall(f"store {store[1]} {store[0]}\n".encode())
            return
        connection.sendall(f"refused {said}\n".encode())


def ask(address: str, ports: Sequence[int], word: str, rank: int, world_size: int, timeout_s: float) -> tuple[str, int]:
    """Another rank: ask at every port in turn until rank 0 answers; the store's address and port.

    Raises:
        InitializationError: rank 0 refuses this rank, or was not found in time.
    """
    host = socket.gethostname()
    line = f"phalanx {word} {rank} {world_size} {os.getpid()} {host}\n".encode()
    start = time.monotonic()
    pause = SHORTEST_PAUSE_S
    trouble = "nothing listens there"
    while True:
        for port in ports:
            try:
                answer = _ask_one(address, port, line)
            except ConnectionRefusedError:
                continue
            except OSError as error:
                trouble = str(error)
                continue
            verb, _, rest = answer.strip().partition(" ")
            if verb == "refused":
                raise InitializationError(f"rank {rank} was refused: {rest}. Start each rank once, with one world size")
            number, _, where = rest.partition(" ")
            if verb == "store" and number.isdigit():
                return where, int(number)
            trouble = f"something else listens on port {port}"
        if time.monotonic() - start > timeout_s:
            raise InitializationError(
                f"rank {rank} on {host} waited {timeout_s:.0f} s for rank 0 at {address}, ports "
                f"{', '.join(map(str, ports))}: {trouble}. If rank 0 is on another host, set MASTER_ADDR and "
                f"MASTER_PORT for all ranks"
            )
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def _ask_one(address: str, port: int, line: bytes) -> str:
    with socket.create_connection((address, port), timeout=ANSWER_S) as connection:
        connection.sendall(line)
        answer = b""
        while b"\n" not in answer and len(answer) < LONGEST_LINE:
            data = connection.recv(LONGEST_LINE)
            if not data:
                break
            answer += data
        return answer.decode("utf-8", "replace")


def _own_name() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


def _missing(arrived: dict[int, str], world_size: int) -> str:
    missing = [rank for rank in range(world_size) if rank not in arrived]
    return f"rank{'s' if len(missing) > 1 else ''} {format_spans(missing)}"


def _close(connection: object) -> None:
    if isinstance(connection, socket.socket):
        connection.close()
