"""The one file that touches torch's backend registry and private slots. Checked on torch 2.13.0.

``register`` is the entry point in the group ``torch.backends``: torch calls it at the end of ``import torch``,
so ``init_process_group("phalanx")`` works in scripts that never import Phalanx. It must be quick and must never
raise: an exception here would make ``import torch`` fail for everybody on the machine.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["NAME", "register"]

NAME = "phalanx"


def register() -> None:
    """Make the backend name ``phalanx`` known to torch. Does nothing where torch has no distributed package."""
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if dist.is_available() and NAME not in dist.Backend.backend_list:
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> dist.ProcessGroup:
    """What torch calls on every member of a new group, with the group's store, rank, size and timeout."""
    from phalanx.backends.create import create_process_group

    return create_process_group(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        options.global_ranks_in_group,
    )
