"""A rank that comes to its end, without a failure, while the others wait for it to make the world."""

from __future__ import annotations

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, remote
from tests.support.waiting import soon

__all__ = ["hosts", "launcher", "remote"]  # fixtures

SCRIPT = """
    import os, sys
    import phalanx

    rank, victim, worlds = int(os.environ["RANK"]), int(sys.argv[1]), int(sys.argv[2])
    for _ in range(worlds):
        phalanx.init(timeout_s=600)
        phalanx.close()
    if rank == victim:
        sys.exit(0)
    try:
        phalanx.init(timeout_s=600)
    except phalanx.errors.InitializationError as error:
        print(f"told: {error} (rank={error.rank})", flush=True)
        raise
"""


BY_TORCH = (
    SCRIPT.replace("import phalanx\n", "import phalanx\n    import torch.distributed as dist\n")
    .replace("import os, sys\n", "import os, sys\n    from datetime import timedelta\n")
    .replace("phalanx.init(timeout_s=600)", "dist.init_process_group('phalanx', timeout=timedelta(minutes=10))")
    .replace("phalanx.close", "dist.destroy_process_group")
)
WAYS = {"phalanx": SCRIPT, "torch": BY_TORCH}


@pytest.mark.parametrize(
    ("way", "victim", "worlds"), [("phalanx", 0, 1), ("phalanx", 2, 0), ("torch", 0, 0), ("torch", 2, 1)]
)
def test_ended_rank_is_told_to_the_others_on_one_host(launcher: Launcher, victim: int, worlds: int, way: str) -> None:
    outcome = launcher.run("-n", "3", "-q", "--no-prefix", launcher.script(WAYS[way]), str(victim), str(worlds))
    told = [line for line in outcome.out_lines if line.startswith("told: ")]
    assert outcome.code == 1, outcome.err_text
    assert told, outcome.err_text  # the launcher ends the others when the first has failed
    assert all(f"rank {victim} has ended" in line for line in told), told
    assert all(line.endswith(f"(rank={victim})") for line in told), told
    assert "DistStoreError" not in outcome.err_text


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
@pytest.mark.parametrize(("way", "victim", "worlds"), [("phalanx", 1, 1), ("phalanx", 3, 0), ("torch", 0, 0)])
def test_ended_rank_is_told_with_its_host_on_two_hosts(
    remote: RemoteLauncher, victim: int, worlds: int, way: str
) -> None:
    script = remote.script(WAYS[way])
    job = remote.run("-H", "h0:2,h1:2", "-q", "--no-prefix", script, str(victim), str(worlds))
    told = [line for line in job.out.splitlines() if line.startswith("told: ")]
    assert job.process.returncode == 1, job.said()
    assert told, job.said()
    assert all(f"rank {victim} on h{victim // 2} has ended" in line for line in told), told
    assert all(line.endswith(f"(rank={victim})") for line in told), told
    assert f"rank {victim} on h{victim // 2} has ended" in job.err


INSIDE = """
    import os, sys
    import phalanx
    from phalanx.transports.shm import segment

    if os.environ["RANK"] == sys.argv[1]:
        segment._reach = lambda *_: sys.exit(0)
    try:
        phalanx.init(timeout_s=600)
    except phalanx.errors.InitializationError as error:
        print(f"told: {error} (rank={error.rank})", flush=True)
        raise
"""


def test_a_rank_that_ends_inside_of_init_is_named_by_rank_0(launcher: Launcher) -> None:
    outcome = launcher.run("-n", "3", "-q", "--no-prefix", launcher.script(INSIDE), "1")
    told = [line for line in outcome.out_lines if line.startswith("told: ")]
    assert outcome.code == 1, outcome.err_text
    assert told, outcome.err_text
    assert all("rank 1 has ended" in line and line.endswith("(rank=1)") for line in told), told
    assert "did not come within" not in outcome.err_text


EARLY = """
    import os, time
    import phalanx

    phalanx.init()
    if os.environ["RANK"] == "1":
        raise SystemExit(0)
    time.sleep(0.3)
    print("well")
"""


def test_a_rank_that_ends_right_after_init_disturbs_nobody(launcher: Launcher) -> None:
    outcome = launcher.run("-n", "3", "-q", "--no-prefix", launcher.script(EARLY))
    assert (outcome.code, outcome.out_lines) == (0, ["well"] * 2), outcome.err_text


NO_INIT = """
    import os
    import torch.distributed as dist
    if os.environ["RANK"] == "3":
        raise SystemExit(0)
    dist.init_process_group("gloo")
"""


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
def test_wait_in_the_store_for_an_ended_rank_is_told_to_the_user(remote: RemoteLauncher) -> None:
    job = remote.start("-H", "h0:2,h1:2", "-q", remote.script(NO_INIT))
    line = "phalanx: rank 3 on h1 has ended, and another rank has waited for 5 s in the job's store, for "
    assert soon(lambda: line in job.err, 200.0), job.said()
    job.process.terminate()
    job.finish()
