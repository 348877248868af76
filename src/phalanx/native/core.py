"""The C core through ctypes, which releases the GIL around every call; only this file knows C signatures."""

from __future__ import annotations

import ctypes
import importlib
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int32, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from types import ModuleType

from phalanx.errors import BackendError

ABI = 39
ANY_SOURCE = NOBODY = 0xFFFFFFFF
SENT = 1  # PHX_SENT
TEXT_BYTES = 376

Poll = CFUNCTYPE(c_int)
Tracer = CFUNCTYPE(None, c_uint32, c_uint64, c_void_p, c_uint64)


class Status:
    """The status that a call of the core returns (``enum phx_status``)."""

    UNMET = -9
    DIFFERS = -8
    OVERDUE = -7
    CUT = -6
    CROSSED = -4
    PEER_LEFT = -3
    UNDER_WAY = -1
    OK = 0
    BAD_ARGUMENT = 1
    SYSTEM = 2
    MISMATCH = 3
    PEER_LOST = 4
    TIMEOUT = 5
    INTERRUPTED = 6


BROKEN_FROM = Status.MISMATCH


class Traced:
    """Name what the core's tracer tells (``enum phx_traced``)."""

    PUT = 1
    TAKEN = 2
    ADDED = 3
    COMBINED = 4
    RAISED = 5
    SAW = 6


class Going:
    """Way in which a rank went (``enum phx_going``)."""

    HERE = 0
    LEFT = 1
    FAILED = 2
    ENDED = 3
    REPLACED = 4


class End(Structure):
    """One end of a message (``struct phx_end``)."""

    _fields_ = [("nbytes", c_uint64), ("dtype", c_uint32), ("site", c_uint32)]


class SeenMessage(Structure):
    """A message that is under way (``struct phx_message_seen``)."""

    _fields_ = [("end", End), ("peer", c_uint32), ("receiving", c_uint32)]


class Breakage(Structure):
    """Why a group broke (``struct phx_breakage``)."""

    _fields_ = [
        *((name, c_uint32) for name in ("status", "rank", "peer", "peer_pid")),
        ("chunk", c_uint64),
        *((name, c_uint32) for name in ("how", "of_message")),
        ("sent", End),
        ("expected", End),
    ]


class Crossing(Structure):
    """Two lines that two ranks have called in different calls (``struct phx_crossing``)."""

    _fields_ = [("peer", c_uint32), ("lines", c_uint32 * 2), ("mine", c_uint32 * 2), ("theirs", c_uint32 * 2)]


class Pairs(Structure):
    """Lines of this rank and another one that have met (``struct phx_line_pairs``)."""

    _fields_ = [("kept", c_uint32), ("calm", c_uint32), ("pairs", c_uint32 * 3 * 16)]


RECORDS, RECORDS_AT, PIECES_AT = 4096, 4096, 80
STRINGS_AT = RECORDS_AT + RECORDS * 64
RECORDER_BYTES = STRINGS_AT + 262144
FOUND_LATE = 1 << 24  # PHX_FOUND_LATE, in what a record is of
NBYTES_BITS = 44  # PHX_NBYTES_BITS, of a record's bytes; above them is the number of its shape


class RecordedGroup(Structure):
    """A group as the recorder counts its operations (``struct phx_record_group``)."""

    _fields_ = [("name", c_uint32), ("pad", c_uint32), ("collectives", c_uint32), ("messages", c_uint32)]


class SeenRecord(Structure):
    """A record of an operation (``struct phx_record_seen``)."""

    _fields_ = [
        *((name, c_uint64) for name in ("number", "entered_ns", "left_ns", "nbytes")),
        *((name, c_uint32) for name in ("in_group", "what", "group", "site", "label")),
        *((name, c_int32) for name in ("peer", "awaits", "step")),
        *((name, c_uint32) for name in ("failed", "shape")),
    ]


@cache
def library() -> ctypes.CDLL:
    """Load the core once and declare its functions; BackendError if it is missing, or of another ABI."""
    path = Path(__file__).with_name("libphalanx.so")
    try:
        core = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL, use_errno=True)  # the module in C finds it there
    except OSError as error:
        raise BackendError(
            f"the C core of Phalanx could not be loaded ({error}); build it with: pip install ."
        ) from error
    core.phx_abi.restype = c_uint32
    if (found := core.phx_abi()) != ABI:
        raise BackendError(
            f"{path} has ABI {found}, this Phalanx needs {ABI}: remove the file and run pip install . again"
        )
    comm = data = message = c_void_p
    blocks, sizes, recorded = POINTER(c_void_p), POINTER(c_uint64), POINTER(RecordedGroup)
    for name, result, arguments in (
        ("phx_segment_format", c_int, [c_int, c_uint32, c_uint64, c_uint64, c_uint64, c_char_p]),
        ("phx_open", comm, [c_int, c_uint32, c_char_p, c_uint32, Poll]),
        ("phx_close", None, [comm]),
        ("phx_look", None, [comm]),
        ("phx_going", c_int, [comm, c_uint32, POINTER(c_uint32)]),
        ("phx_compare_rest", c_int, [comm, c_uint64]),
        ("phx_begin_parts", None, [comm, c_uint64]),
        ("phx_beside_last_call", c_int, [comm, c_uint64]),
        ("phx_process_leaves", None, []),
        ("phx_stacks_in_copy", c_int, [c_int, c_int, c_void_p]),
        ("phx_process_fails", None, [c_char_p]),
        ("phx_trace", None, [Tracer]),
        ("phx_group_fails", None, [comm, c_char_p]),
        ("phx_abort", None, [comm]),
        ("phx_set_timeout", None, [comm, c_uint64, c_uint64]),
        ("phx_breakage", c_int, [comm, POINTER(Breakage)]),
        ("phx_describe", None, [comm, c_char_p]),
        ("phx_description", c_int, [comm, c_uint32, c_char_p]),
        ("phx_compare_lines", None, [comm, c_uint32]),
        ("phx_crossing", None, [comm, POINTER(Crossing)]),
        ("phx_tells_crossing", c_int, [comm]),
        ("phx_break_crossed", None, [comm]),
        ("phx_line_now", c_uint32, []),
        ("phx_pairs_meet", c_int, [POINTER(Pairs), c_uint32, c_uint32, POINTER(Crossing)]),
        ("phx_recorder_open", c_void_p, [c_int, c_uint64, c_uint32, c_int32, c_uint32]),
        ("phx_recorder_names", None, [c_uint32, c_int32, c_uint32]),
        ("phx_recorder_mark", None, [c_int32, c_uint32]),
        ("phx_record_begin", c_uint64, [recorded, c_uint32, c_uint64, c_uint32, c_int32]),
        ("phx_record_begin_at", c_uint64, [recorded, c_uint32, c_uint64, c_uint32, c_int32, c_uint64]),
        ("phx_record_drop", None, [c_uint64]),
        ("phx_record_piece", None, [c_uint64, c_uint64]),
        ("phx_record_end", None, [c_uint64, c_int]),
        ("phx_records_read", c_uint32, [c_void_p, c_uint64, POINTER(SeenRecord), POINTER(c_uint64)]),
        ("phx_recorder_of", c_void_p, [comm, c_uint32]),
        ("phx_name_ranks", None, [comm, POINTER(c_int32)]),
        ("phx_combine", c_int, [blocks, c_uint32, data, c_uint64, c_uint32, c_uint32]),
        ("phx_all_reduce", c_int, [comm, data, data, c_uint64, c_uint32, c_uint32, c_uint64]),
        ("phx_reduce", c_int, [comm, data, data, c_uint64, c_uint32, c_uint32, c_uint32, c_uint64]),
        ("phx_reduce_scatter", c_int, [comm, blocks, data, c_uint64, c_uint32, c_uint32, c_uint64]),
        ("phx_share_memory", c_int, [comm, data, c_uint64]),
        ("phx_broadcast", c_int, [comm, data, c_uint64, c_uint32, c_uint32, c_uint64]),
        ("phx_all_gather", c_int, [comm, data, blocks, c_uint64, c_uint32, c_uint64]),
        ("phx_gather", c_int, [comm, data, blocks, c_uint64, c_uint32, c_uint32, c_uint64]),
        ("phx_scatter", c_int, [comm, blocks, data, c_uint64, c_uint32, c_uint32, c_uint64]),
        ("phx_all_to_all", c_int, [comm, blocks, sizes, blocks, sizes, c_uint32]),
        ("phx_barrier", c_int, [comm]),
        ("phx_send", message, [comm, data, POINTER(End), c_uint32, c_uint32]),
        ("phx_recv", message, [comm, data, POINTER(End), c_uint32, c_uint32]),
        ("phx_message_test", c_int, [comm, message, c_int]),
        ("phx_message_expect", None, [comm, message]),
        ("phx_messages_rest", c_uint64, [comm, c_uint64]),
        ("phx_messages_end", None, [comm, c_int]),
        ("phx_messages_join", c_int, [comm, c_uint32, POINTER(c_int32)]),
        ("phx_messages_connect", c_int, [comm, c_uint32, c_int, c_int]),
        ("phx_messages_refused", None, [comm, c_uint32, c_int]),
        ("phx_messages_cut", None, [comm]),
        ("phx_messages_waiting", c_int, [comm, c_char_p, POINTER(SeenMessage)]),
        ("phx_message_ends", c_char_p, [message, POINTER(End), POINTER(End)]),
        ("phx_message_wait", c_int, [comm, message, c_uint64]),
        ("phx_message_source", c_uint32, [message]),
        ("phx_message_free", None, [comm, message]),
        ("phx_mpi_begin", None, [c_void_p, c_void_p, c_void_p, ctypes.c_ssize_t]),
        ("phx_mpi_prepare", None, [c_int]),
        ("phx_mpi_end", None, [c_int, c_void_p]),
    ):
        function = getattr(core, name)
        function.restype, function.argtypes = result, arguments
    return core


@cache
def rpc(*, holding: bool = False) -> ctypes.CDLL:
    """Load the core's functions for RPC (``native/csrc/rpc/rpc.h``).

    With ``holding``, calls keep the interpreter's lock: a function that never waits is spared two hand-overs, each of
    which may take 5 ms beside a busy thread.
    """
    path = library()._name
    core = ctypes.PyDLL(path) if holding else ctypes.CDLL(path, use_errno=True)
    hub = link = box = c_void_p
    pieces = [c_uint32, POINTER(c_void_p), POINTER(c_uint64)]
    for name, result, arguments in (
        ("phx_rpc_open", hub, [c_char_p, c_uint64]),
        ("phx_rpc_descriptor", c_int, [hub]),
        ("phx_rpc_shut", None, [hub]),
        ("phx_rpc_close", None, [hub]),
        ("phx_rpc_offer", link, [hub, c_char_p, POINTER(c_int)]),
        ("phx_rpc_accept", link, [hub, c_uint32, c_int, c_char_p, c_int, c_char_p]),
        ("phx_rpc_confirm", c_int, [link]),
        ("phx_rpc_begin", c_int, [link]),
        ("phx_rpc_end", None, [link]),
        ("phx_rpc_why", c_uint32, [link]),
        ("phx_rpc_pid", c_uint32, []),
        ("phx_rpc_drop", None, [link]),
        ("phx_rpc_send", c_int, [link, c_char_p, c_uint64]),
        ("phx_rpc_share", c_int, [hub, *pieces, POINTER(c_uint64)]),
        ("phx_rpc_unshare", None, [hub, POINTER(c_uint64)]),
        ("phx_rpc_lend", c_int, [link, c_uint64, c_uint64, c_int]),
        ("phx_rpc_taken", c_uint64, [link]),
        ("phx_rpc_wait_room", None, [link, c_uint64]),
        ("phx_rpc_next", c_int, [hub, box]),
        ("phx_rpc_begun", None, [link]),
        ("phx_rpc_await", c_int, [hub, link, c_uint64, c_uint32, box]),
        ("phx_rpc_answered", None, [hub]),
        ("phx_rpc_answers", c_void_p, [hub]),
        ("phx_rpc_release", None, [link, c_uint32, c_uint32, c_uint64, c_uint64]),
    ):
        function = getattr(core, name)
        function.restype, function.argtypes = result, arguments
    return core


def quick_entry() -> ModuleType | str:
    """Load the module in C for the usual calls (``native/csrc_entry``); or say why all calls go by ctypes."""
    try:
        library()  # whose functions it calls
        module = importlib.import_module("phalanx.native.entry")
    except (ImportError, BackendError) as error:
        return f"the module phalanx.native.entry could not be loaded ({error})"
    if module.ABI != ABI:
        return f"the module phalanx.native.entry has ABI {module.ABI}, this Phalanx needs {ABI}; install it again"
    return module
