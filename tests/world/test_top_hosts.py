"""``phalanx top`` of a job on several hosts: every rank is shown, wherever it is, and what cannot be seen is named."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.hosts import why_no_hosts
from tests.support.remote import PATIENCE_S, RemoteJob, RemoteLauncher, hosts, remote

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

WAITING = """
    import os, time
    import torch, phalanx
    world = phalanx.init()
    x = torch.ones(256)
    for step in range(3):
        world.step(step)
        world.all_reduce(x)
    print("ready", flush=True)
    if world.rank == 2:
        while not os.path.exists("over"):
            sum(range(1000))
    world.all_reduce(x)  # WAIT
"""


def top(job: RemoteJob, *options: str) -> str:
    command = [sys.executable, "-m", "phalanx", "top", str(job.process.pid), "--once", "--interval", "0.3", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout


def look(job: RemoteJob, *options: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(top(job, "--json", *options))
    return shown


def look_until(job: RemoteJob, seen: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Look again and again until this is seen."""
    until = time.monotonic() + PATIENCE_S
    while not seen(shown := look(job)):
        assert time.monotonic() < until, shown
    return shown


def start(remote: RemoteLauncher, hosts_and_ranks: str, ranks: int) -> RemoteJob:
    job = remote.start("-q", "-H", hosts_and_ranks, remote.script(WAITING))
    job.wait_for_lines(ranks, "ready")
    return job


def end(remote: RemoteLauncher, job: RemoteJob) -> None:
    (remote.folder / "over").touch()
    assert job.finish() == 0, job.said()


def states(shown: dict[str, Any]) -> list[str]:
    return [rank["state"] for rank in shown["ranks"]]


def test_the_ranks_of_all_hosts_are_shown_from_any_of_them(remote: RemoteLauncher) -> None:
    job = start(remote, "h0:1,h1:2", 3)
    shown = look_until(job, lambda shown: states(shown) == ["waits", "waits", "computes"])
    assert [(rank["rank"], rank["host"]) for rank in shown["ranks"]] == [(0, "h0"), (1, "h1"), (2, "h1")]
    assert shown["elsewhere"] == {}
    line = 1 + [("# WAIT" in text) for text in (remote.folder / "script.py").read_text().splitlines()].index(True)
    for rank in 0, 1:
        operation = shown["ranks"][rank]["operation"]
        assert (operation["kind"], operation["in_group"], operation["site"]) == ("all_reduce", 4, f"script.py:{line}")
        assert 0 < operation["for_s"] < PATIENCE_S  # by this host's clock
    assert [rank["lag"] for rank in shown["ranks"]] == [0, 0, 1]
    assert {rank["step"] for rank in shown["ranks"]} == {2}
    assert all(rank["resident_bytes"] > 1 << 20 for rank in shown["ranks"])
    assert shown["ranks"][2]["cores"] > 0
    table = top(job).splitlines()
    assert "3 ranks on 2 hosts" in table[0]
    assert [words.split()[:2] for words in table[2:5]] == [["0", "h0"], ["1", "h1"], ["2", "h1"]]

    # From another host, which is this one, as for ssh to the own name: a helper must see what is seen directly.
    starter = remote.script("import os, sys\nos.execvp(sys.argv[2], sys.argv[2:])\n", "starter.py")
    from_elsewhere = ("-H", "login1", "--starter", f"{sys.executable} {starter}")
    same = look(job, *from_elsewhere)
    told = ("pid", "host", "state", "lag")
    assert [[rank[key] for key in told] for rank in same["ranks"]] == [
        [rank[key] for key in told] for rank in shown["ranks"]
    ]
    assert same["job"] == shown["job"]
    command = [sys.executable, "-m", "phalanx", "top", "no-such-job", *from_elsewhere]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert refused.returncode == 2
    assert "login1: no job no-such-job of yours runs on this host" in refused.stderr

    here = look(job, "--here")
    assert (here["ranks"], here["elsewhere"]) == ([], {"h0": [0], "h1": [1, 2]})
    assert here["notes"][-1] == "ranks 1-2 on h1: not shown, since only login was to be looked at"
    end(remote, job)


def test_top_tells_a_stopped_rank_of_another_host_from_an_ended_one(remote: RemoteLauncher) -> None:
    script = remote.script("""
        import os, sys, time
        import torch, phalanx
        world = phalanx.init()
        world.all_reduce(torch.ones(4))
        print("ready", flush=True)
        if world.rank != 1:
            while not os.path.exists("over"):
                time.sleep(0.01)
    """)
    job = remote.start("-q", "-H", "h0:1,h1:2", script)
    job.wait_for_lines(3, "ready")
    stopped = remote.wait_for_process(1, "rank-2")
    os.kill(stopped, signal.SIGSTOP)
    try:
        shown = look_until(job, lambda shown: states(shown)[-1:] == ["stopped"] and 1 not in ranks_of(shown))
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert shown["elsewhere"] == {"h1": [1]}
    assert "rank 1 on h1: not shown, since it has ended, or is in another container" in shown["notes"]
    end(remote, job)


def ranks_of(shown: dict[str, Any]) -> list[int]:
    return [rank["rank"] for rank in shown["ranks"]]


def test_top_names_a_host_that_is_out_of_reach_and_shows_the_others(remote: RemoteLauncher) -> None:
    starter = Path(remote.starter[0].partition("=")[2])
    job = start(remote, "h0:1,h1:2", 3)
    found = starter.resolve()
    starter.unlink()
    starter.write_text(f'#!/bin/sh\n[ "$1" = h1 ] && {{ echo "no way to h1" >&2; exit 255; }}\nexec {found} "$@"\n')
    starter.chmod(0o755)
    shown = look(job)
    assert ranks_of(shown) == [0]
    assert shown["elsewhere"] == {"h1": [1, 2]}
    note = next(note for note in shown["notes"] if note.startswith("ranks 1-2 on h1: not shown, since"))
    assert "no way to h1" in note
    end(remote, job)


def test_the_helpers_end_with_the_command(remote: RemoteLauncher) -> None:
    job = start(remote, "h0:1,h1:2", 3)
    before = {pid for host in (0, 1) for pid in remote.hosts.processes(host)}
    command = [sys.executable, "-m", "phalanx", "top", str(job.process.pid), "--json", "--interval", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        while len(json.loads(watching.stdout.readline())["ranks"]) < 3:
            pass
        watching.send_signal(signal.SIGINT)
        _, said = watching.communicate(timeout=PATIENCE_S)
        assert (watching.returncode, said) == (0, b"")
    until = time.monotonic() + PATIENCE_S
    while left := {pid for host in (0, 1) for pid in remote.hosts.processes(host)} - before:
        assert time.monotonic() < until, left
        time.sleep(0.02)
    end(remote, job)


def test_top_leaves_out_ranks_of_a_silent_host_and_says_for_how_long(remote: RemoteLauncher) -> None:
    job = start(remote, "h0:1,h1:2", 3)
    before = set(remote.hosts.processes(1))
    command = [sys.executable, "-m", "phalanx", "top", str(job.process.pid), "--json", "--interval", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        while len(json.loads(watching.stdout.readline())["ranks"]) < 3:
            pass
        for pid in set(remote.hosts.processes(1)) - before:
            os.kill(pid, signal.SIGSTOP)
        while ranks_of(shown := json.loads(watching.stdout.readline())) != [0]:
            pass
        assert any(re.search(r"h1: not shown, since its host has not answered for \d+ s", n) for n in shown["notes"])
        for pid in set(remote.hosts.processes(1)) - before:
            os.kill(pid, signal.SIGCONT)
        while len(json.loads(watching.stdout.readline())["ranks"]) < 3:
            pass
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=PATIENCE_S)
    end(remote, job)
