"""What crosses each host's link in a collective, by the kernel's counters, is what its definition says must cross it.

The expected bytes are written down here as sums over blocks, without the module that states them for users; that module
is held to the same sums.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from textwrap import dedent

import pytest
from tests.world.test_hosts import Pair, pair

from phalanx.bench.links import busiest, link_bytes

__all__ = ["pair"]  # a fixture

NBYTES = 1 << 20
# Headers, acknowledgements, the leaders' frames: of 1 MiB they are this share at most.
HEADERS = 0.05
# A kernel sends data again whose acknowledgement is late, as on a busy machine: those bytes are not the collective's.
# So a call during which a host sent something again is made once more, but not more often than this.
MOST = 50

SCRIPT = """
    import json, torch, phalanx, torch.distributed as dist

    root, count = ROOT, COUNT
    world = phalanx.init(timeout_s=120, quiet=True)
    rank, size = world.rank, world.size
    block = torch.full((count,), float(rank))
    blocks = [torch.full((count,), float(rank + peer)) for peer in range(size)]
    taken = [torch.empty(count) for _ in range(size)]
    calls = {
        "all_reduce": lambda: dist.all_reduce(block),
        "reduce": lambda: dist.reduce(block, root),
        "broadcast": lambda: dist.broadcast(block, root),
        "all_gather": lambda: dist.all_gather(taken, block),
        "gather": lambda: dist.gather(block, taken if rank == root else None, root),
        "scatter": lambda: dist.scatter(block, blocks if rank == root else None, root),
        "reduce_scatter": lambda: dist.reduce_scatter(block, blocks),
        "all_to_all": lambda: dist.all_to_all(taken, blocks),
        "barrier": dist.barrier,
    }

    def crossed():
        with open("/proc/net/dev") as file:
            words = next(line.split() for line in file if line.strip().startswith("eth0:"))
        with open("/proc/net/snmp") as file:
            names, values = (line.split() for line in file if line.startswith("Tcp:"))
        return [int(words[9]), int(words[1]), int(values[names.index("RetransSegs")])]

    counted = {}
    for name, call in calls.items():
        call()  # connects
        for _ in range(MOST):
            dist.barrier()
            dist.barrier()
            before = crossed()
            dist.barrier()
            call()
            dist.barrier()
            counted[name] = [a - b for a, b in zip(crossed(), before)]
            dist.barrier()
            resent = torch.tensor(counted[name][2:])
            dist.all_reduce(resent)
            if not resent.item():
                break
    if world.local_rank == 0:
        print(json.dumps([world.node_rank, counted]))
    phalanx.close()
"""

# The hosts of the ranks, and the root.
TWO, THREE = ((0, 1, 0, 1), 3), ((0, 1, 1, 2, 2, 2), 1)
CALLS = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")


BENCH = """
    import sys
    from phalanx.__main__ import main

    sys.argv = ["phalanx", "bench", "all_reduce", "broadcast", "barrier", "--sizes", "1M", "--rounds", "2"]
    sys.argv += ["--round-ms", "1", "--against", "gloo", "--json"]
    sys.exit(main())
"""


def test_the_bench_counts_what_crosses_each_link(pair: Pair) -> None:
    pair.script.write_text(dedent(BENCH))
    ended = pair.succeed(*(pair.rank(rank // 2, rank, 4) for rank in range(4)))
    assert [one.out for one in ended[1:]] == [""] * 3
    results = json.loads(ended[0].out)
    (measured,) = results["jobs"]
    assert results["complete"]
    assert measured["hosts"] == [["h0", 2], ["h1", 2]]
    assert measured["link_bytes_per_s"] > 1e6
    rows = {row["operation"]: row for row in measured["rows"]}
    assert rows["all_reduce"]["stated_bytes"] == [[NBYTES, NBYTES]] * 2
    assert rows["broadcast"]["stated_bytes"] == [[NBYTES, 0], [0, NBYTES]]
    for row in rows.values():
        assert row["wrong"] == []
        assert row["wire_us"] == pytest.approx(
            max(map(max, row["stated_bytes"])) / measured["link_bytes_per_s"] * 1e6, abs=1e-6
        )
        for links, stated in zip(row["counted_bytes"]["phalanx"], row["stated_bytes"], strict=True):
            for seen, least in zip(links, stated, strict=True):
                assert least <= seen <= least + HEADERS * NBYTES
    assert max(map(max, rows["all_reduce"]["counted_bytes"]["gloo"])) > 1.4 * NBYTES  # it is flat
    assert "4 ranks, all_reduce float32 1M: phalanx" in ended[0].err


def expected(name: str, hosts: Sequence[int], root: int) -> list[tuple[float, float]]:
    """The tensors or blocks that leave each host, and those that arrive there."""
    count, at = len(set(hosts)), hosts[root]
    own = [hosts.count(host) for host in range(count)]
    if name == "all_reduce":
        return [(2 * (count - 1) / count,) * 2] * count
    if name == "reduce":
        if count > 2:
            return [(1, 1)] * count
        return [(0, 1) if host == at else (1, 0) for host in range(count)]
    if name == "broadcast":
        return [(int((host + 1) % count != at), int(host != at)) for host in range(count)]
    if name == "all_gather":
        return [(len(hosts) - own[(host + 1) % count], len(hosts) - own[host]) for host in range(count)]
    if name == "reduce_scatter":
        return [(len(hosts) - own[host], (count - 1) * own[host]) for host in range(count)]
    if name == "barrier":
        return [(0, 0)] * count
    leave, arrive = [0] * count, [0] * count
    for source, here in enumerate(hosts):
        for target, there in enumerate(hosts):
            if here != there and {"gather": target == root, "scatter": source == root, "all_to_all": True}[name]:
                leave[here] += 1
                arrive[there] += 1
    return [*zip(leave, arrive, strict=True)]


@pytest.mark.parametrize(("hosts", "root"), [THREE, pytest.param(*TWO, marks=pytest.mark.long)])
def test_every_link_carries_what_it_must_and_no_more(pair: Pair, hosts: Sequence[int], root: int) -> None:
    pair.script.write_text(
        dedent(SCRIPT).replace("ROOT", str(root)).replace("COUNT", str(NBYTES // 4)).replace("MOST", str(MOST))
    )
    ended = pair.succeed(*(pair.rank(host, rank, len(hosts)) for rank, host in enumerate(hosts)))
    counted = dict(json.loads(one.out) for one in ended if one.out)
    wrong = []
    for name in counted[0]:
        resent = sum(counted[host][name][2] for host in counted)
        assert not resent, f"{name}: a kernel sent something again in each of {MOST} calls: {counted}"
        for host, links in enumerate(expected(name, hosts, root)):
            for way, blocks, seen in zip(("sends", "gets"), links, counted[host][name][:2], strict=True):
                least, most = blocks * NBYTES, blocks * NBYTES + HEADERS * max(1, blocks) * NBYTES
                if not least <= seen <= most:
                    wrong.append(f"{name}: host {host} {way} {seen / NBYTES:.3f} blocks, not {blocks:.3f}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("hosts", "root"), [TWO, THREE])
def test_what_is_stated_is_the_sum_over_the_blocks(hosts: Sequence[int], root: int) -> None:
    ranks = [hosts.count(host) for host in range(len(set(hosts)))]
    for name in CALLS:
        stated = link_bytes(name, 3000, ranks, hosts[root])
        assert [(link.sent, link.received) for link in stated] == [
            (round(3000 * sent), round(3000 * received)) for sent, received in expected(name, hosts, root)
        ]
        assert busiest(stated) == max(max(link.sent, link.received) for link in stated)


def test_what_crosses_no_link_and_what_is_no_collective() -> None:
    assert [link_bytes("all_gather_single", 8, ranks)[0].sent for ranks in ([1], [5])] == [0, 0]
    with pytest.raises(ValueError, match="'send' is not a collective"):
        link_bytes("send", 8, [2, 2])
