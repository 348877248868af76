"""What ``phalanx run`` and its ranks say of a rank that does not join."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.faults import MISSING, known_of, told_by
from tests.support.golden import await_facts, block_of, check_facts
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, remote

__all__ = ["hosts", "launcher", "remote"]  # fixtures

WAYS = ["init", "gloo"]
HOSTS = "h0:1,h1:2"
GIVEN_UP_S = 8  # the ranks that come must have come by then
PATIENCE_S = 300
needs_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")


def waits(script: str, on_host: str = "") -> str:
    """The line about rank 2, while the others wait for it."""
    lines = known_of(Path(script).parent, script, MISSING, 3)
    return (
        rf"^phalanx: rank 2{on_host} is at script\.py:({lines['line here']}|{lines['line looks']}) .*, "
        r"in no operation yet; "
        rf"ranks 0-1 wait for it in init at script\.py:{lines['line join']}, for [\d.]+ s now; "
        rf"look at the `if` in line {lines['line branch']}$"
    )


@pytest.mark.parametrize("way", WAYS)
def test_the_rank_is_named_with_its_place_while_the_others_wait(launcher: Launcher, way: str) -> None:
    script = launcher.script(MISSING)
    said = launcher.directory / "said"
    arguments = ("--warn-after", "0.5", script, str(launcher.directory), way, str(PATIENCE_S))
    with open(said, "wb") as err:
        job = launcher.start("-n", "3", "-q", *arguments, stderr=err)
    await_facts(said.read_text, lambda: job.process.poll() is not None, lambda: waits(script))
    (launcher.directory / "go").touch()
    assert job.finish().code == 0, said.read_text()


JOINED = """
    import sys
    import torch, torch.distributed as dist
    import phalanx
    from phalanx.watch import recorder, records

    if sys.argv[1] == "init":
        phalanx.init()
    else:
        dist.init_process_group(sys.argv[1])
    dist.all_reduce(torch.ones(4))
    print([record.name() for record in records.read_memory(recorder.own_memory()).records])
"""


@pytest.mark.parametrize("way", WAYS)
def test_when_all_have_joined_it_was_no_operation(launcher: Launcher, way: str) -> None:
    done = launcher.run("-n", "3", "-q", "--no-prefix", launcher.script(JOINED), way)
    assert done.out_lines == ["['all_reduce #1']"] * 3, done.err_text


@needs_hosts
@pytest.mark.parametrize("way", ["init", pytest.param("gloo", marks=pytest.mark.long)])
def test_over_hosts_it_is_named_with_its_host_too(remote: RemoteLauncher, way: str) -> None:
    script = remote.script(MISSING)
    job = remote.start("-H", HOSTS, "-q", "--warn-after", "0.5", script, str(remote.folder), way, str(PATIENCE_S))
    on_host = r" on h1 \(local rank 1\)"
    await_facts(lambda: job.err, lambda: job.process.poll() is not None, lambda: waits(script, on_host))
    (remote.folder / "go").touch()
    assert job.finish() == 0, job.said()


def check_missing(folder: Path, where: str) -> str:
    """Check what the ranks say that came; the error, for what the launcher says."""
    missing = (
        r"phalanx\.errors\.InitializationError: (rank 1 had joined, but )?"
        rf"after {GIVEN_UP_S} s rank 2 of 3 \({where}\) had not come; check whether they were started"
    )
    for told in told_by(folder, "missing", [0, 1]):
        check_facts(told, f"^{missing}")
    return missing


def test_at_the_timeout_every_rank_that_came_names_it(launcher: Launcher) -> None:
    script = launcher.script(MISSING)
    done = launcher.run("-n", "3", "--grace", "60", script, str(launcher.directory), "init", str(GIVEN_UP_S))
    assert done.code == 1
    missing = check_missing(launcher.directory, f"{platform.node()}, local rank 2")
    block = block_of(done.err_text)
    check_facts(block, f"^phalanx: rank [01] of 3 failed: {missing}", f"^  rank [01] then failed: {missing}")
    check_facts(block, "^  rank 2 ended by the launcher$")


@needs_hosts
def test_at_the_timeout_ranks_of_other_hosts_name_it_too(remote: RemoteLauncher) -> None:
    script = remote.script(MISSING)
    job = remote.run("-H", HOSTS, "--grace", "60", script, str(remote.folder), "init", str(GIVEN_UP_S))
    assert job.process.returncode == 1, job.said()
    check_missing(remote.folder, "h1, local rank 1")


def test_the_launcher_names_it_when_torch_gives_up(launcher: Launcher) -> None:
    script = launcher.script(MISSING)
    done = launcher.run("-n", "3", "--grace", "60", script, str(launcher.directory), "gloo", str(GIVEN_UP_S))
    assert done.code == 1
    line = known_of(launcher.directory, script, MISSING, 3)["line join"]
    check_facts(
        block_of(done.err_text),
        "^phalanx: rank [01] of 3 failed: ",
        rf"^  rank 2 had not come to init at script\.py:{line}$",
    )
