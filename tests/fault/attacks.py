"""Attack ports as a stranger who can reach them; a program of the standard library alone, so that it starts at once.

``python attacks.py ATTACK SECONDS UID ADDRESS:PORT...`` attacks every port for so long, as another user unless UID is
0, and prints as JSON how many connections there were, and the most bytes that any of them was answered.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - another user may not be able to read it when it is first needed
import json
import os
import random
import selectors
import socket
import struct
import sys
import time

GREETING = b"phalanx 3\n"  # the test compares it with that of the package
TORCH = b"\0" + struct.pack("=I", 0x3C85F7CE)  # with which torch's client greets its store
Where = tuple[str, int]


class Crowd:
    """Connections of a stranger, and what was answered on them."""

    def __init__(self) -> None:
        self.made = self.most_heard = 0
        self.selector = selectors.DefaultSelector()
        self.heard: dict[socket.socket, int] = {}

    def connect(self, where: Where, said: bytes = b"") -> None:
        """Another connection, on which this is said, unless nobody takes it within a second."""
        with contextlib.suppress(OSError):
            sock = socket.create_connection(where, timeout=1.0)
            sock.setblocking(False)
            self.made += 1
            self.heard[sock] = 0
            self.selector.register(sock, selectors.EVENT_READ)
            self.say(sock, said)

    def say(self, sock: socket.socket, data: bytes) -> None:
        with contextlib.suppress(OSError):
            sock.send(data)

    def listen(self, seconds: float) -> None:
        """Take what is answered, and forget what has been closed."""
        until = time.monotonic() + seconds
        while True:
            for key, _ in self.selector.select(max(0.0, until - time.monotonic())):
                sock: socket.socket = key.fileobj  # type: ignore[assignment]
                data = b""
                with contextlib.suppress(OSError):
                    data = sock.recv(1 << 16)
                self.heard[sock] += len(data)
                self.most_heard = max(self.most_heard, self.heard[sock])
                if not data:
                    self.close(sock)
            if time.monotonic() >= until:
                return

    def close(self, sock: socket.socket) -> None:
        if self.heard.pop(sock, None) is not None:
            self.selector.unregister(sock)
            sock.close()


def silent(crowd: Crowd, ports: list[Where], until: float) -> None:
    """Hundreds of connections, on half of which the beginning of something right comes a byte at a time."""
    for where in ports * 300:
        crowd.connect(where)
    said = GREETING + bytes(2000)
    for at in range(len(said)):
        for sock in list(crowd.heard)[::2]:
            crowd.say(sock, said[at : at + 1])
        crowd.listen(0.1)
        if time.monotonic() > until:
            return


def garbage(crowd: Crowd, ports: list[Where], until: float) -> None:
    """Frames that are cut, too long, or of another protocol; and as many bytes as are taken after a right beginning."""
    chance = random.Random(1)
    while time.monotonic() < until:
        for where in ports:
            noise = chance.randbytes(chance.choice([1, 8, 64, 5000]))
            length = struct.pack("!I", chance.choice([0, 5, 4097, (1 << 32) - 1]))
            messages = [
                noise,
                GREETING + noise,
                GREETING + chance.randbytes(64) + length + noise,
                length + noise,
                TORCH + bytes([chance.randrange(20)]) + struct.pack("=Q", chance.choice([3, 1 << 62])) + noise,
                b"GET / HTTP/1.1\r\nHost: h0\r\n\r\n",
                b"\x80\x05cos\nsystem\n(S'true'\ntR.",
            ]
            crowd.connect(where, chance.choice(messages))
        for sock in list(crowd.heard)[::10]:
            crowd.say(sock, bytes(1 << 16))
        crowd.listen(0.01)
        while len(crowd.heard) > 100 * len(ports):
            crowd.close(next(iter(crowd.heard)))


def flood(crowd: Crowd, ports: list[Where], until: float) -> None:
    """Connections as fast as they can be made, each closed at once, half of them by a reset."""
    while time.monotonic() < until:
        for number, where in enumerate(ports * 8):
            with contextlib.suppress(OSError), socket.create_connection(where, timeout=1.0) as sock:
                crowd.made += 1
                if number % 2:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


ATTACKS = {"silent": silent, "garbage": garbage, "flood": flood}


def main() -> None:
    attack, seconds, uid, *targets = sys.argv[1:]
    if int(uid):
        os.setgroups([])
        os.setresgid(int(uid), int(uid), int(uid))
        os.setresuid(int(uid), int(uid), int(uid))
    crowd = Crowd()
    ports = [(target.rpartition(":")[0], int(target.rpartition(":")[2])) for target in targets]
    ATTACKS[attack](crowd, ports, time.monotonic() + float(seconds))
    crowd.listen(0.0)
    print(json.dumps({"made": crowd.made, "most_heard": crowd.most_heard}))


if __name__ == "__main__":
    main()
