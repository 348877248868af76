"""The part of the job's store in which the ranks of a new group meet: a wait there ends when one of them has gone.

The world's group tells which ranks have gone (``gone.py``). Where there is none, as for the world itself, a wait lasts
as long as in any other store.

Who writes, who reads, and when the writer dies. A key of a meeting is written by one rank, and read by ranks that wait
for it. If its writer dies right before it has written, the wait ends at the next look, which finds the writer gone. If
it dies right after, the key is there: it is looked for once more after its writer was found gone. A rank that is found
gone although its keys are there has come to the end of this step only; the next step finds it gone as well.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError, DistStoreError

from phalanx.errors import InitializationError
from phalanx.system.awake import AwakeClock
from phalanx.transports.gone import WAYS, gone_ranks, has_witness
from phalanx.words import format_named

__all__ = ["MeetingStore", "error_of", "part_of"]

# How often a rank that waits looks for ranks that have gone; in a large group each costs the store two questions.
_LOOK_S = 0.5
_LOOK_S_PER_RANK = 0.002
# How long after the store its rank may show as gone: a process takes seconds to end once torch is loaded.
_ENDING_S = 10.0
_PAUSE_S = 0.02


class _Late(DistStoreError):
    """Keys did not come in time, although the store answers."""


class MeetingStore(PrefixStore):
    """A part of the job's store, as torch's ``PrefixStore``; C++ that is given it waits as in any other.

    Args:
        name: of the part.
        store: the whole.
        ranks: the ranks of the new group, in the world; empty if it is the world.
    """

    timeout: timedelta  # torch's own property, which its stubs leave out

    def __init__(self, name: str, store: Store, ranks: Sequence[int]) -> None:
        super().__init__(name, store)
        self._ranks = ranks

    def part(self, name: str) -> MeetingStore:
        """A part of this part."""
        return MeetingStore(name, self, self._ranks)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys.

        Raises:
            InitializationError: a rank of the group has gone, and so a key will not come, or the store has gone.
            DistStoreError: they did not come in time.
        """
        total_s = (self.timeout if timeout is None else timeout).total_seconds()
        if not self._ranks or not has_witness() or total_s <= 0:
            super().wait(list(keys), timedelta(seconds=total_s))
            return
        clock = AwakeClock()
        look_s = max(_LOOK_S, _LOOK_S_PER_RANK * len(self._ranks))
        while True:
            began, slice_s = time.monotonic(), min(look_s, max(total_s - clock.now(), 0.001))
            try:
                super().wait(list(keys), timedelta(seconds=slice_s))
                return
            except InitializationError:
                raise  # the store knows of a rank that has gone
            except RuntimeError as error:  # each kind of store has a subclass of its own for a wait that timed out
                if time.monotonic() - began < slice_s / 2:
                    raise self.explained(error) from error
            self._refuse_gone(keys)
            if clock.now() >= total_s:
                named = ", ".join(keys[:8]) + (", …" if len(keys) > 8 else "")
                raise _Late(f"wait timeout after {total_s:g} s, keys: {named}")

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise why the store cannot be asked any more, if that is so, in place of what the store raises."""
        try:
            yield
        except _Late as error:
            raise InitializationError(f"not all of {self._group} came as far as this one in time: {error}") from error
        except DistError as error:
            if not self._ranks:
                raise
            raise self.explained(error) from error

    def explained(self, error: BaseException) -> InitializationError:
        """What a rank raises that cannot ask the store any more: most often the rank has gone that had it."""
        until = time.monotonic() + _ENDING_S
        while time.monotonic() < until:
            if (found := self.find_gone()) is not None:
                return found
            time.sleep(_PAUSE_S)
        return InitializationError(f"the store in which {self._group} were meeting cannot be asked any more: {error}")

    def _refuse_gone(self, keys: Sequence[str]) -> None:
        found = self.find_gone()
        if found is None:
            return
        try:
            if self.check(list(keys)):
                return
        except RuntimeError:
            pass  # the store has gone with that rank
        raise found

    def find_gone(self) -> InitializationError | None:
        """The error for a rank of the group that has gone; None if no group of this process knows of one."""
        gone = gone_ranks(self._ranks)
        if not gone:
            return None
        rank, who = min(gone.items(), key=lambda each: (WAYS.index(each[1].way), each[0]))
        return InitializationError.rank_gone(rank, who.pid, who.host, who.words, who.remedy, self._group)

    @property
    def _group(self) -> str:
        return format_named("rank", self._ranks)


def error_of(store: Store, otherwise: str) -> InitializationError:
    """The error of a rank that finds the ranks not to meet: which has gone, if that is known, else ``otherwise``."""
    found = store.find_gone() if isinstance(store, MeetingStore) else None
    return found or InitializationError(otherwise)


def part_of(store: Store, name: str) -> Store:
    """A part of a store in which ranks meet, where waits end as they do in the whole."""
    return store.part(name) if isinstance(store, MeetingStore) else PrefixStore(name, store)
