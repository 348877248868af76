"""Connect from one host to another, and measure round trip and rate.

A connection begins with a token that only caller and :class:`Listener` know. Then the caller sends lengths, each with
so many bytes after it, and the listener acknowledges each by one byte.
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

TOKEN_BYTES = 32
CONNECT_S = 4.0
STILL_S = 4.0  # how long a connection may stand still; a lost packet is sent anew after 0.2, 0.4, 0.8, … s
ECHOES = 50
RATE_S = 0.3  # a rate is taken over at least so long
SMALLEST_BYTES, LARGEST_BYTES = 64 << 10, 1 << 30
SMALL_SEGMENT_BYTES = 500  # passes every network: if larger segments are lost, the MTU is the cause
_LENGTH = struct.Struct("!Q")


@dataclass
class Reach:
    """The way from one host to another, as the first one sees it; 0 or empty if it is not known.

    Attributes:
        error: why it does not reach it.
        addresses: what the other's name resolves to; ``address`` is the one that was connected to.
        source, interface: this side's address of that connection, and the interface with it.
        mtu, speed_mbit: of that interface.
        bytes_per_s: how much arrives at the other side.
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
    """Answer probes at ``port`` on every address of this host, from callers who know ``token``."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(TOKEN_BYTES // 2)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="phalanx-doctor-listener", daemon=True).start()

    def close(self) -> None:
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
            if not hmac.compare_digest(_receive(connection, TOKEN_BYTES), self.token.encode()):
                return
            memory = bytearray(1 << 18)
            while True:
                (left,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
                while left:
                    got = connection.recv_into(memory, min(left, len(memory)))
                    if not got:
                        return
                    left -= got
                connection.sendall(b"k")


def probe(name: str, port: int, token: str, *, rate: bool = True) -> Reach:
    """Connect to another host's listener, and measure the round trip.

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
            own = reach.source.removeprefix("::ffff:")
            for interface, addresses in interface_addresses().items():
                if own in (one.partition("%")[0] for one in addresses):
                    reach.interface = interface
                    reach.mtu, reach.speed_mbit = interface_mtu(interface), interface_speed_mbit(interface)
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
    """Send twice as many bytes each time, until that takes long enough for a rate."""
    try:
        # One packet of the largest size goes first, and alone: virtual interfaces hand many packets on as one, so a
        # long stream may pass where each large packet is lost.
        _send(connection, connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG))
        nbytes = SMALLEST_BYTES
        while (took_s := _send(connection, nbytes)) < RATE_S and nbytes < LARGEST_BYTES:
            nbytes *= 2
        reach.bytes_per_s = nbytes / took_s
    except OSError as error:
        try:
            with _connect(reach.address, port, token, SMALL_SEGMENT_BYTES) as small:
                _send(small, SMALLEST_BYTES)
        except OSError:
            reach.error = f"{reach.address} answers single bytes, and nothing larger arrives there ({_in_words(error)})"
        else:
            reach.small_packets_only = True


def _send(connection: socket.socket, nbytes: int) -> float:
    """Send so many bytes; return the seconds until the other side has them."""
    block, left = memoryview(bytes(1 << 18)), nbytes
    began = time.perf_counter()
    connection.sendall(_LENGTH.pack(nbytes))
    while left:
        left -= connection.send(block[:left])  # sendall's timeout would be for all of them
    _receive(connection, 1)
    return time.perf_counter() - began


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = connection.recv(nbytes - len(data))
        if not more:
            raise ConnectionResetError("the connection was closed")
        data += more
    return data


def _in_words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer; a firewall drops the packets, or the cable is out"
    if error.errno == errno.ECONNREFUSED:
        return "refused, although a process listens there; a firewall rejects it, or the address is another machine's"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return "no route leads there"
    return str(error.strerror or error)
