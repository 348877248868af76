"""The control socket between the launcher and the process that starts the ranks."""

from __future__ import annotations

import socket

from phalanx.launch.rank.descriptors import Control


def test_a_signals_handler_may_send_when_the_socket_has_been_closed() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control = Control(here)
    control.send(do="stacks")
    assert there.recv(1 << 16)
    control.close()
    control.send(do="stacks")
    assert not there.recv(1 << 16)
    there.close()
