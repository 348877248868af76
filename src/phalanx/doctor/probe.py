"""From one host to another: whether a connection is possible, and how quick it is.

One side has a ``Listener``, the other calls ``probe``. A connection begins with a token that only the two know, so a
stranger who finds the port gets nothing. Then the caller sends lengths, each with so many bytes after it, and the
listener acknowledges each by one byte: of nothing for the round trip, of more and more for the rate.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import socket
import statistics
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.system.interfaces import interface_addresses, interface_mtu, interface_speed_mbit, resolve

__all__ = ["Listener", "Reach", "probe"]

TOKEN_BYTES = 32
CONNECT_S = 4.0
# For how long a connection that exists may stand still. A packet that is lost is sent anew after 0.2, 0.4, 0.8, … s.
STILL_S = 4.0
ECHOES = 50
RATE_S = 0.3  # a rate is taken over at least so long
SMALLEST_BYTES, LARGEST_BYTES = 64 << 10, 1 << 30
_LENGTH = struct.Struct("!Q")
# A payload that every network lets pass: where larger segments are lost and these arrive, the MTU is the cause.
SMALL_SEGMENT_BYTES = 500


@dataclass
class Reach:
    """How one host reaches another, as the first one sees it.

    Attributes:
        error: why it cannot; empty if it can.
        addresses: what the other's name resolves to there.
        address: the address that was connected to; empty if none could be.
        source: this side's address of that connection.
        interface: the interface with that address.
        mtu: the most bytes a packet of that interface has; 0 if unknown.
        speed_mbit: what the interface's driver says it can do; 0 if unknown.
        round_trip_us: the median time that one byte takes there and back.
        bytes_per_s: how much arrives at the other side; 0 if nothing large arrived.
        small_packets_only: large packets are lost, and small ones arrive.
    """

    error: str = ""
    addresses: Sequence[str] = ()
    address: str = ""
    source: str = ""
    interface: str = ""
    mtu: int = 0
    speed_mbit: int = 0
    round_trip_us: float = 0.0
    bytes_per_s: float = 0.0
    small_packets_only: bool = False


class Listener:
    """Takes probes on every address of this host, until it is closed.

    Attributes:
        port: where it listens.
        token: what a caller has to say first.
    """

    def __init__(self) -> None:
        self.token = secrets.token_hex(TOKEN_BYTES // 2)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="phalanx-doctor-listener", daemon=True).start()

    def close(self) -> None:
        """Take no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(2 * STILL_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(_exactly(connection, TOKEN_BYTES), self.token.encode()):
                return
            memory = bytearray(1 << 18)
            while True:
                (left,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
                while left:
                    got = connection.recv_into(memory, min(left, len(memory)))
                    if not got:
                        return
                    left -= got
                connection.sendall(b"k")


def probe(name: str, port: int, token: str, *, rate: bool = True) -> Reach:
    """Connect to another host, and measure.

    Args:
        name: the other host, as the user calls it.
        port, token: its listener's.
        rate: whether to measure the rate as well, which takes about half a second and all of the link.
    """
    reach = Reach()
    try:
        reach.addresses = resolve(name)
    except OSError as error:
        reach.error = f"{name} does not resolve ({error.strerror or error})"
        return reach
    errors = []
    for address in reach.addresses:
        try:
            connection = _connect(address, port, token)
        except OSError as error:
            errors.append(f"{address}: {_in_words(error)}")
            continue
        with connection:
            reach.address, reach.source = address, str(connection.getsockname()[0])
            _describe_interface(reach)
            try:
                reach.round_trip_us = 1e6 * statistics.median(_send(connection, 0) for _ in range(ECHOES))
            except OSError as error:
                reach.error = f"{address} accepted a connection, and did not answer on it ({_in_words(error)})"
            else:
                if rate:
                    _measure_rate(reach, connection, port, token)
        return reach
    reach.error = f"port {port}: {'; '.join(errors)}"
    return reach


def _connect(address: str, port: int, token: str, segment_bytes: int = 0) -> socket.socket:
    connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        if segment_bytes:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
        connection.settimeout(CONNECT_S)
        connection.connect((address, port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(STILL_S)
        connection.sendall(token.encode())
    except OSError:
        connection.close()
        raise
    return connection


def _measure_rate(reach: Reach, connection: socket.socket, port: int, token: str) -> None:
    try:
        reach.bytes_per_s = _rate(connection)
    except OSError as error:
        try:
            with _connect(reach.address, port, token, SMALL_SEGMENT_BYTES) as small:
                _send(small, SMALLEST_BYTES)
        except OSError:
            reach.error = f"{reach.address} answers single bytes, and nothing larger arrives there ({_in_words(error)})"
        else:
            reach.small_packets_only = True


def _rate(connection: socket.socket) -> float:
    """Return the bytes per second that arrive: twice as many are sent each time, until that takes long enough.

    One packet of the largest size goes first, and alone: interfaces that are made of software hand many packets on as
    one, whatever the MTU, so that a way on which each large packet is lost may let most of a long stream pass.
    """
    _send(connection, connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG))
    nbytes = SMALLEST_BYTES
    while (took_s := _send(connection, nbytes)) < RATE_S and nbytes < LARGEST_BYTES:
        nbytes *= 2
    return nbytes / took_s


def _send(connection: socket.socket, nbytes: int) -> float:
    """Send so many bytes; return the seconds until the other side has them."""
    block, left = memoryview(bytes(1 << 18)), nbytes
    began = time.perf_counter()
    connection.sendall(_LENGTH.pack(nbytes))
    while left:
        left -= connection.send(block[:left])
    _exactly(connection, 1)
    return time.perf_counter() - began


def _describe_interface(reach: Reach) -> None:
    source = reach.source.removeprefix("::ffff:")
    for name, addresses in interface_addresses().items():
        if source in (address.partition("%")[0] for address in addresses):
            reach.interface = name
            reach.mtu, reach.speed_mbit = interface_mtu(name), interface_speed_mbit(name)


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = connection.recv(nbytes - len(data))
        if not more:
            raise ConnectionResetError("the connection was closed")
        data += more
    return data


def _in_words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer; a firewall drops the packets, or the cable is out"
    number = getattr(error, "errno", None)
    if number == errno.ECONNREFUSED:
        return "refused, although a process listens there; a firewall rejects it, or the address is another machine's"
    if number in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return "no route leads there"
    return str(getattr(error, "strerror", None) or error)
