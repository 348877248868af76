"""Which stores a rank of ``phalanx run`` opens itself: all but the launcher's.

The launcher keeps the job's store at MASTER_PORT, and says so by the variable of torchrun's agent
(TORCHELASTIC_USE_AGENT_STORE), on which torch makes every rank a client. But torch does so for every port. A script
that names another one (``init_method="tcp://…"``, or a MASTER_PORT of its own, as scripts do that start processes
themselves) would wait there for half an hour, because nobody listens. Checked on torch 2.13.0.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Mapping
from typing import Any

from phalanx import settings

__all__ = ["is_launchers", "open_other_stores"]


def is_launchers(port: int, environment: Mapping[str, str]) -> bool:
    """Whether the launcher's store is at this port, as far as the launcher says where it is."""
    own = environment.get(settings.STORE_PORT)
    return own is None or own == str(port)


def open_other_stores() -> None:
    """Have torch's rank 0 listen on every port that is not the launcher's. Does nothing in other processes."""
    # The package has a function of the module's name.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    own_create, own_question = rendezvous._create_c10d_store, rendezvous._torchelastic_use_agent_store
    here = threading.local()

    def create(hostname: str, port: int, *arguments: Any, **options: Any) -> Any:
        here.other = not is_launchers(port, os.environ)
        try:
            return own_create(hostname, port, *arguments, **options)
        finally:
            here.other = False

    def use_agent_store() -> bool:
        return not getattr(here, "other", False) and own_question()

    rendezvous._create_c10d_store = create
    rendezvous._torchelastic_use_agent_store = use_agent_store
