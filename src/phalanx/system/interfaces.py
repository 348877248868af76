"""This host's network interfaces: which addresses it has, where to listen, and who holds a port."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping

from phalanx import settings
from phalanx.errors import InitializationError

__all__ = [
    "chosen_interface",
    "describe_interfaces",
    "holder_of_port",
    "interface_addresses",
    "is_loopback",
    "is_own_name",
    "outward_address",
    "resolve",
]

_SIOCGIFADDR = 0x8915
# Nobody's addresses (RFC 5737, RFC 3849): what the way to them is, is the way to elsewhere.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def interface_addresses() -> dict[str, list[str]]:
    """The addresses of every interface of this host by its name: IPv4, IPv6, IPv6 of the link alone."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name, addresses in found.items():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, _, _, _, _, name = line.split()
            address = str(ipaddress.IPv6Address(int(digits, 16)))
            zone = f"%{name}" if ipaddress.IPv6Address(address).is_link_local else ""
            found.setdefault(name, []).append(address + zone)
    for addresses in found.values():
        addresses.sort(key=lambda address: (":" in address, "%" in address))  # those that hold everywhere first
    return found


def describe_interfaces() -> str:
    """The same for people: ``lo 127.0.0.1, eth0 10.0.0.3``."""
    return ", ".join(f"{name} {' '.join(addresses) or '-'}" for name, addresses in interface_addresses().items())


def chosen_interface(environment: Mapping[str, str] | None = None) -> tuple[str, list[str]] | None:
    """The interface that ``PHALANX_INTERFACE`` names, and its addresses; None if it names none.

    Raises:
        InitializationError: this host has no such interface, or it has no address; the message lists those there are.
    """
    name = (os.environ if environment is None else environment).get(settings.INTERFACE)
    if not name:
        return None
    addresses = interface_addresses().get(name)
    if not addresses:
        lack = "has no interface of that name" if addresses is None else "has no address on it"
        raise InitializationError(
            f"{settings.INTERFACE}={name}: {socket.gethostname()} {lack}; its interfaces are {describe_interfaces()}"
        )
    return name, addresses


def is_loopback(address: str) -> bool:
    """Whether nobody on another host can reach this address."""
    with contextlib.suppress(ValueError):
        number = ipaddress.ip_address(address.partition("%")[0])
        mapped = getattr(number, "ipv4_mapped", None)
        return (mapped or number).is_loopback
    return False


def is_own_name(name: str) -> bool:
    """Whether this host calls itself by this name."""
    own = socket.gethostname()
    if name.lower() in (own.lower(), own.partition(".")[0].lower()):
        return True
    return "." in name and name.lower() == socket.getfqdn().lower()  # which may ask a name server


def resolve(name: str) -> list[str]:
    """The addresses that a name means here, in the order in which they should be tried.

    Raises:
        OSError: it means none.
    """
    answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


def outward_address(name: str) -> str:
    """The address of this host that others reach, where its own name may mean loopback here (127.0.1.1).

    It is one of the chosen interface; else what ``name`` means, unless that is loopback; else that of the interface by
    which a packet to elsewhere would leave. A host without any has only its loopback.
    """
    chosen = chosen_interface()
    if chosen is not None:
        return chosen[1][0]
    with contextlib.suppress(OSError):
        for address in resolve(name):
            if not is_loopback(address):
                return address
    for family, elsewhere in _ELSEWHERE:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))  # sends nothing
            return str(probe.getsockname()[0])
    # No way out: a network of its own, as of test hosts and of clusters without a gateway.
    for addresses in interface_addresses().values():
        for address in addresses:
            if not is_loopback(address) and "%" not in address:
                return address
    return name


def holder_of_port(port: int) -> str:
    """Which process listens on a port of this host, as far as /proc shows it to this user; empty if it does not."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/net/{table}") as file:
            for line in file.readlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{words[9]}]")
    for pid in filter(str.isdigit, os.listdir("/proc")) if inodes else ():
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{descriptor}") in inodes:
                        with open(f"/proc/{pid}/cmdline", "rb") as file:
                            words = file.read(200).replace(b"\0", b" ").decode("utf-8", "replace").split()
                        return f"pid {pid} ({' '.join(words[:4]) or 'unknown'})"
    return ""
