"""The UCX library through ctypes: the few calls of its interface UCP that an engine needs.

The cluster's own library is taken if there is one, because it was built for that network; else that of the wheel
``libucx-cu12``, which works without CUDA, over TCP. Its interface has kept these structures since version 1.10, since
each begins with a mask that says which of its fields count.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Iterator
from ctypes import (
    CFUNCTYPE,
    Structure,
    byref,
    c_byte,
    c_char_p,
    c_int,
    c_int8,
    c_size_t,
    c_uint,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path

from phalanx.system.interfaces import chosen_interface, interface_addresses, outward_address, ucx_devices

__all__ = [
    "BUSY",
    "CANCELED",
    "CLOSE_BY_FORCE",
    "IN_PROGRESS",
    "MISSING",
    "ON_ERROR",
    "TRUNCATED",
    "EndpointParams",
    "RequestParams",
    "UcxFailed",
    "UcxLibrary",
    "devices",
    "open_library",
]

MISSING = (
    "no UCX library can be loaded: pip install libucx-cu12 (it needs no CUDA), or install the system's package of UCX "
    "(libucx0, ucx)"
)
IN_PROGRESS, TRUNCATED, BUSY, CANCELED = 1, -9, -15, -16
_FIRST_ERROR = 2**64 - 100  # pointers from here on are error codes
_OLDEST = (1, 10)  # the version of the interface that is asked for
_TAG, _WAKEUP = 1 << 0, 1 << 4
_ONE_THREAD_AT_A_TIME = 1
_PEER_ERRORS = 1
_REMOTE_ADDRESS, _ERROR_MODE, _ERROR_HANDLER = 1 << 0, 1 << 1, 1 << 2
CLOSE_BY_FORCE = 1
# Read by the library when it is loaded. Without the first it replaces the process's handlers of fatal signals; without
# the second, its warnings come in the midst of what the script prints.
_AT_LOADING = {
    "UCX_HANDLE_ERRORS": "none",
    "UCX_LOG_FILE": "stderr",
    "UCX_LOG_LEVEL": "warn",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}

ON_ERROR = CFUNCTYPE(None, c_void_p, c_void_p, c_int8)


class UcxFailed(Exception):
    """A call of the library has failed."""


class _ContextParams(Structure):
    _fields_ = [
        ("field_mask", c_uint64),
        ("features", c_uint64),
        ("request_size", c_size_t),
        ("request_init", c_void_p),
        ("request_cleanup", c_void_p),
        ("tag_sender_mask", c_uint64),
        ("mt_workers_shared", c_int),
        ("estimated_num_eps", c_size_t),
        ("estimated_num_ppn", c_size_t),
        ("name", c_char_p),
        ("node_local_id", c_size_t),
    ]


class _WorkerParams(Structure):
    _fields_ = [
        ("field_mask", c_uint64),
        ("thread_mode", c_int),
        ("cpu_mask", c_byte * 128),
        ("events", c_uint),
        ("user_data", c_void_p),
        ("event_fd", c_int),
        ("flags", c_uint64),
        ("name", c_char_p),
        ("am_alignment", c_size_t),
        ("client_id", c_uint64),
    ]


class EndpointParams(Structure):
    """How an endpoint is made: ``ucp_ep_params_t``."""

    _fields_ = [
        ("field_mask", c_uint64),
        ("address", c_char_p),
        ("err_mode", c_int),
        ("on_error", ON_ERROR),
        ("on_error_argument", c_void_p),
        ("user_data", c_void_p),
        ("flags", c_uint),
        ("address_of_socket", c_void_p * 2),
        ("conn_request", c_void_p),
        ("name", c_char_p),
        ("local_address_of_socket", c_void_p * 2),
    ]

    @classmethod
    def of(cls, address: bytes, on_error: object) -> EndpointParams:
        """An endpoint to the worker with that address, which says when its peer is lost."""
        mask = _REMOTE_ADDRESS | _ERROR_MODE | _ERROR_HANDLER
        return cls(field_mask=mask, address=address, err_mode=_PEER_ERRORS, on_error=on_error)


class RequestParams(Structure):
    """How a transfer is made, or an endpoint closed: ``ucp_request_param_t``."""

    _fields_ = [
        ("field_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
        ("remote_datatype", c_uint64),
        ("remote", c_void_p),
        ("remote_count", c_size_t),
    ]


_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "ucp_get_version": (None, [c_void_p, c_void_p, c_void_p]),
    "ucp_config_read": (c_int8, [c_char_p, c_char_p, c_void_p]),
    "ucp_config_modify": (c_int8, [c_void_p, c_char_p, c_char_p]),
    "ucp_config_release": (None, [c_void_p]),
    "ucp_init_version": (c_int8, [c_uint, c_uint, c_void_p, c_void_p, c_void_p]),
    "ucp_worker_create": (c_int8, [c_void_p, c_void_p, c_void_p]),
    "ucp_worker_destroy": (None, [c_void_p]),
    "ucp_worker_get_address": (c_int8, [c_void_p, c_void_p, c_void_p]),
    "ucp_worker_release_address": (None, [c_void_p, c_void_p]),
    "ucp_worker_get_efd": (c_int8, [c_void_p, c_void_p]),
    "ucp_worker_arm": (c_int8, [c_void_p]),
    "ucp_worker_progress": (c_uint, [c_void_p]),
    "ucp_ep_create": (c_int8, [c_void_p, c_void_p, c_void_p]),
    "ucp_ep_close_nbx": (c_void_p, [c_void_p, c_void_p]),
    "ucp_ep_flush_nbx": (c_void_p, [c_void_p, c_void_p]),
    "ucp_tag_send_nbx": (c_void_p, [c_void_p, c_void_p, c_size_t, c_uint64, c_void_p]),
    "ucp_tag_recv_nbx": (c_void_p, [c_void_p, c_void_p, c_size_t, c_uint64, c_uint64, c_void_p]),
    "ucp_request_check_status": (c_int8, [c_void_p]),
    "ucp_request_cancel": (None, [c_void_p, c_void_p]),
    "ucp_request_free": (None, [c_void_p]),
}


class UcxLibrary:
    """The library, and a context of it, of which a process has one.

    Attributes:
        c: its functions.
        version: as text.
    """

    def __init__(self, c: ctypes.CDLL) -> None:
        self.c = c
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(c, name)
            function.restype, function.argtypes = result, arguments
        parts = [c_uint() for _ in range(3)]
        c.ucp_get_version(*map(byref, parts))
        self.version = ".".join(str(part.value) for part in parts)
        config, self._context = c_void_p(), c_void_p()
        self.check(c.ucp_config_read(None, None, byref(config)), "ucp_config_read")
        try:
            for name, value in (("NET_DEVICES", devices()), ("TLS", "^sm")):
                if f"UCX_{name}" not in os.environ:
                    self.check(c.ucp_config_modify(config, name.encode(), value.encode()), f"UCX_{name}={value}")
            params = _ContextParams(field_mask=1, features=_TAG | _WAKEUP)
            self.check(
                c.ucp_init_version(*_OLDEST, byref(params), config, byref(self._context)),
                f"ucp_init with the network devices {os.environ.get('UCX_NET_DEVICES', devices())}",
            )
        finally:
            c.ucp_config_release(config)

    def new_worker(self) -> tuple[c_void_p, bytes, int]:
        """A worker, its address, and a descriptor that is readable when it has something to do."""
        worker, address, length = c_void_p(), c_void_p(), c_size_t()
        params = _WorkerParams(field_mask=1, thread_mode=_ONE_THREAD_AT_A_TIME)
        self.check(self.c.ucp_worker_create(self._context, byref(params), byref(worker)), "ucp_worker_create")
        self.check(self.c.ucp_worker_get_address(worker, byref(address), byref(length)), "ucp_worker_get_address")
        found = ctypes.string_at(address, length.value)
        self.c.ucp_worker_release_address(worker, address)
        descriptor = c_int()
        self.check(self.c.ucp_worker_get_efd(worker, byref(descriptor)), "ucp_worker_get_efd")
        return worker, found, descriptor.value

    def check(self, status: int, what: str) -> None:
        """Raise UcxFailed if a call has failed."""
        if status:
            raise UcxFailed(f"{what}: {self.reason(status)}")

    def reason(self, status: int) -> str:
        """An error of UCX in words."""
        return f"{_WORDS.get(status, 'error')} (UCX {self.version}, status {status})"

    @staticmethod
    def status_of(pointer: int | None) -> int | None:
        """What a call returned in place of a request: 0 if it is done, or an error; None if it is a request."""
        if pointer is None:
            return 0
        return pointer - 2**64 if pointer >= _FIRST_ERROR else None


_WORDS = {
    -3: "input/output error",
    -6: "destination is unreachable",
    TRUNCATED: "message is longer than the memory for it",
    -13: "no connection",
    -14: "no such device",
    CANCELED: "cancelled",
    -20: "timed out",
    -23: "connection was refused",
    -24: "not connected",
    -25: "connection reset by the other rank",
    -80: "the other rank does not answer",
}


@cache
def open_library() -> UcxLibrary:
    """The library of this process, loaded now if it was not.

    Raises:
        UcxFailed: there is none, or it cannot be used; says what to do.
    """
    with _variables_at_loading():
        return UcxLibrary(_load())


def _load() -> ctypes.CDLL:
    names = ["libucp.so.0"]
    wheel = importlib.util.find_spec("libucx")
    if wheel is not None:
        names += [str(Path(folder) / "lib" / names[0]) for folder in wheel.submodule_search_locations or ()]
    found = ""
    for name in names:
        try:
            library = ctypes.CDLL(name)
            library.ucp_tag_send_nbx  # noqa: B018 - older libraries do not have it
        except (OSError, AttributeError) as error:
            if os.path.exists(name):
                found = f" ({error})"
        else:
            return library
    raise UcxFailed(MISSING + found)


@contextlib.contextmanager
def _variables_at_loading() -> Iterator[None]:
    added = [name for name in _AT_LOADING if name not in os.environ]
    os.environ.update({name: _AT_LOADING[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def devices() -> str:
    """The devices that UCX may use, as UCX_NET_DEVICES has them: those of the interface over which the ranks talk."""
    chosen = chosen_interface()
    return ucx_devices(chosen[0] if chosen is not None else _interface_of(outward_address()))


def _interface_of(address: str) -> str:
    return next(name for name, addresses in interface_addresses().items() if address in addresses)
