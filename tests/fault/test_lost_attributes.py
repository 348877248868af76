"""What the errors about another rank have as attributes, for programs that act on them, under ``phalanx run``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.hosts import TestHosts, why_no_hosts
from tests.support.remote import RemoteLauncher, reachable_hosts, remote

from phalanx.system.host import machine_name

__all__ = ["launcher", "remote"]  # fixtures

SCRIPT = """\
import json, os, pathlib, signal, sys, time
from datetime import timedelta
import torch
import phalanx
from phalanx.errors import CollectiveTimeout, PeerLost

class Alarm(Exception):
    pass

def raises(*_):
    if not (folder / "interrupted").exists():
        raise Alarm

how, folder = sys.argv[1], pathlib.Path(__file__).parent
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher may ask a rank to end before it has raised
world = phalanx.init(timeout_s=60.0)
x = torch.ones(4)
world.all_reduce(x)
world.all_reduce(x)
if how == "late":
    torch.distributed.group.WORLD.set_timeout(timedelta(seconds=2))  # now: a busy machine joins the ranks in more
(folder / f"done-{world.rank}").touch()
while len([*folder.glob("done-*")]) < 3:  # none is in the call before any more
    time.sleep(0.01)
if world.rank == 1:
    (folder / "pid").write_text(str(os.getpid()))
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "interrupted":
        signal.signal(signal.SIGALRM, raises)
        # On a busy machine the signal may fall before the call begins, where it does no harm.
        while not (folder / "interrupted").exists():
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.1)
                    world.all_reduce(x)  # interrupted
                except PeerLost:
                    (folder / "interrupted").touch()
            except Alarm:
                pass
    while len([*folder.glob("*.json")]) < 2:
        time.sleep(0.01)
else:
    while how == "interrupted" and not (folder / "interrupted").exists():
        time.sleep(0.01)
    try:
        world.all_reduce(x)
    except (PeerLost, CollectiveTimeout) as error:
        names = ("group_rank", "rank", "pid", "host", "signal", "group", "sequence", "last_operation", "last_line",
                 "elapsed_s")
        said = {"type": type(error).__name__, **{name: getattr(error, name) for name in names}}
        (folder / f"part-{world.rank}").write_text(json.dumps(said))
        (folder / f"part-{world.rank}").rename(folder / f"{world.rank}.json")
os._exit(0)
"""
INTERRUPTED = next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# interrupted"))
LAST = next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if line == "world.all_reduce(x)") + 1


BESIDE, ALONE = "h0:1,h1:2", "h0:1,h1:1,h2:1"  # whether rank 1 has another one beside it


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with reachable_hosts(3, tmp_path_factory.mktemp("hosts")) as made:
        yield made


def attributes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 2)]


@pytest.mark.parametrize(
    ("how", "type_name", "signal"),
    [("killed", "PeerLost", 9), ("late", "CollectiveTimeout", 0), ("interrupted", "PeerLost", 0)],
)
def test_on_one_host_all_of_them_are_known(launcher: Launcher, how: str, type_name: str, signal: int) -> None:
    script = launcher.script(SCRIPT)
    launcher.run("-n", "3", "--grace", "60", script, how)
    for said in attributes(launcher.directory):
        assert 0 < said.pop("elapsed_s") < 60
        # The rank that was interrupted has called once more, and found the group broken.
        number, line = (r"\d+", INTERRUPTED) if how == "interrupted" else ("2", LAST)
        assert re.match(rf"all_reduce #{number} \(float32, 16 B, sum\) at ", said.pop("last_operation"))
        assert said.pop("last_line").endswith(f"script.py:{line}")
        assert said == {
            "type": type_name,
            "group_rank": 1,
            "rank": 1,
            "pid": int((launcher.directory / "pid").read_text()),
            "host": machine_name(),
            "signal": signal,
            "group": "0",
            "sequence": 3,
        }


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
@pytest.mark.parametrize(
    ("how", "type_name", "where"),
    [
        ("killed", "PeerLost", BESIDE),
        ("late", "CollectiveTimeout", ALONE),
        pytest.param("killed", "PeerLost", ALONE, marks=pytest.mark.long),
        pytest.param("late", "CollectiveTimeout", BESIDE, marks=pytest.mark.long),
    ],
)
def test_across_hosts_every_rank_knows_who_and_where_it_waited(
    remote: RemoteLauncher, how: str, type_name: str, where: str
) -> None:
    # However long a busy machine takes to say it.
    text = SCRIPT.replace("world = ", "phalanx.transports.hosts.whereabouts.BY_LAUNCHER_S = 60.0\nworld = ")
    line = LAST + 1
    job = remote.run("-H", where, "--grace", "60", remote.script(text), how)
    for rank, said in zip((0, 2), attributes(remote.folder), strict=True):
        assert 0 < said.pop("elapsed_s") < 60
        operation, last_line = said.pop("last_operation"), said.pop("last_line")
        if how == "killed":
            assert operation.startswith("all_reduce #2 (float32, 16 B, sum) at script.py:"), job.said()
            assert last_line.endswith(f"script.py:{line}"), job.said()
        elif rank == 0 or where == ALONE:
            assert (operation, last_line) == ("", ""), job.said()
        assert said == {
            "type": type_name,
            "group_rank": 1,
            "rank": 1,
            "pid": int((remote.folder / "pid").read_text()),
            "host": "h1",
            "signal": 9 if how == "killed" else 0,
            "group": "0",
            "sequence": 3,
        }
