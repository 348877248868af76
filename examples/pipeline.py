"""Train a deep sentiment classifier whose layers are cut into stages on different ranks: a pipeline.

    phalanx run -n 2 examples/pipeline.py                              one stage on each rank
    phalanx run -n 4 examples/pipeline.py --schedule ZBVZeroBubble     two stages on each rank
    phalanx run -n 3 examples/pipeline.py --schedule rpc               stages that call each other
    phalanx run --rehearse 2x2 examples/pipeline.py                    as if on two hosts

Each batch is cut into micro-batches, so that a stage works on one while the next stage works on another. A schedule
says in which order a rank computes them forward and backward. Those of torch.distributed.pipelining send tensors from
rank to rank over the backend. With ``--schedule rpc`` the stages are remote objects that rank 0 makes: each calls the
next, and distributed autograd brings the gradients back.

The gradients of the micro-batches are added up before the optimizers take a step. So with ``--dropout 0``, every
schedule on any number of ranks ends with the same parameters except for rounding, also on one rank.

The last line on stdout is one JSON object with the results.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining
from torch.nn.functional import cross_entropy

import phalanx
from phalanx import World, rpc
from phalanx.data.loader import sharded_loader
from text_classification import (
    LABELS,
    LR_DECAY,
    Classifier,
    evaluate_here,
    fingerprint,
    load_datasets,
    make_parser,
    ngram_scores,
)

ONE_STAGE = ("GPipe", "1F1B")  # schedules for one stage on each rank; those for two follow
LOOPS = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")  # of 3 ranks, rank 0 has the stages 0 and 3
FOLDED = ("ZBVZeroBubble", "DualPipeV")  # of 3 ranks, rank 0 has the stages 0 and 5
SCHEDULES = (*ONE_STAGE, *LOOPS, *FOLDED, "rpc")
LAYERS, CHANNELS = 8, 32


class First(nn.Module):
    """The embeddings of the characters, and the scores by n-grams."""

    def __init__(self, characters: int, dropout: float) -> None:
        super().__init__()
        shallow = Classifier(characters, dropout, CHANNELS)
        self.embedding, self.ngrams, self.dropout = shallow.embedding, shallow.ngrams, shallow.dropout

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is known of each character, (texts, channels, characters), and the scores of each text."""
        embedded = self.embedding(tokens).transpose(1, 2).contiguous()
        return embedded, ngram_scores(tokens, self.ngrams, self.dropout)


class Block(nn.Module):
    """Adds to what is known of each character what its neighbours say of it, and to the scores what that means."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(CHANNELS, len(LABELS))

    def forward(self, known: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as it got, with its own added."""
        known = known + self.convolution(known).relu()
        return known, scores + self.output(self.dropout(known.amax(dim=-1)))


class Last(Block):
    """The last block, of which only the scores are wanted."""

    def forward(self, known: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The scores, (texts, labels)."""
        return super().forward(known, scores)[1]


class Layers(nn.ModuleList):
    """Layers, each of which is called with what the one before has returned: a stage, or all of them."""

    def forward(self, *values: Any) -> Any:
        """What the last of them returns."""
        for layer in self:
            values = layer(*values)
        return values

    def cut(self, stages: int) -> list[Layers]:
        """The layers of each stage, about equally many."""
        return [
            Layers(self[start:end])
            for start, end in pairwise(len(self) * stage // stages for stage in range(stages + 1))
        ]


def make_layers(characters: int, dropout: float, seed: int) -> Layers:
    """All layers, with the same values on every rank."""
    torch.manual_seed(seed)
    blocks = (Block(dropout) for _ in range(LAYERS - 2))
    return Layers([First(characters, dropout), *blocks, Last(dropout)])


class Scheduled:
    """A pipeline by one of torch's schedules, which all ranks run.

    Args:
        world: the ranks.
        layers: all of them; those of this rank's stages are trained.
        options: of the command line.
    """

    def __init__(self, world: World, layers: Layers, options: argparse.Namespace) -> None:
        self._world = world
        stages, mine = stages_of(world.rank, world.world_size, options.schedule)
        self._layers = {stage: part for stage, part in enumerate(layers.cut(stages)) if stage in mine}
        parts = [pipelining.PipelineStage(part, at, stages, world.device) for at, part in self._layers.items()]
        self._has_first = 0 in mine
        schedule: Any = pipelining.schedules.get_schedule_class(options.schedule)
        self._schedule = schedule(
            parts[0] if options.schedule in ONE_STAGE else parts,
            n_microbatches=options.micro_batches,
            loss_fn=cross_entropy,
        )
        parameters = [parameter for part in self._layers.values() for parameter in part.parameters()]
        self._optimizer = torch.optim.AdamW(parameters, lr=options.lr)

    def step(self, tokens: torch.Tensor, labels: torch.Tensor, lr: float) -> None:
        """Train with one batch, the same on every rank."""
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.zero_grad()
        arguments = (tokens,) if self._has_first else ()  # the other stages get what the ones before them send
        self._schedule.step(*arguments, target=labels, return_outputs=False)
        self._optimizer.step()

    def states(self) -> list[dict[str, torch.Tensor]]:
        """The parameters of all stages, on rank 0; all ranks must call it."""
        states: dict[int, dict[str, torch.Tensor]] = {}
        for some in self._world.gather_object({at: part.state_dict() for at, part in self._layers.items()}) or ():
            states |= some
        return [states[at] for at in sorted(states)]


def stages_of(rank: int, ranks: int, schedule: str) -> tuple[int, tuple[int, ...]]:
    """How many stages there are, and which ones a rank has."""
    if schedule in LOOPS:
        return 2 * ranks, (rank, rank + ranks)
    if schedule in FOLDED:
        return 2 * ranks, (rank, 2 * ranks - 1 - rank)
    return ranks, (rank,)


class RemoteStage:
    """A stage that others call, with the optimizer of its parameters."""

    def __init__(self, layers: Layers, lr: float, following: Any) -> None:
        self._layers, self._following = layers, following
        self._optimizer = torch.optim.AdamW(layers.parameters(), lr=lr)
        self._lock = threading.Lock()

    def forward(self, *values: torch.Tensor) -> Any:
        """The scores of a micro-batch, from this stage and those that follow it."""
        with self._lock:  # one micro-batch at a time; meanwhile the next stage has the one before
            values = self._layers(*values)
        return self._following.forward(*values) if self._following is not None else values

    def step(self, context_id: int, lr: float) -> None:
        """Take a step with the gradients of a context."""
        gradients = rpc.get_gradients(context_id)
        for parameter in self._layers.parameters():
            parameter.grad = gradients[parameter]
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """The stage's parameters."""
        return self._layers.state_dict()


class Remote:
    """A pipeline of stages that call each other, which rank 0 runs."""

    def __init__(self, world: World, layers: Layers, options: argparse.Namespace) -> None:
        self._stages: list[Any] = []
        self._micro_batches = options.micro_batches
        for rank, part in reversed(list(enumerate(layers.cut(world.world_size)))):
            following = self._stages[0] if self._stages else None
            self._stages.insert(0, rpc.make(rank, RemoteStage, part, options.lr, following, serial=False))

    def step(self, tokens: torch.Tensor, labels: torch.Tensor, lr: float) -> None:
        """Train with one batch."""
        with rpc.context() as context_id:
            under_way = [self._stages[0].start.forward(part) for part in tokens.chunk(self._micro_batches)]
            scores = torch.cat([each.wait() for each in under_way])
            rpc.backward(context_id, [cross_entropy(scores, labels)])
            for stepping in [stage.start.step(context_id, lr) for stage in self._stages]:
                stepping.wait()

    def states(self) -> list[dict[str, torch.Tensor]]:
        """The parameters of all stages."""
        return [stage.state() for stage in self._stages]


def train(world: World, kind: type[Scheduled] | type[Remote], options: argparse.Namespace) -> dict[str, Any]:
    """Train; the results, which are right on rank 0."""
    vocabulary, train_set, test_set = load_datasets(options.limit)
    # Every rank reads all batches: the first stage needs the tokens, and the last one the labels.
    share: dict[str, Any] = {"rank": 0, "world_size": 1, "shuffle": True, "seed": options.seed}
    loader = sharded_loader(train_set, options.batch_size, drop_last=True, **share)
    layers = make_layers(len(vocabulary), options.dropout, options.seed)
    pipeline = kind(world, layers, options)
    accuracy = seconds = 0.0
    for epoch in range(options.epochs):
        torch.manual_seed((options.seed * 10_000 + epoch + 1) * 10_000 + world.rank)
        layers.train()
        started = time.perf_counter()
        for tokens, labels in loader:
            pipeline.step(tokens, labels, options.lr * LR_DECAY**epoch)
        seconds += time.perf_counter() - started
        states = pipeline.states()
        if world.rank == 0:
            for part, state in zip(layers.cut(len(states)), states, strict=True):
                part.load_state_dict(state)
            accuracy = evaluate_here(layers, test_set)
            print(f"epoch {epoch + 1}/{options.epochs}  held-out accuracy {accuracy:.4f}", file=sys.stderr)
    results = {"accuracy": accuracy, "schedule": options.schedule, "ranks": world.world_size, "train_seconds": seconds}
    return results | {"held_out": len(test_set), "parameters_sha256": fingerprint(layers)}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1F1B", help="[%(default)s]")
    parser.add_argument("--micro-batches", type=int, default=8, help="in a batch [%(default)s]")
    return parser.parse_args()


def check(world: World, options: argparse.Namespace) -> None:
    """Refuse what cannot work."""
    if options.micro_batches < 1 or options.batch_size % options.micro_batches:
        sys.exit(f"--batch-size {options.batch_size} cannot be cut into {options.micro_batches} equal --micro-batches")
    stages = stages_of(0, world.world_size, options.schedule)[0]
    if stages > LAYERS:
        sys.exit(f"{world.world_size} ranks have {stages} stages with --schedule {options.schedule}: {LAYERS} at most")


def main() -> None:
    """Join the world and train."""
    options = parse_arguments()
    with phalanx.init(backend="phalanx") as world:
        check(world, options)
        if options.schedule == "rpc":
            rpc.init()
            results = train(world, Remote, options) if world.rank == 0 else {}
            rpc.shutdown()  # the stages serve until rank 0 is done
        else:
            results = train(world, Scheduled, options)
        world.print(json.dumps(results))
        following = SCHEDULES[(SCHEDULES.index(options.schedule) + 1) % len(SCHEDULES)]
        world.print(f"To compare: --schedule {following}", file=sys.stderr)


if __name__ == "__main__":
    main()
