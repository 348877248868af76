"""The rate of a link is measured for the rank that brings the token, whoever else finds the port first."""

from __future__ import annotations

import secrets
import socket
import struct
import threading

import pytest

from phalanx.bench.links import _receive, _send


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def say_something_else(connection: socket.socket) -> None:
    connection.sendall(bytes(1 << 16))


@pytest.mark.parametrize("do", [reset, say_something_else])
def test_a_stranger_who_comes_first_does_not_end_it(do) -> None:  # type: ignore[no-untyped-def]
    token = secrets.token_bytes(16)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60.0)
        strangers = [socket.create_connection(server.getsockname()) for _ in range(3)]
        for stranger in strangers:
            do(stranger)
        sending = threading.Thread(target=_send, args=(server.getsockname(), token))
        sending.start()
        assert _receive(server, token) > 0
        sending.join()
        for stranger in strangers:
            stranger.close()


def test_a_token_may_come_in_pieces() -> None:
    token = secrets.token_bytes(16)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60.0)

        def send() -> None:
            with socket.create_connection(server.getsockname()) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for piece in (token[:5], token[5:]):
                    connection.sendall(piece)
                    threading.Event().wait(0.1)
                connection.sendall(bytes(1 << 24))

        sending = threading.Thread(target=send)
        sending.start()
        assert _receive(server, token) > 0
        sending.join()
