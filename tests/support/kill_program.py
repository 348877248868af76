"""The program of the kill matrix: a rank does one operation, and one rank falls before, in or after it.

Every rank runs it, with the case and a folder as arguments (``kill_cases.py``). It leaves files there: ``joined-R``
when it has a group that is to stay unconnected, ``ready-R`` when it begins the operation, ``fell`` when the fault
begins, ``outcome-R`` with what it raised or that it came through.

How a moment is met:

- *before* the call: the others call, and the actor does not.
- *first*, inside the call, before any rank can have got beyond its first chunk: one rank comes late, and the actor
  falls while it waits for that one. For ``close``, which waits for nobody, it is at a random time within the call.
- *between* chunks: calls of many chunks follow each other without a pause, and the actor falls at a random time. Which
  chunk that is, nobody chooses; few of the falls are between two calls.
- *after* the call, before the next one.

The actor is the victim, or, where the launcher or the zygote is, a rank that asks the test to strike by ``fell``.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

import phalanx

LATE_S = 0.6
FALLS_WITHIN_S = (0.05, 0.35)  # of a call, or of the first of several; the late rank comes after that
CLOSING_S = 0.005
SMALL, LARGE = 8, 4_000_000
EXIT_CODE = 3
BY_HANDLER = ("exception", "exit(0)")
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGSEGV": signal.SIGSEGV}

case = json.loads(sys.argv[1])
folder = Path(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
acts = rank == case["actor"]
late = case["late"]
chance = case["chance"]
fallen = False


def put(name: str, what: object) -> None:
    """Leave a file, whole or not at all."""
    part = folder / f"{name}.part-{rank}"
    part.write_text(json.dumps(what))
    part.rename(folder / name)


class Fell(ValueError):
    """The victim's exception."""


def fall() -> None:
    """The fault, in this thread."""
    global fallen
    fallen = True
    put("fell", {"at": time.time(), "pid": os.getpid()})
    fault = case["fault"]
    if not case["of_rank"]:
        return  # the test strikes
    if fault in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault])
        if fault != "SIGSTOP":
            time.sleep(600)  # never beyond a signal that is on its way
    elif fault == "os._exit":
        os._exit(EXIT_CODE)
    elif fault == "exit(0)":
        sys.exit(0)
    else:
        raise Fell("the victim fell")


def look_whether_fallen() -> None:
    """Fall once more if an exception was lost: Python ignores those that a handler raises within a finaliser."""
    if fallen and case["of_rank"] and case["fault"] in BY_HANDLER:
        fall()


def fall_later(delay_s: float) -> None:
    """Fall in a moment, whatever the main thread is in then; an exception comes from a handler of a signal."""
    if case["of_rank"] and case["fault"] in BY_HANDLER:
        signal.signal(signal.SIGALRM, lambda *_: fall())
        signal.setitimer(signal.ITIMER_REAL, delay_s)
    else:
        threading.Timer(delay_s, fall).start()


def parts(count: int) -> list[torch.Tensor]:
    return [torch.empty(count) for _ in range(size)]


def exchange(count: int) -> None:
    """A message to the next rank, and one from the rank before."""
    works = [dist.isend(torch.ones(count), (rank + 1) % size), dist.irecv(torch.empty(count), (rank - 1) % size)]
    for work in works:
        assert work is not None
        work.wait()


def step(count: int) -> None:
    """A step of data-parallel training, whose gradients fill several buckets if they are many."""
    model = models[count]
    model(torch.ones(4, 64)).sum().backward()
    model.zero_grad()


# Nobody waits for the readers of a broadcast: the source is the rank that comes late, or another one than the actor.
OPERATIONS: dict[str, Callable[[int], object]] = {
    "all_reduce": lambda count: dist.all_reduce(torch.ones(count)),
    "broadcast": lambda count: dist.broadcast(torch.ones(count), late),
    "all_gather": lambda count: dist.all_gather(parts(count // 4), torch.ones(count // 4)),
    "messages": exchange,
    "barrier": lambda count: dist.barrier(),
    "objects": lambda count: dist.all_gather_object([None] * size, b"x" * count),
    "DDP step": step,
    "init": lambda count: phalanx.init(case["backend"], timeout_s=300),
    "close": lambda count: phalanx.close(),
}
models: dict[int, torch.nn.Module] = {}


def make_ready() -> None:
    """Join the others, and connect with each of them unless the case says that nobody has."""
    phalanx.init(case["backend"], timeout_s=300)
    if case["operation"] == "DDP step":
        for count, width in ((SMALL, 8), (LARGE, 20_000)):
            layers = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.Linear(width, 64))
            models[count] = DistributedDataParallel(layers, bucket_cap_mb=1)
            step(count)
    if case["connected"]:
        exchange(SMALL)
        dist.barrier()
    else:
        await_all()
    _set_pg_timeout(timedelta(seconds=case["timeout_s"]))
    if case["connected"]:
        dist.barrier()


def await_all() -> None:
    """Return when all have joined, which they tell by files: a call would connect them."""
    put(f"joined-{rank}", os.getpid())
    while not all((folder / f"joined-{other}").exists() for other in range(size)):
        time.sleep(0.005)


def perform() -> None:
    operation, moment = OPERATIONS[case["operation"]], case["moment"]
    count = LARGE if moment == "between" else SMALL
    if moment == "before" and acts:
        fall()
    if moment == "first":
        if acts:
            begin, end = (0.0, CLOSING_S) if case["operation"] == "close" else FALLS_WITHIN_S
            fall_later(begin + chance * (end - begin))
        elif rank == late:
            time.sleep(LATE_S)
    if moment == "between":
        if acts:
            fall_later(chance * FALLS_WITHIN_S[1])
        while True:
            operation(count)
            look_whether_fallen()
    operation(count)
    if moment == "after" and acts:
        fall()


def stay() -> None:
    """Be in calls until one fails; without a group, until this rank has fallen, or somebody ends the job."""
    if dist.is_initialized():
        while True:
            look_whether_fallen()
            dist.barrier()
    while not case["of_rank"] or (acts and not fallen):
        time.sleep(0.01)
    look_whether_fallen()


def told(error: BaseException) -> dict[str, Any]:
    known = {name: getattr(error, name, None) for name in ("group_rank", "rank", "pid", "host")}
    return {"error": type(error).__name__, "text": str(error), "at": time.time(), **known}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if case["survivors_wait"] and not acts:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # they have to learn of it by themselves
    try:
        if case["operation"] != "init":
            make_ready()
        put(f"ready-{rank}", os.getpid())
        perform()
        stay()
        put(f"outcome-{rank}", {"error": None, "text": "", "at": time.time()})
    except BaseException as error:
        put(f"outcome-{rank}", told(error))
        raise


if __name__ == "__main__":
    main()
