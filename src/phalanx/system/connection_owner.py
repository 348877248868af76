"""Which user of this host is at the other end of a TCP connection: the kernel knows, and a stranger cannot forge it.

Prior art: the identification protocol (RFC 1413), which asked the other host; here both ends are on this one.

A socket that its process has closed lives on for a while, and the kernel then lists it as root's, without an inode.
Such a socket belongs to nobody any more, so it is never taken for root's.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import struct

__all__ = ["owner_of"]

Address = tuple[str, int]

_NETLINK_SOCK_DIAG = 4
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
_ERROR = 2  # NLMSG_ERROR
_MESSAGE = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_WANTED = struct.Struct("=BBBBI")  # family, protocol, extensions, padding, states
_ENDS = struct.Struct("!HH16s16sI8s")  # ports and addresses of both ends, interface, cookie
_ANY_COOKIE = b"\xff" * 8
# The answer: after its header four bytes and the two ends come expiry, two queues, the user and the inode.
_OWNER = struct.Struct("=4x48xIIIII")


def owner_of(end: Address, other_end: Address) -> int | None:
    """The id of the user who holds the socket at ``end`` of a connection; None if no process of this host does.

    Args:
        end: the address and port of that socket, as numbers.
        other_end: the address and port to which it is connected.
    """
    return _ask_kernel(end, other_end) if _kernel_answers() else _search(end, other_end)


@functools.cache
def _kernel_answers() -> bool:
    """Whether this kernel answers questions about single sockets; tried on a connection of this process."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as listener:
        where = listener.getsockname()
        with socket.create_connection(where, timeout=1) as own:
            return _ask_kernel(own.getsockname(), where) == os.geteuid()
    return False


def _ask_kernel(end: Address, other_end: Address) -> int | None:
    family = socket.AF_INET6 if ":" in end[0] else socket.AF_INET
    ends = _ENDS.pack(end[1], other_end[1], _packed(family, end[0]), _packed(family, other_end[0]), 0, _ANY_COOKIE)
    wanted = _WANTED.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + ends
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(_MESSAGE.pack(_MESSAGE.size + len(wanted), _BY_FAMILY, 1, 1, 0) + wanted)
        answer = kernel.recv(8192)
    if _MESSAGE.unpack_from(answer)[1] == _ERROR:
        code = -struct.unpack_from("=i", answer, _MESSAGE.size)[0]
        if code == errno.ENOENT:
            return None
        raise OSError(code, os.strerror(code))
    *_, user, inode = _OWNER.unpack_from(answer, _MESSAGE.size)
    return user if inode else None


def _packed(family: int, address: str) -> bytes:
    return socket.inet_pton(family, address.partition("%")[0]).ljust(16, b"\0")


def _search(end: Address, other_end: Address) -> int | None:
    """The same from the lists of all sockets, for kernels that do not answer: a line has both ends, user and inode.

    A socket of IPv6, such as torch's, is in the list of IPv6 also when its ends are IPv4.
    """
    for path, prefix in (("/proc/net/tcp", ""), ("/proc/net/tcp6", "" if ":" in end[0] else "::ffff:")):
        wanted = [_as_listed((prefix + address, port)) for address, port in (end, other_end)]
        with contextlib.suppress(OSError), open(path) as table:
            for line in table:
                words = line.split()
                if words[1:3] == wanted:
                    return int(words[7]) if words[9] != "0" else None
    return None


def _as_listed(end: Address) -> str:
    family = socket.AF_INET6 if ":" in end[0] else socket.AF_INET
    packed = socket.inet_pton(family, end[0].partition("%")[0])
    # The kernel prints an address as numbers of four bytes each, in the byte order of the machine.
    numbers = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{number:08X}' for number in numbers)}:{end[1]:04X}"
