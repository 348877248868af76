"""The calls of a communicator, recorded: which, of how many bytes, from which line, and when each began and ended.

A process group calls its communicator through this, so every operation passes here that its quick methods do not take
(those record by themselves, ``native/csrc_entry``): synchronous ones when they are called, queued ones when they run,
on whichever thread that is. What an operation calls inside its communicator is a part of it, and not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof
from typing import Any

import torch

from phalanx.diagnosis import recorder
from phalanx.diagnosis.call_site import dtype_name
from phalanx.diagnosis.snapshot import KIND_NUMBERS
from phalanx.native.core import RecordedGroup
from phalanx.transports.contract import SENT, Communicator, Message
from phalanx.transports.operands import DTYPES, OP_NUMBERS

__all__ = ["RecordedCalls"]

_DTYPES = {dtype: number << 8 for dtype, number in DTYPES.items()}
# Each method of the contract: its kind, and which of its arguments is this rank's tensor, the operation, the root (-1:
# it has none).
_METHODS = {
    "all_reduce": ("all_reduce", 0, 1, -1),
    "reduce": ("reduce", 0, 2, 1),
    "reduce_scatter": ("reduce_scatter", 0, 2, -1),
    "reduce_scatter_single": ("reduce_scatter", 0, 2, -1),
    "broadcast": ("broadcast", 0, -1, 1),
    "all_gather": ("all_gather", 1, -1, -1),
    "all_gather_single": ("all_gather", 1, -1, -1),
    "gather": ("gather", 1, -1, 2),
    "gather_single": ("gather", 1, -1, 2),
    "scatter": ("scatter", 0, -1, 2),
    "all_to_all": ("all_to_all", 1, -1, -1),
    "all_to_all_single": ("all_to_all", 1, -1, -1),
    "barrier": ("barrier", -1, -1, -1),
}

recorder.describe_dtypes({number: dtype_name(dtype) for dtype, number in DTYPES.items()})


class RecordedCalls:
    """The collectives and messages of a communicator, under their names, each of which it records and then calls."""

    def __init__(self, communicator: Communicator, recorded: RecordedGroup) -> None:
        self._recorded = recorded  # the core counts in it
        for name, (kind, *places) in _METHODS.items():
            body, lists = getattr(communicator, name), name == "all_to_all"
            setattr(self, name, _collective(body, recorded, KIND_NUMBERS[kind], lists, *places))
        group = addressof(recorded)
        self.send = _message(communicator.send, group, KIND_NUMBERS["send"])
        self.recv = _message(communicator.recv, group, KIND_NUMBERS["recv"])


def _collective(
    body: Callable[..., None], recorded: RecordedGroup, kind: int, lists: bool, tensor_at: int, op_at: int, root_at: int
) -> Callable[..., None]:
    group, (begin, end) = addressof(recorded), recorder.begin_and_end()

    def call(*arguments: Any) -> None:
        what, nbytes = kind, 0
        if tensor_at >= 0:
            tensor = arguments[tensor_at]
            if lists:
                nbytes = sum([part.nbytes for part in tensor])
                tensor = tensor[0]
            else:
                nbytes = tensor.nbytes
            what |= _DTYPES[tensor.dtype]
        if op_at >= 0:
            what |= OP_NUMBERS.get(arguments[op_at], 0) << 16
        ticket = begin(group, what, nbytes, arguments[root_at] if root_at >= 0 else -1)
        try:
            body(*arguments)
        except BaseException:
            end(ticket, True)
            raise
        end(ticket, False)

    return call


def _message(body: Callable[..., Message], group: int, kind: int) -> Callable[..., Message]:
    def call(tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        ticket = recorder.begin(group, kind | _DTYPES[tensor.dtype], tensor.nbytes, -1 if peer is None else peer)
        try:
            message = body(tensor, peer, tag)
        except BaseException:
            recorder.end(ticket, True)
            raise
        if message is SENT:  # which stands for every such message
            recorder.end(ticket, False)
        elif ticket:
            message.recorded_as(ticket)
        return message

    return call
