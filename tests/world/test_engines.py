"""Which engine carries bytes between hosts: named by the user, or chosen by a measurement on which all ranks agree."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from textwrap import dedent

import pytest
import torch
from tests.support.connecting import gloo_engine, needs_ucx
from tests.support.hosts import why_no_hosts
from tests.support.ranks import Member, run_ranks, values
from tests.world.test_hosts import Ended, Pair, check, pair, two_hosts
from torch._C._distributed_c10d import PrefixStore

from phalanx.errors import InitializationError
from phalanx.transports.hosts import choosing
from phalanx.transports.hosts.lane import Engine, Transfer, TransferFailed
from phalanx.transports.hosts.layout import Layout
from phalanx.transports.hosts.measuring import measured

__all__ = ["pair", "two_hosts"]  # fixtures

needs_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")


def ran(pair: Pair, hosts: Sequence[int], **environment: str) -> list[Ended]:
    """Run the ranks, each on one of the hosts."""
    return pair.end(*[pair.rank(host, rank, len(hosts), **environment) for rank, host in enumerate(hosts)])


@needs_hosts
@needs_ucx
@pytest.mark.parametrize("hosts", [(0, 1, 0), (0, 0, 1, 1)])
def test_the_engine_that_is_named_carries_the_bytes_of_every_group(pair: Pair, hosts: Sequence[int]) -> None:
    ended = ran(pair, hosts, PHALANX_ENGINE="ucx")
    assert [one.code for one in ended] == [0] * len(hosts), "".join(one.err for one in ended)
    check(json.loads(ended[0].out), hosts)
    assert "phalanx over shared memory and UCX (as PHALANX_ENGINE says)" in ended[0].err


@needs_hosts
@needs_ucx
def test_a_measurement_chooses_and_the_table_says_what_it_found(pair: Pair) -> None:
    ended = ran(pair, (0, 0, 1, 1), PHALANX_ENGINE="auto")
    assert [one.code for one in ended] == [0] * 4, "".join(one.err for one in ended)
    check(json.loads(ended[0].out), (0, 0, 1, 1))
    title = next(line for line in ended[0].err.splitlines() if "started by env" in line)
    assert "measured with 64 B" in title
    assert "UCX " in title
    assert "Gloo " in title


@needs_hosts
@needs_ucx
def test_ucx_listens_on_the_network_of_the_job_alone(pair: Pair) -> None:
    pair.script.write_text(
        dedent("""
        import socket, struct, sys, torch, phalanx

        world = phalanx.init(timeout_s=60)
        world.all_reduce(torch.ones(100_000))
        for line in open("/proc/net/tcp").readlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                number, port = words[1].split(":")
                print(world.rank, socket.inet_ntoa(struct.pack("<I", int(number, 16))), file=sys.stderr)
        world.barrier()
        phalanx.close()
    """)
    )
    ended = ran(pair, (0, 1), PHALANX_ENGINE="ucx")
    assert [one.code for one in ended] == [0, 0], ended[0].err + ended[1].err
    for rank in (0, 1):
        addresses = {line.split()[1] for line in ended[rank].err.splitlines() if line.startswith(f"{rank} 1")}
        assert addresses == {f"10.213.77.{rank + 1}"}


@needs_hosts
def test_an_engine_that_cannot_be_had_is_refused_on_every_rank(pair: Pair) -> None:
    for one in ran(pair, (0, 1), PHALANX_ENGINE="mpi"):
        assert one.code != 0
        assert "PHALANX_ENGINE=mpi: rank 0 cannot use it: MPI has not started this rank: start the job w" in one.err


@needs_hosts
def test_ranks_that_name_different_engines_are_told_who_says_what(pair: Pair) -> None:
    runs = [pair.rank(0, 0, PHALANX_ENGINE="gloo"), pair.rank(1, 1, PHALANX_ENGINE="auto")]
    for one in pair.end(*runs):
        assert one.code != 0
        assert "PHALANX_ENGINE differs between the ranks (gloo on rank 0, auto on rank 1)" in one.err


@needs_hosts
def test_a_name_that_is_no_engine_is_refused(pair: Pair) -> None:
    ended = ran(pair, (0, 1), PHALANX_ENGINE="roce")
    assert "PHALANX_ENGINE='roce': it must be one of auto, gloo, mpi, ucx" in ended[0].err


class Cut(Engine):
    """An engine whose network lets nothing through."""

    name = "Cut"

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        raise TransferFailed(peer, "no route to host")

    recv = send

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_ranks_learn_the_same_times_and_which_engine_failed_anywhere(size: int) -> None:
    def body(member: Member) -> str:
        store, rank, timeout = member.store(), member.rank, timedelta(seconds=60)
        layout = Layout([each * 2 // size for each in range(size)], rank)
        engines: dict[str, Engine] = {
            name: gloo_engine(PrefixStore(name, store), rank, size, timeout) for name in ("one", "other")
        }
        engines["cut"] = Cut() if rank == 0 else gloo_engine(PrefixStore("cut", store), rank, size, timeout)
        times = measured(PrefixStore("times", store), layout, rank, engines, timeout)
        for engine in engines.values():
            engine.close()
        return json.dumps({name: [each.failed, each.small_s > 0, each.large_s > 0] for name, each in times.items()})

    outcomes = run_ranks(body, size)
    for outcome in outcomes:
        assert outcome.error is None, outcome.traceback
        found = json.loads(outcome.value)
        assert found == json.loads(outcomes[0].value)
        assert found["one"] == found["other"] == ["", True, True]
        assert found["cut"][0]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_rank_that_fails_before_the_engines_are_measured_is_named(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address never comes, and Gloo would wait for that as long as the store does."""
    timeout = timedelta(seconds=10)
    monkeypatch.setattr(choosing, "_lack", lambda wanted, size: {choosing.GLOO: "", choosing.UCX: ""})
    monkeypatch.setattr(choosing, "UcxEngine", lambda store, rank, limit: gloo_engine(store, rank, size, limit))

    def body(member: Member) -> tuple[str, float]:
        store = member.store()
        member.meet("begun")
        began = time.monotonic()

        def gloo() -> Engine:
            if member.rank == size - 1:
                raise OSError("no thread can be started")
            return gloo_engine(PrefixStore("gloo", store), member.rank, size, timeout)

        layout = Layout([rank * 2 // size for rank in range(size)], member.rank)
        with pytest.raises((InitializationError, OSError)) as raised:
            choosing.choose_engine(PrefixStore("engine", store), layout, member.rank, gloo, timeout, world=False)
        seconds = time.monotonic() - began
        member.meet("all have raised")
        return str(raised.value), seconds

    told = values(run_ranks(body, size))
    assert told[-1][0] == "no thread can be started"
    for text, seconds in told[:-1]:
        assert f"rank {size - 1} " in text, text
        assert seconds < 200
