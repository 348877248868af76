"""How Phalanx writes numbers for people."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from phalanx.words import (
    format_count,
    format_gib,
    format_limit,
    format_named,
    format_size,
    format_spans,
    format_time,
)


def test_numbers_in_a_row_are_spans() -> None:
    assert format_spans([8, 2, 0, 1, 3]) == "0-3, 8"
    assert format_spans([5]) == "5"
    assert format_spans([]) == ""


def test_one_thing_is_singular_and_every_other_number_plural() -> None:
    assert [format_count(count, "host") for count in (0, 1, 2)] == ["0 hosts", "1 host", "2 hosts"]
    assert format_named("rank", [7]) == "rank 7"
    assert format_named("port", [4, 2, 3]) == "ports 2-4"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0"), (4, "4"), (1023, "1023"), (1536, "1536"), (65536, "64K"), (3 << 20, "3M"), (2 << 30, "2G")],
)
def test_sizes_are_exact(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def test_amounts_of_memory_are_rounded() -> None:
    assert format_gib(1 << 30) == "1.0 GiB"
    assert format_gib(1_800_000_000) == "1.7 GiB"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5234, "0.52"), (6.04, "6.04"), (61.24, "61.2"), (622.9, "623"), (40123.0, "40,100"), (99.96, "100")],
)
def test_times_have_three_digits(value: float, text: str) -> None:
    assert format_time(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.01, "0.01 s"), (0.5, "0.5 s"), (2.0, "2 s"), (4.99999, "5 s"), (9.99, "10 s"), (1800.0, "1800 s")],
)
def test_a_limit_is_said_as_it_was_given(seconds: float, text: str) -> None:
    assert format_limit(seconds) == text


def test_a_line_is_written_in_one_piece_under_phalanxs_name() -> None:
    """Several processes write to one terminal."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        subprocess.run(
            [sys.executable, "-c", "from phalanx.words import tell; tell('x')"], stderr=there.fileno(), check=True
        )
        assert here.recv(100) == b"phalanx: x\n"
