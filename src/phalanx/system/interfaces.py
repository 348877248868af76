"""This host's network: its addresses, the one that others reach it by, and who holds a port or a connection."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path

from phalanx import settings
from phalanx.errors import InitializationError, LaunchError
from phalanx.system.host import machine_name

LOOPBACK = "127.0.0.1"

Address = tuple[str, int]  # and port

_SIOCGIFADDR, _SIOCGIFMTU, _SIOCETHTOOL, _ETHTOOL_GSET = 0x8915, 0x8921, 0x8946, 1
# Reserved for documentation (RFC 5737, RFC 3849), so packets to them leave by the default route.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")

# -- interfaces ----------------------------------------------------------------------------------------


def interface_addresses() -> dict[str, list[str]]:
    """Return the addresses of every interface of this host by its name: IPv4 first, then IPv6, link-local ones last."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name, addresses in found.items():
            with contextlib.suppress(OSError):  # this interface has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, _, _, _, _, name = line.split()
            address = str(ipaddress.IPv6Address(int(digits, 16)))
            zone = f"%{name}" if ipaddress.IPv6Address(address).is_link_local else ""
            found.setdefault(name, []).append(address + zone)
    for addresses in found.values():
        addresses.sort(key=lambda address: (":" in address, "%" in address))
    return found


def interface_mtu(name: str) -> int:
    """Return the most bytes that a packet of an interface has; 0 if there is no such interface."""
    with contextlib.suppress(OSError, struct.error), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFMTU, struct.pack("16si12x", name.encode()[:15], 0))
        return int(struct.unpack("16si12x", answer)[1])
    return 0


def interface_speed_mbit(name: str) -> int:
    """Return what the driver of an interface says that it can do, in Mbit/s; 0 if it does not know, as virtual ones."""
    # By an ioctl, because files below /sys may be those of another network namespace.
    asked = ctypes.create_string_buffer(struct.pack("I", _ETHTOOL_GSET), 44)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, _SIOCETHTOOL, struct.pack("16sP8x", name.encode()[:15], ctypes.addressof(asked)))
        low, high = struct.unpack_from("H", asked, 12)[0], struct.unpack_from("H", asked, 28)[0]
        speed = int(low | high << 16)
        return 0 if speed in (0xFFFF, 0xFFFFFFFF) else speed
    return 0


def describe_interfaces() -> str:
    """Describe this host's interfaces and their addresses, for people: ``lo 127.0.0.1, eth0 10.0.0.3``."""
    return ", ".join(f"{name} {' '.join(addresses) or '-'}" for name, addresses in interface_addresses().items())


def ucx_devices(interface: str) -> str:
    """Name an interface for UCX_NET_DEVICES: its InfiniBand or RoCE adapters if it has any, and itself, for TCP."""
    adapters = Path("/sys/class/net") / interface / "device" / "infiniband"
    fast = [f"{adapter.name}:1" for adapter in sorted(adapters.iterdir())] if adapters.is_dir() else []
    return ",".join([*fast, interface])


def chosen_interface(environment: Mapping[str, str] = os.environ) -> tuple[str, list[str]] | None:
    """Return the interface that ``PHALANX_INTERFACE`` names, and its addresses; None if it is not set.

    Raises:
        InitializationError: this host has no such interface, or it has no address; the message lists all interfaces.
    """
    name = environment.get(settings.INTERFACE)
    if not name:
        return None
    addresses = interface_addresses().get(name)
    if not addresses:
        lack = "has no interface of that name" if addresses is None else "has no address on it"
        raise InitializationError(
            f"{settings.INTERFACE}={name}: {machine_name()} {lack}; its interfaces are {describe_interfaces()}"
        )
    return name, addresses


# -- names and addresses -------------------------------------------------------------------------------


def is_loopback(address: str) -> bool:
    """Return whether this address can be reached only from the host itself."""
    with contextlib.suppress(ValueError):
        number = ipaddress.ip_address(address.partition("%")[0])
        mapped = getattr(number, "ipv4_mapped", None)
        return (mapped or number).is_loopback
    return False


def is_own_name(name: str) -> bool:
    """Return whether this host calls itself by this name."""
    own = machine_name()
    if name.lower() in (own.lower(), own.partition(".")[0].lower()):
        return True
    return "." in name and name.lower() == socket.getfqdn().lower()  # last, because it may ask a name server


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def resolve(name: str) -> list[str]:
    """Return the addresses that a name resolves to on this host, in the order in which they should be tried.

    Raises:
        OSError: the name does not resolve.
    """
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except UnicodeError:  # it is not UTF-8, or too long
        raise socket.gaierror(socket.EAI_NONAME, "no host can have this name") from None
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


def outward_address(towards: Iterable[str] = (), environment: Mapping[str, str] = os.environ) -> str:
    """Return the address by which processes on other hosts reach this one.

    The first of these that exists:

    - an address of the interface that ``PHALANX_INTERFACE`` names;
    - the source address of packets to the first host of ``towards`` that is another machine and resolves;
    - the address that this host's own name resolves to, unless it is loopback (127.0.1.1 on Debian);
    - the source address of packets that leave by the default route;
    - any address that is neither loopback nor link-local: a cluster without a gateway has no default route;
    - loopback.

    Raises:
        InitializationError: this host does not have the interface that was chosen.
    """
    return next(_outward(towards, environment))


def outward_addresses(towards: Iterable[str] = (), environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return all addresses of :func:`outward_address`, the likeliest first; IPv6 and loopback only without others."""
    chosen = chosen_interface(environment)
    found = chosen[1] if chosen is not None else list(dict.fromkeys(_outward(towards, environment)))
    found = [address for address in found if not is_loopback(address) and "%" not in address] or found
    return [address for address in found if ":" not in address] or found


def listening_address(addresses: Sequence[str]) -> str:
    """Return the address to bind a listener to: the only one of these, or the wildcard if there are several."""
    return addresses[0] if len(addresses) == 1 else "::" if ":" in addresses[0] else "0.0.0.0"


def _outward(towards: Iterable[str], environment: Mapping[str, str]) -> Iterator[str]:
    chosen = chosen_interface(environment)
    if chosen is not None:
        yield from chosen[1]
    for name in towards:
        with contextlib.suppress(OSError):
            # A host that sends to itself uses the address to which it sends.
            pairs = [(address, _source_address(address)) for address in resolve(name)]
            yield from (own for to, own in pairs if own and own != to and not is_loopback(to))
    with contextlib.suppress(OSError):
        yield from (address for address in resolve(machine_name()) if not is_loopback(address))
    yield from filter(None, map(_source_address, _ELSEWHERE))
    for addresses in interface_addresses().values():
        yield from (address for address in addresses if not is_loopback(address) and "%" not in address)
    yield LOOPBACK


def is_other_host(name: str) -> bool:
    """Return whether a host's name or address means another machine; False where the name does not resolve."""
    try:
        addresses = resolve(name)
    except OSError:
        return False
    return not any(is_loopback(address) or _source_address(address) == address for address in addresses)


def _source_address(target: str) -> str | None:
    """Return the source address of packets to ``target``; None where no route leads there."""
    with contextlib.suppress(OSError), socket.socket(_family(target), socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))  # for a datagram socket this sends nothing
        return str(probe.getsockname()[0])
    return None


def check_reachable(address: str) -> None:
    """Check that processes of this host can connect to each other at an address of it; raise LaunchError if not.

    They cannot in a new network namespace, as in some containers, where the loopback interface is down.
    """
    with socket.socket(_family(address)) as listener, socket.socket(_family(address)) as caller:
        try:
            listener.bind((address, 0))
            listener.listen()
            caller.settimeout(5.0)
            caller.connect(listener.getsockname())
        except OSError as error:
            raise LaunchError(
                f"the ranks of this host could not reach each other at {address}: {error.strerror or error}. Is the "
                f"loopback interface down? Bring it up with: ip link set lo up"
            ) from None


# -- who holds a port or a connection -------------------------------------------------------------------

# Of <linux/netlink.h> and <linux/sock_diag.h>.
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLMSG_ERROR = 4, 20, 2
_MESSAGE = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_WANTED = struct.Struct("=BBBBI")  # family, protocol, extensions, padding, states
_ENDS = struct.Struct("!HH16s16sI8s")  # ports and addresses of both ends, interface, cookie
_ANY_COOKIE = b"\xff" * 8
# The answer: after its header four bytes and the two ends come expiry, two queues, the user and the inode.
_OWNER = struct.Struct("=4x48xIIIII")


def holder_of_port(port: int) -> str:
    """Say which process listens on a port of this host; empty where /proc does not show it to this user."""
    at = f":{port:04X}"
    inodes = {f"socket:[{line[9]}]" for line in _sockets("tcp", "tcp6") if line[3] == "0A" and line[1].endswith(at)}
    for path in glob("/proc/[0-9]*/fd/*") if inodes else ():
        with contextlib.suppress(OSError):
            if os.readlink(path) in inodes:
                pid = path.split("/")[2]
                words = Path(f"/proc/{pid}/cmdline").read_bytes()[:200].replace(b"\0", b" ").decode("utf-8", "replace")
                return f"pid {pid} ({' '.join(words.split()[:4]) or 'unknown'})"
    return ""


def _sockets(*tables: str) -> Iterator[list[str]]:
    """List the kernel's sockets, as words: 1 and 2 are both ends, 3 is the state, 7 the user, 9 the inode."""
    for table in tables:
        with contextlib.suppress(OSError), open(f"/proc/net/{table}") as file:
            yield from map(str.split, file.readlines()[1:])


def owner_of(end: Address, other_end: Address) -> int | None:
    """Return which user holds the socket at ``end`` of a connection; None if no process of this host does.

    A socket that its process has closed lives on for a while as root's, without an inode: it belongs to nobody.
    """
    return _ask_kernel(end, other_end) if _kernel_answers() else _search(end, other_end)


@functools.cache
def _kernel_answers() -> bool:
    """Try whether this kernel answers questions about single sockets; gVisor's and qemu's do not."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as listener:
        where = listener.getsockname()
        with socket.create_connection(where, timeout=1) as own:
            return _ask_kernel(own.getsockname(), where) == os.geteuid()
    return False


def _ask_kernel(end: Address, other_end: Address) -> int | None:
    family, addresses = _family(end[0]), (_packed(address).ljust(16, b"\0") for address, _ in (end, other_end))
    wanted = _WANTED.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    wanted += _ENDS.pack(end[1], other_end[1], *addresses, 0, _ANY_COOKIE)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(_MESSAGE.pack(_MESSAGE.size + len(wanted), _SOCK_DIAG_BY_FAMILY, 1, 1, 0) + wanted)
        answer = kernel.recv(8192)
    if _MESSAGE.unpack_from(answer)[1] == _NLMSG_ERROR:
        code = -struct.unpack_from("=i", answer, _MESSAGE.size)[0]
        if code == errno.ENOENT:
            return None
        raise OSError(code, os.strerror(code))
    *_, user, inode = _OWNER.unpack_from(answer, _MESSAGE.size)
    return user if inode else None


def _search(end: Address, other_end: Address) -> int | None:
    """Find the same in the lists of all sockets, for kernels that do not answer.

    A socket of IPv6, such as torch's, is in the list of IPv6 also when its ends are IPv4.
    """
    for table, prefix in (("tcp", ""), ("tcp6", "" if ":" in end[0] else "::ffff:")):
        wanted = [_as_listed(prefix + address, port) for address, port in (end, other_end)]
        for words in _sockets(table):
            if words[1:3] == wanted:
                return int(words[7]) if words[9] != "0" else None
    return None


def _packed(address: str) -> bytes:
    return socket.inet_pton(_family(address), address.partition("%")[0])


def _as_listed(address: str, port: int) -> str:
    # The kernel prints an address as numbers of four bytes each, in the byte order of the machine.
    numbers = (f"{number:08X}" for (number,) in struct.iter_unpack("=I", _packed(address)))
    return f"{''.join(numbers)}:{port:04X}"
