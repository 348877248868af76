"""Bytes to lines."""

from __future__ import annotations

import itertools
import os
import select

import pytest

from phalanx.launch.output.logs import LONGEST_LINE, Console, LineAssembler, Sink, fit, make_prefixes


def assemble(data: bytes, cuts: list[int], prefix: bytes = b"> ", *, redraws: bool = False) -> bytes:
    lines = LineAssembler(prefix, redraws=redraws)
    edges = [0, *sorted(cuts), len(data)]
    done = b"".join(lines.feed(data[a:b]) for a, b in itertools.pairwise(edges) if a < b)
    return done + lines.finish()


@pytest.mark.parametrize(
    ("data", "lines", "on_terminal"),
    [
        (b"one\ntwo\n", b"> one\n> two\n", b"> one\n> two\n"),
        (b"no newline", b"> no newline\n", b"> no newline\n"),
        (b"\r\n\ra\r\r\nb", b"> \n> \r> a\n> b\n", b"> \n> a\n> b\n"),
        (b"dos\r\nline\r\n", b"> dos\n> line\n", b"> dos\n> line\n"),
        (b"  0%\r 50%\r100%\n", b">   0%\r>  50%\r> 100%\n", b"> 100%\n"),
        (b" 50%\r", b">  50%\n", b">  50%\n"),
        (b"50%\r      \r", b"> 50%\r>       \n", b""),
        (b"\n\n", b"> \n> \n", b"> \n> \n"),
        (b"\xff\xfe\n", b"> \xff\xfe\n", b"> \xff\xfe\n"),
        (b"", b"", b""),
    ],
)
def test_lines(data: bytes, lines: bytes, on_terminal: bytes) -> None:
    for cuts in itertools.combinations(range(len(data) + 1), min(2, len(data))):
        assert (assemble(data, [*cuts]), assemble(data, [*cuts], redraws=True)) == (lines, on_terminal)


def test_a_line_without_end_is_cut_and_not_kept_in_memory() -> None:
    lines = LineAssembler(b"")
    done = b"".join(lines.feed(b"x" * 65536) for _ in range(40))
    assert done == (b"x" * LONGEST_LINE + b"\n") * 2
    assert len(lines.finish()) == 40 * 65536 - 2 * LONGEST_LINE + 1


def test_prefixes_have_one_width_and_colours_only_if_asked() -> None:
    plain = make_prefixes(11, color=False)
    assert plain[3] == b"[rank  3] "
    assert plain[10] == b"[rank 10] "
    colored = make_prefixes(11, color=True)
    assert colored[3].startswith(b"\x1b[")
    assert b"[rank  3]" in colored[3]
    assert make_prefixes(1, color=False) == [b"[rank 0] "]


def test_fit_cuts_to_cells_and_keeps_colours() -> None:
    assert fit(b"hello", 3) == b"hel"
    assert fit("日本".encode(), 3) == "日".encode()
    assert fit(b"\x1b[31mred\x1b[0m\x1b[2J", 10) == b"\x1b[31mred\x1b[0m\x1b[0m"


def test_a_live_line_stays_below_whole_lines() -> None:
    master, slave = os.openpty()
    try:
        sink = Sink(slave, {"TERM": "xterm"})
        dumb = Sink(slave, {"TERM": "dumb"})
        assert (sink.terminal, sink.color, dumb.terminal, dumb.color) == (True, True, False, False)
        assert not Sink(slave, {"TERM": "xterm", "NO_COLOR": "1"}).color
        console = Console(sink, sink)
        console.show(sink, b"[rank 0] 50%", "rank 0")
        console.redraw()
        console.write(sink, b"[rank 1] whole\n")
        console.show(sink, b"", "rank 1")  # Another's to take away.
        console.finish()
        wipe = b"\r\x1b[K"
        expected = b"[rank 0] 50%" + wipe + b"[rank 1] whole\r\n" + b"[rank 0] 50%" + wipe
        seen = b""
        while len(seen) < len(expected) and select.select([master], [], [], 10)[0]:
            seen += os.read(master, 4096)  # a terminal hands on what was written piece by piece
    finally:
        os.close(master)
        os.close(slave)
    assert seen == expected


def test_a_sink_gives_up_on_a_stalled_reader_at_its_deadline() -> None:
    read, write = os.pipe()
    sink = Sink(write, {})
    sink.deadline = 0.0
    sink.write(b"x" * (1 << 20))
    assert not sink.closed
    assert 0 < len(os.read(read, 1 << 21)) < 1 << 20
    os.close(read)
    os.close(write)
