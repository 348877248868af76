"""A training script that a stop may hit anywhere, and the check that nothing is lost by it.

Ranks send the signal themselves, in a phase of a step that is drawn at random; so no test waits for the right moment.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["PHASES", "TRAINING", "check_chain"]

PHASES = ("loader", "forward", "backward", "evaluation", "save", "anywhere")

TRAINING = """
    import hashlib, os, signal, sys, threading, time
    import torch, phalanx

    path, total, rank, phase, first, whom, signum = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4], *sys.argv[5:8]
    state = {"step": 0}
    target = os.getpid()
    if whom == "launcher":  # the agent's parent, where that runs on the same host
        target = int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])

    def strike(here):
        global phase
        if here == phase and world.rank == rank and state["step"] >= int(first):
            phase = ""
            os.kill(target, getattr(signal, signum))

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 48

        def __getitem__(self, index):
            strike("loader")
            return torch.tensor([index / 48.0, 1.0]), torch.tensor([3.0 * index / 48.0])

    with phalanx.init(quiet=True) as world:
        world.seed(0)
        layers = torch.nn.Linear(2, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        model = world.data_parallel(torch.nn.Sequential(*layers))
        next(model.parameters()).register_hook(lambda _: strike("backward"))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        loader = world.loader(Numbers(), batch_size=2, shuffle=True)
        state |= {"model": model, "optimizer": optimizer, "loader": loader}
        if os.path.exists(path):
            world.load(path, state)
        begun, stops = state["step"], world.should_stop()
        if phase == "anywhere":
            threading.Timer(float(first) / 1000, strike, ["anywhere"]).start()
            first = 0
        while not stops and state["step"] < total:
            for x, y in loader:
                strike("forward")
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                state["step"] += 1
                with torch.no_grad():
                    strike("evaluation")
                    world.mean({"loss": torch.nn.functional.mse_loss(model.eval()(x), y).item()})
                    model.train()
                if state["step"] % 3 == 0:
                    strike("save")
                    world.save(path, state)
                stops = world.should_stop()
                if stops or state["step"] >= total:
                    break
        world.save(path, state)
        phase = ""
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
        print("stopped" if stops else "done", begun, state["step"], digest, flush=True)
"""


def check_chain(
    run: Callable[..., Any], folder: Path, ranks: int, stops: int, seed: int, *, on_hosts: bool = False
) -> int:
    """Train to the end by runs of which each but the last is stopped, and compare with a run that is not.

    Args:
        run: ``phalanx run`` of the script with these arguments; returns exit code, standard output and error.
        folder: where checkpoints may be.
        ranks: how many there are.
        stops: how many stops to make.
        seed: of what is drawn.
        on_hosts: whether ranks run on other hosts, where none can signal the launcher.

    Returns:
        How many stops there were.
    """
    draw = random.Random(seed)
    made = 0
    total = 12 * stops
    whole = _lines(run(str(folder / "whole.pt"), str(total), "0", "none", "0", "self", "SIGUSR1"), ranks)
    assert {line[0] for line in whole} == {"done"}
    while True:
        phase, rank, signum = draw.choice(PHASES), draw.randrange(ranks), draw.choice(("SIGTERM", "SIGUSR1"))
        whom = "self" if on_hosts else draw.choice(("self", "launcher"))
        done = 12 * made + 4
        first = draw.randrange(100) if phase == "anywhere" else done + draw.randrange(4)
        words = (str(total), str(rank), phase if made < stops else "none", str(first), whom, signum)
        outcome = run(str(folder / "parts.pt"), *words)
        lines = _lines(outcome, ranks)
        assert len({(line[0], line[2]) for line in lines}) == 1, outcome  # all left after the same step
        if lines[0][0] == "done":
            assert made <= stops
            assert lines[0][3] == whole[0][3], outcome  # to the same bits
            return made
        made += 1
        assert re.search(r"phalanx: stopped after step \d+ on request \(SIG", outcome[2]), outcome


def _lines(outcome: Any, ranks: int) -> list[list[str]]:
    code, out, _ = outcome
    assert code == 0, outcome
    lines = [line.split() for line in out.splitlines()]
    assert len(lines) == ranks, outcome
    return lines
