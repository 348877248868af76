"""A training state as one file: a dict that plain ``torch.load`` reads, with nothing in it that is executed.

The file appears whole or not at all; what a killed writer has left goes with the next (``system/files.py``).
Beside the state it has one more entry, ``MARK``, by which it is recognised.
"""

from __future__ import annotations

import os
import pickle
import random
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.serialization import get_unsafe_globals_in_checkpoint

from phalanx.errors import ArgumentError, CheckpointError
from phalanx.system.files import check_creatable, whole_file

# The entry with the format's number, the file's id, the random states of the ranks, and, by the names of the models in
# the checkpoint, what their replicas keep from one exchange to the next.
MARK = "phalanx"
FORMAT = 1

_PATHS = str | os.PathLike[str]


def contents_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is to be written: of everything that has a ``state_dict`` that, the rest as it is.

    Raises:
        ArgumentError: an entry has a reserved name, or tensors that are divided among the ranks.
    """
    if MARK in state:
        raise ArgumentError(f"the entry {MARK!r} of a checkpoint is Phalanx's own; give yours another name")
    contents = {}
    for name, entry in state.items():
        entry = plain(entry)
        contents[name] = entry.state_dict() if _has_state(entry) else entry
        if any(hasattr(tensor, "device_mesh") or hasattr(tensor, "local_shards") for tensor in _nested(contents[name])):
            raise ArgumentError(
                f"the tensors of {name!r} are divided among the ranks, and this file would have rank 0's part alone. "
                f"Save them with torch.distributed.checkpoint"
            )
    return contents


def write(
    path: _PATHS, contents: dict[str, Any], random_states: list[Any], exchanges: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint so that ``path`` always holds a whole one, whatever happens meanwhile.

    Raises:
        CheckpointError: the file could not be written, or has objects that :func:`read` would refuse. An earlier file
            of that name is still there then.
    """
    check_writable(path)
    target = _target(path)
    mark = {"format": FORMAT, "id": secrets.token_hex(16), "random": random_states, "exchanges": dict(exchanges or {})}
    marked = {**contents, MARK: mark}
    try:
        with whole_file(target) as file:
            torch.save(marked, file)
            file.flush()
            file.seek(0)
            strange = get_unsafe_globals_in_checkpoint(file)
            if strange:
                raise CheckpointError(
                    f"{path} was not written, because it could not be read again: a checkpoint holds numbers, texts, "
                    f"tensors, and dicts and lists of them, but the state has {', '.join(sorted(strange))}"
                )
    except CheckpointError:
        raise
    except (OSError, RuntimeError, pickle.PicklingError, AttributeError, TypeError) as error:  # RuntimeError: disk full
        earlier = ". The earlier checkpoint of that name is intact" if target.exists() else ""
        raise CheckpointError(f"{path} was not written: {error}{earlier}") from error


def read(path: _PATHS) -> dict[str, Any]:
    """The contents of a checkpoint, with their tensors on the CPU. Nothing in the file is executed.

    Raises:
        CheckpointError: there is no such file, it is cut short, or something else wrote it.
    """
    try:
        file = open(os.fspath(path), "rb")  # noqa: SIM115 - closed below, where its errors mean something else
    except FileNotFoundError:
        raise CheckpointError(f"There is no checkpoint {path}") from None
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {error.strerror}") from error
    with file:
        try:
            contents: Any = torch.load(file, map_location="cpu", weights_only=True)
        except (
            Exception
        ) as error:  # of a file that is cut short torch raises all kinds, OSError and EOFError among them
            reason = str(error).partition("\n")[0].partition(". ")[0]
            raise CheckpointError(
                f"{path} is not a whole checkpoint: it was cut short, or another program wrote it ({reason})"
            ) from error
    mark = contents.get(MARK) if isinstance(contents, dict) else None
    if not isinstance(contents, dict) or not isinstance(mark, dict) or mark.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by world.save() of this version; load it by torch.load()")
    return contents


def restore(path: _PATHS, contents: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Put the entries of a checkpoint into ``state``, whose objects take them by ``load_state_dict``; the others.

    Raises:
        CheckpointError: ``state`` has an entry that the file lacks; nothing has been restored then.
    """
    missing = [name for name in state if name not in contents]
    if missing:
        has = ", ".join(name for name in contents if name != MARK) or "nothing"
        raise CheckpointError(f"{path} has no {', '.join(missing)}; it has {has}")
    for name, entry in state.items():
        entry = plain(entry)
        if _has_state(entry):
            entry.load_state_dict(contents[name])
        else:
            state[name] = contents[name]
    return {name: entry for name, entry in contents.items() if name not in state and name != MARK}


def check_writable(path: _PATHS) -> None:
    """Refuse a path to which :func:`write` could not write.

    Raises:
        CheckpointError: its directory is missing or cannot be written to, or the path is a directory.
    """
    target = _target(path)
    if not target.parent.is_dir():
        raise CheckpointError(f"There is no directory {Path(path).parent} for the checkpoint")
    if target.is_dir():
        raise CheckpointError(f"{path} is a directory; a checkpoint is a file")
    try:
        check_creatable(target)
    except OSError as error:
        raise CheckpointError(f"No checkpoint can be written to {Path(path).parent}: {error.strerror}") from error


def _target(path: _PATHS) -> Path:
    return Path(os.path.realpath(path))  # what a link means is replaced, not the link


def plain(entry: Any) -> Any:
    """The module within wrappers that only change how it is called, so that the file does not depend on them."""
    while True:
        if isinstance(entry, DistributedDataParallel):
            entry = entry.module
        elif isinstance(entry, torch.nn.Module) and isinstance(getattr(entry, "_orig_mod", None), torch.nn.Module):
            entry = entry._orig_mod  # torch.compile's wrapper
        else:
            return entry


def _has_state(entry: Any) -> bool:
    return hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict")


def _nested(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _nested(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _nested(entry)


# -- random number generators: Python's, numpy's, and torch's on every device ------------------------------


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
