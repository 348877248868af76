"""The communicator for the ranks of one host: a shared segment and the C core."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from phalanx.diagnosis import recorder
from phalanx.diagnosis.call_site import CallSite, capture, shape_word, shown, text_of
from phalanx.diagnosis.ends import AT_ONCE_S, how_ended, tell_how_the_script_ends
from phalanx.diagnosis.reading import with_own_wait
from phalanx.diagnosis.stacks import be_seen
from phalanx.errors import BackendError, ClosedError, PhalanxError
from phalanx.membership.liveness import Gone
from phalanx.native.core import BROKEN_FROM, TEXT_BYTES, Breakage, Crossing, Going, Status, library
from phalanx.native.signals import SignalPoll
from phalanx.system.host import machine_name
from phalanx.transports.call_check import MOST_JUDGED, Wish, crossed_lines
from phalanx.transports.contract import Communicator, Message, with_site
from phalanx.transports.operands import DTYPES, OP_NUMBERS, reducible
from phalanx.transports.shm.explanation import WAYS, exchanged, explain, facts_of, text_of_call
from phalanx.transports.shm.mailbox import Mailbox
from phalanx.transports.shm.segment import join_segment, share_parts
from phalanx.transports.shm.tuning import Tuning, load_tuning

__all__ = ["SharedMemoryCommunicator"]

_ALL = (1 << 32) - 1

_Pointers = ctypes.Array[ctypes.c_void_p]
_Unheard = tuple[CallSite | None, Callable[..., str], tuple[Any, ...]]


class SharedMemoryCommunicator(Communicator):
    """Collectives through one shared segment (``native/csrc/segment/segment.h`` has its protocol).

    Every rank of the group constructs it, at the same point of its program.

    Args:
        store: the group's part of the job's store, in which the ranks exchange how to reach the segment.
        rank, size: this process's place in the group of at most 1024 ranks.
        timeout: how long to wait for the others, here and in every collective.
        tuning: by default what ``phalanx bench --tune`` found, else what is built in. All ranks use that of rank 0.
        names: what errors call the ranks; by default their ranks in the group.

    Attributes:
        part_of: tells the call, with its line, of a larger group, of which the calls of this one are a part; or None.
        outer_error: makes the error of a message for that larger group, of what this one knows and of the message.
        crossed: which lines this rank has found crossed, if that is an error that the user wants.
        meeting: the name of the meeting at which the ranks made it (:class:`NotOneHost`).

    Raises:
        NotOneHost: a rank cannot make or open the segment; the message says which and why.
        InitializationError: a rank did not come within the timeout.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        tuning: Tuning | None = None,
        names: Sequence[int] = (),
    ) -> None:
        self.rank = rank
        self._names = names or range(size)
        self.size = size
        self._core = library()
        self._signals = SignalPoll()
        self._pointers = (ctypes.c_void_p * size)()
        self._other_pointers = (ctypes.c_void_p * size)()
        self._sizes = (ctypes.c_uint64 * size)()
        self._other_sizes = (ctypes.c_uint64 * size)()
        cores = len(os.sched_getaffinity(0))
        # About 4 µs; less with more ranks than cores, where the awaited rank needs the core that a spin would occupy.
        spin = 100 if size <= cores else 50
        poll = self._signals.callback
        tuning = tuning or load_tuning()
        self._comm, self.meeting = join_segment(store, rank, size, timeout, tuning, spin, poll)
        if (wish := Wish.read()) != Wish.IGNORE:
            self._core.phx_compare_lines(self._comm, MOST_JUDGED if wish == Wish.WARN else _ALL)
        if names:
            self._numbers = (ctypes.c_int32 * size)(*names)  # which the core reads as long as it has the group
            self._core.phx_name_ranks(self._comm, self._numbers)
        self._mailbox = Mailbox(self._comm, self._signals, self._explain_message, self._names)
        self.set_timeout(timeout)
        tell_how_the_script_ends()
        be_seen()
        self.crossed = ""
        self._shared: list[torch.Tensor] = []  # memory that the core knows, mapped as long as it may be asked for it
        self.part_of: Callable[[], str] | None = None
        self.outer_error: Callable[[PhalanxError, str], PhalanxError] | None = None
        self._told = False  # whether this rank has raised the error of the broken group
        # The last call that returned before every other rank had confirmed it, as a broadcast's root does. If it did
        # not match, that is found in a later call, whose error must name this one. Kept as (call site, function that
        # writes the text, its arguments), with the recorder's number of the site where it is known. The thread in a
        # collective writes it; one that explains its message reads it, too: one assignment replaces it whole.
        self._unheard: tuple[CallSite | int | None, Callable[..., str], tuple[Any, ...]] | None = None

    def can_reduce(self, dtype: torch.dtype, op: int) -> bool:
        return reducible(dtype, op)

    @property
    def handle(self) -> int:
        """The core's handle of the group, for calls of the core under the group's lock; 0 once it is closed."""
        return self._comm

    @property
    def mailbox(self) -> Mailbox:
        """The messages of the group, which a larger group makes its own."""
        return self._mailbox

    def tells_crossing(self) -> bool:
        """Return whether this rank is to tell the user of crossed lines: the first one that asks."""
        return bool(self._core.phx_tells_crossing(self._comm))

    @property
    def aborted(self) -> bool:
        """A rank has broken the group by :meth:`abort`, or because a signal interrupted it."""
        return bool(self._mailbox.why_broken().status == Status.INTERRUPTED)

    @property
    def timed_out_elsewhere(self) -> bool:
        """Another rank has broken the group, because its time was over."""
        why = self._mailbox.why_broken()
        return bool(why.status == Status.TIMEOUT and why.rank != self.rank)

    def group_fails(self, error: BaseException, cause: str) -> None:
        self._mailbox.group_fails(cause)

    def gone(self, ranks: Collection[int]) -> dict[int, Gone]:
        """Find those of these ranks that have gone, without waiting. Any thread may ask; a closed group knows none."""
        found: dict[int, Gone] = {}
        pid, said = ctypes.c_uint32(), ctypes.create_string_buffer(TEXT_BYTES)
        with self._mailbox as comm:
            for rank in ranks if comm else ():
                how = self._core.phx_going(comm, rank, ctypes.byref(pid))
                if how == Going.HERE:
                    continue
                text = how_ended(pid.value, AT_ONCE_S).text if how == Going.ENDED else ""
                if how == Going.FAILED and self._core.phx_description(comm, rank, said):
                    text = said.value.decode(errors="replace")
                found[rank] = Gone(pid.value, machine_name(), WAYS[how], text)
        return found

    def ended(self, rank: int, pid: int) -> dict[str, Any]:
        """Say how a rank has ended, as ``how`` and ``signal``, with the facts of :class:`PeerLost` known of it."""
        ending = how_ended(pid)
        with self._mailbox as comm:
            facts = facts_of(comm, rank) if comm else {}
        return {**facts, "how": ending.text, "signal": ending.signal}

    @property
    def differs_late(self) -> bool:
        """The ranks' calls differ, and those before the present one of the larger group."""
        why, comm = self._mailbox.why_broken(), self._comm
        return why.status == Status.MISMATCH and bool(comm) and self._core.phx_beside_last_call(comm, why.chunk) < 0

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        data, dtype = tensor.data_ptr(), DTYPES[tensor.dtype]
        status = self._core.phx_all_reduce(
            self._comm, data, data, tensor.numel(), dtype, OP_NUMBERS[op], shape_word(tensor.shape)
        )
        if status:
            self._fail(status, "all_reduce", tensor, op)

    def reduce(self, tensor: torch.Tensor, root: int, op: int) -> None:
        data, dtype = tensor.data_ptr(), DTYPES[tensor.dtype]
        status = self._core.phx_reduce(
            self._comm, data, data, tensor.numel(), dtype, OP_NUMBERS[op], root, shape_word(tensor.shape)
        )
        self._end(status, "reduce", tensor, op, root, heard=root == self.rank)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> None:
        self._reduce_scatter(_fill(self._pointers, inputs), output, op)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, op: int) -> None:
        self._reduce_scatter(_fill_evenly(self._pointers, tensor, output.nbytes), output, op)

    def _reduce_scatter(self, inputs: _Pointers, output: torch.Tensor, op: int) -> None:
        data, dtype = output.data_ptr(), DTYPES[output.dtype]
        status = self._core.phx_reduce_scatter(
            self._comm, inputs, data, output.numel(), dtype, OP_NUMBERS[op], shape_word(output.shape)
        )
        if status:
            self._fail(status, "reduce_scatter", output, op)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        data, dtype = tensor.data_ptr(), DTYPES[tensor.dtype]
        status = self._core.phx_broadcast(self._comm, data, tensor.nbytes, dtype, root, shape_word(tensor.shape))
        self._end(status, "broadcast", tensor, None, root, heard=root != self.rank and self.size == 2)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        self._all_gather(_fill(self._pointers, outputs), tensor)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        self._all_gather(_fill_evenly(self._pointers, output, tensor.nbytes), tensor)

    def _all_gather(self, outputs: _Pointers, tensor: torch.Tensor) -> None:
        data, dtype = tensor.data_ptr(), DTYPES[tensor.dtype]
        status = self._core.phx_all_gather(self._comm, data, outputs, tensor.nbytes, dtype, shape_word(tensor.shape))
        if status:
            self._fail(status, "all_gather", tensor)

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        self._gather(None if outputs is None else _fill(self._pointers, outputs), tensor, root)

    def gather_single(self, output: torch.Tensor | None, tensor: torch.Tensor, root: int) -> None:
        self._gather(None if output is None else _fill_evenly(self._pointers, output, tensor.nbytes), tensor, root)

    def _gather(self, outputs: _Pointers | None, tensor: torch.Tensor, root: int) -> None:
        data, dtype = tensor.data_ptr(), DTYPES[tensor.dtype]
        status = self._core.phx_gather(self._comm, data, outputs, tensor.nbytes, dtype, root, shape_word(tensor.shape))
        self._end(status, "gather", tensor, None, root, heard=root == self.rank)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        parts = None if inputs is None else _fill(self._pointers, inputs)
        data, dtype = output.data_ptr(), DTYPES[output.dtype]
        status = self._core.phx_scatter(self._comm, parts, data, output.nbytes, dtype, root, shape_word(output.shape))
        self._end(status, "scatter", output, None, root, heard=root != self.rank and self.size == 2)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self._sizes[:] = [tensor.nbytes for tensor in inputs]
        self._other_sizes[:] = [tensor.nbytes for tensor in outputs]
        self._all_to_all(_fill(self._other_pointers, outputs), _fill(self._pointers, inputs), outputs[0].dtype)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
    ) -> None:
        self._all_to_all(
            _fill_unevenly(self._other_pointers, self._other_sizes, output, output_counts),
            _fill_unevenly(self._pointers, self._sizes, tensor, input_counts),
            output.dtype,
        )

    def _all_to_all(self, outputs: _Pointers, inputs: _Pointers, dtype: torch.dtype) -> None:
        status = self._core.phx_all_to_all(self._comm, inputs, self._sizes, outputs, self._other_sizes, DTYPES[dtype])
        # The receiver alone compares the sizes of a pair.
        unheard = recorder.number_here() or capture(2), exchanged, (dtype, bytes(self._sizes), bytes(self._other_sizes))
        if status:
            self._raise(status, "all_to_all", unheard[1](*unheard[2]))
        self._unheard = unheard

    def empty(self, nbytes: int) -> torch.Tensor:
        """Bytes that other ranks can read where they lie: an ``all_reduce`` of a tensor in them copies nothing."""
        whole, own = share_parts(self, nbytes)
        self._shared.append(whole)  # first, because the core must never know memory that is not mapped
        if self._core.phx_share_memory(self._comm, whole.data_ptr(), whole.nbytes):
            raise BackendError("there is no memory to note a shared tensor in")
        return own

    def barrier(self) -> None:
        status = self._core.phx_barrier(self._comm)
        if status:
            self._fail(status, "barrier", None)

    # -- point to point ----------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        return self._mailbox.send(tensor, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        return self._mailbox.recv(tensor, peer, tag)

    def rest(self) -> None:
        self._mailbox.rest()

    def end_messages(self) -> None:
        self._mailbox.end()

    # -- lifetime and errors -----------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta, of_messages: timedelta | None = None) -> None:
        self._timeout_s = timeout.total_seconds()
        self._message_timeout_s = self._timeout_s if of_messages is None else of_messages.total_seconds()
        with self._mailbox as comm:
            if comm:
                self._core.phx_set_timeout(comm, int(self._timeout_s * 1e9), int(self._message_timeout_s * 1e9))

    def begin_parts(self, call: int) -> None:
        """The calls from now on are parts of a call of a larger group, which has this number on each rank."""
        if self._comm:
            self._core.phx_begin_parts(self._comm, call)

    def abort(self, doing: str = "") -> None:
        with self._mailbox as comm:
            if comm:
                if doing:
                    self._core.phx_describe(comm, doing.encode()[: TEXT_BYTES - 1])
                self._core.phx_abort(comm)

    def compare_rest(self, patience_s: float) -> None:
        with self._mailbox as comm:
            if not comm or self._told:
                return
            broken = self._core.phx_breakage(comm, ctypes.byref(why := Breakage()))
            if not broken and self._core.phx_compare_rest(comm, int(patience_s * 1e9)) <= 0:
                return
            self._core.phx_breakage(comm, ctypes.byref(why))
            beside = self._core.phx_beside_last_call(comm, why.chunk) if why.status == Status.MISMATCH else 1
            if beside <= 0 or (not broken and why.how == Going.LEFT):
                place, text, arguments = self._last_unheard() or (None, lambda: "leaving the group", ())
                later = "a later call: " if beside < 0 else ""
                raise self._error(comm, with_site(later + text(*arguments), shown(text_of(place))))

    def close(self) -> None:
        self._mailbox.end()
        if not (comm := self._mailbox.take()):
            return
        self._comm = 0
        if self._mailbox.close():  # else the memory stays mapped until the process ends
            self._core.phx_close(comm)

    def _end(self, status: int, name: str, tensor: torch.Tensor, op: int | None, root: int, *, heard: bool) -> None:
        """End a call with a root: raise its error, and keep what it was, unless each other rank has ``heard`` of it."""
        if status:
            self._fail(status, name, tensor, op, root)
        if not heard:
            site = recorder.number_here() or capture(2)
            self._unheard = site, text_of_call, (name, tensor.dtype, tensor.shape, op, root)

    def _fail(
        self, status: int, name: str, tensor: torch.Tensor | None, op: int | None = None, root: int | None = None
    ) -> None:
        """Raise the error for ``status``, after publishing for the other ranks what this one was doing.

        A call whose line has crossed another one is done, and an error only if the user wants that.
        """
        dtype, shape = (None, ()) if tensor is None else (tensor.dtype, tensor.shape)
        self._raise(status, name, text_of_call(name, dtype, shape, op, root))

    def _raise(self, status: int, name: str, text: str) -> None:
        if status == Status.CROSSED:
            self.crossed = self._judge_crossing()
            if not self.crossed:
                return
            self._core.phx_describe(self._comm, f"{with_site(text)} ({self.crossed})".encode()[: TEXT_BYTES - 1])
        elif status < BROKEN_FROM:
            raise BackendError(
                f"the core refused {name} on rank {self.rank} (status {status}): a rank that the group does not have, "
                "a dtype or operation that the core does not know, or a tensor without memory of its own, such as a "
                "wrapper around others: give those instead"
            )
        self._signals.raise_pending()
        raise self._explain(text)

    def _judge_crossing(self) -> str:
        """Warn of lines that the last call has found crossed; if that is an error, name them and break the group."""
        self._core.phx_crossing(self._comm, ctypes.byref(found := Crossing()))
        crossed = crossed_lines(found, self._names[self.rank], self._names[found.peer])
        if crossed is not None and Wish.read() == Wish.ERROR:
            self._core.phx_break_crossed(self._comm)
            return crossed.briefly()
        if crossed is not None and self.tells_crossing():
            crossed.warn()
        return ""

    def _explain(self, call: str) -> PhalanxError:
        """The error for a broken group, given what this rank was doing."""
        if self._comm and self.part_of is not None:
            return self._error(self._comm, self.part_of())
        if not (comm := self._comm):
            return ClosedError.of_message()
        why = self._mailbox.why_broken()
        what, before = with_site(call), self._last_unheard()
        if before and why.status == Status.MISMATCH and self._core.phx_beside_last_call(comm, why.chunk) < 0:
            place, text, arguments = before
            what = with_site(text(*arguments), shown(text_of(place)))
        return self._error(comm, what)

    def _explain_message(self, message: str) -> PhalanxError:
        """The error for a message of a broken group."""
        if self.outer_error is None:
            return self._explain(message)
        if not (comm := self._comm):
            return ClosedError.of_message()
        what = with_site(message)
        return self.outer_error(self._error(comm, what, self._message_timeout_s), what)

    def _last_unheard(self) -> _Unheard | None:
        if self.part_of is not None:
            return None, self.part_of, ()
        if self._unheard is None:
            return None
        site, text, arguments = self._unheard
        return recorder.site_of(site) if isinstance(site, int) else site, text, arguments

    def _error(self, comm: int, what: str, timeout_s: float | None = None) -> PhalanxError:
        self._told = True
        own_timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return with_own_wait(explain(comm, self.rank, self._names, what, own_timeout_s))


def _fill(pointers: _Pointers, tensors: Sequence[torch.Tensor]) -> _Pointers:
    """Return the address of each tensor."""
    for index, tensor in enumerate(tensors):
        pointers[index] = tensor.data_ptr()
    return pointers


def _fill_evenly(pointers: _Pointers, whole: torch.Tensor, nbytes: int) -> _Pointers:
    """Return the addresses of a tensor's pieces of ``nbytes`` each."""
    at = whole.data_ptr()
    for index in range(len(pointers)):
        pointers[index] = at
        at += nbytes
    return pointers


def _fill_unevenly(
    pointers: _Pointers, sizes: ctypes.Array[ctypes.c_uint64], whole: torch.Tensor, counts: Sequence[int]
) -> _Pointers:
    """Return the addresses and sizes of a tensor's pieces of so many elements each."""
    at, itemsize = whole.data_ptr(), whole.element_size()
    for index, count in enumerate(counts):
        pointers[index] = at
        sizes[index] = nbytes = count * itemsize
        at += nbytes
    return pointers
