"""The time that data parallelism adds to a training step, over backend phalanx and over Gloo.

The model is an embedding bag with eight million parameters and next to no arithmetic, so a step is mostly the exchange
of gradients: the worst case. Each rank runs one thread and steps four copies of the model in turn, in every round: one
without DDP, one under DDP over Phalanx, one of ``world.data_parallel`` (``shared``, since its buckets are), one under
DDP over Gloo. DDP adds the difference to the step without it.

    python benchmarks/ddp_step.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from phalanx.parallel.data_parallel import data_parallel

ROWS, WIDTH, BATCH, WORDS = 131_072, 64, 64, 16


class Bag(torch.nn.Module):
    """131,072 x 64 numbers, of which a step reads a thousand rows and for all of which it has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(ROWS, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Logits of shape (batch, 2) for word numbers of shape (batch, words)."""
        logits: torch.Tensor = self.head(self.bag(words))
        return logits


def measure(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Measure, on one rank; rank 0 writes the milliseconds per step of each copy."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = FileStore(f"{folder}/store", options.ranks)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=options.ranks)
    torch.manual_seed(0)
    ways: dict[str, torch.nn.Module] = {"alone": Bag()}
    for backend in ("phalanx", "gloo"):
        ways[backend] = DistributedDataParallel(
            Bag(), process_group=dist.new_group(backend=backend), gradient_as_bucket_view=True
        )
        if backend == "phalanx":
            group = dist.new_group(backend=backend)
            ways["shared"] = data_parallel(Bag(), group, torch.device("cpu"), gradient_as_bucket_view=True)
    words = torch.randint(ROWS, (BATCH, WORDS))
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(options.rounds + 1):
        for way, model in ways.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(options.steps):
                model.zero_grad(set_to_none=False)
                model(words).sum().backward()
            if turn:  # the first round is not counted: it makes buckets and connections
                samples[way].append((time.perf_counter() - started) / options.steps * 1e3)
    if rank == 0:
        with open(f"{folder}/results", "w") as file:
            json.dump(samples, file)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Parse the command line, run the ranks, print how long a step takes with each copy and what DDP adds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="steps per round and way")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every sample")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start_processes(measure, (options, folder), nprocs=options.ranks, start_method="fork")
        with open(f"{folder}/results") as file:
            samples: dict[str, list[float]] = json.load(file)
    if options.json:
        print(json.dumps({"ranks": options.ranks, "torch": torch.__version__, "milliseconds": samples}))
        return
    alone = statistics.median(samples["alone"])
    print(
        f"{ROWS * WIDTH / 1e6:.1f} million parameters, {options.ranks} ranks of one thread, torch {torch.__version__}"
    )
    for way, values in samples.items():
        median = statistics.median(values)
        print(f"{way:>8}: {median:7.2f} ms a step ({min(values):.2f}–{max(values):.2f}), adds {median - alone:6.2f} ms")
    added = {way: statistics.median(samples[way]) - alone for way in ("phalanx", "shared", "gloo")}
    of_gloo = [f"{way} adds {added[way] / added['gloo']:.2f}" for way in ("phalanx", "shared")]
    print(f"{', '.join(of_gloo)} of what Gloo adds")


if __name__ == "__main__":
    main()
