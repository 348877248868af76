"""Programs of torch and of training frameworks, unmodified, on two ranks: over Gloo, and over Phalanx in its place.

torch's needs nothing else. The others need their packages: ``make frameworks`` installs them into an environment of
their own and names it in PHALANX_FRAMEWORKS_VENV; without it they are skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

VARIABLE = "PHALANX_FRAMEWORKS_VENV"
PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]
COMPATIBILITY = ROOT / "docs" / "compatibility.md"
SOURCES = f"{ROOT / 'src'}:{ROOT}"
FOLDER = os.environ.get(VARIABLE)
PYTHON = str(Path(FOLDER, "bin", "python")) if FOLDER else sys.executable
SIZE = 2
OURS = "PhalanxProcessGroup"

# Each with the ways in which it is asked for gloo: by default, and by the framework's own setting.
FRAMEWORKS = [
    pytest.param("hf_trainer", "transformers", (), id="trainer"),
    pytest.param("hf_trainer", "transformers", ("gloo",), id="trainer, ddp_backend=gloo"),
    pytest.param("accelerate_loop", "accelerate", (), id="accelerate"),
    pytest.param("fabric_loop", "lightning", (), id="fabric"),
    pytest.param("fabric_loop", "lightning", ("gloo",), id="fabric, process_group_backend=gloo"),
    pytest.param("ignite_loop", "ignite", (), id="ignite"),
    pytest.param("deepspeed_zero", "deepspeed", (), id="deepspeed, ZeRO stage 1"),
]


@cache
def answers(python: str, question: str) -> bool:
    return subprocess.run([python, "-c", f"import sys; sys.exit(not ({question}))"], check=False).returncode == 0


def need(module: str) -> None:
    if not answers(PYTHON, f"__import__('importlib.util').util.find_spec({module!r})"):
        pytest.skip(f"{module} is not installed; make frameworks installs it, or name an environment in {VARIABLE}")


def started(folder: Path, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "PHALANX_REPLACE"))}
    path = os.pathsep.join([SOURCES, *filter(None, [own.get("PYTHONPATH")])])
    # Nothing is downloaded; and one thread, since a sum's order must not depend on how many there are.
    fixed = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**own, **fixed, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run(folder: Path, command: list[str], **variables: str) -> list[dict[str, Any]]:
    """Run a job whose ranks leave their results in ``folder``; what each has left, in rank order."""
    started(folder, command, **variables)
    return load(folder)


def load(folder: Path) -> list[dict[str, Any]]:
    """What each rank has left in ``folder``, in rank order."""
    found = sorted(folder.glob("*.pt"), key=lambda file: int(file.stem))
    results: list[dict[str, Any]] = [torch.load(file) for file in found]
    assert [result["rank"] for result in results] == list(range(len(results)))
    return results


def phalanx_run(
    folder: Path, program: str, *arguments: str, options: tuple[str, ...] = (), size: int = SIZE, python: str = PYTHON
) -> list[dict[str, Any]]:
    folder.mkdir()
    launch = [python, "-m", "phalanx", "run", "-q", "-n", str(size), *options]
    return run(folder, [*launch, str(PROGRAMS / f"{program}.py"), str(folder), *arguments])


def check_in_step(results: list[dict[str, Any]], group: str, size: int = SIZE) -> None:
    """All ranks of one world, the loss fallen, and the same parameters everywhere."""
    assert [result["world_size"] for result in results] == [size] * size
    assert [result["group"] for result in results] == [group] * size
    for result in results:
        losses = result["losses"]
        assert sum(losses[-4:]) < 0.2 * sum(losses[:4])
        assert torch.equal(result["parameters"], results[0]["parameters"])


def check_same_training(results: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """What two transports gave: the same but for the order of a sum."""
    for result, other in zip(results, others, strict=True):
        torch.testing.assert_close(result["parameters"], other["parameters"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.tensor(result["losses"]), torch.tensor(other["losses"]), rtol=1e-4, atol=1e-5)
        for name in {"evaluated", "gathered", "mean"} & set(result):
            assert result[name] == pytest.approx(other[name], rel=1e-4)


@pytest.mark.parametrize(("program", "module", "arguments"), FRAMEWORKS)
def test_framework_trains_over_gloo_and_over_phalanx(
    program: str, module: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    need(module)
    by_gloo = phalanx_run(tmp_path / "gloo", program, *arguments)
    check_in_step(by_gloo, "ProcessGroup")
    ours = phalanx_run(tmp_path / "ours", program, *arguments, options=("--replace", "gloo"))
    check_in_step(ours, OURS)
    check_same_training(ours, by_gloo)


@pytest.mark.parametrize(("framework", "module"), [("trainer", "transformers"), ("lightning", "lightning")])
def test_trainer_stops_in_step_by_the_callback_of_the_page(framework: str, module: str, tmp_path: Path) -> None:
    need(module)
    command = [PYTHON, "-m", "phalanx", "run", "-q", "--no-prefix", "-n", "2", str(PROGRAMS / "stop_in_step.py")]
    done = started(tmp_path, [*command, framework])
    left = {line for line in done.stdout.splitlines() if re.fullmatch(r"\d+ \['.*'\]", line)}
    assert len(left) == 1, done.stdout  # of both ranks
    steps, saved = left.pop().split(maxsplit=1)
    assert saved == (f"['checkpoint-{steps}']" if framework == "trainer" else "['last.ckpt']")
    assert int(steps) < 1000
    assert "on request (SIGUSR1 at rank 1)" in done.stderr


def test_ray_train_runs_on_phalanx_if_the_variable_says_so(tmp_path: Path) -> None:
    need("ray")
    by_gloo, ours = (tmp_path / name for name in ("gloo", "ours"))
    with tempfile.TemporaryDirectory(prefix="ray-") as sockets:  # whose paths may be 107 bytes long
        for folder, variables in ((by_gloo, {}), (ours, {"PHALANX_REPLACE": "gloo"})):
            folder.mkdir()
            program = [PYTHON, str(PROGRAMS / "ray_train.py"), str(folder), str(SIZE), sockets]
            run(folder, program, RAY_TRAIN_V2_ENABLED="1", RAY_USAGE_STATS_ENABLED="0", **variables)
    check_in_step(load(by_gloo), "ProcessGroup")
    check_in_step(load(ours), OURS)
    check_same_training(load(ours), load(by_gloo))


def trained_by_parts(history: list[int]) -> torch.Tensor:
    """What torchft_steps.py must come to, if so many replicas took part in each of its steps: their mean gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, parts in enumerate(history):
        optimizer.zero_grad()
        for part in range(parts):
            generator = torch.Generator().manual_seed(1000 * step + part)
            x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
            (torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin()) / parts).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("made_by", ["recipe", "native"])
def test_torchft_goes_on_without_a_killed_replica_and_takes_in_another(made_by: str, size: int, tmp_path: Path) -> None:
    need("torchft")
    if made_by == "native" and not answers(
        PYTHON, "hasattr(__import__('torch').distributed.ProcessGroup, 'reconfigure')"
    ):
        pytest.skip(f"groups whose ranks change need torch 2.15; name an environment that has it in {VARIABLE}")
    recipe = re.search(r"^```python\n([^`]*ProcessGroupPhalanx.*?)^```", COMPATIBILITY.read_text(), re.M | re.DOTALL)
    assert recipe, "docs/compatibility.md has no recipe for torchft"
    (tmp_path / "recipe.py").write_text(recipe[1])
    *others, newcomer = run(tmp_path, [PYTHON, str(PROGRAMS / "torchft_steps.py"), str(tmp_path), str(size), made_by])
    assert len(others) == size - 1
    for result in others:
        assert (result["life"], result["failed"] > 0) == ("first", True)
    assert newcomer["life"] == "second"
    history = newcomer["history"]
    assert set(history) >= {size - 1, size}
    for result in (*others, newcomer):
        assert result["group"] == (OURS if made_by == "recipe" else "ReconfigurableProcessGroup")
        assert result["history"] == history
        assert torch.equal(result["parameters"], newcomer["parameters"])
        torch.testing.assert_close(result["parameters"], trained_by_parts(history), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("program", "module"),
    [("hf_trainer", "transformers"), ("accelerate_loop", "accelerate"), ("fabric_loop", "lightning")],
)
def test_script_under_a_bare_mpiexec_trains_once_it_calls_init(program: str, module: str, tmp_path: Path) -> None:
    need(module)
    mpiexec = Path(PYTHON).parent / "mpiexec"
    if not os.access(mpiexec, os.X_OK):
        pytest.skip(f"no mpiexec beside {PYTHON}; make frameworks installs one")
    script = tmp_path / "train.py"
    script.write_text(f"import phalanx\n\nphalanx.init()\n{(PROGRAMS / f'{program}.py').read_text()}")
    by_mpiexec = tmp_path / "mpiexec"
    by_mpiexec.mkdir()
    results = run(by_mpiexec, [str(mpiexec), "-n", str(SIZE), PYTHON, str(script), str(by_mpiexec)])
    check_in_step(results, OURS)
    check_same_training(results, phalanx_run(tmp_path / "gloo", program))


# -- torch alone ---------------------------------------------------------------------------------------


def trained_by_one_process(ranks: int) -> torch.Tensor:
    """What plain_ddp.py must come to: one process that sees the batches of all ranks as one."""
    torch.manual_seed(0)
    features = torch.randn(64, 8)
    targets = features @ torch.randn(8, 1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(5):
        for x, y in zip(features.split(8 * ranks), targets.split(8 * ranks), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "group", "size"),
    [
        (("--replace", "gloo"), OURS, 2),
        pytest.param(("--replace", "gloo"), OURS, 4, marks=pytest.mark.long),
        pytest.param((), "ProcessGroup", 2, marks=pytest.mark.long),
    ],
)
def test_torchs_own_ddp_trains_as_one_process_does(
    options: tuple[str, ...], group: str, size: int, tmp_path: Path
) -> None:
    results = phalanx_run(tmp_path / "out", "plain_ddp", options=options, size=size, python=sys.executable)
    for result in results:
        assert result["world_size"] == size
        assert (result["group"], result["second_group"]) == (group, group)
        assert result["losses"][-1] < result["losses"][0]
        assert torch.equal(result["parameters"], results[0]["parameters"])
        torch.testing.assert_close(result["parameters"], trained_by_one_process(size), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_torchrun_with_the_variable_trains_as_one_process_does(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(PROGRAMS / "plain_ddp.py")]
    results = run(tmp_path, [*launch, str(tmp_path)], PHALANX_REPLACE="gloo")
    assert [result["group"] for result in results] == [OURS] * 2
    for result in results:
        torch.testing.assert_close(result["parameters"], trained_by_one_process(2), rtol=1e-4, atol=1e-5)


def test_cells_of_a_notebook_launch_ranks_by_phalanx_launch(tmp_path: Path) -> None:
    for module in ("ipykernel", "jupyter_client"):
        need(module)
    done = started(tmp_path, [PYTHON, str(PROGRAMS / "notebook.py")], IPYTHONDIR=".", JUPYTER_RUNTIME_DIR=str(tmp_path))
    cells = json.loads(done.stdout)
    assert cells["define"]["error"] == ""
    assert cells["train"]["result"].count("([12.0, 12.0], 'phalanx')") == 3, cells["train"]
    assert sorted(cells["train"]["stdout"].splitlines()) == [f"[rank {rank}] trains {rank}" for rank in range(3)]
    assert cells["fail"]["error"].startswith("RankFailed: rank 1 of 3 failed: ValueError: one\n")
    assert 'raise ValueError("one")' in cells["fail"]["error"]  # the line of the cell
    assert cells["interrupt"]["error"].startswith("KeyboardInterrupt")
    assert "SIGINT: all 2 ranks have been ended" in cells["interrupt"]["stderr"]
    assert "have no input" in cells["input"]["error"]
    assert cells["left"]["result"] == "['sh']", cells["left"]  # the shell that asks
    for name in ("again", "spawn"):
        assert cells[name]["result"].count("([9.0, 9.0], 'phalanx')") == 2, cells[name]
