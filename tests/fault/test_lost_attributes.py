"""What the errors about another rank have as attributes, for programs that act on them, under ``phalanx run``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, remote

from phalanx.system.host import machine_name

__all__ = ["hosts", "launcher", "remote"]  # fixtures

SCRIPT = """\
import json, os, pathlib, signal, sys, time
import torch
import phalanx
from phalanx.errors import CollectiveTimeout, PeerLost

how, folder = sys.argv[1], pathlib.Path(__file__).parent
world = phalanx.init(timeout_s=2.0 if how == "late" else 60.0)
x = torch.ones(4)
world.all_reduce(x)
world.all_reduce(x)
if world.rank == 1:
    (folder / "pid").write_text(str(os.getpid()))
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while len([*folder.glob("*.json")]) < 2:
        time.sleep(0.01)
else:
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
LAST = next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if line == "world.all_reduce(x)") + 1


def attributes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 2)]


@pytest.mark.parametrize(("how", "type_name", "signal"), [("killed", "PeerLost", 9), ("late", "CollectiveTimeout", 0)])
def test_on_one_host_all_of_them_are_known(launcher: Launcher, how: str, type_name: str, signal: int) -> None:
    script = launcher.script(SCRIPT)
    launcher.run("-n", "3", "--grace", "60", script, how)
    for said in attributes(launcher.directory):
        assert 0 < said.pop("elapsed_s") < 60
        assert said.pop("last_operation").startswith("all_reduce #2 (float32, 16 B, sum) at ")
        assert said.pop("last_line").endswith(f"script.py:{LAST}")
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
@pytest.mark.parametrize(("how", "type_name"), [("killed", "PeerLost"), ("late", "CollectiveTimeout")])
def test_across_hosts_every_rank_knows_who_and_where_it_waited(
    remote: RemoteLauncher, how: str, type_name: str
) -> None:
    job = remote.run("-H", "h0:1,h1:2", "--grace", "60", remote.script(SCRIPT), how)
    for rank, said in zip((0, 2), attributes(remote.folder), strict=True):
        assert 0 < said.pop("elapsed_s") < 60
        # Which rank is the first to notice the end decides what is known on the other host.
        known = said.pop("signal"), said.pop("last_line")[-len(f":{LAST}") :]
        if how == "late" or rank == 0:
            assert known in ((0, ""), (9, f":{LAST}")), job.said()
        else:
            assert known == (9, f":{LAST}"), job.said()
        del said["last_operation"]
        assert said == {
            "type": type_name,
            "group_rank": 1,
            "rank": 1,
            "pid": int((remote.folder / "pid").read_text()),
            "host": "h1",
            "group": "0",
            "sequence": 3,
        }
