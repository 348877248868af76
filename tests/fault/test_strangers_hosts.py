"""Strangers attack every port of a job over two hosts, while it works: they get nothing, and it is not held up.

One stranger is another user of a host of the job, the other one is on a third host of the same network. The ports are
those that the kernel lists, so none is forgotten: the job's store, the launcher's port for its agents and its store,
signs of life, RPC, and Gloo's, which asks for no key and is only given what does it no harm (docs/security.md).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from tests.support import attacks
from tests.support.attackers import MOST_ANSWERED, NOBODY, Attack, attack_all, delays, listening
from tests.support.connecting import needs_ucx
from tests.support.hosts import TestHosts, running_hosts, why_no_hosts
from tests.support.remote import RemoteLauncher, reachable_hosts
from tests.support.waiting import soon

from phalanx.wire.proof import GREETING

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

PATIENCE_S = 200.0  # no busy machine needs as long
STRANGER = 2  # the number of the host that is none of the job's
# How long each attack takes, and what a step may take longer meanwhile, both in seconds. A stranger for whom somebody
# waited would hold up a step for the ten seconds that he has to prove himself. On a quiet machine it is far below 1 s.
lengths = pytest.mark.parametrize(("seconds", "limit_s"), [(0.5, 7.0), pytest.param(5.0, 1.0, marks=pytest.mark.fault)])
USER, HOST = "another user", "another host"

SCRIPT = """
    import json, operator, os, pathlib, sys, time
    import torch, torch.distributed as dist
    import phalanx
    from phalanx import rpc
    folder = pathlib.Path(sys.argv[1] if sys.argv[1:] else os.environ["FOLDER"])
    world = phalanx.init(timeout_s=100, quiet=True)
    rpc.init()
    steps, large, works = [], torch.ones(100_000), True
    while works:
        began = time.monotonic()
        over = torch.tensor([float((folder / "over").exists())])
        world.all_reduce(over)
        world.all_reduce(large.fill_(1))
        assert large.eq(world.size).all()
        assert rpc.call((world.rank + 1) % world.size, operator.add, world.rank, 1) == world.rank + 1
        works = not over.item()
        steps.append((began, time.monotonic()))
        (folder / f"works-{world.rank}").touch()
        time.sleep(0.003)
    group = dist.new_group()  # the store still answers
    dist.barrier(group)
    rpc.shutdown(timeout_s=60)
    (folder / f"steps-{world.rank}").write_text(json.dumps(steps))
    phalanx.close()
"""


@pytest.fixture(scope="module")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with running_hosts(3, tmp_path_factory.mktemp("forking")) as made:
        yield made


@pytest.fixture(scope="module")
def reachable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with reachable_hosts(3, tmp_path_factory.mktemp("reachable")) as made:
        yield made


def who_attacks(hosts: TestHosts, stranger: str, host: int = 0) -> Attack:
    """The stranger, and the ports of a host of the job that he can reach."""
    ports = listening(hosts.inside[host])
    if stranger == USER:
        return Attack(hosts.entry(host), NOBODY, ports)
    return Attack(hosts.entry(STRANGER), 0, [at for at in ports if not at[0].startswith(("127.", "::1"))])


def test_the_attacks_begin_as_a_right_caller_does() -> None:
    assert attacks.GREETING == GREETING


class ByHand:
    """Ranks 0 and 1 on the first host and rank 2 on the second, without a launcher but with a key."""

    def __init__(self, hosts: TestHosts, folder: Path, port: int) -> None:
        self.hosts, self.folder, self.port = hosts, folder, port
        self.script = folder / "script.py"
        self.script.write_text(dedent(SCRIPT))
        key = folder / "key"
        key.touch(0o600)
        key.write_text("of this test, and of nobody else")
        self.runs: dict[int, int] = {}

    def host(self, rank: int) -> int:
        return rank // 2

    def start(self, rank: int) -> None:
        at = {"MASTER_ADDR": "h0", "MASTER_PORT": str(self.port), "RANK": str(rank), "WORLD_SIZE": "3"}
        own = {"FOLDER": str(self.folder), "PHALANX_KEY_FILE": str(self.folder / "key")}
        out, err = self.folder / f"out-{rank}", self.folder / f"err-{rank}"
        self.runs[rank] = self.hosts.zygotes[self.host(rank)].fork(self.script, {**at, **own}, out, err)

    def code(self, rank: int) -> int | None:
        return self.hosts.zygotes[self.host(rank)].code(self.runs[rank])

    def said(self) -> str:
        return "\n".join(f"{file.name}: {file.read_text()}" for file in sorted(self.folder.glob("err-*")))

    def works(self) -> bool:
        return all((self.folder / f"works-{rank}").exists() for rank in self.runs)

    def finish(self) -> None:
        (self.folder / "over").touch()
        assert soon(lambda: all(self.code(rank) is not None for rank in self.runs), PATIENCE_S), self.said()
        assert [self.code(rank) for rank in self.runs] == [0] * len(self.runs), self.said()


@lengths
@pytest.mark.parametrize("stranger", [HOST, pytest.param(USER, marks=pytest.mark.long)])
def test_a_job_with_a_key_is_not_held_up_by_strangers(
    forking: TestHosts, tmp_path: Path, stranger: str, seconds: float, limit_s: float
) -> None:
    job = ByHand(forking, tmp_path, 29517)
    try:
        for rank in range(3):
            job.start(rank)
        assert soon(job.works, PATIENCE_S), job.said()
        attack = who_attacks(forking, stranger)
        assert 29517 in dict(map(reversed, attack.ports))  # type: ignore[arg-type]
        assert len(attack.ports) >= 5  # the store, and of each rank the signs of life and RPC
        attack_all(attack, seconds, lambda: all(job.code(rank) is None for rank in range(3)))
        job.finish()
        assert max(delays(tmp_path, attack).values()) < limit_s
        assert "refused a connection from" in job.said()
    finally:
        forking.end_processes()


@lengths
@pytest.mark.parametrize(
    ("target", "stranger"),
    [
        ("the launcher", USER),
        pytest.param("the launcher", HOST, marks=pytest.mark.long),
        pytest.param("a host of the job", USER, marks=pytest.mark.long),
        pytest.param("a host of the job", HOST, marks=pytest.mark.long),
    ],
)
def test_a_job_of_phalanx_run_is_not_held_up_by_strangers(
    reachable: TestHosts, tmp_path: Path, target: str, stranger: str, seconds: float, limit_s: float
) -> None:
    launcher = RemoteLauncher(reachable, tmp_path, own=[0, 1])
    try:
        job = launcher.start("-H", "h0:2,h1:1", "-q", launcher.script(SCRIPT), str(tmp_path))
        works = [tmp_path / f"works-{rank}" for rank in range(3)]
        assert soon(lambda: all(file.exists() for file in works) or job.process.poll() is not None, PATIENCE_S)
        assert job.process.poll() is None, job.said()
        attack = who_attacks(reachable, stranger)
        if target == "the launcher":
            ports = listening(job.process.pid)
            words = reachable.outside() if attack.user else attack.words
            assert len(ports) == 2  # that for the agents, and the store's
            attack = Attack(words, attack.user, ports)
        attack_all(attack, seconds, lambda: job.process.poll() is None)
        (tmp_path / "over").touch()
        assert job.finish() == 0, job.said()
        assert max(delays(tmp_path, attack).values()) < limit_s
        launcher.check()
    finally:
        launcher.clear()


@needs_ucx
@lengths
@pytest.mark.parametrize("stranger", [HOST, pytest.param(USER, marks=pytest.mark.long)])
def test_a_job_over_ucx_is_not_held_up_by_strangers(
    reachable: TestHosts, tmp_path: Path, stranger: str, seconds: float, limit_s: float
) -> None:
    """UCX's listeners ask for no key: they are given garbage, many connections, and some that are left half open."""
    launcher = RemoteLauncher(reachable, tmp_path, own=[0, 1])
    try:
        arguments = ("-H", "h0:2,h1:1", "-q", launcher.script(SCRIPT), str(tmp_path))
        job = launcher.start(*arguments, environment={"PHALANX_ENGINE": "ucx"})
        works = [tmp_path / f"works-{rank}" for rank in range(3)]
        assert soon(lambda: all(file.exists() for file in works) or job.process.poll() is not None, PATIENCE_S)
        assert job.process.poll() is None, job.said()
        for host in (0, 1):
            attack = who_attacks(reachable, stranger, host)
            at_host = [at for at in attack.ports if at[0] == reachable.address(host)]
            assert len(at_host) >= 3  # with RPC's and the signs of life
            attack_all(attack, seconds, lambda: job.process.poll() is None)
        (tmp_path / "over").touch()
        assert job.finish() == 0, job.said()
        assert max(delays(tmp_path, attack).values()) < limit_s
        launcher.check()
    finally:
        launcher.clear()


def test_a_proof_that_somebody_passes_on_or_repeats_lets_nobody_in(forking: TestHosts, tmp_path: Path) -> None:
    """Rank 2 is made to dial a stranger's host, who passes all on to the store, and then says the same himself."""
    job = ByHand(forking, tmp_path, 29518)
    way = [(forking.address(STRANGER), 29518), (forking.address(0), 29518)]
    command = Attack(forking.entry(STRANGER), 0, way).command("relay", 60.0)
    try:
        job.start(0)
        job.start(1)
        assert soon(lambda: ("10.213.77.1", 29518) in listening(forking.inside[0]), PATIENCE_S), job.said()
        forking.set_names(1, {"h0": forking.address(STRANGER)})
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as relay:
            assert relay.stdout is not None
            assert relay.stdout.readline() == "listens\n"
            job.start(2)
            recorded, told = (json.loads(line) for line in relay.stdout)
        assert recorded["recorded"] > 100
        assert told["most_heard"] <= MOST_ANSWERED
        words = f"was meant for {forking.address(STRANGER)} port 29518, not for {forking.address(0)} port 29518"
        assert words in job.said()
        assert not job.works()
        forking.reset_names()
        if soon(lambda: job.code(2) is not None, 5.0):
            job.start(2)
        assert soon(job.works, PATIENCE_S), job.said()
        job.finish()
    finally:
        forking.reset_names()
        forking.end_processes()
