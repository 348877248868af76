"""What a training loop asks of its world: seeds, accumulation, one rank's printing, checkpoints, the end of a block."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # by optimizers and DDP in any case; imported here once, before the ranks are forked
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from tests.support.worlds import join_world
from torch.utils.data import DataLoader, Dataset, TensorDataset

import phalanx
from phalanx.errors import ArgumentError, CheckpointError, PeerFailed
from phalanx.training import checkpoint

SIZE = 3


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


class Drawn(Dataset[tuple[float, float, float]]):
    """What each library draws for an item."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return draw()


def test_every_rank_and_worker_draws_its_own_numbers() -> None:
    def body(member: Member) -> list[Any]:
        world = join_world(member)
        runs = []
        for seed in (7, 7, 2**40):
            world.seed(seed)
            workers = DataLoader(Drawn(), num_workers=1 + (seed > 7), batch_size=None)
            runs.append([draw(), *map(tuple, workers)])
        assert runs[0] == runs[1]
        return runs[0] + runs[2]

    ranks = on_ranks(body, SIZE)
    assert ranks[0] == on_ranks(body, 1)[0]  # rank 0's do not depend on the number of ranks
    drawn = [numbers for rank in ranks for numbers in rank]
    for library in zip(*drawn, strict=True):
        assert len(set(library)) == len(drawn)


def test_accumulated_gradients_are_those_of_one_large_batch() -> None:
    """They are exchanged once, and each by itself again after a loop that is left early."""
    items = torch.arange(18.0).view(-1, 1)

    def body(member: Member) -> list[Any]:
        world = join_world(member)
        torch.manual_seed(0)
        exchanges = []
        model = world.data_parallel(torch.nn.Linear(1, 1))

        def counting(_, bucket):  # type: ignore[no-untyped-def] # torch compares annotations with its classes
            exchanges.append(len(bucket.parameters()))
            work = dist.all_reduce(bucket.buffer().div_(SIZE), async_op=True)
            assert work is not None
            return work.get_future().then(lambda future: future.value()[0])

        model.register_comm_hook(None, counting)
        batches = iter(world.loader(TensorDataset(items), 2))
        steps = 0
        while some := list(itertools.islice(batches, 3)):
            for (x,) in world.accumulate(model, some):
                (model(x).square().mean() / len(some)).backward()
            steps += 1
        assert exchanges == [2] * steps == [2]
        assert model.require_backward_grad_sync
        for _ in world.accumulate(model, [1, 2, 3]):
            assert not model.require_backward_grad_sync
            break
        assert model.require_backward_grad_sync
        assert list(world.accumulate(model, [])) == []
        with pytest.raises(TypeError, match="Linear exchanges no gradients"):
            list(world.accumulate(model.module, some))
        return [parameter.grad.flatten().tolist() for parameter in model.parameters() if parameter.grad is not None]

    torch.manual_seed(0)
    plain = torch.nn.Linear(1, 1)
    plain(items).square().mean().backward()
    expected = [p.grad.flatten().tolist() for p in plain.parameters() if p.grad is not None]
    for gradients in on_ranks(body, SIZE):
        assert gradients == [pytest.approx(gradient, rel=1e-5) for gradient in expected]


def test_only_rank_0_prints(capfd: pytest.CaptureFixture[str]) -> None:
    def body(member: Member) -> None:
        world = join_world(member)
        world.print("rank", world.rank, sep="=", end="!\n")

    on_ranks(body, SIZE)
    assert capfd.readouterr().out == "rank=0!\n"


def test_one_rank_of_each_host_goes_first() -> None:
    def body(member: Member) -> bool:
        world = join_world(member, hosts=2)
        file = member.folder / f"made-on-{world.node_rank}"
        with world.local_main_first():
            found = file.exists()
            file.touch()
        return found

    assert on_ranks(body, 4) == [False, True, False, True]


def state_of(world: phalanx.World) -> dict[str, Any]:
    torch.manual_seed(world.rank)
    model = world.data_parallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = world.loader(TensorDataset(torch.arange(30.0).view(10, 3)), 1, shuffle=True)
    return {"model": model, "optimizer": optimizer, "loader": loader, "step": 0, "names": ["a"]}


def train(state: dict[str, Any], batches: int) -> None:
    for (x,) in itertools.islice(state["loader"], batches):
        state["optimizer"].zero_grad()
        state["model"](x + torch.rand(3)).square().mean().backward()
        state["optimizer"].step()
        state["step"] += 1


def bits(state: dict[str, Any]) -> list[Any]:
    return [parameter.tolist() for parameter in state["model"].parameters()]


def test_a_run_that_is_loaded_ends_as_the_one_that_went_on(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"

    def body(member: Member) -> None:
        world = join_world(member)
        world.check_writable(path)
        assert list(tmp_path.iterdir()) == [] or world.rank != 0
        state = state_of(world)
        world.seed(3)
        train(state, 2)
        world.save(path, {**state, "vocabulary": "abc"})
        drawn = draw()
        other = state_of(world)
        random.random()
        assert world.load(path, other) == {"vocabulary": "abc"}
        assert draw() == drawn
        assert (other["step"], other["names"]) == (2, ["a"])
        assert bits(other) == bits(state)
        train(other, 1)
        assert bits(other) != bits(state)
        assert sorted(world.load(path)) == ["loader", "model", "names", "optimizer", "step", "vocabulary"]

    on_ranks(body, SIZE)
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
    assert list(torch.load(path, weights_only=True)["model"]) == ["weight", "bias"]


def test_another_number_of_ranks_loads_it_and_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.pt"

    def save(member: Member) -> list[Any]:
        world = join_world(member)
        world.save(path, state := state_of(world))
        return bits(state)

    def load(member: Member) -> list[Any]:
        world = join_world(member)
        state = state_of(world)
        expected = torch.get_rng_state()
        world.load(path, state)
        assert torch.equal(torch.get_rng_state(), expected)
        return bits(state)

    saved = on_ranks(save, 2)
    assert on_ranks(load, 3) == [saved[0]] * 3
    assert capfd.readouterr().err.count("was saved by 2 ranks and loaded by 3") == 1


def test_what_is_not_a_whole_checkpoint_is_refused_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    torch.save({"model": {}}, tmp_path / "plain.pt")
    torch.save(subprocess.PIPE, tmp_path / "number.pt")
    torch.save({"model": Path("x")}, tmp_path / "objects.pt")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "text.pt").write_text("not a checkpoint")

    def body(member: Member) -> None:
        world = join_world(member)
        world.save(path, {"x": torch.arange(1000)})
        if world.rank == 0:
            whole = path.read_bytes()
            for part in (1, 100, len(whole) // 2, len(whole) - 1):
                (tmp_path / f"cut-{part}.pt").write_bytes(whole[:part])
        world.barrier()
        names = sorted(file.name for file in tmp_path.glob("cut-*"))
        assert len(names) == 4
        for name in [*names, "empty.pt", "text.pt", "objects.pt"]:
            with pytest.raises(
                CheckpointError, match=rf"{name} is not a whole checkpoint: it was cut short, or another"
            ):
                world.load(tmp_path / name)
        for name in ("plain.pt", "number.pt"):
            with pytest.raises(CheckpointError, match=rf"{name} was not written by world.save\(\)"):
                world.load(tmp_path / name)
        with pytest.raises(CheckpointError, match=r"There is no checkpoint .*nothing\.pt"):
            world.load(tmp_path / "nothing.pt")
        model = torch.nn.Linear(1, 1)
        before = model.weight.item()
        with pytest.raises(CheckpointError, match=r"run\.pt has no model; it has x"):
            world.load(path, {"x": 0, "model": model})
        assert model.weight.item() == before
        assert world.load(path)["x"].tolist() == list(range(1000))
        # One rank reads another file than the others.
        own = path if world.rank else tmp_path / "other.pt"
        if world.rank == 0:
            checkpoint.write(own, {"x": 1}, [])
        with pytest.raises(CheckpointError, match="the ranks have read different files"):
            world.load(own)
        with pytest.raises(CheckpointError, match=r"There is no checkpoint .*gone|rank 1 could not load it"):
            world.load(tmp_path / "gone.pt" if world.rank == 1 else path)

    on_ranks(body, SIZE)


def test_what_cannot_be_written_is_said_and_the_earlier_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.pt"
    (tmp_path / "file").touch()

    def body(member: Member) -> None:
        world = join_world(member)
        refused = CheckpointError if world.rank == 0 else PeerFailed
        world.save(path, {"step": 1})
        for where, words in (
            (tmp_path / "nowhere" / "run.pt", "There is no directory .*nowhere for the checkpoint"),
            (tmp_path, "is a directory; a checkpoint is a file"),
            (tmp_path / "file" / "run.pt", "There is no directory"),
        ):
            with pytest.raises(refused, match=words):
                world.check_writable(where)
        with pytest.raises(refused, match=r"was not written, because it could not be read again: .* pathlib"):
            world.save(path, {"where": tmp_path})
        with pytest.raises(ArgumentError, match="'phalanx' of a checkpoint is Phalanx's own"):
            world.save(path, {"phalanx": 1})
        for interruption in (RuntimeError("disk full"), KeyboardInterrupt()):

            def half(path: str, interruption: BaseException = interruption) -> list[str]:
                raise interruption

            ends = KeyboardInterrupt if isinstance(interruption, KeyboardInterrupt) else CheckpointError
            with monkeypatch.context() as patch:
                patch.setattr(checkpoint, "get_unsafe_globals_in_checkpoint", half)
                with pytest.raises(ends if world.rank == 0 else PeerFailed):
                    world.save(path, {"step": 2})
        assert world.load(path) == {"step": 1}
        world.save(path, {"step": 3})
        assert world.load(path) == {"step": 3}

    on_ranks(body, SIZE)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "run.pt"]


def test_a_link_stays_and_an_unwritable_folder_is_found_early(tmp_path: Path) -> None:
    def body(member: Member) -> None:
        world = join_world(member)
        with pytest.raises(CheckpointError, match=r"No checkpoint can be written to /proc/self: .+"):
            world.check_writable("/proc/self/run.pt")  # also to root
        (tmp_path / "scratch").mkdir()
        (tmp_path / "run.pt").symlink_to(tmp_path / "scratch" / "real.pt")
        world.save(tmp_path / "run.pt", {"step": 1})
        assert (tmp_path / "run.pt").is_symlink()
        assert world.load(tmp_path / "scratch" / "real.pt") == {"step": 1}

    on_ranks(body, 1)


def test_divided_tensors_are_refused_rather_than_saved_in_part(tmp_path: Path) -> None:
    def body(member: Member) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        world = join_world(member)
        whole = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(ArgumentError, match=r"'model' are divided among the ranks.*torch\.distributed\.checkpoint"):
            world.save(tmp_path / "run.pt", {"model": {"weight": whole}})

    on_ranks(body, 2)


def test_a_with_block_ends_the_world(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = """
        import sys, torch, phalanx
        for _ in range(2):
            with phalanx.init(quiet=True) as world:
                world.print(world.sum(1))
        try:
            world.sum(1)
        except phalanx.PhalanxError:
            with phalanx.init(quiet=True) as world:
                phalanx.close()
        with phalanx.init(quiet=True) as world:
            world.all_reduce(torch.ones(1 << 20), async_op=True)  # nobody waits for it
            if world.rank == world.world_size - 1:
                raise ValueError("the cause")
            world.barrier()
            world.barrier()
    """
    script.write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "phalanx", "run", "--no-prefix", "-q", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert done.stdout == "2\n" * 2
    assert "rank 1" in done.stderr
    assert "ValueError: the cause" in done.stderr
