"""Has torch make our groups where a program asks for a backend that Phalanx replaces.

The name that a program asked for stays: ``dist.get_backend()`` says ``gloo``, because programs branch on it. (One
training library wraps its models in DDP only for names that it knows, and would train each rank's model alone.) So the
name is not rewritten where torch takes it in. Only where torch is about to make the backends of a group does it read
another name for ours, ``phalanx-as-gloo``, which ``register_backend`` has made known.

``mpi`` needs one step more: torch treats a group of that one name in a way of its own, without a store, before it makes
a backend. So the plain name is rewritten where torch takes it in, and ``get_backend`` says the old one.

Checked on torch 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx import settings
from phalanx.c10d.replace import BACKENDS, names_to_replace

__all__ = ["replace_backends"]

# The value of PHALANX_REPLACE in force; empty if there was none yet.
_wanted = ""
# What torch makes in place of each backend.
SERVED = {name: f"{settings.BACKEND}-as-{name}" for name in BACKENDS}
_ASKED = {served: name for name, served in SERVED.items()}


def replace_backends(wanted: str, create: Callable[..., Any]) -> None:
    """Have our groups made in place of the backends that ``wanted`` lists.

    Args:
        wanted: the value of PHALANX_REPLACE, in place of that of an earlier call. If it cannot be used, the first group
            says so, and not this call, because ``import torch`` must not fail.
        create: makes a group from torch's two arguments, and the backend's name as the program knows it.
    """
    global _wanted
    before, _wanted = _wanted, wanted
    if before:
        return
    for asked, served in SERVED.items():
        dist.Backend.register_backend(served, partial(create, backend=asked), extended_api=True, devices=["cpu"])
    own_config: Any = c10d.BackendConfig
    own_new, own_get_backend = c10d.Backend.__new__, c10d.get_backend

    class ReplacingConfig(own_config):  # type: ignore[misc]
        """The backend of each device: ours for those replaced, where torch reads which ones to make."""

        def get_device_backend_map(self) -> dict[str, Any]:
            replaced = names_to_replace(_wanted)
            return {
                device: SERVED[name] if name in replaced else name for device, name in self.device_backend_map.items()
            }

        def __repr__(self) -> str:
            return ",".join(f"{device}:{_ASKED.get(name, name)}" for device, name in self.device_backend_map.items())

    def new(cls: type[dist.Backend], name: str) -> Any:
        found = own_new(cls, name)
        return SERVED["mpi"] if found == "mpi" and "mpi" in names_to_replace(_wanted) else found

    def get_backend(group: dist.ProcessGroup | None = None) -> Any:
        name = own_get_backend(group)
        return _ASKED.get(name, name)

    setattr(c10d, "BackendConfig", ReplacingConfig)  # noqa: B010
    c10d.Backend.__new__ = new
    c10d.get_backend = dist.get_backend = get_backend
