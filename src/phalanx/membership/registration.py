"""Rank registration: until the world is made, each rank says in the store which process it is, and looks at others.

So two processes of one rank, different world sizes, and a rank that has ended or is stopped are told at once, in any
store: rank 0's, torchrun's, one that a script opens, a file. The first cause wins: it is published under one key, and
every rank that waits raises it. Under ``phalanx run`` nobody registers, because the launcher says all of this.

The keys are in a part of the store that worlds of all sizes have in common.

============  ==============================================  =============================  ==================
key           value                                           writer                         if the writer dies
============  ==============================================  =============================  ==================
``rank/<r>``  the process of this rank, and its world size    that process, as it comes      the others see that
``failed``    an error, and the nonce of the first to find    the first to find one          nothing
============  ==============================================  =============================  ==================

A process that comes takes the place of an earlier one that has ended, or that it cannot see; if that one lives, it
finds so at its next look. What had failed before it came it does not believe. It deletes its key when it has met the
others. If the meeting fails the key stays, so that a rank which comes later finds that this process has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from dataclasses import asdict, dataclass
from types import TracebackType

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from phalanx.diagnosis.recorder import is_kept
from phalanx.errors import BackendError, DeviceError, InitializationError, LauncherEnvironmentError, PhalanxError
from phalanx.membership.client import JobStore, peek, underlying
from phalanx.membership.store_protocol import RankProcess, own_process
from phalanx.system.processes import state_text
from phalanx.words import format_named

__all__ = ["Registration", "cause_for_others", "register_rank", "registered"]

# How many ranks on either side, by number, a rank looks at; and at rank 0. A death is seen by those of the same host.
_NEIGHBOURS = 4
# How long rank 0, which may have the store in its process, stays after a failure, for the others to read it.
_LINGER_S = 0.5
# How long a process waits for an earlier one of its rank that may be about to end.
_MOMENT_S = 0.5
_PAUSE_S = 0.02
# Of the errors of Phalanx and of torch those that are not about other ranks.
_OWN_FAULTS = (BackendError, DeviceError, LauncherEnvironmentError)
_PART = "registration"
_REMEDY = "Look at that rank's own output for the cause"
_LONGEST_TEXT = 200  # characters of an exception
_decode_failure = msgspec.json.Decoder(tuple[str, int, int, str, str]).decode


@dataclass(frozen=True)
class _Entry(RankProcess):
    """A process that has come as a rank; ``nonce`` is of this coming alone, and empty once it meets nobody any more."""

    size: int
    nonce: str

    def is_seen_meeting(self) -> bool:
        """Return whether it is another process of this host that lives, and meets the others."""
        return bool(self.nonce) and self.is_seen and self.pid != os.getpid() and not self.has_ended()


class Registration:
    """This process's part in a meeting of the world's ranks, as a context.

    Args:
        store: the part of the store that worlds of all sizes have in common.
        rank, size: this process's place in the world.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = PrefixStore(_PART, store)
        self._rank, self._size = rank, size
        self._own = _Entry(**asdict(own_process(rank)), size=size, nonce=secrets.token_hex(8))
        self._text = json.dumps(asdict(self._own))
        self._earlier = b""  # what had failed before this process came
        self._may_conflict = True  # until all have come
        self._known: dict[int, RankProcess] = {}  # those that this process can see
        if isinstance(whole := underlying(store), JobStore):
            self._know(whole.connections.rank_0)  # which may end before it has come
        near = {0, *((rank + step) % size for step in range(-_NEIGHBOURS, _NEIGHBOURS + 1))}
        self._near = sorted(near - {rank})

    def __enter__(self) -> None:
        global _open
        try:
            self._earlier = peek(self._store, "failed") or b""
            self._come()
        except BaseException as error:
            self._end(error)
            if isinstance(error, DistError):
                raise InitializationError.store_lost("the ranks meet", error) from error
            raise
        _open = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        global _open
        _open = None
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """End this process's part, and tell the others why if it has failed by a cause that concerns them."""
        with contextlib.suppress(RuntimeError):  # the store has gone
            if error is not None and (cause := cause_for_others(error, self._own, self._group)) is not None:
                self._publish(cause)
            if not self._is_stopped(0):
                self._leave(error is not None)
        if error is not None and self._rank == 0:
            time.sleep(_LINGER_S)
        if isinstance(error, DistError) and (found := self.await_end_of_rank_0(_MOMENT_S)) is not None:
            raise found from error

    def all_have_come(self) -> None:
        """Note that all ranks have come: the next process of this rank, or world of another size, is a later one."""
        self._may_conflict = False

    def look(self) -> InitializationError | None:
        """Return why the meeting has failed, if it has.

        Raises:
            DistError: the store has gone.
        """
        if self._is_stopped(0):
            return None  # nothing is asked of a store that may be in its process
        found = self._published()
        if found is None and (found := self._find_conflict() or self._find_ended()) is not None:
            found = self._publish(found)
        return found

    def find_stopped(self) -> InitializationError | None:
        """Return the error that names a stopped rank, or None. Until the timeout it may go on."""
        for rank, process in sorted(self._known.items()):
            if state := process.stopped_state():
                return InitializationError.rank_stopped(rank, process.pid, process.host, state_text(state), self._group)
        return None

    def await_end_of_rank_0(self, patience_s: float) -> InitializationError | None:
        """Return the error if rank 0 ends in this time, and the store with it; None at once if it cannot be seen."""
        until = time.monotonic() + patience_s
        while (process := self._known.get(0)) is not None and time.monotonic() < until:
            if process.has_ended():
                return self._gone("has ended, and the store with it,", process)
            time.sleep(_PAUSE_S)
        return None

    def read_near(self, ranks: list[int] | None = None) -> InitializationError | None:
        """Read which processes have come as the ranks that this one looks at; return an error if their sizes differ."""
        for rank in self._near if ranks is None else ranks:
            if rank in self._known or rank == self._rank or (entry := self._entry(f"rank/{rank}")) is None:
                continue
            if self._may_conflict and entry.size != self._size and entry.nonce and not entry.has_ended():
                return self._sizes_differ(entry)
            self._know(entry)
        return None

    def _is_stopped(self, rank: int) -> bool:
        return rank in self._known and bool(self._known[rank].stopped_state())

    # -- who comes -------------------------------------------------------------------------------------

    def _come(self) -> None:
        key, until = f"rank/{self._rank}", time.monotonic() + _MOMENT_S
        while (found := self._set(key, "", self._text)) != self._text:
            if (other := _decoded(found)) is None or not other.is_seen_meeting():
                self._set(key, found, self._text)
            elif time.monotonic() >= until:
                raise self._rank_is_twice(other)
            else:
                time.sleep(_PAUSE_S)
        if (error := self.read_near([0])) is not None:
            raise error

    def _find_conflict(self) -> InitializationError | None:
        own = self._entry(f"rank/{self._rank}") if self._may_conflict else None
        return self.read_near() if own is None or own == self._own else self._rank_is_twice(own)

    def _leave(self, failed: bool) -> None:
        """Delete this process's key; if the meeting has failed, say there that it meets nobody now."""
        key = f"rank/{self._rank}"
        if failed:
            self._set(key, self._text, json.dumps({**asdict(self._own), "nonce": ""}))
        else:
            self._store.delete_key(key)

    def _gone(self, how: str, process: RankProcess | None = None) -> InitializationError:
        process = process or self._own
        return InitializationError.rank_gone(process.rank, process.pid, process.host, how, _REMEDY, self._group)

    def _rank_is_twice(self, other: _Entry) -> InitializationError:
        return InitializationError.rank_twice(self._rank, other.name, self._own.name, other.pid, other.host)

    def _sizes_differ(self, other: _Entry) -> InitializationError:
        own = f"rank {self._rank} ({self._own.name})"
        return InitializationError.sizes_differ(other.rank, other.pid, other.host, other.size, own, self._size)

    # -- what has failed -------------------------------------------------------------------------------

    def _published(self) -> InitializationError | None:
        found = peek(self._store, "failed") or b""
        return None if found == self._earlier else _decoded_failure(found)

    def _publish(self, error: InitializationError) -> InitializationError:
        """Publish a cause unless there is one; return the one that there is."""
        if self._is_stopped(0):
            return error  # the store may be in its process
        return _decoded_failure(self._set("failed", self._earlier, self._encoded(error))) or error

    def _encoded(self, error: InitializationError) -> str:
        return json.dumps([self._own.nonce, error.rank, error.pid, error.host, str(error)])

    def _find_ended(self) -> InitializationError | None:
        for rank, process in sorted(self._known.items()):
            if not process.has_ended():
                continue
            entry = self._entry(f"rank/{rank}")
            if entry is None or (entry.pid, entry.start) != (process.pid, process.start):
                del self._known[rank]  # it had met the others, or another process has its place
                return None
            return self._gone("has ended", process)
        return None

    # -- the store -------------------------------------------------------------------------------------

    def _know(self, process: RankProcess) -> None:
        if process.is_seen and process.rank != self._rank:
            self._known[process.rank] = process

    def _entry(self, key: str) -> _Entry | None:
        return _decoded(peek(self._store, key) or b"")

    def _set(self, key: str, expected: str | bytes, desired: str) -> str:
        expected = expected if isinstance(expected, str) else expected.decode(errors="replace")
        return bytes(self._store.compare_set(key, expected, desired)).decode(errors="replace")

    @property
    def _group(self) -> str:
        return format_named("rank", range(self._size))


# The meeting of the world's ranks that this process is in. Written by the thread that makes the world.
_open: Registration | None = None


def register_rank(store: Store, rank: int, size: int) -> contextlib.AbstractContextManager[None]:
    """Register this process while the body runs, unless it has been before, or a launcher tells of the others.

    The arguments are those of :class:`Registration`.

    Raises:
        InitializationError: another process has this rank or another world size, or the store has gone.
    """
    return contextlib.nullcontext() if _open is not None or is_kept() else Registration(store, rank, size)


def registered() -> Registration | None:
    """Return the meeting of the world's ranks that this process is in, if it is in one."""
    return _open


def cause_for_others(error: BaseException, own: RankProcess, group: str) -> InitializationError | None:
    """Return what the other ranks raise when an exception ends this process's part in a meeting; None if it names none.

    Args:
        own: this process.
        group: the ranks that meet, for people.
    """
    if not isinstance(error, (DistError, PhalanxError)) or isinstance(error, _OWN_FAULTS):
        return InitializationError.rank_gone(own.rank, own.pid, own.host, _how(error), _REMEDY, group)
    return error if isinstance(error, InitializationError) and error.rank >= 0 else None


def _how(error: BaseException) -> str:
    """Say how this process goes that an exception takes out of the meeting."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return f"has ended with exit code {error.code or 0}"
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"has failed ({text[:_LONGEST_TEXT]})"


def _decoded_failure(value: str | bytes) -> InitializationError | None:
    """Read a published cause; None if it is something else. In a store of torch's anybody may write."""
    try:
        _, rank, pid, host, text = _decode_failure(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return InitializationError.of_rank(text, rank, pid, host)


def _decoded(text: str | bytes) -> _Entry | None:
    """Read an entry; None if it is something else, as of another release."""
    try:
        return msgspec.json.decode(text, type=_Entry)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
