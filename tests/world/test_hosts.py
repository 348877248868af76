"""Two hosts, each with its own network, process ids and name: how ranks meet, and what is said when they do not."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest
from tests.support.golden import check_told, last_error
from tests.support.hosts import TestHosts, why_no_hosts
from tests.support.ranks import Member, fork_rank, stacks_of
from tests.support.waiting import soon

SCRIPT = """
    import json, os, sys, torch, phalanx
    from phalanx.membership import rendezvous

    rendezvous.REMIND_S = 0.3  # how often a rank says for whom it waits
    world = phalanx.init(timeout_s=float(os.environ.get("TIMEOUT_S", "60")))

    def total(group):
        x = torch.tensor([10.0 ** world.rank])
        group.all_reduce(x)
        return x.item()

    evens = world.subgroup(range(0, world.world_size, 2))
    answers = [None] * world.world_size
    world.all_gather_object(answers, dict(
        place=[world.rank, world.local_rank, world.local_world_size, world.node_rank, world.num_nodes],
        inside=[list(world.node_group.ranks), total(world.node_group)],
        across=[list(world.peers_group.ranks), total(world.peers_group)],
        evens=None if evens is None else [list(evens.ranks), evens.rank, total(evens)],
        everybody=total(world), host=world.nodes[world.node_rank].host))
    if world.rank == 0:
        print(json.dumps(answers))
    phalanx.close()
"""
PORT = 29511
PATIENCE_S = 120.0  # no busy machine needs as long


@dataclass
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str


@dataclass
class Run:
    """A process under way on a host: its exit code, or None, and the files that it writes."""

    poll: Callable[[], int | None]
    out_file: Path
    err_file: Path

    @property
    def err(self) -> str:
        return self.err_file.read_text() if self.err_file.exists() else ""

    def heard(self, words: str) -> None:
        """Wait until it has printed these words on standard error."""
        assert soon(lambda: words in self.err, PATIENCE_S), f"no {words!r} in:\n{self.err}"

    def told(self, words: str) -> str:
        """The one line that it has printed on standard error with these words in it."""
        (line,) = [line for line in self.err.splitlines() if words in line]
        return line


class Pair:
    """Two hosts, and the processes that a test starts there."""

    def __init__(self, hosts: TestHosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.script = folder / "script.py"
        self.script.write_text(dedent(SCRIPT))
        self.runs: list[Run] = []
        self.pids: dict[int, int] = {}  # of the ranks

    def start(self, host: int, command: Sequence[str]) -> Run:
        """Start a command."""
        own = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        out, err = self._files()
        with out.open("wb") as out_file, err.open("wb") as err_file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out_file, "stderr": err_file}
            process = self.hosts.start(host, command, own, **streams)
        self.runs.append(Run(process.poll, out, err))
        return self.runs[-1]

    def rank(self, host: int, rank: int, world_size: int = 2, /, **environment: str) -> Run:
        """Start one rank as if by hand."""
        own = {"MASTER_ADDR": "h0", "MASTER_PORT": str(PORT), "RANK": str(rank), "WORLD_SIZE": str(world_size)}
        own |= environment
        out, err = self._files()
        pid = fork_rank(lambda _: become(self.script, own, out, err), self._member(), self.hosts.inside[host])
        codes: list[int] = []

        def poll() -> int | None:
            if not codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes.append(os.waitstatus_to_exitcode(ended[1]))
            return codes[0] if codes else None

        self.pids[len(self.runs)] = pid
        self.runs.append(Run(poll, out, err))
        return self.runs[-1]

    def end(self, *runs: Run) -> list[Ended]:
        """Wait until they have ended; fails with every rank's stacks if one does not."""
        if not soon(lambda: all(run.poll() is not None for run in runs), PATIENCE_S):
            late = [number for number, run in enumerate(self.runs) if number in self.pids and run.poll() is None]
            text = [f"process {number} ended with {run.poll()}\n{run.err}" for number, run in enumerate(self.runs)]
            pytest.fail("\n".join([*text, stacks_of(self.pids, late, self.folder, PATIENCE_S)]))
        return [Ended(run.poll() or 0, run.out_file.read_text(), run.err) for run in runs]

    def succeed(self, *runs: Run) -> list[Ended]:
        """Wait until all have ended in order."""
        ended = self.end(*runs)
        assert [one.code for one in ended] == [0] * len(ended), "".join(one.err for one in ended)
        return ended

    def clean(self) -> None:
        for host in range(self.hosts.count):
            self.hosts.kill_all(host)
        self.end(*self.runs)
        self.hosts.reset_names()

    def _member(self) -> Member:
        return Member(len(self.runs), len(self.runs), self.folder)

    def _files(self) -> tuple[Path, Path]:
        number = len(self.runs)
        return self.folder / f"out-{number}", self.folder / f"err-{number}"


def become(script: Path, environment: Mapping[str, str], out: Path, err: Path) -> None:
    """Be a process that runs a script."""
    os.environ.update(environment)
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.stdout, sys.stderr, sys.argv = open(1, "w"), open(2, "w"), [str(script)]  # noqa: SIM115 - pytest has its own
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@pytest.fixture
def pair(workers_hosts: TestHosts | None, tmp_path: Path) -> Iterator[Pair]:
    if workers_hosts is None:
        pytest.skip(why_no_hosts())
    pair = Pair(workers_hosts, tmp_path)
    yield pair
    pair.clean()


def node(number: int) -> dict[str, str]:
    """What a launcher of one's own may set beside RANK and WORLD_SIZE."""
    return {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": str(number), "NNODES": "2"}


def check(answers: Sequence[Mapping[str, object]], hosts: Sequence[int]) -> None:
    """Whether every rank has found its place and reached its peers, given the host of each."""
    first = list(dict.fromkeys(hosts))
    ranks = {host: [rank for rank, at in enumerate(hosts) if at == host] for host in first}
    evens = list(range(0, len(hosts), 2))
    for rank, (answer, host) in enumerate(zip(answers, hosts, strict=True)):
        local_rank = ranks[host].index(rank)
        across = [own[local_rank] for own in ranks.values() if local_rank < len(own)]
        assert answer == {
            "place": [rank, local_rank, len(ranks[host]), first.index(host), len(first)],
            "inside": [ranks[host], sum(10.0**member for member in ranks[host])],
            "across": [across, sum(10.0**member for member in across)],
            "evens": [evens, evens.index(rank), sum(10.0**member for member in evens)] if rank in evens else None,
            "everybody": sum(10.0**member for member in range(len(hosts))),
            "host": f"h{host}",
        }


# -- they meet -----------------------------------------------------------------------------------------


def test_ranks_started_by_hand_on_each_host_meet(pair: Pair) -> None:
    hosts = (0, 1, 0, 1, 1)
    ended = pair.succeed(*(pair.rank(host, rank, 5) for rank, host in enumerate(hosts)))
    check(json.loads(ended[0].out), hosts)
    assert "5 ranks, started by env, phalanx over shared memory and TCP" in ended[0].err
    note = f"phalanx: note: the join is open: every process that reaches 10.213.77.1 port {PORT} can join"
    assert note in ended[0].err
    assert "PHALANX_KEY_FILE" not in ended[1].err


@pytest.mark.long  # the places that torchrun gives are read in tests/unit, and one host is in test_world.py
def test_torchrun_once_on_each_host(pair: Pair) -> None:
    words = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    words += ["--master-addr", "h0", "--master-port", str(PORT)]
    runs = [pair.start(host, [sys.executable, *words, "--node-rank", str(host), str(pair.script)]) for host in (0, 1)]
    ended = pair.succeed(*runs)
    check(json.loads(ended[0].out), (0, 0, 1, 1))
    assert "4 ranks, started by torchrun, phalanx over shared memory and TCP" in ended[0].err


@pytest.mark.parametrize("address", ["fd77:a:b::1", pytest.param("10.213.77.1", marks=pytest.mark.long)])
def test_ranks_meet_by_number_on_an_interface_with_a_key(pair: Pair, address: str) -> None:
    key = pair.folder / "key"
    key.write_text("a key that nobody guesses\n")
    key.chmod(0o600)
    given = {"MASTER_ADDR": address, "PHALANX_INTERFACE": "eth0", "PHALANX_KEY_FILE": str(key)}
    ended = pair.succeed(*(pair.rank(rank, rank, 2, **given, **node(rank)) for rank in (0, 1)))
    check(json.loads(ended[0].out), (0, 1))
    assert "2 ranks, started by env, phalanx over TCP" in ended[0].err
    assert "the join is open" not in ended[0].err


ENDS = """
    import json, os, re, socket, struct, torch, phalanx

    world = phalanx.init(timeout_s=60)
    world.all_reduce(torch.ones(1_000_000))
    world.all_reduce(torch.ones(1))
    world.barrier()
    held = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            held |= set(re.findall(r"socket:.(\\d+)", os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:
            pass
    ends = []
    for line in open("/proc/self/net/tcp").readlines()[1:]:
        words = line.split()
        if words[9] in held:
            pair = [socket.inet_ntoa(struct.pack("=I", int(words[at].partition(":")[0], 16))) for at in (1, 2)]
            ends.append(["listens" if words[3] == "0A" else "connected", *pair])
    assert not any(line.split()[9] in held for line in open("/proc/self/net/tcp6").readlines()[1:])
    every = [None] * world.world_size
    world.all_gather_object(every, ends)
    if world.rank == 0:
        print(json.dumps(every))
    phalanx.close()
"""


def test_everything_between_hosts_goes_by_the_chosen_interface(pair: Pair) -> None:
    pair.hosts.add_network("eth1", "10.213.78")
    try:
        pair.script.write_text(dedent(ENDS))
        given = {"MASTER_ADDR": "10.213.78.1", "PHALANX_INTERFACE": "eth1"}
        ended = pair.succeed(*(pair.rank(rank // 2, rank, 4, **given) for rank in range(4)))
    finally:
        pair.hosts.remove_network("eth1")
    for rank, ends in enumerate(json.loads(ended[0].out)):
        own = f"10.213.78.{rank // 2 + 1}"
        listening = [here for kind, here, _ in ends if kind == "listens"]
        assert set(listening) == {own}
        # Rank 0 has the store and the registrar; each rank lets others in for collectives and messages.
        assert len(listening) == 1 + 2 * (rank == 0)
        connected = {(here, there) for kind, here, there in ends if kind == "connected"}
        assert {here for here, _ in connected} == {own}
        assert {there for _, there in connected} <= {"10.213.78.1", "10.213.78.2"}
        assert {there for _, there in connected} - {own}


def test_a_host_that_calls_itself_loopback_is_found(pair: Pair) -> None:
    """As on Debian, where a host's own name means 127.0.1.1 to itself."""
    for host in (0, 1):
        others = {f"h{other}": pair.hosts.address(other) for other in (0, 1)}
        pair.hosts.set_names(host, {**others, f"h{host}": "127.0.1.1"})
    ended = pair.succeed(*(pair.rank(host, rank, 3) for rank, host in enumerate((0, 0, 1))))
    check(json.loads(ended[0].out), (0, 0, 1))


# -- they do not ---------------------------------------------------------------------------------------


def test_a_rank_says_for_whom_it_waits_and_where(pair: Pair) -> None:
    first = pair.rank(0, 0, 3, **node(0), MASTER_PORT=str(PORT + 1))
    second = pair.rank(1, 1, TIMEOUT_S="1")
    first.heard("phalanx: waiting for ranks 1-2 of 3; no rank has come from node 1, ")
    at = f"rank 0 at h0 (10.213.77.1), port {PORT}"
    second.heard(f"phalanx: rank 1 on h1 searches for {at} (MASTER_ADDR=h0, MASTER_")
    assert re.search(r"rank 1 on h1 waited 1 s for rank 0 at h0 .*nothing listens there", pair.end(second)[0].err)


def test_addresses_that_cannot_be_right_are_refused(pair: Pair) -> None:
    elsewhere, nowhere = pair.rank(0, 0, MASTER_ADDR="h1"), pair.rank(0, 0, PHALANX_INTERFACE="ib0")
    unresolved = [pair.rank(rank, rank, MASTER_ADDR="h7") for rank in (0, 1)]
    ended = pair.end(elsewhere, nowhere, *unresolved)
    assert all(one.code != 0 for one in ended)
    assert "rank 0 runs on h0 and cannot listen on h1, which means 10.213.77.2, (MASTER_ADDR=h1" in ended[0].err
    assert "whose interfaces are lo 127.0.0.1 ::1, eth0 10.213.77.1 fd77:a:b::1" in ended[0].err
    assert "PHALANX_INTERFACE=ib0: h0 has no interface of that name; its interfaces are lo 127.0.0.1" in ended[1].err
    for rank, one in enumerate(ended[2:]):
        known = {"name": "h7", "port": PORT, "host": f"h{rank}", "rank": rank}
        check_told("unresolved", last_error(one.err), known)


def test_a_name_that_means_loopback_on_another_host_is_refused(pair: Pair) -> None:
    pair.hosts.set_names(1, {"h0": "127.0.1.1", "h1": pair.hosts.address(1)})
    placed, unplaced = pair.end(pair.rank(1, 1, 2, **node(1)), pair.rank(1, 1, TIMEOUT_S="1"))
    assert placed.code != 0
    assert f"h0 (MASTER_ADDR=h0, MASTER_PORT={PORT}) means loopback (127.0.1.1) on h1, which is node 1" in placed.err
    # Where nothing says on which host rank 0 is, the rank looks there, and says what it found.
    assert "That is h1 itself (loopback): if rank 0 is on another host, set MASTER_ADDR to its name" in unplaced.err


def test_a_port_that_is_taken_is_named_with_who_holds_it(pair: Pair) -> None:
    holds = f"""
        import socket, sys, time
        held = socket.create_server(("", {PORT}))
        print("up", file=sys.stderr, flush=True)
        while True:
            line, _ = held.accept()
            line.sendall(b"HTTP/1.1 400 Bad Request")
            line.close()
    """
    holder = pair.start(0, [sys.executable, "-c", dedent(holds)])
    holder.heard("up")
    both = pair.end(*(pair.rank(rank, rank) for rank in (0, 1)))
    assert all(ended.code != 0 for ended in both)
    pid = re.search(r"taken by (pid \d+ \([^)]*\))", both[0].err)
    assert pid is not None, both[0].err
    assert re.fullmatch(r"pid \d+ \(\S*python\S* -c.*\)", pid[1])
    known = {"address": "10.213.77.1", "name": "h0", "port": PORT, "holder": pid[1]}
    for rank, ended in enumerate(both):
        check_told(f"port-taken.rank-{rank}", last_error(ended.err), known)


def test_two_processes_of_one_rank_are_both_named(pair: Pair) -> None:
    """On one host, and on two: then each is named with its host."""
    first = pair.rank(0, 0, 3)
    first.heard("the join is open")
    pair.rank(1, 1, 3)
    first.heard("phalanx: waiting for rank 2 of 3")
    for rank, again in enumerate(pair.end(*(pair.rank(0, rank, 3) for rank in (0, 1)))):
        assert again.code != 0
        pids = re.search(r"pid (\d+) on h0 and pid (\d+) on", again.err)
        assert pids is not None, again.err
        known = {"rank": rank, "pid refused": pids[1], "pid accepted": pids[2]}
        known |= {"host refused": "h0", "host accepted": f"h{rank}"}
        check_told("twice", last_error(again.err), known)
        said = f"refused a process: there are two of rank {rank}"
        first.heard(said)  # which it says when it has told that process
        check_told("twice.rank-0", first.told(said), known)


def test_a_stranger_and_a_rank_with_another_key_stay_outside(pair: Pair) -> None:
    keys = []
    for name in ("ours", "theirs"):
        keys.append(pair.folder / name)
        keys[-1].write_text(f"a key, which is {name}\n")
        keys[-1].chmod(0o600)
    first = pair.rank(0, 0, PHALANX_KEY_FILE=str(keys[0]))
    knock = f"""
        import socket, time
        while True:
            try:
                s = socket.create_connection(("h0", {PORT}))
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        s.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n" * 9)
        heard = b""
        while data := s.recv(99):
            heard += data
        print(heard[:9].decode(), len(heard))
    """
    assert pair.end(pair.start(1, [sys.executable, "-c", dedent(knock)]))[0].out == "phalanx 3 42\n"
    first.heard("sent no proof")
    others = pair.end(pair.rank(1, 1, 2, PHALANX_KEY_FILE=str(keys[1])), pair.rank(1, 1, 2))
    for other, source in zip(others, (f"PHALANX_KEY_FILE={keys[1]}", "none"), strict=True):
        assert other.code != 0
        check_told("other-key", last_error(other.err), {"port": PORT, "source": source})
    ended, _ = pair.succeed(first, pair.rank(1, 1, PHALANX_KEY_FILE=str(keys[0])))
    check(json.loads(ended.out), (0, 1))
    refused = [line for line in ended.err.splitlines() if "refused a connection" in line]
    check_told("stranger.host", "\n".join(refused), {"source": f"PHALANX_KEY_FILE={keys[0]}"})
    assert "a key, which is" not in ended.err
