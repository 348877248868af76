"""UCX as the engine between hosts: RDMA where the library and the network have it, several links, and else TCP.

It neither authenticates nor encrypts. It listens on the interface over which the ranks talk, and on no other.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from ctypes import byref, c_void_p
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from phalanx.transports.hosts.lane import TransferFailed, TransferLate
from phalanx.transports.hosts.polled import SPIN_S, PolledEngine, PolledTransfer
from phalanx.transports.hosts.ucx_library import (
    BUSY,
    CLOSE_BY_FORCE,
    IN_PROGRESS,
    ON_ERROR,
    EndpointParams,
    RequestParams,
    UcxFailed,
    open_library,
)

__all__ = ["UcxEngine"]

_HELLO = 2**32 - 1  # a tag of 32 bits that no transfer has
# Workers that are not destroyed, and the memory of their transfers, until the process ends.
_kept: list[tuple[c_void_p, list[tuple[int, torch.Tensor]]]] = []
_DONE = 0  # in place of the request of a transfer that waits for its rank's greeting alone
_GONE = "gone"  # in place of an address
_EVERY_BIT = 2**64 - 1
_LOOK_S = 0.25  # how often a rank that waits for another one's address asks the store whether that one has left
# How long a wait sleeps at most: another thread may have settled its transfer.
_NAP_MS = 2
# How long the last bytes may take to leave when the group is destroyed, and what is given up to end.
_PATIENCE_S = 2.0
# Endpoint parameters of request calls: nothing special; and closing an endpoint at once.
_PLAIN = RequestParams()
_BY_FORCE = RequestParams(field_mask=1 << 4, flags=CLOSE_BY_FORCE)


class UcxEngine(PolledEngine):
    """A worker of UCX, made when the group first uses it, with an endpoint for each rank that it has talked to.

    Args:
        store: where the ranks find each other's addresses.
        rank: this process's rank in the group.
        timeout: how long a transfer may take.
    """

    name = "UCX"

    def __init__(self, store: Store, rank: int, timeout: timedelta) -> None:
        super().__init__(timeout)
        self._store, self._rank = store, rank
        self._library = open_library()
        self._c = self._library.c
        self._worker: c_void_p | None = None
        self._descriptor = -1
        self._poll = select.poll()
        self._endpoints: dict[int, c_void_p] = {}
        self._peer_of: dict[int, int] = {}
        self._connecting = threading.Lock()
        self._greetings: dict[int, list[int]] = {}  # with each peer: what is not done of it
        self._given_up: list[tuple[int, torch.Tensor]] = []
        self._on_error = ON_ERROR(self._note_loss)
        self._process = os.getpid()

    def start(self) -> None:
        """Make the worker, and publish its address. A group does so when it first uses the engine."""
        with self.lock:
            if self._worker is not None or self._why_ended:
                return
            worker, address, self._descriptor = self._library.new_worker()
            self._poll.register(self._descriptor, select.POLLIN)
            self._worker = worker
        self._store.set(f"ucx/{self._rank}", address.hex())

    def _connect(self, peer: int) -> None:
        if peer in self._endpoints:
            return
        with self._connecting:
            try:
                self.start()
                self._make_endpoint(peer, self._address(peer))
            except (RuntimeError, UcxFailed) as error:
                raise TransferFailed(peer, " ".join(str(error).split())) from error

    def _address(self, peer: int) -> bytes:
        """Where a rank is, once it has said so. One that leaves before it has used the engine never does."""
        key, now = f"ucx/{peer}", time.monotonic()
        until, look_at = now + self.timeout.total_seconds(), now
        while not self._store.check([key]):
            now = time.monotonic()
            if self._why_ended:
                raise TransferFailed(peer, self._why_ended)
            if self.first_contact is not None and now >= look_at:
                self.first_contact.look(peer)
                look_at = now + _LOOK_S
            if now > until:
                raise TransferLate(peer, f"timed out after {self.timeout.total_seconds():g} s: it has no address")
            time.sleep(0.005)
        address = self._store.get(key).decode()
        if address == _GONE:
            raise TransferFailed(peer, "the other rank has left the group")
        return bytes.fromhex(address)

    def _make_endpoint(self, peer: int, address: bytes) -> None:
        with self.lock:
            if peer in self._endpoints or self._worker is None:
                return
            endpoint = c_void_p()
            params = EndpointParams.of(address, self._on_error)
            self._library.check(self._c.ucp_ep_create(self._worker, byref(params), byref(endpoint)), "ucp_ep_create")
            self._endpoints[peer] = endpoint
            self._peer_of[endpoint.value or 0] = peer
            # A rank that only receives has to notice as well that its peer is lost, so each greets the other. No
            # transfer is over before that: UCX calls one done whose bytes wait in this process for the connection.
            greeting = [
                self._c.ucp_tag_send_nbx(endpoint, None, 0, self._tag(_HELLO, self._rank), byref(_PLAIN)),
                self._c.ucp_ep_flush_nbx(endpoint, byref(_PLAIN)),
                self._c.ucp_tag_recv_nbx(self._worker, None, 0, self._tag(_HELLO, peer), _EVERY_BIT, byref(_PLAIN)),
            ]
            self._greetings[peer] = [each for each in greeting if self._library.status_of(each) is None]

    def _greeted(self, peer: int) -> bool:
        """Whether this rank and its peer are connected. The lock is held."""
        waiting = self._greetings.get(peer)
        if waiting:
            self._greetings[peer] = self._free_done(waiting)
            return not self._greetings[peer]
        return True

    def _free_done(self, requests: list[int]) -> list[int]:
        """Give back the requests that are done; returns the others."""
        waiting = []
        for request in requests:
            if self._c.ucp_request_check_status(request) == IN_PROGRESS:
                waiting.append(request)
            else:
                self._c.ucp_request_free(request)
        return waiting

    @staticmethod
    def _tag(tag: int, sender: int) -> int:
        return tag << 32 | sender

    def _note_loss(self, argument: object, endpoint: int, status: int) -> None:
        """Called by UCX while it advances, so the lock is held."""
        if (peer := self._peer_of.get(endpoint)) is not None:
            self.lost.setdefault(peer, self._library.reason(status))

    # -- transfers ---------------------------------------------------------------------------------

    def _begin(self, transfer: PolledTransfer, tag: int) -> None:
        tensor, peer = transfer.tensor, transfer.peer
        if transfer.receives:
            request = self._c.ucp_tag_recv_nbx(
                self._worker, tensor.data_ptr(), tensor.nbytes, self._tag(tag, peer), _EVERY_BIT, byref(_PLAIN)
            )
        else:
            request = self._c.ucp_tag_send_nbx(
                self._endpoints[peer], tensor.data_ptr(), tensor.nbytes, self._tag(tag, self._rank), byref(_PLAIN)
            )
        status = self._library.status_of(request)
        if status is None:
            transfer.request = request
        elif status or self._greeted(peer):
            self._settle(transfer, status)
        else:
            transfer.request = _DONE

    def _settle(self, transfer: PolledTransfer, status: int) -> None:
        transfer.settle(TransferFailed(transfer.peer, self._library.reason(status)) if status else None)

    def _advance(self) -> None:
        if self._worker is not None:
            while self._c.ucp_worker_progress(self._worker):
                pass

    def _look(self, transfer: PolledTransfer) -> None:
        if transfer.request is None:
            return
        status = 0
        if transfer.request != _DONE:
            status = self._c.ucp_request_check_status(transfer.request)
            if status == IN_PROGRESS:
                return
            self._c.ucp_request_free(transfer.request)
            transfer.request = _DONE
        if status or self._greeted(transfer.peer):
            self._settle(transfer, status)

    def _give_up(self, transfer: PolledTransfer) -> None:
        if transfer.request not in (None, _DONE):
            self._given_up.append((transfer.request, transfer.tensor))  # until the worker is gone

    def _rest(self, waited_s: float) -> None:
        if waited_s < SPIN_S:
            os.sched_yield()
            return
        with self.lock:
            idle = self._worker is not None and self._c.ucp_worker_arm(self._worker) != BUSY
        if idle:
            self._poll.poll(_NAP_MS)

    # -- the end -----------------------------------------------------------------------------------

    def forget(self, rank: int) -> None:
        self._store.delete_key(f"ucx/{rank}")

    def _end(self, *, orderly: bool) -> None:
        if self._process != os.getpid():
            return
        if self._worker is None:
            if not orderly:
                with contextlib.suppress(RuntimeError):  # the store may have gone with rank 0
                    self._store.set(f"ucx/{self._rank}", _GONE)
            return
        flushes = (
            [self._c.ucp_ep_flush_nbx(each, byref(_PLAIN)) for each in self._endpoints.values()] if orderly else []
        )
        # A host that is cut off takes nothing any more, and UCX prints a warning of what is not given back.
        left = self._settle_all(flushes)
        left += [request for greeting in self._greetings.values() for request in greeting]
        left += [request for request, _ in self._given_up]
        for request in left:
            self._c.ucp_request_cancel(self._worker, request)
        # The address stays in the store as long as there are ranks in the group: one that connects late is refused at
        # once, and need not wait for one.
        closing = [self._c.ucp_ep_close_nbx(each, byref(_BY_FORCE)) for each in self._endpoints.values()]
        self._settle_all([*closing, *left])
        if self._given_up:
            # They may wait for a connection, or for more lanes of one, and UCX 1.13 ends the process if a worker is
            # destroyed meanwhile (an assertion about its requests).
            _kept.append((self._worker, self._given_up))
        else:
            self._c.ucp_worker_destroy(self._worker)
            self._given_up.clear()
        self._worker = None

    def _settle_all(self, requests: list[int | None]) -> list[int]:
        """Wait a little for requests, and give them back; returns those that are not done."""
        waiting = [request for request in requests if request and self._library.status_of(request) is None]
        until = time.monotonic() + _PATIENCE_S
        while waiting and time.monotonic() < until:
            self._advance()
            waiting = self._free_done(waiting)
            if waiting:
                time.sleep(0.0005)
        return waiting
