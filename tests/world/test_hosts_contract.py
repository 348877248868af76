"""The contract of communicators on two hosts, and not only among ranks that take themselves for ranks of two.

``test_contract.py`` has every check on every transport; what real hosts add are their networks, names and process ids.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from textwrap import dedent

import pytest
from tests.support.contract import CHECKS
from tests.support.hosts import running_hosts, why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

PORT = 29561
PATIENCE_S = 500.0
MOST_BYTES = 600_000
SAMPLE = [
    "all_gather_collects_every_ranks_bytes",
    "all_to_all_has_a_size_for_every_pair",
    "mixed_operations_in_a_random_order_stay_in_step",
    "calls_that_differ_are_an_error_on_every_rank",
]
SCRIPT = """
    import json, os, sys
    from datetime import timedelta
    import torch.distributed as dist, phalanx
    from tests.support.contract import run_check

    world = phalanx.init(timeout_s=300)
    found = {}
    for name in json.loads(os.environ["CHECKS"]):
        group = dist.new_group(range(world.world_size), timeout=timedelta(seconds=60))
        assert type(group._communicator).__name__ == "HostsCommunicator"
        skipped, wrong = run_check(name, group._communicator, int(os.environ["MOST_BYTES"]))
        found[name] = wrong
        world.barrier()
        dist.destroy_process_group(group)
    print(json.dumps(found))
    phalanx.close()
"""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SAMPLE, id="sample"),
        pytest.param([name for name in CHECKS if name not in SAMPLE], id="others", marks=pytest.mark.long),
    ],
)
def test_two_hosts_keep_the_contract(names: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(dedent(SCRIPT))
    with running_hosts(2, tmp_path) as hosts:
        numbers = []
        for rank in range(5):  # three on one host, two on the other
            own = {"MASTER_ADDR": "h0", "MASTER_PORT": str(PORT), "RANK": str(rank), "WORLD_SIZE": "5"}
            own |= {"CHECKS": json.dumps(names), "MOST_BYTES": str(MOST_BYTES)}
            files = tmp_path / f"out-{rank}", tmp_path / f"err-{rank}"
            zygote = hosts.zygotes[rank // 3]
            numbers.append((zygote, zygote.fork(script, own, *files)))
        until = time.monotonic() + PATIENCE_S
        while any(zygote.code(number) is None for zygote, number in numbers):
            if time.monotonic() > until:
                for zygote in hosts.zygotes:
                    zygote.show_stacks()
                time.sleep(2)
                break
            time.sleep(0.02)
        errors = "\n".join((tmp_path / f"err-{rank}").read_text() for rank in range(5))
        assert [zygote.code(number) for zygote, number in numbers] == [0] * 5, errors
    for rank in range(5):
        assert json.loads((tmp_path / f"out-{rank}").read_text()) == {name: [] for name in names}
