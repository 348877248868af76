"""What ``phalanx run`` and its ranks say of a rank that does not join, held word for word against golden texts."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.faults import MISSING, known_of, told_by
from tests.support.golden import await_told, block_of, check_told
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, remote

__all__ = ["hosts", "launcher", "remote"]  # fixtures

WAYS = ["init", "phalanx", "gloo"]
HOSTS = "h0:1,h1:2"
GIVEN_UP_S = 20  # the ranks that come must have come by then
PATIENCE_S = 300
needs_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")


def known(folder: Path, script: str, on_host: str = "", where: str = "") -> dict[str, object]:
    where = f" ({where or f'{platform.node()}, local rank 2'})"
    facts = {"on host": on_host, "host": platform.node(), "where": where, "timeout": GIVEN_UP_S}
    return {**known_of(folder, script, MISSING, 3), **facts}


@pytest.mark.parametrize("way", WAYS)
def test_the_rank_is_named_with_its_place_while_the_others_wait(launcher: Launcher, way: str) -> None:
    script = launcher.script(MISSING)
    said = launcher.directory / "said"
    arguments = ("--warn-after", "0.5", script, str(launcher.directory), way, str(PATIENCE_S))
    with open(said, "wb") as err:
        job = launcher.start("-n", "3", "-q", *arguments, stderr=err)
    await_told(
        "waits-join", said.read_text, lambda: known(launcher.directory, script), lambda: job.process.poll() is not None
    )
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
@pytest.mark.parametrize("way", WAYS)
def test_over_hosts_it_is_named_with_its_host_too(remote: RemoteLauncher, way: str) -> None:
    script = remote.script(MISSING)
    job = remote.start("-H", HOSTS, "-q", "--warn-after", "0.5", script, str(remote.folder), way, str(PATIENCE_S))
    await_told(
        "waits-join",
        lambda: job.err,
        lambda: known(remote.folder, script, " on h1 (local rank 1)"),
        lambda: job.process.poll() is not None,
    )
    (remote.folder / "go").touch()
    assert job.finish() == 0, job.said()


def test_at_the_timeout_every_rank_that_came_names_it(launcher: Launcher) -> None:
    script = launcher.script(MISSING)
    done = launcher.run("-n", "3", "--grace", "60", script, str(launcher.directory), "init", str(GIVEN_UP_S))
    assert done.code == 1
    facts = known(launcher.directory, script)
    for told in told_by(launcher.directory, "missing", [0, 1]):
        check_told("missing.run", told, facts)
    check_told("missing.run.launcher", block_of(done.err_text), facts)


@needs_hosts
def test_at_the_timeout_ranks_of_other_hosts_name_it_too(remote: RemoteLauncher) -> None:
    script = remote.script(MISSING)
    job = remote.run("-H", HOSTS, "--grace", "60", script, str(remote.folder), "init", str(GIVEN_UP_S))
    assert job.process.returncode == 1, job.said()
    for told in told_by(remote.folder, "missing", [0, 1]):
        check_told("missing.run", told, known(remote.folder, script, where="h1, local rank 1"))


def test_the_launcher_names_it_when_torch_gives_up(launcher: Launcher) -> None:
    script = launcher.script(MISSING)
    done = launcher.run("-n", "3", "--grace", "60", script, str(launcher.directory), "gloo", str(GIVEN_UP_S))
    assert done.code == 1
    check_told("missing.gloo.launcher", block_of(done.err_text), known(launcher.directory, script))
