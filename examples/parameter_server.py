"""Train the sentiment classifier of text_classification.py with its parameters on parameter servers.

    phalanx run -n 4 examples/parameter_server.py --servers 1                     three trainers, one server
    phalanx run -n 4 examples/parameter_server.py --servers 2 --mode asynchronous
    phalanx run -n 3 examples/parameter_server.py --mode bounded --staleness 4
    phalanx run -n 3 examples/parameter_server.py --sparse                        embeddings are pulled by row

The last ranks are the servers. They call ``rpc.init()`` and nothing else; ``rpc.parameters()`` on the trainers puts the
parameters there. ``Parameters`` stands in the place of an optimizer: ``step()`` pushes the gradients and pulls the new
values. With synchronous updates the trainers take the steps that replicas (``world.data_parallel``) would take. In the
other modes each trainer's gradients are a step of their own, of a batch that is smaller by the number of trainers, so
the learning rate is smaller by its square root.

The last line on stdout is one JSON object with the results.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import phalanx
from phalanx import World, rpc
from phalanx.data.loader import sharded_loader
from text_classification import LR_DECAY, Classifier, evaluate_here, fingerprint, load_datasets, make_parser


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--servers", type=int, default=1, help="how many of the ranks are servers [%(default)s]")
    add("--mode", choices=("synchronous", "bounded", "asynchronous"), default="synchronous", help="[%(default)s]")
    add("--staleness", type=int, default=4, help="steps ahead of the slowest, for --mode bounded [%(default)s]")
    add("--sparse", action="store_true", help="pull and push only the rows of embeddings that a batch has")
    add("--checkpoint", type=Path, metavar="PATH", help="where servers keep their shards, each with its name added")
    return parser.parse_args()


def options_for(options: argparse.Namespace, trainers: int) -> dict[str, Any]:
    """What ``rpc.parameters`` gets, beside the model and the servers."""
    lr = options.lr if options.mode == "synchronous" else options.lr / math.sqrt(trainers)
    chosen: dict[str, Any] = {"optimizer": torch.optim.AdamW, "lr": lr, "mode": options.mode, "name": "classifier"}
    if options.mode == "synchronous":
        chosen["trainers"] = trainers
    if options.mode == "bounded":
        chosen["staleness"] = options.staleness
    if options.sparse:
        chosen |= {"sparse_optimizer": torch.optim.SparseAdam, "sparse_options": {"lr": lr}}
    return chosen | {"checkpoint": options.checkpoint}


def train(options: argparse.Namespace, trainer: int, trainers: int, servers: list[str]) -> dict[str, Any]:
    """Train on one trainer's share of the reviews. Returns its results; the model is evaluated on all held-out ones."""
    vocabulary, train_set, test_set = load_datasets(options.limit)
    loader = sharded_loader(
        train_set,
        options.batch_size // trainers,
        rank=trainer,
        world_size=trainers,
        shuffle=True,
        seed=options.seed,
        drop_last=True,
    )
    torch.manual_seed(options.seed)
    model = Classifier(len(vocabulary), options.dropout)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = options.sparse

    chosen = options_for(options, trainers)
    started = time.perf_counter()
    loss = torch.zeros(())
    with rpc.parameters(model, on=servers, **chosen) as trained:
        # One that joins late, or comes back, begins with the epoch in which the others are.
        per_epoch = len(loader) * (1 if options.mode == "synchronous" else trainers)
        loader.set_epoch(trained.steps // per_epoch)
        for epoch in range(loader.epoch, options.epochs):
            torch.manual_seed((options.seed * 10_000 + epoch + 1) * 10_000 + trainer)
            trained.set(lr=chosen["lr"] * LR_DECAY**epoch)
            model.train()
            for tokens, labels in loader:
                trained.zero_grad()
                loss = nn.functional.cross_entropy(model(tokens), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                trained.step()
            print(f"trainer {trainer}: epoch {epoch + 1}/{options.epochs}, step {trained.steps}", file=sys.stderr)
        seconds = time.perf_counter() - started
        trained.pull(rows=True)
    accuracy = evaluate_here(model, test_set) if trainer == 0 else 0.0
    results: dict[str, Any] = {"accuracy": accuracy, "loss": loss.item(), "train_seconds": seconds}
    results |= {"mode": options.mode, "trainers": trainers, "servers": len(servers), "steps": trained.steps}
    return results | {"held_out": len(test_set), "parameters_sha256": fingerprint(model)}


def run(world: World, options: argparse.Namespace) -> None:
    """A rank's part: the last ones serve, the others train."""
    trainers = world.world_size - options.servers
    if options.servers < 1 or trainers < 1:
        sys.exit(f"--servers {options.servers} of {world.world_size} ranks: at least one server and one trainer")
    if options.batch_size % trainers:
        sys.exit(f"--batch-size {options.batch_size} cannot be shared evenly by {trainers} trainers")
    rpc.init(timeout_s=600)
    if world.rank < trainers:
        servers = [f"worker{rank}" for rank in range(trainers, world.world_size)]
        world.print(json.dumps(train(options, world.rank, trainers, servers)))
    rpc.shutdown()  # servers serve until the trainers are done


def main() -> None:
    """Join the world, and train or serve."""
    options = parse_arguments()
    with phalanx.init(backend="phalanx") as world:
        run(world, options)


if __name__ == "__main__":
    main()
