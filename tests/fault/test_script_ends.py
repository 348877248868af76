"""How a script ends, told to ranks that still need it: on one host and between hosts, without a launcher.

From Python 3.12 on no thread can be started when the interpreter ends; the scripts forbid it everywhere.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.hosts import TestHosts, Zygote

PATIENCE_S = 300.0
BEGIN = """
    import argparse, atexit, ctypes, os, sys, threading, time
    from datetime import timedelta
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore
    from tests.support.islands import pretend_host
    from phalanx.errors import PeerLost

    ctypes.CDLL(None).prctl(1, 9)  # it ends with the process of the tests

    def forbid():
        def start(thread):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        threading.Thread.start = start

    def wait_for(happens):
        until = time.monotonic() + 200
        while not happens():
            assert time.monotonic() < until
            time.sleep(0.005)

    rank, hosts, folder = int(os.environ["OWN_RANK"]), os.environ["PLACE"], Path(os.environ["FOLDER"])
    size, how, pid = len(hosts), os.environ["HOW"], folder / "pid"
    last = size - 1
    if rank == last:
        pid.with_suffix(".part").write_text(str(os.getpid()))
        pid.with_suffix(".part").rename(pid)
    if len(set(hosts)) > 1:
        pretend_host(int(hosts[rank]))
    store = FileStore(str(folder / "store"), size)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=200))
    atexit.register(forbid)
    tensor = torch.ones(4)
"""
NEEDS = """
    if how == "gone":  # and was never connected with this rank
        wait_for(lambda: pid.exists() and not Path(f"/proc/{pid.read_text()}").exists())
    (folder / f"begun-{rank}").touch()
    try:
        if how == "connected":
            dist.barrier()  # the last rank may be through it before the others are
        if rank or size > 2:
            dist.all_reduce(tensor)
        else:
            dist.recv(tensor, *([last] if len(set(hosts)) > 1 else []))
    except PeerLost as error:
        print(error.group_rank, error)
"""
GOES = """
    if how == "connected":
        dist.barrier()
    if how == "meanwhile":
        wait_for(lambda: all((folder / f"begun-{other}").exists() for other in range(last)))
"""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """A process that has imported torch once and forks the scripts."""

    run = "import runpy, phalanx.c10d.create, tests.support.islands as _; runpy.run_module('tests.support.host_zygote')"

    def start(host: int, command: Sequence[str], own: dict[str, str], **streams: Any) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **own, "PYTHONPATH": ":".join(sys.path)}
        return subprocess.Popen([sys.executable, "-c", run], env=environment, **streams)

    made = Zygote(cast(TestHosts, SimpleNamespace(start=start)), 0)
    made.wait_until_ready()
    yield made
    made.close()
    made.wait()


class Scripts:
    """Ranks that run scripts of their own."""

    def __init__(self, zygote: Zygote, folder: Path, place: str, how: str, texts: Sequence[str]) -> None:
        self.folder, self._zygote, self._numbers = folder, zygote, []
        for rank, text in enumerate(texts):
            script = folder / f"rank{rank}.py"
            script.write_text(dedent(BEGIN) + dedent(text))
            own = {"OWN_RANK": str(rank), "PLACE": place, "FOLDER": str(folder), "HOW": how}
            # On a busy machine a rank may wait for so long that it says so.
            own |= {"PYTHONPATH": ":".join(sys.path), "PHALANX_WARN_AFTER": "0"}
            files = folder / f"out-{rank}", folder / f"err-{rank}"
            self._numbers.append(zygote.fork(script, own, *files))

    def ends(self, ranks: range | None = None) -> list[tuple[str, str, int]]:
        """What each printed, on both streams, and its exit code."""
        until, found = time.monotonic() + PATIENCE_S, []
        for rank in ranks or range(len(self._numbers)):
            while (code := self._zygote.code(self._numbers[rank])) is None:
                if time.monotonic() > until:
                    self._zygote.show_stacks()
                    time.sleep(2.0)
                    self._zygote._process.kill()  # and all of them with it
                    pytest.fail("\n".join(path.read_text() for path in sorted(self.folder.glob("err-*"))))
                time.sleep(0.005)
            out, err = ((self.folder / f"{name}-{rank}").read_text() for name in ("out", "err"))
            found.append((out, err, code))
        return found


# What the last rank does, with which code it ends, and what the others are told.
FAILED = "has failed (exit code 3)"
WAYS = {
    "ends": ("", 0, "in order"),
    "exits with nothing": ("sys.exit()", 0, "in order"),
    "exits with 0": ("sys.exit(0)", 0, "in order"),
    "exits with text": ("sys.exit('this batch is empty')", 1, "has failed (exit code 1)"),
    "exits deep within": (
        "def main():\n    try:\n        sys.exit(3)\n    finally:\n        tensor.zero_()\nmain()",
        *(3, FAILED),
    ),
    "exits, which is kept": (
        "try:\n    sys.exit(3)\nexcept SystemExit as error:\n    kept = error\n    raise",
        *(3, FAILED),
    ),
    "exits, which is caught": ("try:\n    sys.exit(3)\nexcept SystemExit as error:\n    kept = error", 0, "in order"),
    "raises SystemExit": ("raise SystemExit(3)", 3, FAILED),
    "raises a subclass": ("class Exit(SystemExit): pass\nraise Exit(3)", 3, FAILED),
    "calls exit": ("exit(3)", 3, FAILED),
    "by argparse": ("argparse.ArgumentParser().parse_args(['--no-such-option'])", 2, "has failed (exit code 2)"),
    "by os._exit": ("os._exit(3)", 3, FAILED),
    "by os._exit of a thread": ("threading.Timer(0.2, os._exit, [3]).start()\ndist.recv(tensor, 0)", 3, "has ended"),
    "fails": ("raise ValueError('this batch is empty')", 1, "has failed (ValueError: this batch is empty at "),
    "fails, in a circle": (
        "try:\n    raise ValueError('this batch is empty')\nexcept ValueError as error:\n    raise error from error",
        *(1, "has failed (ValueError: this batch is empty at "),
    ),
}
CASES = [
    *(("01", "connected", way) for way in WAYS),
    *(
        ("00", "connected", way)
        for way in ("ends", "exits deep within", "exits, which is caught", "fails, in a circle")
    ),
    *(("001", "connected", way) for way in ("ends", "exits with text", "fails")),
    *(("012", "meanwhile", way) for way in ("ends", "fails")),
    *(("001", "gone", way) for way in ("exits with 0", "fails")),
    *(
        pytest.param(place, how, way, marks=pytest.mark.long)
        for place, how in (("00", "meanwhile"), ("001", "connected"), ("012", "gone"))
        for way in WAYS
        if (how, way) != ("gone", "by os._exit of a thread")
    ),
]


@pytest.mark.parametrize(("place", "how", "way"), CASES)
def test_end_of_a_script_is_told(zygote: Zygote, tmp_path: Path, place: str, how: str, way: str) -> None:
    """By one that is alone on its host, if it is: nobody else could see its exit code."""
    text, code, said = WAYS[way]
    *others, (_, err, of_last) = Scripts(
        zygote, tmp_path, place, how, [*[NEEDS] * (len(place) - 1), dedent(GOES) + text]
    ).ends()
    assert of_last == code, err
    assert "PeerLost" not in err
    for out, err, of_other in others:
        assert (of_other, err) == (0, ""), err
        if "all other ranks of the group left the group in order" not in out or said != "in order":
            assert out.startswith(f"{len(place) - 1} "), out + err
            assert f"rank {len(place) - 1} of the group" in out
        assert said in out, out
        if "ValueError" in said:
            assert f"rank{len(place) - 1}.py:" in out


def test_exception_is_told_long_before_its_process_ends(zygote: Zygote, tmp_path: Path) -> None:
    """The handler stands for all that may keep a process alive long after its script has failed."""
    fails = "atexit.register(time.sleep, 600)\nraise ValueError('this batch is empty')"
    scripts = Scripts(zygote, tmp_path, "00", "connected", [NEEDS, dedent(GOES) + fails])
    try:
        ((out, err, code),) = scripts.ends(range(1))
        assert scripts._zygote.code(scripts._numbers[1]) is None
        assert code == 0, err
        assert "has failed (ValueError: this batch is empty at " in out
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        scripts.ends()


@pytest.mark.parametrize("place", ["00", "01"])
def test_exception_that_is_only_printed_ends_nothing(zygote: Zygote, tmp_path: Path, place: str) -> None:
    together = """
    dist.all_reduce(tensor)
    print(tensor[0].item())
    """
    prints = """
    try:
        raise ValueError("caught")
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as a program prints what it has caught
    time.sleep(0.3)
    """
    for out, err, code in Scripts(zygote, tmp_path, place, "", [together, prints + together]).ends():
        assert (out, code) == ("2.0\n", 0), err


@pytest.mark.parametrize("place", ["01", "001"])
def test_child_that_fails_breaks_nothing_of_its_parents(zygote: Zygote, tmp_path: Path, place: str) -> None:
    """Rank 0 waits for a message meanwhile, and looks once in a while whether the group is broken."""
    text = """
    dist.all_reduce(tensor)
    if rank == last:
        child = os.fork()
        if child == 0:
            raise ValueError("this is the child's")
        assert os.waitpid(child, 0)[1] != 0
        time.sleep(1.0)
        dist.send(tensor, 0)
    elif rank == 0:
        dist.recv(tensor, last)
    dist.all_reduce(tensor)
    print(tensor[0].item())
    dist.destroy_process_group()
    """
    size = len(place)
    ends = Scripts(zygote, tmp_path, place, "", [text] * size).ends()
    assert [(out, code) for out, _, code in ends] == [(f"{float(size * size)}\n", 0)] * size, ends


@pytest.mark.parametrize("leaver", ["sends", "receives"])
def test_script_ends_while_a_large_message_is_on_its_way(zygote: Zygote, tmp_path: Path, leaver: str) -> None:
    text = """
    leaves = rank == 1
    sends = leaves == (how == "sends")
    tensor = torch.ones(50_000_000)  # so much that the rank leaves before it has gone
    for _ in range(2):  # from the second one on the receiver's memory is known before the message comes
        (dist.send if sends else dist.recv)(tensor, 1 - rank)
    dist.barrier()
    work = (dist.isend if sends else dist.irecv)(tensor, 1 - rank)
    if leaves:
        sys.exit(0)
    try:
        work.wait()
    except PeerLost:
        pass
    print("ended", flush=True)
    """
    ends = Scripts(zygote, tmp_path, "01", leaver, [text] * 2).ends()
    assert ends == [("ended\n", "", 0), ("", "", 0)]


@pytest.mark.parametrize("place", ["00", "001"])
def test_script_that_ends_right_after_a_mismatch_prints_it(zygote: Zygote, tmp_path: Path, place: str) -> None:
    """Of the ranks of the first host one makes another call; the one of the second host hears of it."""
    text = """
    from phalanx.c10d import leaving
    leaving.LAST_CALLS_S = 100.0  # a rank that leaves would wait a second, and a busy machine takes longer
    dist.broadcast(torch.ones(5 if rank == 1 else 4), last)
    """
    for _, err, _ in Scripts(zygote, tmp_path, place, "", [text] * len(place)).ends():
        assert "CollectiveMismatch: the ranks of a group called different operations" in err
        assert "rank 1: broadcast(float32[5], src=" in err
