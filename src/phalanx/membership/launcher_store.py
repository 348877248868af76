"""The store that ``phalanx run``, or torchrun's agent, keeps at MASTER_PORT: what its ranks and the launcher agree on.

The launcher says so by the variable of torchrun's agent (TORCHELASTIC_USE_AGENT_STORE), on which torch makes every rank
a client, for every port. Checked on torch 2.13.0. The store's process imports this file, so it imports
no torch.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx import settings
from phalanx.errors import InitializationError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from phalanx.topology.place import Place

__all__ = ["ENDED", "EndedRank", "ended_ranks", "is_launchers", "kept_store", "open_other_stores", "size_of_meeting"]

#: Under this key the store of ``phalanx run`` has the ranks that have ended, in that order, as JSON.
ENDED = "phalanx/ended"
# The keys in which a world of so many ranks meets (world.py, c10d/create.py), and not those of a group that it splits.
_OF_MEETING = re.compile(r"(?:.*/)?phalanx/.+/of (\d+)/(?!.*phalanx/)", re.DOTALL)


class EndedRank(NamedTuple):
    """A rank that the launcher knows to have ended.

    ``host`` is empty if the job has one; ``how`` is as ``by signal 9 (SIGKILL)``, and empty if the rank ended in order.
    """

    rank: int
    pid: int
    host: str
    how: str


def kept_store(place: Place, timeout_s: float) -> Store:
    """Connect to the store that this process's launcher keeps (``Place.keeps_store``).

    Raises:
        InitializationError: it cannot be reached.
    """
    from torch._C._distributed_c10d import TCPStore

    address, port = str(place.master_addr), int(place.master_port or 0)
    try:
        return TCPStore(address, port, place.world_size, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise InitializationError(
            f"rank {place.rank} could not reach the store that {place.launcher} keeps at {address}:{port} "
            f"(MASTER_ADDR, MASTER_PORT): {error}"
        ) from error


def is_launchers(port: int, environment: Mapping[str, str]) -> bool:
    """Return whether the launcher's store is at this port, as far as the launcher says where it is."""
    own = environment.get(settings.STORE_PORT)
    return own is None or own == str(port)


def open_other_stores() -> None:
    """Have torch's rank 0 listen on every port that is not the launcher's. Does nothing in other processes.

    A script that names another one (``init_method="tcp://…"``, or a MASTER_PORT of its own, as scripts do that start
    processes themselves) would wait there for half an hour, because nobody listens.
    """
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


# -- ranks that have ended, for which nobody should wait -----------------------------------------------


def size_of_meeting(key: str) -> int:
    """Return how many ranks meet as a world by this key; 0 for any other key."""
    found = _OF_MEETING.match(key)
    return 0 if found is None else int(found[1])


def ended_ranks(store: Store) -> list[EndedRank]:
    """Return the ranks that have ended, in that order, if this is the store of ``phalanx run``."""
    return [EndedRank(*each) for each in json.loads(store.get(ENDED))] if store.check([ENDED]) else []
