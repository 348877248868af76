"""Train the sentiment classifier with its embeddings on a server and the rest of it on replicas.

    phalanx run -n 3 examples/ddp_and_rpc.py     two replicas, and the last rank has the embeddings

A forward pass calls the server for what the embeddings say of the batch's tokens. Inside of ``rpc.context()`` gradients
go the same way back: ``rpc.backward`` computes those of the replica, which ``DistributedDataParallel`` averages over
the replicas meanwhile, and those of the embeddings on the server. The server takes a step when the gradients of all
replicas have come, so the training is that of text_classification.py with as many ranks as there are replicas.

The last line on stdout is one JSON object with the results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import phalanx
from phalanx import World, rpc
from phalanx.data.loader import sharded_loader
from text_classification import LR_DECAY, Classifier, evaluate_here, fingerprint, load_datasets, make_parser

EMBEDDINGS = ("embedding", "ngrams")


class Tables:
    """The embeddings of the classifier, on the server.

    Args:
        seed: of their values.
        characters: how many the vocabulary has.
        replicas: how many of them look rows up.
        lr: the learning rate.
    """

    def __init__(self, seed: int, characters: int, replicas: int, lr: float) -> None:
        torch.manual_seed(seed)
        model = Classifier(characters, dropout=0.0)
        self._tables = nn.ModuleDict({name: getattr(model, name) for name in EMBEDDINGS})
        self._optimizer = torch.optim.AdamW(self._tables.parameters(), lr=lr)
        self._replicas = replicas
        self._contexts: list[int] = []
        self._taken = asyncio.Event()

    def lookup(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The rows of one of the tables. In a context, gradients come back to it."""
        found: torch.Tensor = self._tables[name](rows)
        return found

    async def step(self, context_id: int, lr: float) -> None:
        """Take a step with the mean of the gradients of all replicas, each of which calls this from its context.

        It runs on the event loop of the worker, so no two calls are here at once, and nobody leaves its context before
        the step has been taken.
        """
        self._contexts.append(context_id)
        taken = self._taken
        if len(self._contexts) < self._replicas:
            await taken.wait()
            return
        gradients = [rpc.get_gradients(each) for each in self._contexts]
        for parameter in self._tables.parameters():
            parameter.grad = sum((found[parameter] for found in gradients), torch.zeros(())) / self._replicas
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._contexts, self._taken = [], asyncio.Event()
        taken.set()

    def fingerprint(self) -> str:
        """SHA-256 of the tables."""
        return fingerprint(self._tables)


class Lookup(nn.Module):
    """Stands for an embedding that lives on the server."""

    def __init__(self, tables: rpc.RemoteObject, name: str) -> None:
        super().__init__()
        self._tables, self._name = tables, name

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """What the embedding says of ``rows``."""
        found: torch.Tensor = self._tables.lookup(self._name, rows)
        return found


def train(world: World, group: phalanx.Group, options: argparse.Namespace) -> dict[str, Any]:
    """Train one replica; the results."""
    vocabulary, train_set, test_set = load_datasets(options.limit)
    per_replica = options.batch_size // group.size
    share: dict[str, Any] = {"rank": group.rank, "world_size": group.size, "shuffle": True, "seed": options.seed}
    loader = sharded_loader(train_set, per_replica, drop_last=True, **share)

    server = world.world_size - 1
    tables = (
        rpc.make(server, Tables, options.seed, len(vocabulary), group.size, options.lr) if group.rank == 0 else None
    )
    tables = group.broadcast_object(tables)
    torch.manual_seed(options.seed)
    plain = Classifier(len(vocabulary), options.dropout)
    for name in EMBEDDINGS:
        setattr(plain, name, Lookup(tables, name))
    model = DistributedDataParallel(plain, process_group=group.process_group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    started = time.perf_counter()
    loss = torch.zeros(())
    for epoch in range(options.epochs):
        torch.manual_seed((options.seed * 10_000 + epoch + 1) * 10_000 + group.rank)
        lr = optimizer.param_groups[0]["lr"] = options.lr * LR_DECAY**epoch
        plain.train()
        for tokens, labels in loader:
            with rpc.context() as context_id:
                loss = nn.functional.cross_entropy(model(tokens), labels)
                rpc.backward(context_id, [loss])
                gradients = rpc.get_gradients(context_id)
                for parameter in model.parameters():
                    parameter.grad = gradients[parameter]
                optimizer.step()
                tables.step(context_id, lr)
        print(f"replica {group.rank}: epoch {epoch + 1}/{options.epochs}", file=sys.stderr)
    seconds = time.perf_counter() - started
    accuracy = evaluate_here(plain, test_set) if group.rank == 0 else 0.0
    results = {"accuracy": accuracy, "loss": loss.item(), "train_seconds": seconds, "replicas": group.size}
    return results | {"held_out": len(test_set), "tables_sha256": tables.fingerprint()}


def main() -> None:
    """Join the world, and train or serve."""
    options = make_parser(__doc__).parse_args()
    with phalanx.init(backend="phalanx") as world:
        replicas = world.world_size - 1
        if replicas < 1 or options.batch_size % replicas:
            sys.exit(f"{world.world_size} ranks: one server, and replicas that share --batch-size evenly")
        group = world.split(0 if world.rank < replicas else None)
        rpc.init(timeout_s=600)
        if group is not None:
            world.print(json.dumps(train(world, group, options)))
        rpc.shutdown()  # the server serves until the replicas are done


if __name__ == "__main__":
    main()
