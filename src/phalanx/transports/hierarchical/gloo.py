"""Making a Gloo group: when it is made, which address it listens on, and when it connects.

Gloo, in C++, writes the address of a rank into the store when the group is made, and another rank reads it there when
it first has something to exchange with that one. What two ranks exchange is done only when both have posted it, and so
have read each other's addresses: what was done needs the address of neither, and a rank that has ended its side can be
connected to no more. So a rank may delete its own address when it ends its side. If it dies before, the key stays. If
it dies after, a rank that wants to connect to it waits for the address, as for a rank that has not come.
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

    ``_made``, ``_ended`` and ``timeout`` are written under ``_lock``, which a signal handler can take again; they are
    also read without it, because each is one reference that Python reads whole.

    Args:
        make: makes it, given its timeout; every rank of the group finds the others in the same place.
        timeout: for connecting and for every operation.
        addresses: the part of the store in which its ranks find each other, and nothing else is; None if there is no
            need to delete anything there.
        own: the rank of which the address is deleted when the group ends; None if :meth:`forget` is called for that.

    Attributes:
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
        self._made: AttachedGloo | None = None
        self._ended = False
        self._lock = threading.RLock()
        self.timeout = timeout
        self.on_timeout: Callable[[timedelta], None] | None = None

    @property
    def made(self) -> AttachedGloo | None:
        """The Gloo group, if it has been used."""
        return self._made

    def get(self) -> AttachedGloo:
        """The Gloo group, made now if this is its first use. It waits for no other rank.

        Raises:
            ClosedError: its process group was destroyed or aborted.
        """
        with self._lock:
            if self._ended:
                raise ClosedError("a process group was used after it had been destroyed or aborted")
            if self._made is None:
                self._made = self._make(self.timeout)
                # Weakly: a Gloo group that lives until garbage is collected has threads when the interpreter ends, and
                # one that then asks for the interpreter aborts the process.
                self._made.on_timeout = _weakly(self._changed)
            return self._made

    def set_timeout(self, timeout: timedelta) -> None:
        """The timeout of operations that start from now on; ``on_timeout`` is not called."""
        with self._lock:
            self.timeout = timeout
            if self._made is not None:
                ProcessGroupGloo._set_default_timeout(self._made, timeout)

    def shutdown(self) -> None:
        """End it if it was made, and never make it."""
        with self._lock:
            self._ended = True
            if self._made is not None:
                self._made.shutdown()
                own, self._own = self._own, None
                if own is not None:
                    with contextlib.suppress(RuntimeError, TimeoutError):  # the store has gone, or cannot be reached
                        within(_FORGETTING_S, lambda: self.forget(own))

    def release(self) -> None:
        """:meth:`shutdown`, and give back its connections and threads now, which otherwise wait for the last reference.

        An error's traceback may be that reference, until the interpreter ends.
        """
        with self._lock:
            self.shutdown()
            self._made = None

    def forget(self, rank: int) -> None:
        """Delete the address of a rank to which no other connects any more."""
        if self._addresses is not None:
            self._addresses.delete_key(f"0/{rank}")  # it listens on one device, which Gloo counts from 0

    def abort(self) -> None:
        """Abort it if it was made, and never make it."""
        with self._lock:
            self._ended = True
            if self._made is not None:
                self._made.abort()

    def _changed(self, timeout: timedelta) -> None:
        self.timeout = timeout
        if self.on_timeout is not None:
            self.on_timeout(timeout)


def _weakly(method: Callable[[timedelta], None]) -> Callable[[timedelta], None]:
    """Calls the method as long as its object exists, which this does not keep alive."""
    reference = weakref.WeakMethod(method)

    def call(timeout: timedelta) -> None:
        alive = reference()
        if alive is not None:
            alive(timeout)

    return call
