"""``phalanx run`` with ``--rehearse``, ``--bind``, ``--device`` and ``--pass-local-rank``: what ranks see of it."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from tests.launch_support import Launcher, Outcome, launcher

__all__ = ["launcher"]

# Joins with four or two devices of a stand-in accelerator on each host where one is named, and says where it is.
WHERE = """
import json, os, sys
import torch, phalanx
kind, count = (sys.argv[1:] + ["cpu", "0"])[:2]
if kind != "cpu":
    import phalanx.topology.device as devices
    if kind != "cuda":
        from torch.utils.backend_registration import rename_privateuse1_backend
        rename_privateuse1_backend(kind)
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda: torch.device(kind)
    torch.accelerator.device_count = lambda: int(count)
    devices.open_device = lambda *_: None
world = phalanx.init("phalanx", device=None if kind == "cpu" else kind)
x = torch.tensor([float(world.rank)])
world.all_reduce(x)
evens = world.subgroup(range(0, world.size, 2))
sums = []
for group in (world.node_group, world.peers_group):
    y = torch.tensor([float(world.rank)])
    group.all_reduce(y)
    sums.append(y.item())
table = world.describe()
print(json.dumps({
    "rank": world.rank, "node": world.node_rank, "local": world.local_rank, "device": str(world.device),
    "host": world.nodes[world.node_rank].host, "even": None if evens is None else evens.rank, "sum": x.item(),
    "node_group": world.node_group.ranks, "peers": world.peers_group.ranks, "sums": sums, "table": table,
    "beside": world.local_world_size, "nodes": world.num_nodes, "threads": torch.get_num_threads(),
    "environment": [os.environ[name] for name in ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")],
}))
phalanx.close()
"""


def answers(outcome: Outcome) -> list[dict[str, Any]]:
    assert outcome.code == 0, outcome.err_text
    said = [json.loads(line.partition("] ")[2]) for line in outcome.out_lines]
    return sorted(said, key=lambda each: each["rank"])


def test_two_machines_with_four_devices_each(launcher: Launcher) -> None:
    said = answers(launcher.run("-q", "--rehearse", "2x4", launcher.script(WHERE), "cuda", "4"))
    assert [each["rank"] for each in said] == list(range(8))
    assert [each["node"] for each in said] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [each["local"] for each in said] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [each["device"] for each in said] == [f"cuda:{index}" for index in (0, 1, 2, 3, 0, 1, 2, 3)]
    evens = [each for each in said if each["even"] is not None]
    assert [each["even"] for each in evens] == [0, 1, 2, 3]
    assert [each["node"] for each in evens] == [0, 0, 1, 1]
    assert [each["device"] for each in evens] == ["cuda:0", "cuda:2", "cuda:0", "cuda:2"]


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        (["--rehearse", "1,3,2"], [[0], [1, 2, 3], [4, 5]]),
        (["--rehearse", "1,3,2", "--placement", "cyclic"], [[0], [1, 3, 5], [2, 4]]),
    ],
)
def test_ranks_find_the_rehearsed_hosts(launcher: Launcher, options: list[str], nodes: list[list[int]]) -> None:
    said = answers(launcher.run("-q", *options, launcher.script(WHERE)))
    size = sum(map(len, nodes))
    assert len(said) == size
    for each in said:
        rank = each["rank"]
        node = next(number for number, ranks in enumerate(nodes) if rank in ranks)
        local = nodes[node].index(rank)
        peers = [ranks[local] for ranks in nodes if local < len(ranks)]
        assert (each["node"], each["local"], each["host"]) == (node, local, f"node{node}")
        assert (each["beside"], each["nodes"]) == (len(nodes[node]), len(nodes))
        assert each["environment"] == [str(number) for number in (node, local, len(nodes[node]), len(nodes))]
        assert (each["node_group"], each["peers"]) == (nodes[node], peers)
        assert each["sum"] == sum(range(size))
        assert each["sums"] == [sum(nodes[node]), sum(peers)]
        assert each["device"] == "cpu"
    title, _, *lines = said[0]["table"].splitlines()
    assert title == f"{size} ranks, rehearsed on one host in shared memory, started by phalanx, phalanx"
    assert [line.split()[1:4] for line in lines] == [
        [str(each["node"]), each["host"], str(each["local"])] for each in said
    ]


def test_table_has_a_line_for_each_rehearsed_host_above_16_ranks(launcher: Launcher) -> None:
    """A failure names the host."""
    passing = launcher.script("pass", "passing.py")
    failing = launcher.script("import os, sys; sys.exit(3 if os.environ['RANK'] == '4' else 0)", "failing.py")
    outcome, failed = launcher.run_all(
        ["--no-preload", "--rehearse", "6x3", passing], ["--no-preload", "-q", "--rehearse", "2x3", failing]
    )
    title, _, *lines = outcome.err_text.splitlines()
    assert "18 ranks of" in title
    assert "rehearsed: 6 hosts on" in title
    assert [line.split()[:4] for line in lines[:6]] == [
        [str(node), f"node{node}", f"{3 * node}-{3 * node + 2}", "3"] for node in range(6)
    ]
    assert lines[6].startswith("phalanx: note: a rehearsal: ranks compute on the CPU")
    assert (failed.code, "node1" in failed.err_text) == (3, True)


def test_a_dry_run_as_json(launcher: Launcher) -> None:
    script = launcher.script("raise SystemExit('started')")
    outcome = launcher.run("--rehearse", "1,2", "--placement", "cyclic", "--dry-run", "--json", script)
    assert outcome.code == 0
    told = json.loads(outcome.out)
    assert told["world_size"] == 3
    assert told["rehearsal"] == {"hosts": [1, 2], "placement": "cyclic", "given": "1,2"}
    assert [(row["node_rank"], row["host"], row["local_rank"]) for row in told["ranks"]] == [
        (0, "node0", 0),
        (1, "node1", 0),
        (1, "node1", 1),
    ]
    assert told["bind"] == "none"
    assert told["cpus"] is None
    plain = json.loads(launcher.run("-n", "1", "--bind", "core", "--dry-run", "--json", script).out)
    assert plain["rehearsal"] is None
    assert sorted(plain["cpus"][0]) == sorted(os.sched_getaffinity(0))


AFFINITY = """
import os, sys
print(os.environ["RANK"], *sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"], flush=True)
"""


def test_bound_ranks_run_on_cores_of_their_own_and_others_on_all(launcher: Launcher) -> None:
    mine = os.sched_getaffinity(0)
    ranks = min(2, len(mine))
    script = launcher.script(AFFINITY)
    plain = ["-q", "--no-prefix", "--no-preload"]
    bound, free, program = launcher.run_all(
        [*plain, "-n", str(ranks), "--bind", "core", script],
        [*plain, "-n", "3", script],
        # A program that is not Python is bound too; numa gives each rank all cores of its node.
        [*plain, "-n", "1", "--bind", "numa", "sh", "-c", "grep Cpus_allowed_list /proc/$$/status"],
    )
    shares = [{int(cpu) for cpu in line.split()[1:-1]} for line in bound.out_lines]
    assert set.union(*shares) == mine
    assert sum(map(len, shares)) == len(mine)
    assert [[int(cpu) for cpu in line.split()[1:-1]] for line in free.out_lines] == [sorted(mine)] * 3
    assert program.out.startswith(b"Cpus_allowed_list")


def test_device_is_chosen_on_the_command_line_unless_the_script_does(launcher: Launcher) -> None:
    script = launcher.script("""
        import phalanx, sys
        world = phalanx.init(**({"device": sys.argv[1]} if len(sys.argv) > 1 else {}))
        print(world.rank, world.device)
        phalanx.close()
    """)
    # No rank has such a device as the second one.
    words = (["cpu", script], ["mtia", script, "cpu"], ["mtia", script])
    chosen, own, missing = launcher.run_all(*(["-q", "--no-prefix", "-n", "2", "--device", *one] for one in words))
    assert sorted(chosen.out_lines) == sorted(own.out_lines) == ["0 cpu", "1 cpu"]
    assert missing.code == 1
    assert "the device mtia was asked for" in missing.err_text


OLDER_SCRIPT = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--lr", type=float)
parser.add_argument("rest", nargs=argparse.REMAINDER)
arguments = parser.parse_args()
print(os.environ["RANK"], arguments.local_rank, arguments.lr, arguments.rest)
"""


def test_the_local_rank_is_passed_to_scripts_that_read_it(launcher: Launcher) -> None:
    script = launcher.script(OLDER_SCRIPT)
    passed, outcome = launcher.run_all(
        ["-q", "--no-prefix", "--rehearse", "2x2", "--pass-local-rank", script, "--lr", "0.5", "x", "--y"],
        ["-q", "--no-prefix", "-n", "2", script, "--lr", "0.5"],
    )
    assert sorted(passed.out_lines) == [f"{rank} {rank % 2} 0.5 ['x', '--y']" for rank in range(4)]
    assert sorted(outcome.out_lines) == ["0 -1 0.5 []", "1 -1 0.5 []"]
