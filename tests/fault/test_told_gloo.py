"""What ``phalanx run`` says of mistakes that Gloo lets pass, or waits in, held word for word against golden texts."""

from __future__ import annotations

import signal

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.faults import PASSES, known_of
from tests.support.golden import await_told, check_told

__all__ = ["launcher"]  # a fixture


@pytest.mark.parametrize("row", ["dtype", "operation", "gathered", "scattered", "swapped", "skipped"])
def test_a_mistake_that_passes_is_said_once(launcher: Launcher, row: str) -> None:
    script = launcher.script(PASSES)
    done = launcher.run("-n", "3", "-q", "--warn-after", "0", script, str(launcher.directory), "gloo", row)
    assert done.code == 0, done.err_text
    facts = known_of(launcher.directory, script, PASSES, 3)
    told = [line for line in done.err_text.splitlines() if not line.startswith("[rank ")]  # torch's warnings
    check_told(f"{row}.gloo", "\n".join(told), facts)


def test_nothing_is_said_of_lines_if_the_user_wants_that(launcher: Launcher) -> None:
    script = launcher.script(PASSES)
    arguments = ("-n", "3", "-q", "--warn-after", "0", script, str(launcher.directory), "gloo", "swapped")
    done = launcher.run(*arguments, environment={"PHALANX_CALL_SITES": "ignore"})
    assert (done.code, "phalanx: " in done.err_text) == (0, False), done.err_text


# Calls that differ between ranks and belong together all the same.
RIGHT = """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.join import Join

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1]  # which torch makes with DDP
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    x, parts, objects, lengths = torch.ones(4), [torch.empty(4) for _ in range(size)], [None] * size, range(1, size + 1)

    def log():
        dist.reduce(x, 0)

    for step in range(10):
        if step % size == rank:
            dist.broadcast(x, rank)
        else:
            dist.broadcast(x, step % size)
        dist.reduce(x, step % size)
        first, second = dist.all_reduce(x, async_op=True), dist.all_reduce(x, async_op=True)
        second.wait()
        first.wait()
        dist.gather(x, parts if rank == 0 else None, 0)
        dist.scatter(x, parts if rank == 1 else None, 1)
        dist.all_gather_object(objects, "x" * rank)
        dist.gather_object(rank, objects if rank == 0 else None, 0)
        dist.broadcast_object_list([step] if rank == 0 else [None], 0)
        ours = [rank + 1] * size  # of all_to_all: to each as many as this rank's number says
        # Of a reduce_scatter each rank keeps as many as its number says.
        dist.reduce_scatter(torch.empty(rank + 1), [torch.ones(length) for length in lengths])
        dist.all_to_all_single(torch.empty(sum(lengths)), torch.ones(sum(ours)), [*lengths], ours)
        dist.monitored_barrier()
        if rank == 0:
            log()
        else:
            dist.reduce(x, 0)
    few, others = dist.new_group([0, 2]), dist.new_group([1, 2])
    if rank != 1:
        dist.all_reduce(x, group=few)
    if rank != 0:
        dist.all_reduce(x.double(), group=others)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    with Join([model]):
        for _ in range(2 + rank):
            model(torch.ones(3, 4)).sum().backward()
    dist.barrier()
"""


def test_a_program_that_is_right_is_not_warned_of(launcher: Launcher) -> None:
    script = launcher.script(RIGHT)
    done = launcher.run("-n", "3", "-q", "--warn-after", "0", script, str(launcher.directory / "cache"))
    assert (done.code, "phalanx: " in done.err_text) == (0, False), done.err_text


@pytest.mark.parametrize("row", ["root", "kind", "batches"])
def test_calls_that_differ_are_listed_while_the_ranks_wait(launcher: Launcher, row: str) -> None:
    script = launcher.script(PASSES)
    said = launcher.directory / "said"
    with open(said, "wb") as err:
        arguments = ("--warn-after", "0.5", script, str(launcher.directory), "gloo", row)
        job = launcher.start("-n", "3", "-q", *arguments, stderr=err)

    await_told(
        f"waits-{row}.gloo",
        said.read_text,
        lambda: known_of(launcher.directory, script, PASSES, 3),
        lambda: job.process.poll() is not None,
    )
    job.process.send_signal(signal.SIGINT)
    job.finish()
