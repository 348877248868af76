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
WAYS = pytest.mark.parametrize("way", [SCRIPT, BY_TORCH], ids=["phalanx", "torch"])


@WAYS
@pytest.mark.parametrize("worlds", [0, 1])
@pytest.mark.parametrize("victim", [0, 2])
def test_on_one_host_the_others_are_told_at_once(launcher: Launcher, victim: int, worlds: int, way: str) -> None:
    outcome = launcher.run("-n", "3", "-q", "--no-prefix", launcher.script(way), str(victim), str(worlds))
    told = [line for line in outcome.out_lines if line.startswith("told: ")]
    assert outcome.code == 1, outcome.err_text
    assert told, outcome.err_text  # the launcher ends the others when the first has failed
    assert all(f"rank {victim} has ended" in line for line in told), told
    assert all(line.endswith(f"(rank={victim})") for line in told), told
    assert "DistStoreError" not in outcome.err_text


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
@WAYS
@pytest.mark.parametrize("worlds", [0, 1])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_on_two_hosts_the_others_are_told_which_rank_and_where(
    remote: RemoteLauncher, victim: int, worlds: int, way: str
) -> None:
    script = remote.script(way)
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


@pytest.mark.parametrize(("size", "victim"), [(2, 1), (3, 1), (5, 4)])
def test_a_rank_that_ends_inside_of_init_is_named_by_the_rank_that_collects(
    launcher: Launcher, size: int, victim: int
) -> None:
    """Rank 0 offers the segment, and waits in the store for what the others answer."""
    outcome = launcher.run("-n", str(size), "-q", "--no-prefix", launcher.script(INSIDE), str(victim))
    told = [line for line in outcome.out_lines if line.startswith("told: ")]
    assert outcome.code == 1, outcome.err_text
    assert told, outcome.err_text
    assert all(f"rank {victim} has ended" in line for line in told), told
    assert all(line.endswith(f"(rank={victim})") for line in told), told
    assert "did not come within" not in outcome.err_text


EARLY = """
    import os, time
    import phalanx

    phalanx.init()
    if os.environ["RANK"] == "1":
        raise SystemExit(0)
    time.sleep(1)
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
def test_on_two_hosts_a_rank_that_waits_in_the_store_for_one_that_has_ended_is_told_to_the_user(
    remote: RemoteLauncher,
) -> None:
    job = remote.start("-H", "h0:2,h1:2", "-q", remote.script(NO_INIT))
    line = "phalanx: rank 3 on h1 has ended, and another rank has waited for 5 s in the job's store, for "
    assert soon(lambda: line in job.err, 200.0), job.said()
    job.process.terminate()
    job.finish()
