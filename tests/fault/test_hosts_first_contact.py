"""A rank goes before it has been connected with any rank of another host: the others learn it at once, and who it was.

Whether the two would have connected by themselves depends on who dials whom, which the ports decide that the kernel
gives; so each case is done several times, in groups of their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from textwrap import dedent

import pytest
import torch
import torch.distributed as dist
from tests.support.islands import divide_by
from tests.support.ranks import Member, run_ranks, values

from phalanx.errors import PeerLost

TIMEOUT_S = 200.0
SOON_S = 30.0  # a second on a quiet machine; the timeout of the groups is far from it
SMALL, LARGE = 8, 1_000_000

# The host of each rank.
SPLITS = {"2+1": (0, 0, 1), "1+2": (0, 1, 1), "1+1+1": (0, 1, 2), "2+3": (0, 0, 1, 1, 1)}

Group = dist.ProcessGroup | None
# What the ranks do that the one which goes, the second argument, does not come to.
OPERATIONS: dict[str, Callable[[Group, int], object]] = {
    "all_reduce": lambda group, gone: dist.all_reduce(torch.ones(SMALL), group=group),
    "large all_reduce": lambda group, gone: dist.all_reduce(torch.ones(LARGE), group=group),
    "broadcast": lambda group, gone: dist.broadcast(torch.ones(SMALL), gone, group=group),
    "barrier": lambda group, gone: dist.barrier(group=group),
    "recv": lambda group, gone: dist.recv(torch.ones(SMALL), gone, group=group),
    "send": lambda group, gone: dist.send(torch.ones(LARGE), gone, group=group),
}


def split(monkeypatch: pytest.MonkeyPatch, hosts: Sequence[int]) -> None:
    divide_by(monkeypatch, lambda rank, size: hosts[rank])


def lost_in(operation: str, group: Group, gone: int) -> tuple[PeerLost, float]:
    """The error of an operation, and after how many seconds it came."""
    began = time.monotonic()
    with pytest.raises(PeerLost) as lost:
        OPERATIONS[operation](group, gone)
    return lost.value, time.monotonic() - began


def check_no_words_of_gloo(capfd: pytest.CaptureFixture[str]) -> None:
    written = capfd.readouterr().err
    assert "gloo" not in written.lower(), written


@pytest.mark.parametrize("hosts", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("first_or_last", [0, -1], ids=["first", "last"])
def test_a_rank_that_leaves_is_named_at_once(
    hosts: Sequence[int], first_or_last: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    split(monkeypatch, hosts)
    size = len(hosts)
    leaver = range(size)[first_or_last]
    cases = [(operation, when) for operation in OPERATIONS for when in ("before", "meanwhile")]
    cases += [("all_reduce", "before"), ("barrier", "meanwhile")] * 5

    def body(member: Member) -> None:
        member.join(timeout_s=TIMEOUT_S)
        for number, (operation, when) in enumerate(cases):
            group = dist.new_group(range(size), timeout=timedelta(seconds=TIMEOUT_S))
            others = [f"{number}-{rank}" for rank in range(size) if rank != leaver]
            if member.rank == leaver:
                if when == "meanwhile":
                    member.await_said(*others)
                dist.destroy_process_group(group)
                member.say(f"{number}-left")
                continue
            if when == "before":
                member.await_said(f"{number}-left")
            member.say(f"{number}-{member.rank}")
            error, seconds = lost_in(operation, group, leaver)
            assert "left" in str(error), (operation, when, str(error))
            assert error.group_rank == leaver, (operation, when, error.group_rank, str(error))
            assert seconds < SOON_S, (operation, when, seconds, str(error))
            dist.destroy_process_group(group)
        member.meet("over")
        dist.destroy_process_group()

    values(run_ranks(body, size))
    check_no_words_of_gloo(capfd)


def end_by_signal() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def end_by_code() -> None:
    os._exit(3)


def await_end(pid: int) -> None:
    until = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":  # the test collects it later
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.parametrize("hosts", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("end", [end_by_signal, pytest.param(end_by_code, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "operation", ["all_reduce", "recv", *(pytest.param(each, marks=pytest.mark.long) for each in ("broadcast", "send"))]
)
@pytest.mark.parametrize("of_world", [True, False], ids=["world", "group"])
def test_a_rank_that_ends_is_named_soon(
    hosts: Sequence[int],
    when: str,
    end: Callable[[], None],
    operation: str,
    of_world: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    split(monkeypatch, hosts)
    size = len(hosts)
    last = size - 1

    def body(member: Member) -> None:
        file = member.folder / "pid"
        if member.rank == last:
            file.write_text(str(os.getpid()))
        member.join(timeout_s=TIMEOUT_S)
        group = None if of_world else dist.new_group(range(size), timeout=timedelta(seconds=TIMEOUT_S))
        member.meet("made")  # one that is still making the group might raise there
        if member.rank == last:
            if when == "meanwhile":
                member.await_said(*(f"begun-{rank}" for rank in range(last)))
            end()
        if when == "before":
            await_end(int(file.read_text()))
        member.say(f"begun-{member.rank}")
        error, seconds = lost_in(operation, group, last)
        assert error.group_rank == last, str(error)
        assert seconds < SOON_S, (seconds, str(error))
        member.say(f"over-{member.rank}")  # a rank that ends is lost to those that still wait
        member.await_said(*(f"over-{rank}" for rank in range(last)))

    values(run_ranks(body, size)[:-1])
    check_no_words_of_gloo(capfd)


# The end of a script, which Phalanx sees.
SCRIPT = """
    import sys, time
    from datetime import timedelta
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore
    from tests.fault.test_hosts_first_contact import OPERATIONS, lost_in
    from tests.support.islands import pretend_host

    rank, size, host, file, how, when, operation = *map(int, sys.argv[1:4]), Path(sys.argv[4]), *sys.argv[5:]
    begun = [file.with_name(f"begun-{other}") for other in range(size - 1)]
    pretend_host(host)
    store = FileStore(str(file), size)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=200))
    if rank == size - 1:
        while when == "meanwhile" and not all(each.exists() for each in begun):
            time.sleep(0.005)
        if how == "raises":
            raise ValueError("this batch is empty")
        if how == "exits":
            sys.exit(0)
    else:
        begun[rank].touch()
        error, seconds = lost_in(operation, None, size - 1)
        print(int(seconds), error.group_rank, error)
"""


@pytest.mark.parametrize(
    ("how", "when", "operation"),
    [
        ("ends", "meanwhile", "all_reduce"),
        ("exits", "before", "recv"),
        ("raises", "meanwhile", "all_reduce"),
        pytest.param("ends", "before", "recv", marks=pytest.mark.long),
        pytest.param("exits", "before", "all_reduce", marks=pytest.mark.long),
        pytest.param("raises", "before", "recv", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("hosts", [SPLITS["2+1"], SPLITS["1+1+1"]], ids=["2+1", "1+1+1"])
def test_a_script_that_ends_is_named_at_once(
    hosts: Sequence[int], how: str, when: str, operation: str, tmp_path: Path
) -> None:
    script, size = tmp_path / "script.py", len(hosts)
    script.write_text(dedent(SCRIPT))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, *map(str, (rank, size, host, tmp_path / "store", how, when, operation))],
            # On a busy machine a rank may wait for so long that it says so.
            env={"PYTHONPATH": ":".join(sys.path), "PHALANX_WARN_AFTER": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        ends = [(*rank.communicate(timeout=300), rank.returncode) for rank in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    assert ends[-1][2] == (how == "raises")
    for out, err, _ in ends[:-1]:
        seconds, rank, text = out.split(" ", 2)
        assert float(seconds) < SOON_S, text
        assert int(rank) == size - 1, text
        assert ("ValueError: this batch is empty" if how == "raises" else "left") in text, text
        assert err == "", err
