"""Jobs in places as containers make them: without a home, with limits, read-only, with names that are not UTF-8."""

from __future__ import annotations

import os
import shlex
import sys

import pytest
from tests.launch_support import Launcher, launcher

__all__ = ["launcher"]
pytestmark = pytest.mark.long  # test_falls.py has a job in one such place

SCRIPT = """
    import signal, sys, torch
    import torch.distributed as dist
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("phalanx")
    if sys.argv[1:] == ["fail"] and dist.get_rank() == 1:
        raise ValueError(__file__)
    total = torch.ones(1)
    try:
        dist.all_reduce(total)
        print("sum", total.item(), ascii(sys.argv[1:]))
    except Exception as error:
        print("rank 0 got", type(error).__name__)
"""
# An answer of 99 says that this machine cannot make such a place.
NO_HOME = 'unset HOME; unshare -U --map-user=54321 true || exit 99; set -- unshare -U --map-user=54321 "$@"'
READ_ONLY = """
    unshare -rm true || exit 99
    set -- unshare -rm sh -c '
        mount --make-rprivate / && mount -o remount,bind,ro / || exit 99
        for place in /tmp /dev/shm "$PWD"; do
            mount --bind "$place" "$place" && mount -o remount,bind,ro "$place" || exit 99
        done
        cd "$PWD"; touch file 2>/dev/null && exit 98
        exec "$@"
    ' sh "$@"
"""
ASCII = "export LC_ALL=C PYTHONUTF8=0"
ODD, ODD_SHOWN = os.fsdecode(b"caf\xe9"), r"caf\udce9"
SUMS = [f"[rank {rank}] sum 2.0 []" for rank in range(2)]
TABLE = "phalanx run: 2 ranks of "


@pytest.mark.parametrize(
    ("preparation", "words", "name", "code", "seen"),
    [
        pytest.param(NO_HOME, [], "a.py", 0, SUMS, id="no-home"),
        pytest.param("ulimit -f 10", [], "a.py", 2, ["file size", "ulimit -f unlimited"], id="file-size"),
        pytest.param("ulimit -c 0; ulimit -l 0; ulimit -s 512; ulimit -v 20000000", [], "a.py", 0, SUMS, id="limits"),
        pytest.param(READ_ONLY, [], "a.py", 0, SUMS, id="read-only"),
        pytest.param('set -- env -i LANG=C COLUMNS=60 "$@"', [], "a.py", 0, SUMS, id="no-variables"),
        pytest.param("", ["-x", f"A={ODD}"], f"{ODD}.py", 0, [*SUMS, f"{TABLE}{ODD_SHOWN}.py"], id="names"),
        pytest.param(ASCII, [], "ü.py", 0, [*SUMS, TABLE + r"\udcc3\udcbc.py"], id="names-in-ascii"),
        pytest.param(
            ASCII, ["-H", "localhost:2", "--log-dir", ODD, "--tee"], f"{ODD}.py", 0, SUMS, id="names-of-hosts-and-logs"
        ),
        pytest.param("", ["--dry-run", "-H", f"{ODD}@{ODD}:2"], "a.py", 0, [ODD_SHOWN], id="hosts"),
        pytest.param("", ["-n", ODD], "a.py", 2, [f"-n {ODD_SHOWN}"], id="options"),
        pytest.param("exec <&-", [], "a.py", 0, SUMS, id="no-stdin"),
        pytest.param("exec >&-", [], "a.py", 0, [TABLE], id="no-stdout"),
        pytest.param("exec 2>&-", [], "a.py", 0, SUMS, id="no-stderr"),
        pytest.param("exec <&- >&- 2>&-", [], "a.py", 0, [], id="no-streams"),
    ],
)
def test_a_job_in_a_strange_place(
    launcher: Launcher, preparation: str, words: list[str], name: str, code: int, seen: list[str]
) -> None:
    program = launcher.directory / "python"
    program.write_text(f'#!/bin/sh\nset -- {shlex.quote(sys.executable)} "$@"\n{preparation}\nexec "$@"\n')
    program.chmod(0o755)
    launcher.python = str(program)
    launcher.script(SCRIPT, name)
    outcome = launcher.run("-n", "2", *words, name)
    if outcome.code == 99:
        pytest.skip("this machine cannot make such a place")
    said = outcome.out + outcome.err
    assert outcome.code == code, said
    assert b"Traceback" not in said
    assert [text for text in seen if text.encode() not in said] == []


def test_a_failed_rank_is_named_though_its_script_is_not_utf8(launcher: Launcher) -> None:
    launcher.script(SCRIPT, f"{ODD}.py")
    outcome = launcher.run("-n", "2", "--grace", "100", f"{ODD}.py", "fail")
    assert (outcome.code, outcome.out_lines) == (1, ["[rank 0] rank 0 got PeerLost"])
    assert f"ValueError: {launcher.directory}/{ODD_SHOWN}.py" in outcome.err_text
