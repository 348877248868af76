"""Gloo, for what Phalanx leaves to torch: it comes with torch, and needs no setup.

It neither authenticates nor encrypts. ``lazy_gloo`` makes a group, and ``GlooOnDemand`` makes it at its first use. Gloo
writes the address of a rank into the store when the group is made. Another rank reads it when they first have something
to exchange. So a rank may delete its own address when it ends its side: who wants to connect then waits for the
address, as for a rank that has not come.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import ProcessGroupGloo, Store

from phalanx.errors import ClosedError
from phalanx.system.interfaces import LOOPBACK, chosen_interface, outward_address
from phalanx.system.threads import within

__all__ = ["AttachedGloo", "GlooOnDemand", "lazy_gloo"]

# For this many times the timeout Gloo waits for a rank that should connect to this one (its ``Pair::waitUntil``).
CONNECT_FACTOR = 5
_FORGETTING_S = 0.7  # how long the store may take to delete an address; where it can be reached, it does so at once


class AttachedGloo(ProcessGroupGloo):
    """Gloo that passes a new timeout on: torch's ``_set_pg_timeout`` gives it only to the backends that torch knows.

    Attributes:
        on_timeout: returns what is called with the new timeout, or None; set once, before the group is used.
    """

    on_timeout: Callable[[], Callable[[timedelta], None] | None] = staticmethod(lambda: None)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        if (tell := self.on_timeout()) is not None:
            tell(timeout)


def lazy_gloo(store: Store, rank: int, size: int, timeout: timedelta, *, one_host: bool) -> AttachedGloo:
    """A Gloo group that listens on one address and connects when it is used.

    Args:
        store: where its ranks exchange addresses.
        rank, size, timeout: of the group; the timeout is also for connecting.
        one_host: listen on loopback. Otherwise listen on the interface that GLOO_SOCKET_IFNAME or PHALANX_INTERFACE
            names, or on the address by which others reach this host.
    """
    options = ProcessGroupGloo._Options()
    # The connections take over the timeout that holds when the group is made.
    options._timeout = max(timeout / CONNECT_FACTOR, timedelta(milliseconds=1))  # 0 would be without limit
    if one_host:
        device = ProcessGroupGloo.create_device(hostname=LOOPBACK, lazy_init=True)
    elif named := os.environ.get("GLOO_SOCKET_IFNAME"):
        # torch reads the variable only where it makes the group's options itself; it may name several.
        device = ProcessGroupGloo.create_device(interface=named.split(",")[0], lazy_init=True)
    elif (chosen := chosen_interface()) is not None:
        device = ProcessGroupGloo.create_device(interface=chosen[0], lazy_init=True)
    else:
        # Not Gloo's default, the address that the host's name resolves to: that may be loopback.
        device = ProcessGroupGloo.create_device(hostname=outward_address(), lazy_init=True)
    options._devices = [device]
    gloo = AttachedGloo(store, rank, size, options)
    gloo._set_default_timeout(timeout)
    return gloo


class GlooOnDemand:
    """A Gloo group that is made when it is first used: until then this process has none of its ports and threads.

    Args:
        make: makes it, given its timeout; every rank of the group finds the others in the same place.
        timeout: for connecting and for every operation.
        addresses: the part of the store in which its ranks find each other, and nothing else is; None if there is no
            need to delete anything there.
        own: the rank of which the address is deleted when the group ends, if there are ``addresses``.

    Attributes:
        made: the Gloo group, once it has been used, until it is released.
        timeout: the one that holds now.
        on_timeout: called with the new timeout if somebody changes Gloo's; set once, before the group is used.
    """

    def __init__(
        self,
        make: Callable[[timedelta], AttachedGloo],
        timeout: timedelta,
        addresses: Store | None = None,
        own: int | None = None,
    ) -> None:
        self._make = make
        self._addresses, self._own = addresses, own
        self._ended = False
        self._lock = threading.RLock()
        self.made: AttachedGloo | None = None
        self.timeout = timeout
        self.on_timeout: Callable[[timedelta], None] | None = None

    def get(self) -> AttachedGloo:
        """The Gloo group, made now if this is its first use. It waits for no other rank.

        Raises:
            ClosedError: its process group was destroyed or aborted.
        """
        with self._lock:
            if self._ended:
                raise ClosedError("a process group was used after it had been destroyed or aborted")
            if self.made is None:
                self.made = self._make(self.timeout)
                # Weakly: a Gloo group that lives until garbage is collected has threads when the interpreter ends, and
                # one that then asks for the interpreter aborts the process.
                self.made.on_timeout = weakref.WeakMethod(self._changed)
            return self.made

    def set_timeout(self, timeout: timedelta) -> None:
        """The timeout of operations that start from now on; ``on_timeout`` is not called."""
        with self._lock:
            self.timeout = timeout
            if self.made is not None:
                ProcessGroupGloo._set_default_timeout(self.made, timeout)

    def shutdown(self) -> None:
        """End it if it was made, and never make it."""
        with self._lock:
            self._ended = True
            if self.made is not None:
                self.made.shutdown()
                own, addresses, self._own = self._own, self._addresses, None
                if own is not None and addresses is not None:
                    # It listens on one device, which Gloo counts from 0. The store may have gone, or be out of reach.
                    with contextlib.suppress(RuntimeError, TimeoutError):
                        within(_FORGETTING_S, lambda: addresses.delete_key(f"0/{own}"))

    def release(self) -> None:
        """:meth:`shutdown`, and give back its connections and threads now.

        Otherwise they wait for the last reference, which may be an error's traceback, until the interpreter ends.
        """
        with self._lock:
            self.shutdown()
            self.made = None

    def abort(self) -> None:
        """Abort it if it was made, and never make it."""
        with self._lock:
            self._ended = True
            if self.made is not None:
                self.made.abort()

    def _changed(self, timeout: timedelta) -> None:
        self.timeout = timeout
        if self.on_timeout is not None:
            self.on_timeout(timeout)
