"""Workers on several hosts: a host that is cut off is lost within seconds; one whose worker is stopped is not."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from tests.support.hosts import TestHosts, running_hosts, why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

PATIENCE_S = 120.0
PORT = 29533
SCRIPT = """
    import ctypes, json, os, signal, threading, time
    from pathlib import Path
    import torch, phalanx
    from phalanx import rpc
    from phalanx.errors import CallTimeout, WorkerLost
    from phalanx.rpc import inquiry

    vars(inquiry)["_NEIGHBOUR_S"] = 20  # which may have to wait for a core

    folder = Path(os.environ["FOLDER"])

    def wait_for(name):
        until = time.monotonic() + 100
        while not (folder / name).exists():
            assert time.monotonic() < until, name
            time.sleep(0.01)

    def stop():
        pid = os.getpid()
        if os.fork() == 0:
            while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.01)
            (folder / "answers_nothing").touch()
            wait_for("go_on")
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        os.kill(pid, signal.SIGSTOP)

    def hold():
        ended = f"n=0; while [ ! -e {folder}/go_on -a $n -lt 600 ]; do n=$((n+1)); sleep 0.1; done"
        ctypes.PyDLL(None).system(f"touch {folder}/answers_nothing; {ended}".encode())

    def number(tensor):
        return tensor.numel()

    def cut(last):
        futures = [rpc.start(last, time.sleep, 90, timeout_s=80)]
        (folder / "cut").touch()
        wait_for("is_cut")
        began = time.monotonic()
        if os.environ["SENDS"] == "1":
            futures.append(rpc.start(last, number, torch.zeros(1000), timeout_s=80))
        lost = []
        for future in futures:
            try:
                future.wait()
            except WorkerLost as error:
                lost.append([error.worker, error.host])
        return time.monotonic() - began, lost

    def keep(last, how):
        future = rpc.start(last, how, timeout_s=80)
        wait_for("answers_nothing")
        try:
            rpc.call(last, number, torch.ones(3), timeout_s=2)
        except CallTimeout as error:
            answer = error.cause, error.at, str(error)
        threading.Timer(5, (folder / "go_on").touch).start()
        assert rpc.call(last, number, torch.zeros(1 << 24), timeout_s=80) == 1 << 24
        future.wait()
        return answer

    def body(world):
        if world.rank != 0:
            wait_for("over")
            return
        last = world.world_size - 1
        assert rpc.call(last, number, torch.ones(3)) == 3
        how = os.environ["HOW"]
        answer = cut(last) if how == "cut" else keep(last, {"stop": stop, "hold": hold}[how])
        print(json.dumps(answer), flush=True)
        (folder / "over").touch()

    world = phalanx.init()
    rpc.init()
    body(world)
    rpc.shutdown(timeout_s=20)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with running_hosts(2, tmp_path_factory.mktemp("hosts")) as made:
        yield made


class Job:
    """Rank 0 on the first host and the others on the second."""

    def __init__(self, hosts: TestHosts, folder: Path, size: int, **environment: str) -> None:
        self.hosts, self.folder = hosts, folder
        script = folder / "script.py"
        script.write_text(dedent(SCRIPT))
        self.runs = []
        for rank in range(size):
            at = {"MASTER_ADDR": "h0", "MASTER_PORT": str(PORT), "RANK": str(rank), "WORLD_SIZE": str(size)}
            host = min(rank, 1)
            out, err = folder / f"out-{rank}", folder / f"err-{rank}"
            number = hosts.zygotes[host].fork(script, {**at, "FOLDER": str(folder), **environment}, out, err)
            self.runs.append((host, number))

    def wait_for(self, name: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not (self.folder / name).exists():
            assert time.monotonic() < until, self.said()
            time.sleep(0.01)

    def said(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("err-*")))

    def answer(self) -> Any:
        """What rank 0 has printed, when it has ended."""
        until = time.monotonic() + PATIENCE_S
        while self.hosts.zygotes[0].code(self.runs[0][1]) is None:
            assert time.monotonic() < until, self.said()
            time.sleep(0.01)
        out = (self.folder / "out-0").read_text()
        assert out, self.said()
        return json.loads(out)


@pytest.fixture
def clean(hosts: TestHosts) -> Iterator[None]:
    yield
    hosts.mend()
    hosts.end_processes()


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("sends", [0, 1])
def test_a_host_that_is_cut_off_is_lost_within_seconds(hosts: TestHosts, tmp_path: Path, sends: int) -> None:
    job = Job(hosts, tmp_path, 2, HOW="cut", SENDS=str(sends))
    job.wait_for("cut")
    hosts.cut(1)
    (tmp_path / "is_cut").touch()
    elapsed_s, lost = job.answer()
    assert lost == [["worker1", "h1"]] * (1 + sends)
    assert elapsed_s < 20  # about 4 s on a quiet machine


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(("size", "how"), [(2, "stop"), (3, "stop"), (3, "hold")])
def test_a_worker_of_another_host_that_answers_nothing_is_told_by_its_neighbour(
    hosts: TestHosts, tmp_path: Path, size: int, how: str
) -> None:
    cause, at, text = Job(hosts, tmp_path, size, HOW=how).answer()
    if size == 2:
        assert (cause, at) == ("silent", "")
        assert "though its host answers" in text
    elif how == "stop":
        assert cause == "stopped"
        assert " on h1 lets it go on" in text
    else:
        assert cause == "interpreter"
