"""How a script ends, told to ranks that still need it: on one host and between hosts, without a launcher.

From Python 3.12 on no thread can be started when the interpreter ends; the scripts forbid it everywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent
from typing import IO

import pytest

PATIENCE_S = 300.0
BEGIN = """
    import atexit, ctypes, os, sys, threading, time
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
        while not happens():
            time.sleep(0.005)

    rank, hosts, folder = int(os.environ["OWN_RANK"]), os.environ["PLACE"], Path(os.environ["FOLDER"])
    size, how, last = len(hosts), os.environ["HOW"], len(hosts) - 1
    pid = folder / f"pid-{last}"
    (folder / f"part-{rank}").write_text(str(os.getpid()))
    (folder / f"part-{rank}").rename(folder / f"pid-{rank}")
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


# It has imported torch once, and forks the scripts that it is told of, each from a process that notes how it ends.
ZYGOTE = """
    import ctypes, faulthandler, gc, json, os, runpy, signal, sys
    import phalanx.c10d.create, phalanx.world, tests.support.islands

    def next_script():
        for line in sys.stdin:
            order = json.loads(line)
            if os.fork():
                continue
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(1, 9)
            script = os.fork()
            if script:
                code = os.waitstatus_to_exitcode(os.waitpid(script, 0)[1])
                with open(order["files"] + "part", "w") as file:
                    file.write(str(code))
                os.rename(order["files"] + "part", order["files"] + "code")
                os._exit(0)
            os.environ.clear()
            os.environ.update(order["environment"])
            for descriptor, name in ((0, os.devnull), (1, order["files"] + "out"), (2, order["files"] + "err")):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
            return order["script"]

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    gc.freeze()  # what is frozen is not collected when a script ends, which would take three times as long
    script = next_script()
    if script:
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def zygote() -> Iterator[IO[str]]:
    """Where to write which script is to be started."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", dedent(ZYGOTE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdin is not None
        yield process.stdin
        process.stdin.close()


class Scripts:
    """Ranks that run scripts of their own, on such hosts: "001" are three on two."""

    def __init__(self, zygote: IO[str], folder: Path, place: str, how: str, texts: Sequence[str]) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self._size = folder, len(texts)
        for rank, text in enumerate(texts):
            script = folder / f"rank{rank}.py"
            script.write_text(dedent(BEGIN) + dedent(text))
            own = {"OWN_RANK": str(rank), "PLACE": place, "FOLDER": str(folder), "HOW": how}
            # On a busy machine a rank may wait for so long that it says so.
            own |= {"PYTHONPATH": ":".join(sys.path), "PHALANX_WARN_AFTER": "0"}
            order = {"script": str(script), "files": f"{folder}/{rank}-", "environment": {**os.environ, **own}}
            zygote.write(json.dumps(order) + "\n")
        zygote.flush()

    def code(self, rank: int) -> int | None:
        file = self.folder / f"{rank}-code"
        return int(file.read_text()) if file.exists() else None

    def end(self, rank: int) -> tuple[str, str, int]:
        """What a rank printed, on both streams, and its exit code."""
        until = time.monotonic() + PATIENCE_S
        while (code := self.code(rank)) is None:
            if time.monotonic() > until:
                for file in self.folder.glob("pid-*"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(file.read_text()), signal.SIGUSR1)
                time.sleep(2.0)
                pytest.fail("\n".join(path.read_text() for path in sorted(self.folder.glob("*-err"))))
            time.sleep(0.005)
        out, err = ((self.folder / f"{rank}-{name}").read_text() for name in ("out", "err"))
        return out, err, code

    def ends(self) -> list[tuple[str, str, int]]:
        return [self.end(rank) for rank in range(self._size)]


# What the last rank does, with which code it ends, and what the others are told.
FAILED = "has failed (exit code 3)"
RAISES = "raise ValueError('this batch is empty')"
EMPTY = "has failed (ValueError: this batch is empty at "
WAYS = {
    "ends": ("", 0, "in order"),
    "exits with nothing": ("sys.exit()", 0, "in order"),
    "exits with text": ("sys.exit('this batch is empty')", 1, "has failed (exit code 1)"),
    "exits deep within": ("def f():\n try: sys.exit(3)\n finally: tensor.zero_()\nf()", 3, FAILED),
    "exits, which is kept": ("try: sys.exit(3)\nexcept SystemExit as error:\n kept = error\n raise", 3, FAILED),
    "exits, which is caught": ("try: sys.exit(3)\nexcept SystemExit as error: kept = error", 0, "in order"),
    "raises SystemExit": ("raise SystemExit(3)", 3, FAILED),
    "raises a subclass": ("class Exit(SystemExit): pass\nraise Exit(3)", 3, FAILED),
    "calls exit": ("exit(3)", 3, FAILED),
    "by os._exit": ("os._exit(3)", 3, "has ended"),
    "by os._exit of a thread": ("threading.Timer(0.2, os._exit, [3]).start()\ndist.recv(tensor, 0)", 3, "has ended"),
    "fails": (RAISES, 1, EMPTY),
    "fails, in a circle": (f"try: {RAISES}\nexcept ValueError as error: raise error from error", 1, EMPTY),
}
RARE = ("exits with nothing", "raises SystemExit", "calls exit")
MORE = [("00", "meanwhile"), ("001", "connected"), ("012", "gone")]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([("01", "connected", way) for way in WAYS if way not in RARE], id="alone on its host"),
        pytest.param(
            [("00", "connected", way) for way in ("ends", "exits deep within", "fails, in a circle")], id="00"
        ),
        pytest.param(
            [
                ("001", "connected", "exits with text"),
                ("001", "gone", "fails"),
                ("012", "meanwhile", "ends"),
                ("012", "meanwhile", "fails"),
            ],
            id="three",
        ),
        pytest.param(
            [(*more, way) for more in MORE for way in WAYS if (more[1], way) != ("gone", "by os._exit of a thread")],
            marks=pytest.mark.long,
            id="all",
        ),
    ],
)
def test_end_of_a_script_is_told(zygote: IO[str], tmp_path: Path, cases: list[tuple[str, str, str]]) -> None:
    """Ranks of its host learn its exit code; those of other hosts know it from the launcher alone."""
    started = []
    for number, (place, how, way) in enumerate(cases):
        texts = [*[NEEDS] * (len(place) - 1), dedent(GOES) + WAYS[way][0]]
        started.append(Scripts(zygote, tmp_path / str(number), place, how, texts))
        if len(started) % 4 == 0:
            started[-1].ends()  # not all at once
    for (place, how, way), scripts in zip(cases, started, strict=True):
        _, code, said = WAYS[way]
        if "exit code" in said and place != "00":
            said = "in order"
        *others, (_, err, of_last) = scripts.ends()
        assert of_last == code, (place, how, way, err)
        assert "PeerLost" not in err
        for out, err, of_other in others:
            assert (of_other, err) == (0, ""), (place, how, way, err)
            if "all other ranks of the group left the group in order" not in out or said != "in order":
                assert out.startswith(f"{len(place) - 1} "), (place, how, way, out + err)
                assert f"rank {len(place) - 1} of the group" in out
            assert said in out, (place, how, way, out)
            assert said != EMPTY or f"rank{len(place) - 1}.py:" in out


def test_exception_is_told_long_before_its_process_ends(zygote: IO[str], tmp_path: Path) -> None:
    """The handler stands for all that may keep a process alive long after its script has failed."""
    fails = f"atexit.register(time.sleep, 600)\n{RAISES}"
    scripts = Scripts(zygote, tmp_path, "00", "connected", [NEEDS, dedent(GOES) + fails])
    try:
        out, err, code = scripts.end(0)
        assert scripts.code(1) is None
        assert code == 0, err
        assert EMPTY in out
    finally:
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
        scripts.end(1)


# Rank 0 waits for a message meanwhile, and looks once in a while whether the group is broken.
HARMLESS = """
    dist.all_reduce(tensor)
    if rank == last:
        try:
            raise ValueError("caught")
        except ValueError as error:
            sys.excepthook(type(error), error, error.__traceback__)  # as a program prints what it has caught
        child = os.fork()
        if child == 0:
            raise ValueError("this is the child's")
        assert os.waitpid(child, 0)[1] != 0
        (folder / "failed").touch()
    elif rank == 0:
        work = dist.irecv(tensor, last)
        wait_for((folder / "failed").exists)
        (folder / "seen").touch()
        work.wait()
    if rank == last:
        wait_for((folder / "seen").exists)
        dist.send(tensor, 0)
    dist.all_reduce(tensor)
    print(tensor[0].item())
    dist.destroy_process_group()
"""


def test_exception_that_is_printed_or_a_childs_breaks_nothing(zygote: IO[str], tmp_path: Path) -> None:
    ends = Scripts(zygote, tmp_path, "001", "", [HARMLESS] * 3).ends()
    assert [(out, code) for out, _, code in ends] == [("9.0\n", 0)] * 3, ends


def test_script_ends_while_a_large_message_is_on_its_way(zygote: IO[str], tmp_path: Path) -> None:
    text = """
    tensor = torch.ones(50_000_000)  # so much that the rank leaves before it has gone
    for _ in range(2):  # from the second one on the receiver's memory is known before the message comes
        (dist.send if rank else dist.recv)(tensor, 1 - rank)
    dist.barrier()
    work = (dist.isend if rank else dist.irecv)(tensor, 1 - rank)
    if rank:
        sys.exit(0)
    try:
        work.wait()
    except PeerLost:
        pass
    print("ended", flush=True)
    """
    ends = Scripts(zygote, tmp_path, "01", "", [text] * 2).ends()
    assert ends == [("ended\n", "", 0), ("", "", 0)]


@pytest.mark.long
@pytest.mark.parametrize("sender", [0, 1])  # which rank dials the other is decided by their ports
@pytest.mark.parametrize("then", ["ends", "destroys"])
def test_what_a_rank_sends_before_its_script_ends_arrives(
    zygote: IO[str], tmp_path: Path, sender: int, then: str
) -> None:
    text = f"""
    box = torch.full((30_000,), 7.0)
    dist.barrier()
    if rank == {sender}:
        dist.send(box, 1 - rank)
        if how == "destroys":  # the last group, so nothing of this process answers others any more
            dist.destroy_process_group()
    else:
        time.sleep(1.5)  # longer than a rank that leaves waits before it goes on; nothing tells when it does
        dist.recv(box.zero_(), {sender})
        print(box.eq(7).all().item())
    """
    ends = Scripts(zygote, tmp_path, "01", then, [text] * 2).ends()
    assert ends == [("" if rank == sender else "True\n", "", 0) for rank in (0, 1)]


def test_script_that_ends_right_after_a_mismatch_prints_it(zygote: IO[str], tmp_path: Path) -> None:
    """Of the ranks of the first host one makes another call, which these two compare."""
    text = """
    from phalanx.c10d import leaving
    leaving.LAST_CALLS_S = 100.0  # a rank that leaves would wait a second, and a busy machine takes longer
    dist.broadcast(torch.ones(5 if rank == 1 else 4), last)
    """
    for _, err, _ in Scripts(zygote, tmp_path, "001", "", [text] * 3).ends()[:2]:
        assert "CollectiveMismatch: the ranks of a group called different operations" in err
        assert "rank 1: broadcast(float32[5], src=" in err


# The last rank ends, so that only rank 0 learns of it, which waits for a message of it; each of the others waits for
# the rank before itself, in a message or in a collective.
CHAIN = """
    try:
        dist.barrier()
        if rank == last:
            if "7" in how:
                raise ValueError(7)
            sys.exit()
        if rank and "barrier" in how:
            dist.barrier()
        else:
            dist.recv(torch.ones(8), (rank - 1) % size)
    except PeerLost as error:
        print(error.group_rank, error, flush=True)
        if "wrapped" in how:
            raise RuntimeError("the step failed") from error
        raise
"""


@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("0000", "0 message"),
        ("0011", "7 barrier"),
        ("0001", "7 wrapped, message"),
        *(pytest.param(place, "0 wrapped, barrier", marks=pytest.mark.long) for place in ("0000", "0001", "0111")),
    ],
)
def test_every_survivor_names_the_rank_that_ended_first(zygote: IO[str], tmp_path: Path, place: str, how: str) -> None:
    """Also those that wait for another one, which has failed for it."""
    *others, (_, err, of_last) = Scripts(zygote, tmp_path, place, how, [CHAIN] * 4).ends()
    failed = "7" in how
    assert of_last == failed, err
    for out, err, of_other in others:
        assert of_other == 1, err
        assert "rank 3 of the group" in out, out
        assert ("has failed (ValueError: 7 at " if failed else "left the group") in out, out
        assert "in order" not in out or not failed
