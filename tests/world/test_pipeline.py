"""Pipelines: every schedule of torch.distributed.pipelining, and stages that call each other, compute what one process
computes.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest
from tests.support.examples import example
from tests.support.hosts import PATIENCE_S, running_hosts, why_no_hosts
from tests.support.pipelines import SCHEDULES, Answer, check, run
from tests.support.pool import Pool
from tests.support.ranks import Member

from phalanx import rpc

pytest.importorskip("tqdm")
example("pipeline")  # before ranks are forked: its remote stages are tested here

ROWS = 3  # in a micro-batch
LARGE_ROWS = 10_000  # then the micro-batches do not fit into the memory between two ranks, and a sender has to wait


class Case(NamedTuple):
    """So many ranks, on so many hosts by what they report."""

    ranks: int
    hosts: int

    def __str__(self) -> str:
        return f"{self.ranks} ranks on {self.hosts}"


SHORT = (Case(2, 1), Case(3, 2))


def joining(hosts: int) -> Callable[[Member], Member]:
    """What makes a process a rank on one of the hosts, and a worker. Ranks of two hosts do not share memory."""

    def join(member: Member) -> Member:
        os.environ["PHALANX_HOST"] = f"h{member.rank * hosts // member.size}"
        member.join()
        rpc.init()
        return member

    return join


@pytest.fixture(
    scope="module",
    params=[
        case if case in SHORT else pytest.param(case, marks=pytest.mark.long)
        for case in (Case(ranks, hosts) for ranks in (2, 3, 4) for hosts in (1, 2))
    ],
    ids=str,
)
def world(request: pytest.FixtureRequest) -> Iterator[tuple[Case, Pool]]:
    case = request.param
    with Pool(case.ranks, joining(case.hosts)) as pool:
        pool.do(repr)
        yield case, pool


def run_here(member: Member, name: str, rows: int) -> Answer:
    return run(member.rank, member.size, name, rows)


@pytest.mark.parametrize("rows", [ROWS, pytest.param(LARGE_ROWS, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_one_process(world: tuple[Case, Pool], name: str, rows: int) -> None:
    case, pool = world
    check(case.ranks, name, rows, pool.do(run_here, name, rows))


# A rank on a host of its own network; it leaves its answers in a file.
SCRIPT = f"""
    import os, pickle, phalanx
    from phalanx import rpc
    from tests.support.examples import example
    from tests.support.pipelines import SCHEDULES, run

    example("pipeline")
    with phalanx.init(backend="phalanx") as world:
        rpc.init()
        answers = {{name: run(world.rank, world.size, name, {ROWS}) for name in SCHEDULES}}
        world.barrier()
        rpc.shutdown()
    with open(os.environ["ANSWERS"], "wb") as file:
        pickle.dump(answers, file)
"""


@pytest.mark.long
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gradients_are_those_of_one_process_between_hosts(tmp_path: Path, ranks: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(dedent(SCRIPT))
    with running_hosts(2, tmp_path) as hosts:
        started = []
        for rank in range(ranks):
            place = {"MASTER_ADDR": "h0", "MASTER_PORT": "29533", "RANK": str(rank), "WORLD_SIZE": str(ranks)}
            files = [tmp_path / f"{kind}-{rank}" for kind in ("answers", "out", "err")]
            zygote = hosts.zygotes[rank * 2 // ranks]
            number = zygote.fork(script, {**place, "ANSWERS": str(files[0])}, *files[1:])
            started.append((zygote, number, files))
        until = time.monotonic() + PATIENCE_S
        while any(zygote.code(number) is None for zygote, number, _ in started) and time.monotonic() < until:
            time.sleep(0.05)
        errors = "\n".join(err.read_text() for _, _, (_, _, err) in started)
        assert [zygote.code(number) for zygote, number, _ in started] == [0] * ranks, errors
    answers = [pickle.loads(files[0].read_bytes()) for _, _, files in started]
    for name in SCHEDULES:
        check(ranks, name, ROWS, [answer[name] for answer in answers])
