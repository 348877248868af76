"""Part of the job's store in which the ranks of a new group meet: a wait there ends when one of them has gone.

The world's group knows which ranks have gone; while the world itself is made, the ranks that register do
(``registration.py``), and under ``phalanx run`` the launcher's store. Elsewhere a wait lasts as long as in any store.

A rank deletes the keys that it has written once all have come to a later step (:meth:`RendezvousStore.clear`). If it
dies before, or the meeting fails, its keys stay: every meeting of a group is under a name of its own.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from phalanx.diagnosis.own_waits import AGAIN, warn_after_s
from phalanx.diagnosis.recorder import is_kept
from phalanx.errors import InitializationError
from phalanx.membership.client import WaitTimeout, ended_ranks
from phalanx.membership.liveness import Gone, gone_ranks
from phalanx.membership.protocol import Way
from phalanx.membership.registration import cause_for_others, registered
from phalanx.membership.store_protocol import own_process
from phalanx.system.host import this_host
from phalanx.system.threads import AwakeClock
from phalanx.words import format_named, tell

__all__ = ["OFFER", "RendezvousStore", "meeting_within", "part_of", "time_left"]

# How often a rank that waits looks for ranks that have gone; in a large group each look costs the store some requests.
_LOOK_S = 0.5
_LOOK_S_IN_WORLD = 0.1
_LOOK_S_PER_RANK = 0.002
# How long after the store its rank may show as gone: a process takes seconds to end once torch is loaded.
_ENDING_S = 10.0
# How long after what follows from the end of a rank it may take until this one knows which rank has ended.
_NAMING = timedelta(seconds=5)
_PAUSE_S = 0.02
_SHORTEST_WAIT_S = 0.1
# How much longer than all steps together may take a rank waits in the last one: those that time out first say why.
_GRACE_S = 5.0
# The pause between two questions for a key is a quarter of the time that the wait has taken, within these limits: it
# delays the meeting by little, and many ranks that wait do not flood the store.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_SHORTEST_PAUSE_S_PER_RANK, _LONGEST_PAUSE_S_PER_RANK = 0.00005, 0.0015

OFFER = "offer"  # the key in which rank 0 of a group offers the shared memory

# When the ranks of the world which is being made are to have met: a clock, and its time then. Written by the thread
# that makes it, which also makes its first group.
_deadline: tuple[AwakeClock, float] | None = None


@contextlib.contextmanager
def meeting_within(clock: AwakeClock, timeout_s: float) -> Iterator[None]:
    """Limit all steps together in which the world's ranks meet while the body runs; ``clock`` is how long they have."""
    global _deadline
    _deadline = clock, timeout_s
    try:
        yield
    finally:
        _deadline = None


def _left_s() -> float:
    """Return the seconds until then, and a little if it has passed: what is there already can still be read."""
    return math.inf if _deadline is None else max(_SHORTEST_WAIT_S, _deadline[1] - _deadline[0].now())


def time_left(timeout: timedelta) -> timedelta:
    """Return how long the next step of making the world may take: what is left for all, if that is less."""
    return timedelta(seconds=min(timeout.total_seconds(), _left_s()))


class RendezvousStore(PrefixStore):
    """A part of the job's store, as torch's ``PrefixStore``; C++ that is given it waits as in any other.

    Args:
        name, store: the part and the whole.
        ranks: the ranks of the new group, in the world.
        world: the new group is the world.
        rank: this process's rank in the group.
    """

    timeout: timedelta  # torch's own property, which its stubs leave out

    def __init__(self, name: str, store: Store, ranks: Sequence[int], world: bool, rank: int) -> None:
        super().__init__(name, store)
        self._ranks, self._rank, self._world = ranks, rank, world
        # The keys that this process has written and not deleted, by their names in the whole meeting, which all its
        # parts note in the same place. Written by the thread that meets, and by others once the group is watched.
        self._whole, self._path, self._written = PrefixStore(name, store), "", dict[str, None]()

    def part(self, name: str) -> RendezvousStore:
        """A part of this part."""
        made = RendezvousStore(name, self, self._ranks, self._world, self._rank)
        made._whole, made._written = self._whole, self._written
        made._path = f"{self._path}{name}/"
        return made

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        self._written[self._path + key] = None

    def delete_key(self, key: str) -> bool:
        self._written.pop(self._path + key, None)
        return super().delete_key(key)

    def clear(self) -> None:
        """Delete what this process has written in this part, and in parts of it; every rank has read that.

        If the store has gone, nothing is raised: whoever needs it next finds that.
        """
        with contextlib.suppress(RuntimeError):
            for key in list(self._written):  # in one step: once a group is watched, other threads write as well
                if key.startswith(self._path):
                    del self._written[key]
                    self._whole.delete_key(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys.

        Raises:
            InitializationError: a rank of the group has gone, and so a key will not come, or the store has gone; or two
                processes claim one rank of the world, or count its ranks differently; or the keys did not come in time,
                and a rank is stopped.
            DistStoreError: they did not come in time.
        """
        total_s = (self.timeout if timeout is None else timeout).total_seconds()
        if self._world and total_s > 0:
            total_s = min(total_s, _left_s() + _GRACE_S)
        is_watched = self._is_watched and total_s > 0
        try:
            if is_watched:
                self._poll(keys, total_s)
            else:
                super().wait(list(keys), timedelta(seconds=total_s))
        except InitializationError:
            raise
        except RuntimeError as error:
            if is_watched and not isinstance(error, WaitTimeout):
                raise self.explained(error) from error
            if (found := self.find_late()) is None:
                raise
            raise found from None

    def _poll(self, keys: Sequence[str], total_s: float) -> None:
        """Ask for keys again and again; meanwhile look for ranks that have gone, and say for whom this one waits.

        At the end of a wait that is too short torch's TCPStore would write two lines of warnings.
        """
        size, clock = len(self._ranks), AwakeClock()
        shortest_s = max(_SHORTEST_PAUSE_S, _SHORTEST_PAUSE_S_PER_RANK * size)
        longest_s = max(_LONGEST_PAUSE_S, _LONGEST_PAUSE_S_PER_RANK * size)
        every_s = max(_LOOK_S_IN_WORLD if self._world else _LOOK_S, _LOOK_S_PER_RANK * size)
        look_at_s, nth = every_s, 0
        say_at_s = (not is_kept() and warn_after_s()) or math.inf  # under phalanx run the launcher says it
        while not self.check(list(keys)):
            waited_s = clock.now()
            if waited_s >= say_at_s:
                say_at_s, nth = AGAIN * say_at_s, nth + 1
                self.say_who_is_missing(keys, waited_s, nth)
            if waited_s >= look_at_s:
                try:
                    self.look()
                except InitializationError:
                    if not self.check(list(keys)):
                        raise
                look_at_s = clock.now() + every_s
            if waited_s >= total_s:
                named = ", ".join(keys[:8]) + (", …" if len(keys) > 8 else "")
                raise WaitTimeout(f"wait timeout after {total_s:g} s, keys: {named}")
            time.sleep(min(max(shortest_s, waited_s / 4), longest_s, total_s - waited_s))

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise why the store cannot be asked any more, if that is so, in place of what the store raises."""
        try:
            yield
        except WaitTimeout as error:
            raise InitializationError(f"not all of {self._group} came as far as this one in time: {error}") from error
        except DistError as error:
            if not self._is_watched:
                raise
            raise self.explained(error) from error

    def explained(self, error: BaseException) -> InitializationError:
        """Return what a rank raises that cannot ask the store any more: most often the rank has gone that had it."""
        if self._world:
            registration = registered()
            found = registration.await_end_of_rank_0(_ENDING_S) if registration else None
        else:
            until = time.monotonic() + _ENDING_S
            while (found := self._of_gone_ranks()) is None and time.monotonic() < until:
                time.sleep(_PAUSE_S)
        return found or InitializationError.store_lost(f"{self._group} were meeting", error)

    def find_gone(self) -> InitializationError | None:
        """Return the error for a rank of the group that has gone; None if none has, as far as this process knows."""
        if not self._world:
            return self._of_gone_ranks()
        registration = registered()
        found = None if registration is None else registration.look()
        return found or self._known_to_store()

    def _known_to_store(self) -> InitializationError | None:
        ended = [each for each in ended_ranks(self) if each.rank in self._ranks]
        if not ended:
            return None
        first = ended[0]
        if first.how:
            return self._error_of(first.rank, Gone(first.pid, first.host or this_host().name, Way.ENDED, first.how))
        call = "phalanx.init()" if _deadline is not None else "init_process_group()"
        return InitializationError.ranks_ended({each.rank: each.host for each in ended if not each.how}, call)

    def cause_for_others(self, error: BaseException) -> InitializationError | None:
        """Return what the other ranks raise when an exception ends this rank's part; None if it names no rank."""
        return cause_for_others(error, own_process(self._ranks[self._rank]), self._group)

    def await_gone(self) -> InitializationError | None:
        """Return the error for the rank that has gone, of which this process sees the effects; it may take seconds."""
        with contextlib.suppress(DistError):  # the time is over, or the store has gone
            try:
                self.wait(["never"], _NAMING)
            except InitializationError as error:
                return error
        return None

    def find_late(self) -> InitializationError | None:
        """Return the error for a rank that has gone or is stopped, when the time is over; else None."""
        with contextlib.suppress(DistError):  # the store has gone
            if (found := self.find_gone()) is not None:
                return found
        return self.find_stopped()

    def _of_gone_ranks(self) -> InitializationError | None:
        gone = None if self._world else gone_ranks(self._ranks)
        if not gone:
            return None
        rank, who = min(gone.items(), key=lambda each: (Way.DEPARTED.index(each[1].way), each[0]))
        return self._error_of(rank, who)

    def _error_of(self, rank: int, who: Gone) -> InitializationError:
        return InitializationError.rank_gone(rank, who.pid, who.host, who.words, who.remedy, self._group)

    def find_stopped(self) -> InitializationError | None:
        """Return the error that names a stopped rank, or None. Until the timeout it may go on."""
        registration = registered() if self._world else None
        return None if registration is None else registration.find_stopped()

    def look(self) -> None:
        """Raise the error for a rank of the group that has gone."""
        if (found := self.find_gone()) is not None:
            raise found

    def all_have_come(self) -> None:
        """Say that all ranks of the group have come to where it is made."""
        if self._world and (registration := registered()) is not None:
            registration.all_have_come()

    def is_first_to_set(self, key: str) -> bool:
        """Return whether no other rank of the group has set this key."""
        own = secrets.token_hex(8)
        with contextlib.suppress(RuntimeError):  # the store has gone
            if self.compare_set(key, "", own).decode() == own:
                self._written[self._path + key] = None
                return True
        return False

    def say_who_is_missing(self, keys: Sequence[str], waited_s: float, nth: int) -> None:
        """Say which ranks have not written these keys, unless another rank has said it for the ``nth`` time.

        Of one that is stopped, that is said instead.
        """
        lacking = [key for key in keys if not self.check([key])]
        missing = {_rank_of(key) for key in lacking}
        if missing and -1 not in missing and self.is_first_to_set(f"said/{lacking[0]}/{nth}"):
            if (stopped := self.find_stopped()) is not None:
                tell(str(stopped))
                return
            has, them = ("has", "it") if len(missing) == 1 else ("have", "them")
            tell(
                f"{format_named('rank', sorted(self._ranks[each] for each in missing))} {has} not come as far as rank "
                f"{self._ranks[self._rank]}, which waits for {them} to make a group of {self._group}, for "
                f"{waited_s:.0f} s now"
            )

    @property
    def _is_watched(self) -> bool:
        """Return whether anybody could know that a rank of the group has gone."""
        return registered() is not None or is_kept() if self._world else gone_ranks(()) is not None

    @property
    def _group(self) -> str:
        return format_named("rank", self._ranks)


def _rank_of(key: str) -> int:
    """Return the rank of the group that writes a key; -1 if its name does not say that."""
    last = key.rpartition("/")[2]
    return 0 if key == OFFER else int(last) if last.isdecimal() else -1


def part_of(store: Store, name: str) -> Store:
    """A part of a store in which ranks meet, where waits end as they do in the whole."""
    return store.part(name) if isinstance(store, RendezvousStore) else PrefixStore(name, store)
