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
    import torch, torch.distributed as dist
    dist.init_process_group("phalanx")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("sum", total.item())
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
SUMS = [f"[rank {rank}] sum 2.0" for rank in range(2)]
TABLE = "phalanx run: 2 ranks of "


@pytest.mark.parametrize(
    ("preparation", "words", "name", "code", "seen"),
    [
        (NO_HOME, [], "a.py", 0, SUMS),
        ("ulimit -f 10", [], "a.py", 2, ["file size", "ulimit -f unlimited"]),
        ("ulimit -c 0; ulimit -l 0; ulimit -s 512; ulimit -v 20000000", [], "a.py", 0, SUMS),
        (READ_ONLY, [], "a.py", 0, SUMS),
        ('set -- env -i LANG=C COLUMNS=60 "$@"', [], "a.py", 0, SUMS),
        ("", ["-x", f"A={ODD}"], f"{ODD}.py", 0, [*SUMS, f"{TABLE}{ODD_SHOWN}.py"]),
        (ASCII, [], "ü.py", 0, [*SUMS, TABLE + r"\udcc3\udcbc.py"]),
        (ASCII, ["-H", "localhost:2", "--log-dir", ODD, "--tee"], f"{ODD}.py", 0, SUMS),
        ("", ["--dry-run", "-H", f"{ODD}@{ODD}:2"], "a.py", 0, [ODD_SHOWN]),
        ("", ["-n", ODD], "a.py", 2, [f"-n {ODD_SHOWN}"]),
        ("exec >&-", [], "a.py", 0, [TABLE]),
        ("exec 2>&-", [], "a.py", 0, SUMS),
        ("exec <&- >&- 2>&-", [], "a.py", 0, []),
    ],
)
def test_job_runs_in_a_strange_place(
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
