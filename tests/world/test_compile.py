"""``torch.compile`` around the backend: compiled data parallelism, and collectives in compiled functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # before the ranks are forked: it takes each of them seconds
import torch._functorch.aot_autograd
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from phalanx.group import Group, Session

SIZES = (1, 2, 3)
Program = Callable[[torch.Tensor], torch.Tensor]


def losses(place: Member, group: Any, compiler: str) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    model = torch.compile(DistributedDataParallel(net, process_group=group), backend=compiler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(place.rank)
    found = []
    for _ in range(3):
        batch = torch.randn(6, 4, generator=generator)
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def train(size: int, compiler: str) -> None:
    def body(place: Member) -> None:
        place.join()
        over_gloo = losses(place, dist.new_group(backend="gloo"), compiler)
        assert losses(place, dist.group.WORLD, compiler) == pytest.approx(over_gloo, rel=1e-6)
        dist.destroy_process_group()

    on_ranks(body, size)


@pytest.mark.parametrize("size", SIZES)
def test_compiled_data_parallelism_trains_as_over_gloo(size: int) -> None:
    train(size, "aot_eager")


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES)
def test_inductor_trains_as_over_gloo(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    train(size, "inductor")


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 3))])
def test_collectives_work_in_compiled_functions_and_after_graph_breaks(size: int) -> None:
    def body(place: Member) -> None:
        place.join()
        n, rank, root = place.size, place.rank, place.rank == 0
        right, left = (rank + 1) % n, (rank - 1) % n
        pg: Any = dist.group.WORLD
        world = Group(pg, range(n), Session(frozenset({"cpu"})))

        def parts(x: torch.Tensor) -> list[torch.Tensor]:
            return [x + r for r in range(n)]

        def rows() -> list[torch.Tensor]:
            return [torch.zeros(4) for _ in range(n)]

        def wait(work: dist.Work | None) -> None:
            if work is not None:
                work.wait()

        def all_reduce(x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x)
            return x

        def all_reduce_max_asynchronously(x: torch.Tensor) -> torch.Tensor:
            wait(dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True))
            return x

        def reduce(x: torch.Tensor) -> torch.Tensor:
            dist.reduce(x, dst=0)
            return x

        def broadcast(x: torch.Tensor) -> torch.Tensor:
            dist.broadcast(x, src=n - 1)
            return x

        def gather(x: torch.Tensor) -> torch.Tensor:
            gathered = rows()
            dist.gather(x, gathered if root else None, dst=0)
            return torch.stack(gathered)

        def scatter(x: torch.Tensor) -> torch.Tensor:
            output = torch.zeros(4)
            dist.scatter(output, parts(x) if root else None, src=0)
            return output

        def all_gather(x: torch.Tensor) -> torch.Tensor:
            gathered = rows()
            dist.all_gather(gathered, x)
            dist.barrier()
            return torch.stack(gathered)

        def all_to_all(x: torch.Tensor) -> torch.Tensor:
            gathered = rows()
            dist.all_to_all(gathered, parts(x))
            return torch.stack(gathered)

        def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
            output = torch.zeros(4)
            dist.reduce_scatter(output, parts(x))
            return output

        def messages(x: torch.Tensor) -> torch.Tensor:
            if root:
                dist.send(x, dst=1)
            elif rank == 1:
                dist.recv(x, src=0)
            return x

        def messages_asynchronously(x: torch.Tensor) -> torch.Tensor:
            received = torch.zeros(4)
            sent, awaited = dist.isend(x, dst=right), dist.irecv(received, src=left)
            wait(sent)
            wait(awaited)
            return received

        def messages_in_a_batch(x: torch.Tensor) -> torch.Tensor:
            received = torch.zeros(4)
            both = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, received, left)]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            return received

        def functional_collectives(x: torch.Tensor) -> torch.Tensor:
            total = functional.all_reduce(x, "sum", dist.group.WORLD)
            return functional.all_gather_tensor(total, 0, dist.group.WORLD)

        def of_a_group(x: torch.Tensor) -> torch.Tensor:
            world.all_reduce(x)
            world.broadcast(x, src=0)
            wait(world.all_reduce(x, async_op=True))
            world.barrier()
            return x

        def in_a_new_group(x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x, group=dist.new_group(list(range(n))))
            return x

        programs: list[Program] = [all_reduce, all_reduce_max_asynchronously, reduce, broadcast, gather, scatter]
        programs += [all_gather, all_to_all, reduce_scatter, functional_collectives, of_a_group, in_a_new_group]
        if n > 1:
            programs += [messages, messages_asynchronously, messages_in_a_batch]
        for program in programs:

            def around(x: torch.Tensor, program: Program = program) -> torch.Tensor:
                y = x * 2 + 1
                print(end="")  # a graph ends here
                return program(y) * 3

            plain = around(torch.arange(4.0) + rank)
            torch._dynamo.reset()
            compiled = torch.compile(around, backend="eager")(torch.arange(4.0) + rank)
            assert compiled.tolist() == plain.tolist(), program.__name__
        dist.destroy_process_group()

    on_ranks(body, size)
