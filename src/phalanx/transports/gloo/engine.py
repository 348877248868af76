"""Making a Gloo group: which address it listens on, and when it connects."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, ProcessGroupGloo, Store

from phalanx.system.interfaces import LOOPBACK, chosen_interface, outward_address

__all__ = ["AttachedGloo", "LocalGloo", "lazy_gloo"]

# For this many times the timeout Gloo waits for a rank that should connect to this one (its ``Pair::waitUntil``).
CONNECT_FACTOR = 5


class AttachedGloo(ProcessGroupGloo):
    """Gloo that passes a new timeout on: torch's ``_set_pg_timeout`` gives it only to the backends that torch knows.

    Attributes:
        on_timeout: called with the new timeout; set once, before the group is used.
    """

    on_timeout: Callable[[timedelta], None] | None = None

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        if self.on_timeout is not None:
            self.on_timeout(timeout)


def lazy_gloo(store: Store, rank: int, size: int, timeout: timedelta, *, one_host: bool) -> AttachedGloo:
    """A Gloo group that listens on one address and connects when it is used.

    Args:
        store: where its ranks exchange addresses.
        rank, size: this process's place in the group.
        timeout: for connecting and for every operation.
        one_host: listen on loopback, which other hosts cannot reach. Otherwise listen on the interface that
            GLOO_SOCKET_IFNAME or PHALANX_INTERFACE names, or on the address by which others reach this host.
    """
    options = ProcessGroupGloo._Options()
    # The connections take over the timeout that holds when the group is made.
    options._timeout = max(timeout / CONNECT_FACTOR, timedelta(milliseconds=1))  # 0 would be without limit
    if one_host:
        device = ProcessGroupGloo.create_device(hostname=LOOPBACK, lazy_init=True)
    elif os.environ.get("GLOO_SOCKET_IFNAME"):
        device = ProcessGroupGloo.create_default_device(lazy_init=True)
    elif (chosen := chosen_interface()) is not None:
        device = ProcessGroupGloo.create_device(interface=chosen[0], lazy_init=True)
    else:
        # Not Gloo's default, the address that the host's name resolves to: that may be loopback.
        device = ProcessGroupGloo.create_device(hostname=outward_address(), lazy_init=True)
    options._devices = [device]
    gloo = AttachedGloo(store, rank, size, options)
    gloo._set_default_timeout(timeout)
    return gloo


class LocalGloo:
    """A Gloo group of ranks that meet in another way, so that it leaves no keys in their store.

    Gloo publishes an address when it is made, and reads the others' when it first connects.

    Args:
        rank, size, timeout: as for :func:`lazy_gloo`; it listens on loopback.

    Attributes:
        gloo: the group. It may be used after :meth:`meet`.
        card: this rank's address, for :meth:`meet` on the other ranks.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        self._store = HashStore()
        self.gloo = lazy_gloo(self._store, rank, size, timeout, one_host=True)
        (own,) = self._store.list_keys()
        self._prefix = own.removesuffix(str(rank))
        self.card = base64.b64encode(self._store.get(own)).decode()

    def meet(self, cards: Sequence[str]) -> AttachedGloo:
        """Give the group the addresses of all its ranks, in order."""
        for rank, card in enumerate(cards):
            self._store.set(f"{self._prefix}{rank}", base64.b64decode(card))  # type: ignore[arg-type]
        return self.gloo
