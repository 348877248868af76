"""Training by torchft: a replica is killed in the middle of a step, and another one joins the running training.

Usage: torchft_steps.py FOLDER RANKS recipe|native; starts a lighthouse and RANKS replicas, and one more in the place of
the last, which is killed. Their process group is ``ProcessGroupPhalanx`` of a module ``recipe`` in FOLDER, or torch's
own, made with ``enable_reconfigure=True`` (torch 2.15). Each replica that reaches the end leaves in FOLDER what it has
trained.
"""

import importlib
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer

FATAL_STEP = 3  # in which the last replica dies
TOGETHER = 8  # the training ends after so many steps of all replicas
ALONE = 3  # the next replica is started after so many steps of the others
TIMEOUT = timedelta(seconds=120)


def batch(step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + part)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


def await_file(path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"there is no {path}")
        time.sleep(0.05)


def group_of(made_by: str, ranks: int, rank: int, meeting_port: int) -> Any:
    """The process group that a Manager is given."""
    if made_by == "recipe":
        return importlib.import_module("recipe").ProcessGroupPhalanx(timeout=TIMEOUT)
    meeting = TCPStore("localhost", meeting_port, is_master=False, wait_for_workers=False)
    dist.init_process_group(  # type: ignore[call-arg] # torch 2.15
        "phalanx", store=meeting, rank=rank, world_size=ranks, timeout=TIMEOUT, enable_reconfigure=True
    )
    return dist.group.WORLD


def replica(folder: str, ranks: int, made_by: str, rank: int, meeting_port: int, lighthouse: str, life: str) -> None:
    process_group = group_of(made_by, ranks, rank, meeting_port)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0 if life == "first" else 1)  # one that comes later has its state from the others
    first = torch.nn.Linear(6, 16)
    model = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    history: list[int] = []  # of each step that counted, how many replicas took part in it

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])
        history[:] = state["history"]

    manager = Manager(
        process_group,
        load_state_dict=load_state,
        state_dict=lambda: {
            "model": model.state_dict(),
            "optimizer": sgd.state_dict(),
            "history": list(history),
        },
        min_replica_size=ranks - 1,
        init_sync=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{rank}",
        hostname="localhost",
    )
    if life == "second":
        Path(folder, "come").touch()
    else:  # two of three would begin alone, and come to the end of their steps alone before one is killed
        Path(folder, f"manager {rank}").touch()
        for each in range(ranks):
            await_file(Path(folder, f"manager {each}"))
    # Several buckets, so that some gradients are averaged before the replica dies.
    ddp = DistributedDataParallel(manager, model, bucket_cap_mb=1e-6)
    optimizer = Optimizer(manager, sgd)
    failed = 0

    def die(_: torch.Tensor) -> None:
        if rank == ranks - 1 and life == "first" and manager.current_step() == FATAL_STEP:
            os.kill(os.getpid(), signal.SIGKILL)

    first.weight.register_hook(die)  # the last gradient but one
    while history.count(ranks) < TOGETHER:
        optimizer.zero_grad()
        part = manager.participating_rank() or 0
        x, y = batch(manager.current_step(), part)
        torch.nn.functional.mse_loss(ddp(x), y).backward()
        step = manager.current_step()
        optimizer.step()
        if manager.current_step() == step:
            failed += 1
            continue
        history.append(manager.num_participants())
        if history.count(ranks - 1) == ALONE:
            Path(folder, "gone on").touch()
            await_file(Path(folder, "come"))
    torch.save(
        {
            "rank": rank,
            "pid": os.getpid(),
            "life": life,
            "group": type(process_group.parent if made_by == "recipe" else process_group).__name__,
            "history": history,
            "failed": failed,
            "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]),
        },
        f"{folder}/{rank}.pt",
    )
    manager.shutdown(wait=False)
    process_group.shutdown()


def main() -> None:
    folder, ranks, made_by = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    sys.path.insert(0, folder)
    if len(sys.argv) > 4:
        rank, meeting_port, lighthouse, life = sys.argv[4:]
        replica(folder, ranks, made_by, int(rank), int(meeting_port), lighthouse, life)
        return
    meeting = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # where the ranks of each group meet
    server = LighthouseServer("[::]:0", min_replicas=ranks - 1, join_timeout_ms=60_000, heartbeat_timeout_ms=5_000)

    def start(rank: int, life: str) -> subprocess.Popen[bytes]:
        places = [folder, str(ranks), made_by, str(rank), str(meeting.port), server.address(), life]
        return subprocess.Popen([sys.executable, __file__, *places])

    replicas = [start(rank, "first") for rank in range(ranks)]
    try:
        assert replicas[-1].wait() == -signal.SIGKILL
        await_file(Path(folder, "gone on"))
        replicas[-1] = start(ranks - 1, "second")
        assert [each.wait() for each in replicas] == [0] * ranks
    finally:
        for each in replicas:
            each.kill()
            each.wait()
    server.shutdown()


if __name__ == "__main__":
    main()
