"""The part of the job's store in which the ranks of a new group meet: a wait there ends when one of them has gone.

The world's group tells which ranks have gone (``membership/departures.py``); for the world itself the ranks that are
meeting do (``attendance.py``). Where there is neither, a wait lasts as long as in any other store.

Who writes, who reads, and when the writer dies. A key of a meeting is written by one rank, and read by ranks that wait
for it. If its writer dies right before it has written, the wait ends at the next look, which finds the writer gone. If
it dies right after, the key is there: it is looked for once more after its writer was found gone. A rank that is found
gone although its keys are there has come to the end of this step only; the next step finds it gone as well.

Two kinds of keys are read by nobody who waits: ``said/KEY/N`` and ``stopped/RANK/PID`` are set by the first rank that
is about to tell the user something, by a comparison, so the others stay silent. If it dies right before, another one
sets the key. If it dies right after, that line is lost; of ranks that wait, another one says the next, under N + 1.

Who deletes. A rank deletes the keys of a part that it has written itself, once all ranks have come to a later step and
so have read them (:meth:`MeetingStore.clear`). If it dies before, or the meeting fails for it, its keys stay. Nobody
reads them by then, because every meeting of a group is under a name of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError, DistStoreError

from phalanx.diagnosis.own_waits import AGAIN, warn_after_s
from phalanx.diagnosis.recorder import is_kept
from phalanx.errors import InitializationError
from phalanx.membership.departures import WAYS, gone_ranks, has_witness
from phalanx.store.client import JobStore, underlying
from phalanx.store.ended import ended_of
from phalanx.system.processes import state_text
from phalanx.system.threads import AwakeClock, ended_early
from phalanx.transports.attendance import Attendance, attending
from phalanx.words import format_named, tell

__all__ = ["OFFER", "MeetingStore", "error_of", "meeting_within", "part_of", "time_left"]

# How often a rank that waits looks for ranks that have gone; in a large group each costs the store two questions.
_LOOK_S = 0.5
_LOOK_S_IN_WORLD = 0.1  # the ranks that meet ask the store and the kernel, and do not look after each other otherwise
_LOOK_S_IN_QUESTION = 0.02  # as long as a process is there that does not belong to this world
_LOOK_S_PER_RANK = 0.002
# How long after the store its rank may show as gone: a process takes seconds to end once torch is loaded.
_ENDING_S = 10.0
_PAUSE_S = 0.02
_SHORTEST_WAIT_S = 0.1
# How much longer than all steps together may take a rank waits in the last one: those that time out first say why.
_GRACE_S = 5.0
# The pause between two questions for a key is an eighth of the time that the wait has taken, within these limits: it
# delays the meeting by little, and many ranks that wait for long do not flood the store.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.05
_LONGEST_PAUSE_S_PER_RANK = 0.0005
# For how long a rank is stopped before the user is told: one that is suspended with its whole job goes on with it.
_STOPPED_S = 3.0


OFFER = "offer"  # the key in which rank 0 of a group offers the shared memory


class _Deadline:
    """When the world's ranks are to have met, by a clock that stands still while the process does."""

    def __init__(self, clock: AwakeClock, timeout_s: float) -> None:
        self._clock, self._timeout_s = clock, timeout_s

    def left_s(self) -> float:
        """The seconds until then, and a little if it has passed: what is there already can still be read."""
        return max(_SHORTEST_WAIT_S, self._timeout_s - self._clock.now())


# That of the world which is being made. Written by the thread that makes it, which also makes its first group.
_deadline: _Deadline | None = None


@contextlib.contextmanager
def meeting_within(clock: AwakeClock, timeout_s: float) -> Iterator[None]:
    """While the body runs, the world's ranks meet, step after step, and have so much time for all steps together.

    Args:
        clock: how long they have been meeting.
        timeout_s: how long it may take, in seconds.
    """
    global _deadline
    _deadline = _Deadline(clock, timeout_s)
    try:
        yield
    finally:
        _deadline = None


def time_left(timeout: timedelta) -> timedelta:
    """How long the next step of making the world may take: what is left for all, if a step alone may take longer."""
    return timeout if _deadline is None else min(timeout, timedelta(seconds=_deadline.left_s()))


class _Late(DistStoreError):
    """Keys did not come in time, although the store answers."""


class MeetingStore(PrefixStore):
    """A part of the job's store, as torch's ``PrefixStore``; C++ that is given it waits as in any other.

    Args:
        name: of the part.
        store: the whole.
        ranks: the ranks of the new group, in the world.
        world: the new group is the world, whose ranks look after each other while they attend (``attendance.py``).
        rank: this process's rank in the group, so that it can say for whom it waits; it says nothing if that is -1.
    """

    timeout: timedelta  # torch's own property, which its stubs leave out

    def __init__(self, name: str, store: Store, ranks: Sequence[int], world: bool = False, rank: int = -1) -> None:
        super().__init__(name, store)
        self._ranks, self._rank = ranks, rank
        self._world = world
        whole = underlying(store)
        # What this process sees of the others while they meet in Phalanx's own store.
        self._company = whole.company if world and isinstance(whole, JobStore) else None
        self._clock, self._stopped_since_s = AwakeClock(), math.inf
        # The keys that this process has written and not deleted, by their names in the whole meeting, which all its
        # parts note in the same place. Written by the thread that meets, and by others once the group is watched.
        self._whole, self._path, self._written = PrefixStore(name, store), "", dict[str, None]()
        self._meeting = name
        self._told_of: set[int] = set()  # the stopped ranks of which this process has told, or another one has

    def part(self, name: str) -> MeetingStore:
        """A part of this part."""
        made = MeetingStore(name, self, self._ranks, self._world, self._rank)
        made._whole, made._path, made._written = self._whole, f"{self._path}{name}/", self._written
        made._meeting = self._meeting
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
                and a rank is stopped, or may be there twice.
            DistStoreError: they did not come in time.
        """
        total_s = (self.timeout if timeout is None else timeout).total_seconds()
        if self._world and _deadline is not None and total_s > 0:
            total_s = min(total_s, _deadline.left_s() + _GRACE_S)
        if not self._is_watched or total_s <= 0:
            self._wait_in_company(keys, total_s)
            return
        clock = AwakeClock()
        next_look_s = self._look_s()
        # Under phalanx run the launcher says it.
        says_at_s, said = (not is_kept() and warn_after_s()) or math.inf, 0
        while not self._has(keys):
            waited_s = clock.now()
            if waited_s >= says_at_s:
                says_at_s, said = AGAIN * says_at_s, said + 1
                self._say_who_is_missing(keys, waited_s, said)
            if waited_s >= next_look_s:
                self._refuse_gone(keys)
                self.look()
                next_look_s = clock.now() + self._look_s()
            if waited_s >= total_s:
                self._refuse_gone(keys)
                doubt = self._attendance.doubt_seat() if self._attendance is not None else None
                if (why := self.find_stopped() or doubt) is not None:
                    raise why
                named = ", ".join(keys[:8]) + (", …" if len(keys) > 8 else "")
                raise _Late(f"wait timeout after {total_s:g} s, keys: {named}")
            longest_s = max(_LONGEST_PAUSE_S, _LONGEST_PAUSE_S_PER_RANK * len(self._ranks))
            time.sleep(min(max(_SHORTEST_PAUSE_S, waited_s / 8), longest_s, total_s - waited_s))
        if self._attendance is not None:
            self._attendance.read_rank_0()

    def _say_who_is_missing(self, keys: Sequence[str], waited_s: float, nth: int) -> None:
        """Say which ranks have not written these keys, unless another rank has said it for the ``nth`` time."""
        lacking = [key for key in keys if not self._has([key])]
        missing = {_rank_of(key) for key in lacking}
        if not missing or -1 in missing or self._rank < 0:
            return
        if self._is_first_to_set(f"said/{lacking[0]}/{nth}"):
            them = "it" if len(missing) == 1 else "them"
            who = format_named("rank", sorted(self._ranks[each] for each in missing))
            tell(
                f"{who} {'has' if len(missing) == 1 else 'have'} not come as far as rank {self._ranks[self._rank]}, "
                f"which waits for {them} to make a group of {self._group}, for {waited_s:.0f} s now"
            )

    def _is_first_to_set(self, key: str) -> bool:
        """Whether no other rank of the group has set this key. If that rank dies right after, nobody else sets it."""
        own = f"{os.getpid()} {secrets.token_hex(4)}"
        with contextlib.suppress(RuntimeError):  # the store has gone
            if self.compare_set(key, "", own).decode() == own:
                self._written[self._path + key] = None
                return True
        return False

    def _look_s(self) -> float:
        """How long this process waits until it looks again for ranks that have gone, and for its seat."""
        if self._attendance is not None and self._attendance.seat_in_question():
            shortest_s = _LOOK_S_IN_QUESTION
        else:
            shortest_s = _LOOK_S_IN_WORLD if self._world else _LOOK_S
        return max(shortest_s, _LOOK_S_PER_RANK * len(self._ranks))

    def _wait_in_company(self, keys: Sequence[str], total_s: float) -> None:
        """Wait in a store that knows itself which ranks go, or where nobody does."""
        began = time.monotonic()
        try:
            super().wait(list(keys), timedelta(seconds=total_s))
        except InitializationError:
            raise
        except RuntimeError as error:
            if not ended_early(began, total_s):
                why = self.find_stopped()
            elif (why := self._find_ended(keys)) is not None:
                raise why from None  # the store has ended the wait for this reason
            if why is None:
                raise
            raise why from error

    def _find_ended(self, keys: Sequence[str]) -> InitializationError | None:
        """The error for ranks of the world that have ended before they came, if the launcher's store knows of them."""
        with contextlib.suppress(RuntimeError):  # it has gone
            absent = [f"{self._meeting}/{self._path}{key}" for key in keys if self._world and not self._has([key])]
            if absent and (ended := ended_of(underlying(self), absent)):
                return InitializationError.ranks_ended(ended, "init_process_group()")
        return None

    def _has(self, keys: Sequence[str]) -> bool:
        # Asked for again and again, rather than waited for in slices: at the end of each slice torch's TCPStore writes
        # two lines of warnings to standard error.
        try:
            return self.check(list(keys))
        except InitializationError:
            raise  # the store knows of a rank that has gone
        except RuntimeError as error:
            raise self.explained(error) from error

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise why the store cannot be asked any more, if that is so, in place of what the store raises."""
        try:
            yield
        except _Late as error:
            raise InitializationError(f"not all of {self._group} came as far as this one in time: {error}") from error
        except DistError as error:
            if not self._is_watched:
                raise
            raise self.explained(error) from error

    def explained(self, error: BaseException) -> InitializationError:
        """What a rank raises that cannot ask the store any more: most often the rank has gone that had it."""
        until = time.monotonic() + _ENDING_S
        while True:
            if (found := self.find_gone()) is not None:
                stopped = self.find_stopped()
                return found if stopped is None else InitializationError(f"{found}. And {stopped}")
            # In a meeting of the world a store goes with rank 0 or with the launcher, and only the former can be seen.
            vain = self._attendance is not None and (not self._attendance.sees_rank_0() or self._answers())
            if vain or time.monotonic() >= until:
                break
            time.sleep(_PAUSE_S)
        return InitializationError.store_lost(f"{self._group} were meeting", error)

    def _answers(self) -> bool:
        try:
            self.check([OFFER])
        except RuntimeError:
            return False
        return True

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
        if self._world:
            gone = self._attendance.gone(self._ranks) if self._attendance else {}
        else:
            gone = gone_ranks(self._ranks)
        if not gone:
            return None
        rank, who = min(gone.items(), key=lambda each: (WAYS.index(each[1].way), each[0]))
        return InitializationError.rank_gone(rank, who.pid, who.host, who.words, who.remedy, self._group)

    def find_stopped(self) -> InitializationError | None:
        """The error that names a stopped rank, or None. It is for the timeout: until then the rank may go on."""
        if self._attendance is None:
            return self._company.find_stopped() if self._company is not None else None
        stopped = self._attendance.stopped()
        if not stopped:
            return None
        rank, (pid, host, state) = min(stopped.items())
        return InitializationError.rank_stopped(rank, pid, host, state_text(state), self._group)

    def look(self) -> None:
        """Tell the user of a rank that has been stopped for some seconds; for one that waits, every second or so.

        Raises:
            InitializationError: another process claims this rank, or has come with another world size.
        """
        if self._company is not None:
            self._company.look()
        stopped = None
        if self._attendance is not None:
            self._attendance.check_seat()
            self._attendance.read_new()
            stopped = self.find_stopped()
        now_s = self._clock.now()
        self._stopped_since_s = math.inf if stopped is None else min(self._stopped_since_s, now_s)
        if stopped is not None and now_s - self._stopped_since_s >= _STOPPED_S:
            self._tell_once(stopped)

    def all_have_come(self) -> None:
        """Say that all ranks of the group have come to where it is made."""
        if self._attendance is not None:
            self._attendance.all_have_come()

    def _tell_once(self, stopped: InitializationError) -> None:
        """Print this, unless another rank has."""
        if stopped.rank in self._told_of:
            return
        self._told_of.add(stopped.rank)
        if self._is_first_to_set(f"stopped/{stopped.rank}/{stopped.pid}"):
            tell(str(stopped))

    @property
    def _is_watched(self) -> bool:
        """Whether anybody could know that a rank of the group has gone."""
        return self._attendance is not None if self._world else has_witness()

    @property
    def _attendance(self) -> Attendance | None:
        return attending() if self._world else None

    @property
    def _group(self) -> str:
        return format_named("rank", self._ranks)


def _rank_of(key: str) -> int:
    """The rank of the group that writes a key; -1 if its name does not say that."""
    last = key.rpartition("/")[2]
    return 0 if key == OFFER else int(last) if last.isdecimal() else -1


def error_of(store: Store, otherwise: str, *, late: bool = False) -> InitializationError:
    """The error of a rank that finds the ranks not to meet: which has gone, if that is known, else ``otherwise``.

    Args:
        store: where they meet.
        otherwise: the text if it is not known.
        late: they may not have gone, but have not come in time; so one that is stopped is named as well.
    """
    if not isinstance(store, MeetingStore):
        return InitializationError(otherwise)
    return store.find_gone() or (store.find_stopped() if late else None) or InitializationError(otherwise)


def part_of(store: Store, name: str) -> Store:
    """A part of a store in which ranks meet, where waits end as they do in the whole."""
    return store.part(name) if isinstance(store, MeetingStore) else PrefixStore(name, store)
