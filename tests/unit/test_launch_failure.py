"""What the launcher prints: bytes to lines, which rank is the cause of a failure, and what is said about it."""

from __future__ import annotations

import itertools
import math
import os
import select
import signal
from dataclasses import replace
from unittest.mock import Mock

import pytest
from tests.support.golden import MOST_LINES, without_frames

from phalanx.diagnosis.call_site import listed
from phalanx.errors import CollectiveMismatch
from phalanx.launch.conclusion import Ended, format_failure
from phalanx.launch.output.failure import End, RankState, Report, as_report, find_cause, signal_name
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


def report(
    name: str = "builtins.ValueError", *, time: float | None = 1.0, text: str = "bad", consequence: bool = False
) -> Report:
    return Report(name, text, f"Traceback\n{name}: {text}\n", False, time, 1, consequence=consequence)


def failure(rank: int, status: int, at: float, said: Report | None = None, *, by_launcher: bool = False) -> RankState:
    return RankState(rank, 10 + rank, End(status, at, by_launcher), said)


def block_on(*failures: RankState) -> str:
    job = Mock(ranks=len(failures))
    job.output.log_of.return_value = ""
    return format_failure(Ended(job, failures, math.inf, ["h"] * len(failures), 0.0, None, {}, None, {}, ()))


def test_cause_is_the_earliest_report_but_for_complaints_about_others() -> None:
    first = failure(2, 1, 5.0, report(time=5.0))
    later = failure(0, 1, 5.2, report("builtins.ConnectionError", time=5.2))
    assert find_cause([later, first]) is first  # whatever ended first
    killed = failure(1, -9, 5.010)
    complaint = failure(0, 1, 5.005, report("builtins.RuntimeError", time=5.005))
    assert find_cause([complaint, killed]) is killed
    lost = failure(0, 1, 5.0, report("phalanx.errors.PeerLost", consequence=True))
    exited = failure(1, 3, 5.5)
    assert find_cause([lost, exited]) is exited
    assert find_cause([lost]) is lost
    ended = failure(0, -15, 1.0, by_launcher=True)
    assert find_cause([ended, failure(1, 3, 2.0)]).number == 1


def test_script_that_exited_is_recognised_by_its_field() -> None:
    exited = replace(report("script.Enough", text="3 of 4\nmore"), exited=True)
    block = block_on(failure(0, 1, 1.0, exited))
    assert block.startswith("phalanx: rank 0 of 1 failed: 3 of 4\n")
    assert "sys.exit" in block
    without = replace(exited, message="")
    block = block_on(failure(0, 3, 1.0, without), failure(1, 1, 2.0, exited))
    assert block.startswith("phalanx: rank 0 of 2 failed\n")
    assert "rank 1 then failed: 3 of 4" in block


@pytest.mark.parametrize("count", [4, 64])
def test_block_on_many_different_calls_is_not_longer_than_a_user_reads(count: int) -> None:
    """Each rank has called something else, and each fails with words of its own."""
    calls = {rank: f"all_reduce(float32[{rank + 4}], sum) at train.py:7" for rank in range(count)}
    error = CollectiveMismatch.of_calls(listed(calls, range(count)), calls)
    name = "phalanx.errors.CollectiveMismatch"
    frames = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    world.all_reduce(x)\n'
    raised = Report(name, str(error), f"{frames}{name}: {error}\n", False, 1.0, 1)
    others = [failure(rank, 1, 2.0, replace(raised, message=f"{rank}")) for rank in range(1, count)]
    for failures in ([replace(each, report=raised) for each in others], others[:1]):
        block = block_on(failure(0, 1, 1.0, raised), *failures)
        assert len(without_frames(block).splitlines()) <= MOST_LINES, block
        assert (f"  and {count - 3} other calls on other ranks\n" in block) == (count > 4)
    assert len(error.calls) == count  # a program can read all of them


def test_signals_have_hints_and_names() -> None:
    crashed = failure(0, -signal.SIGSEGV, 1.0)
    assert "Python stack" in block_on(crashed)
    assert signal_name(200) == "signal 200"


def test_reports_are_read_and_nonsense_is_not_believed() -> None:
    assert as_report({}, float) is None
    assert as_report({"message": 3}, float) is None
    recorded = {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "T", "timestamp": "1"}}}
    found = as_report(recorded, float)
    assert found is not None
    assert (found.summary, found.shown, found.time) == ("ValueError: x", True, None)
