"""What a stranger does to ports that he can reach; a program of the standard library alone, so that it starts at once.

``python attacks.py ATTACK SECONDS UID ADDRESS:PORT...`` attacks every port for so long, as another user unless UID is
0, and prints as JSON what came of it: how many connections there were, and the most bytes that any of them was
answered. ``relay`` instead listens at the first port and passes on to the second what comes there, then says the same
again.
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

__all__ = ["ATTACKS"]

GREETING = b"phalanx 3\n"  # the test compares it with that of the package
TORCH = b"\0" + struct.pack("=I", 0x3C85F7CE)  # with which torch's client greets its store
SILENT = 300
SLICE_S = 0.1
Where = tuple[str, int]


class Crowd:
    """Connections of a stranger, and what was answered on them."""

    def __init__(self) -> None:
        self.made = 0
        self.most_heard = 0
        self.selector = selectors.DefaultSelector()
        self.heard: dict[socket.socket, int] = {}

    def connect(self, where: Where) -> socket.socket | None:
        """Another connection; None if nobody takes it within a second."""
        with contextlib.suppress(OSError):
            sock = socket.create_connection(where, timeout=1.0)
            sock.setblocking(False)
            self.made += 1
            self.heard[sock] = 0
            self.selector.register(sock, selectors.EVENT_READ)
            return sock
        return None

    def say(self, sock: socket.socket, data: bytes) -> None:
        with contextlib.suppress(OSError):
            sock.send(data)

    def listen(self, seconds: float) -> None:
        """Take what is answered, and forget what has been closed."""
        until = time.monotonic() + seconds
        while True:
            for key, _ in self.selector.select(max(0.0, until - time.monotonic())):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
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
    """Hundreds of connections on which nothing is said."""
    for where in ports:
        for _ in range(SILENT):
            crowd.connect(where)
    crowd.listen(until - time.monotonic())


def slow(crowd: Crowd, ports: list[Where], until: float) -> None:
    """A hundred connections that send the beginning of something right, a byte at a time."""
    socks = [sock for where in ports for _ in range(100) if (sock := crowd.connect(where))]
    said = GREETING + bytes(2000)
    at = 0
    while time.monotonic() < until:
        for sock in socks:
            if sock in crowd.heard:
                crowd.say(sock, said[at : at + 1])
        at = (at + 1) % len(said)
        crowd.listen(SLICE_S)


def messages(chance: random.Random) -> bytes:
    """Garbage, and frames that are cut, or too long, or of another protocol."""
    garbage = chance.randbytes(chance.choice([1, 8, 64, 5000]))
    return chance.choice(
        [
            garbage,
            GREETING + garbage,
            GREETING + chance.randbytes(64) + struct.pack("!I", chance.choice([0, 5, 4097, (1 << 32) - 1])) + garbage,
            struct.pack("!I", (1 << 32) - 1) + garbage,
            struct.pack("!I", 3),
            TORCH + bytes([chance.randrange(20)]) + struct.pack("=Q", chance.choice([3, 1 << 62])) + garbage,
            b"GET / HTTP/1.1\r\nHost: h0\r\n\r\n",
            b"\x80\x05cos\nsystem\n(S'true'\ntR.",
        ]
    )


def garbage(crowd: Crowd, ports: list[Where], until: float) -> None:
    """One connection after the other, with something on each that is not right; half of them are closed at once."""
    chance = random.Random(1)
    while time.monotonic() < until:
        for where in ports:
            sock = crowd.connect(where)
            if sock is not None:
                crowd.say(sock, messages(chance))
                if chance.random() < 0.5:
                    crowd.close(sock)
        crowd.listen(0.01)
        while len(crowd.heard) > 100 * len(ports):
            crowd.close(next(iter(crowd.heard)))


def large(crowd: Crowd, ports: list[Where], until: float) -> None:
    """As many bytes as are taken, after the beginning of something right, on a few connections."""
    block = bytes(1 << 16)
    while time.monotonic() < until:
        for where in ports:
            sock = crowd.connect(where)
            if sock is not None:
                crowd.say(sock, GREETING)
        for sock in list(crowd.heard):
            for _ in range(16):
                crowd.say(sock, block)
        crowd.listen(0.01)
        while len(crowd.heard) > 4 * len(ports):
            crowd.close(next(iter(crowd.heard)))


def flood(crowd: Crowd, ports: list[Where], until: float) -> None:
    """Connections as fast as they can be made, each closed at once, half of them by a reset."""
    while time.monotonic() < until:
        for number, where in enumerate(ports * 8):
            with contextlib.suppress(OSError), socket.create_connection(where, timeout=1.0) as sock:
                crowd.made += 1
                if number % 2:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def relay(crowd: Crowd, ports: list[Where], until: float) -> None:
    """Be in the way of one caller; then say to the listener what the caller has said, on a connection of one's own."""
    recorded = b""
    with socket.create_server(ports[0]) as listener:
        print("listens", flush=True)
        listener.settimeout(max(0.0, until - time.monotonic()))
        near, _ = listener.accept()
    with near, socket.create_connection(ports[1], timeout=10.0) as far, selectors.DefaultSelector() as both:
        for here, there in ((near, far), (far, near)):
            both.register(here, selectors.EVENT_READ, there)
        while time.monotonic() < until and len(both.get_map()) == 2:
            for key, _ in both.select(SLICE_S):
                data = b""
                with contextlib.suppress(OSError):
                    data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                recorded += data if key.fileobj is near else b""
                if not data:
                    both.unregister(key.fileobj)
                    continue
                with contextlib.suppress(OSError):
                    key.data.sendall(data)
    for _ in range(3):
        again = crowd.connect(ports[1])
        assert again is not None
        crowd.say(again, recorded)
    crowd.listen(2.0)
    print(json.dumps({"recorded": len(recorded)}), flush=True)


ATTACKS = {"silent": silent, "slow": slow, "garbage": garbage, "large": large, "flood": flood, "relay": relay}


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
