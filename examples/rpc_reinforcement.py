"""Teach a cart to balance a pole: one agent learns, and observers on the other ranks try out what it says.

    phalanx run -n 3 examples/rpc_reinforcement.py     one agent, two observers

Each observer has a world of its own, a cart on a rail with a pole on it, and asks the agent at every moment which way
to push: ``agent.act(...)`` is a call of a remote object's method. The agent waits until all observers that are at it
have asked, answers them with one forward pass (``async def``), and learns from their rewards when their episodes are
over (REINFORCE: R. J. Williams, 1992). The observers are remote objects too: the agent's process starts their episodes
with ``observer.start.episode(...)``.

The last line on stdout is one JSON object with the results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from typing import Any

import torch
from torch import nn

import phalanx
from phalanx import rpc


class Pole:
    """A pole on a cart. Its state: where the cart is, its speed, the pole's angle (radians) and how fast that changes.

    The equations are those of A. G. Barto, R. S. Sutton and C. W. Anderson (1983), with their constants.
    """

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._state = [0.0] * 4

    def begin(self) -> list[float]:
        """A new episode, from about upright."""
        self._state = (torch.rand(4, generator=self._random) * 0.1 - 0.05).tolist()
        return self._state

    def push(self, right: bool) -> tuple[list[float], bool]:
        """Push the cart for 20 ms. Returns the state, and whether the pole has fallen or the cart left its rail."""
        place, speed, angle, turning = self._state
        sine, cosine = math.sin(angle), math.cos(angle)
        force = ((10.0 if right else -10.0) + 0.05 * turning**2 * sine) / 1.1
        turn = (9.8 * sine - cosine * force) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        push = force - 0.05 * turn * cosine / 1.1
        self._state = [place + 0.02 * speed, speed + 0.02 * push, angle + 0.02 * turning, turning + 0.02 * turn]
        return self._state, abs(self._state[0]) > 2.4 or abs(self._state[2]) > math.radians(12)


class Agent:
    """The policy, and what its observers have seen.

    Args:
        seed: of the policy's values and choices.
        lr: the learning rate.
    """

    def __init__(self, seed: int, lr: float) -> None:
        torch.manual_seed(seed)
        self._policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self._optimizer = torch.optim.Adam(self._policy.parameters(), lr=lr)
        self._at_it = 0
        self._asked: dict[int, tuple[list[float], asyncio.Future[bool]]] = {}
        self._chances: dict[int, list[torch.Tensor]] = {}

    def begin(self, observers: int) -> None:
        """An episode begins, with so many observers."""
        self._at_it = observers
        self._chances = {observer: [] for observer in range(observers)}

    async def act(self, observer: int, state: list[float]) -> bool:
        """Whether the observer shall push to the right. All that ask at about the same time share a forward pass."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._asked[observer] = state, answer
        self._answer_all()
        return await answer

    async def fallen(self) -> None:
        """An observer's episode is over: the others do not wait for it."""
        self._at_it -= 1
        self._answer_all()

    def _answer_all(self) -> None:
        if not self._asked or len(self._asked) < self._at_it:
            return
        asked, self._asked = sorted(self._asked.items()), {}
        choice = torch.distributions.Categorical(logits=self._policy(torch.tensor([state for _, (state, _) in asked])))
        sides = choice.sample()  # type: ignore[no-untyped-call]
        chances = choice.log_prob(sides)  # type: ignore[no-untyped-call]
        for number, (observer, (_, answer)) in enumerate(asked):
            self._chances[observer].append(chances[number])
            answer.set_result(bool(sides[number]))

    def learn(self) -> float:
        """Make what led to long episodes more likely. Returns the mean of their lengths."""
        gains: list[float] = []
        chances: list[torch.Tensor] = []
        for said in self._chances.values():
            gain = 0.0
            discounted = [gain := 1.0 + 0.99 * gain for _ in said]
            gains += reversed(discounted)
            chances += said
        gained = torch.tensor(gains)
        gained = (gained - gained.mean()) / (gained.std() + 1e-6)
        loss = -(torch.stack(chances) * gained).mean()
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return len(chances) / len(self._chances)


class Observer:
    """One cart, on a rank of its own."""

    def __init__(self, number: int, seed: int) -> None:
        self._number, self._pole = number, Pole(seed + number)

    def episode(self, agent: Any, longest: int) -> int:
        """Balance the pole as the agent says, for so many pushes at most. Returns how many it were."""
        state, fallen, pushes = self._pole.begin(), False, 0
        while not fallen and pushes < longest:
            state, fallen = self._pole.push(agent.act(self._number, state))
            pushes += 1
        agent.fallen()
        return pushes


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--episodes", type=int, default=150, help="of each observer [%(default)s]")
    add("--longest", type=int, default=200, help="pushes in an episode at most [%(default)s]")
    add("--lr", type=float, default=0.01, help="learning rate [%(default)s]")
    add("--seed", type=int, default=0, help="of the policy, its choices and the carts [%(default)s]")
    return parser.parse_args()


def train(world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run the episodes; the results."""
    agent = rpc.make("worker0", Agent, options.seed, options.lr)
    observers = [rpc.make(rank, Observer, rank - 1, options.seed) for rank in range(1, world_size)]
    lengths = []
    started = time.perf_counter()
    for episode in range(options.episodes):
        agent.begin(len(observers))
        for running in [observer.start.episode(agent, options.longest) for observer in observers]:
            running.wait()
        lengths.append(agent.learn())
        if episode % 10 == 9:
            print(f"episode {episode + 1}: {sum(lengths[-10:]) / 10:.0f} pushes", file=sys.stderr)
    seconds = time.perf_counter() - started
    pushes = sum(lengths) * len(observers)
    some = max(1, len(lengths) // 5)
    results = {"first_pushes": sum(lengths[:some]) / some, "last_pushes": sum(lengths[-some:]) / some}
    return results | {"observers": len(observers), "seconds": seconds, "calls_per_s": pushes / seconds}


def main() -> None:
    """Join the world: rank 0 has the agent, the others the observers."""
    options = parse_arguments()
    with phalanx.init(backend="phalanx") as world:
        if world.world_size < 2:
            sys.exit("one rank is the agent's alone; start at least two: phalanx run -n 2 ...")
        rpc.init()
        if world.rank == 0:
            print(json.dumps(train(world.world_size, options)))
        rpc.shutdown()


if __name__ == "__main__":
    main()
