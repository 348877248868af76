"""The random number generators of a process: Python's, numpy's, and torch's on every device."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy
import torch


def seed_generators(seed: int) -> None:
    """Seed every generator of this process. torch seeds its loaders' workers from its own."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator, as numbers, texts and tensors."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": torch.get_rng_state()}
    name, keys, *rest = cast(tuple[Any, ...], numpy.random.get_state())
    state["numpy"] = [name, keys.tolist(), *rest]
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue from a state that :func:`random_state` returned; generators that it lacks stay as they are."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        numpy.random.set_state(tuple(state["numpy"]))
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)
