"""``phalanx run`` with ``--rehearse``, ``--bind``, ``--device`` and ``--pass-local-rank``: what ranks see of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher

__all__ = ["launcher"]

# Joins with four devices of a stand-in accelerator on each host, and says where it is.
WHERE = """
import json, os, sys
import torch, phalanx
import phalanx.topology.device as devices
torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda: torch.device("cuda")
torch.accelerator.device_count = lambda: 4
devices.open_device = lambda *_: None
world = phalanx.init("phalanx", device="cuda")
x = torch.tensor([float(world.rank)])
world.all_reduce(x)
evens = world.subgroup(range(0, world.size, 2))
sums = []
for group in (world.node_group, world.peers_group):
    y = torch.tensor([float(world.rank)])
    group.all_reduce(y)
    sums.append(y.item())
print(json.dumps({
    "rank": world.rank, "node": world.node_rank, "local": world.local_rank, "device": str(world.device),
    "host": world.nodes[world.node_rank].host, "even": None if evens is None else evens.rank, "sum": x.item(),
    "node_group": world.node_group.ranks, "peers": world.peers_group.ranks, "sums": sums, "table": world.describe(),
    "beside": world.local_world_size, "nodes": world.num_nodes, "threads": torch.get_num_threads(),
    "environment": [os.environ[name] for name in ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")],
}))
phalanx.close()
"""


def test_ranks_find_the_rehearsed_hosts_and_their_devices(launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script(WHERE)
    picture = tmp_path / "places.svg"
    cyclic = ("--rehearse", "1,3,2", "--placement", "cyclic")
    outcome = launcher.run("-q", "--no-prefix", *cyclic, "--svg", str(picture), script)
    assert outcome.code == 0, outcome.err_text
    assert "node1: rank 1 (local rank 0, cpu), rank 3 (local rank 1, cpu)" in picture.read_text()
    said = sorted((json.loads(line) for line in outcome.out_lines), key=lambda each: each["rank"])
    nodes = [[0], [1, 3, 5], [2, 4]]
    assert len(said) == 6
    for each in said:
        rank = each["rank"]
        node = next(number for number, ranks in enumerate(nodes) if rank in ranks)
        local = nodes[node].index(rank)
        peers = [ranks[local] for ranks in nodes if local < len(ranks)]
        assert (each["node"], each["local"], each["host"]) == (node, local, f"node{node}")
        assert (each["beside"], each["nodes"]) == (len(nodes[node]), 3)
        assert each["environment"] == [str(number) for number in (node, local, len(nodes[node]), 3)]
        assert (each["node_group"], each["peers"]) == (nodes[node], peers)
        assert (each["sum"], each["sums"]) == (15, [sum(nodes[node]), sum(peers)])
        assert each["device"] == f"cuda:{local}"
        assert each["even"] == (None if rank % 2 else rank // 2)
    title, _, *lines = said[0]["table"].splitlines()
    assert title == "6 ranks, rehearsed on one host in shared memory, started by phalanx, phalanx"
    assert [line.split()[1:4] for line in lines] == [
        [str(each["node"]), each["host"], str(each["local"])] for each in said
    ]


AFFINITY = """
import os, sys
print(os.environ["RANK"], *sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"], flush=True)
"""
OLDER_SCRIPT = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--lr", type=float)
parser.add_argument("rest", nargs=argparse.REMAINDER)
arguments = parser.parse_args()
print(os.environ["RANK"], arguments.local_rank, arguments.lr, arguments.rest)
"""


@pytest.mark.long
def test_table_bound_cores_local_ranks_and_devices_are_as_asked_for(launcher: Launcher) -> None:
    """A dry run tells the same; a failure names the host; a script may choose another device."""
    mine = os.sched_getaffinity(0)
    plain = ["-q", "--no-prefix", "--no-preload"]
    passing = launcher.script("pass", "passing.py")
    failing = launcher.script("import os, sys; sys.exit(3 if os.environ['RANK'] == '4' else 0)", "failing.py")
    affinity = launcher.script(AFFINITY, "affinity.py")
    older = launcher.script(OLDER_SCRIPT, "older.py")
    outcome, failed, dry, bound, passed = launcher.run_all(
        ["--rehearse", "6x3", "--dry-run", passing],
        ["-q", "--no-preload", "--rehearse", "2x3", failing],
        ["--rehearse", "1,2", "--placement", "cyclic", "--dry-run", "--json", passing],
        [*plain, "-n", str(min(2, len(mine))), "--bind", "core", affinity],
        [*plain, "--rehearse", "2x2", "--pass-local-rank", older, "--lr", "0.5", "x", "--y"],
    )
    title, _, *lines = outcome.out_lines
    assert "18 ranks of" in title
    assert "rehearsed: 6 hosts on" in title
    assert [line.split()[:4] for line in lines[:6]] == [
        [str(node), f"node{node}", f"{3 * node}-{3 * node + 2}", "3"] for node in range(6)
    ]
    assert outcome.err_text.startswith("phalanx: note: a rehearsal: ranks compute on the CPU")
    assert (failed.code, "node1" in failed.err_text) == (3, True)
    told = json.loads(dry.out)
    assert (told["world_size"], told["bind"], told["cpus"]) == (3, "none", None)
    assert told["rehearsal"] == {"hosts": [1, 2], "placement": "cyclic", "given": "1,2"}
    assert [(row["node_rank"], row["host"], row["local_rank"]) for row in told["ranks"]] == [
        (0, "node0", 0), (1, "node1", 0), (1, "node1", 1),
    ]  # fmt: skip
    shares = [{int(cpu) for cpu in line.split()[1:-1]} for line in bound.out_lines]
    assert set.union(*shares) == mine
    assert sum(map(len, shares)) == len(mine)
    assert sorted(passed.out_lines) == [f"{rank} {rank % 2} 0.5 ['x', '--y']" for rank in range(4)]
    script = launcher.script("""
        import phalanx
        try:
            phalanx.init()
        except phalanx.PhalanxError as error:
            print(error, flush=True)
        world = phalanx.init(device="cpu")
        print(world.rank, world.device)
        phalanx.close()
    """)
    outcome = launcher.run("-q", "--no-prefix", "-n", "2", "--device", "mtia", script)
    assert outcome.code == 0, outcome.err_text
    assert sum("the device mtia was asked for" in line for line in outcome.out_lines) == 2
    assert {"0 cpu", "1 cpu"} <= set(outcome.out_lines)
