"""How Phalanx writes numbers for people."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from phalanx.words import (
    format_count,
    format_gib,
    format_limit,
    format_named,
    format_size,
    format_spans,
    format_time,
    printable,
)


def test_numbers_in_a_row_are_spans() -> None:
    assert [format_spans(each) for each in ([8, 2, 0, 1, 3], [5], [])] == ["0-3, 8", "5", ""]


def test_one_thing_is_singular_and_every_other_number_plural() -> None:
    assert [format_count(count, "host") for count in (0, 1, 2)] == ["0 hosts", "1 host", "2 hosts"]
    assert format_named("rank", [7]) == "rank 7"
    assert format_named("port", [4, 2, 3]) == "ports 2-4"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (format_size, {0: "0", 1023: "1023", 1536: "1536", 65536: "64K", 3 << 20: "3M", 2 << 30: "2G"}),
        (format_gib, {1 << 30: "1.0 GiB", 1_800_000_000: "1.7 GiB"}),
        (format_time, {0.5234: "0.52", 6.04: "6.04", 61.24: "61.2", 622.9: "623", 40123.0: "40,100", 99.96: "100"}),
        (format_limit, {0.01: "0.01 s", 0.5: "0.5 s", 2.0: "2 s", 4.99999: "5 s", 9.99: "10 s", 1800.0: "1800 s"}),
    ],
)
def test_amounts_are_written_for_people(words: Callable[[float], str], expected: dict[float, str]) -> None:
    assert {amount: words(amount) for amount in expected} == expected


def test_names_in_any_bytes_are_escaped_where_they_are_no_text() -> None:
    assert printable(os.fsdecode(b"caf\xe9.py")) == "caf\\udce9.py"


def test_a_line_is_written_in_one_piece_under_phalanxs_name() -> None:
    """Several processes write to one terminal."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        command = [sys.executable, "-c", "from phalanx.words import tell; tell('x')"]
        subprocess.run(command, stderr=there.fileno(), check=True)
        assert here.recv(100) == b"phalanx: x\n"
