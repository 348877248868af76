"""Standing in for another backend: scripts that ask for ``gloo`` get ``phalanx``, unmodified.

``phalanx run --replace gloo`` sets PHALANX_REPLACE, and so can anybody by hand, under torchrun for one. The variable is
read once, at ``import torch`` (``register.py``); ``replacing.py`` then has torch make our groups. That covers
``init_process_group("gloo")``, ``"cpu:gloo,cuda:nccl"``, torch's own default on a machine without accelerators, and
``new_group(backend="gloo")``.

Decisions.

- ``dist.get_backend()`` says the name that the program asked for, because programs branch on it. The class of the
  group, the title of the rank table and ``World.backend`` say what serves it.
- Only names are replaced, never classes: a program that makes a ``ProcessGroupGloo`` itself, as our groups do for the
  operations that they leave to Gloo, gets Gloo.
- ``rpc`` is torch's RPC, which has no backends of its own to choose: ``torch.distributed.rpc`` then runs over Phalanx.
- nccl, xccl and the like are not replaced. They move tensors between devices; Phalanx's transport moves CPU tensors.
  CUDA tensors in a group that asked for gloo go over Gloo, as they would have (``vendor.py``).

This module imports nothing of torch: the launcher, which never loads it, checks ``--replace`` with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from phalanx import settings
from phalanx.errors import ArgumentError

__all__ = ["BACKENDS", "OTHERS", "REPLACEABLE", "names_to_replace", "replaces"]

BACKENDS = ("gloo", "mpi")
# What is not a backend: the module whose import stands in for it. By name, because RPC is built on this room.
OTHERS = {"rpc": "phalanx.rpc.torch_api"}
REPLACEABLE = (*BACKENDS, *OTHERS)

_VENDORS = ("nccl", "xccl", "hccl", "ucc", "rccl", "cncl", "mccl")


def names_to_replace(text: str, *, source: str = settings.REPLACE) -> tuple[str, ...]:
    """The names that ``text`` lists, separated by commas; none if it is empty.

    Args:
        text: ``gloo``, ``mpi``, ``rpc``, or several as ``gloo,rpc``; upper case is as good.
        source: the option or variable that says so, for the error.

    Raises:
        ArgumentError: a name is not one that Phalanx can stand in for.
    """
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    for name in names:
        if name in _VENDORS:
            raise ArgumentError(
                f"{source} {text}: {name} moves tensors between devices, and Phalanx itself moves CPU tensors. "
                f"Keep {name} for the device (of cpu:gloo,cuda:nccl only gloo is replaced), and replace "
                f"{' or '.join(BACKENDS)}"
            )
        if name not in REPLACEABLE:
            raise ArgumentError(
                f"{source} {text}: {name!r} is not something that Phalanx stands in for; choose "
                f"{', '.join(BACKENDS)} or {' or '.join(OTHERS)}"
            )
    return names


def replaces(name: str, environment: Mapping[str, str] | None = None) -> bool:
    """Whether PHALANX_REPLACE lists this backend. Other entries, which may be wrong, are not checked here.

    Args:
        name: a backend's, in lower case.
        environment: where the variable is read; ``os.environ`` by default.
    """
    environment = os.environ if environment is None else environment
    return name in {part.strip().lower() for part in environment.get(settings.REPLACE, "").split(",")}
