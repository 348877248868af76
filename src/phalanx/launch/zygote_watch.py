"""When a zygote does not say that a rank has ended: it is continued, and given up if that does not help.

Only the parent of a rank learns how the rank has ended. If somebody has stopped it (SIGSTOP), or it hangs, the end of a
rank would be hidden for ever. But the kernel shows by a pidfd that a process has ended, also to others and also while
it is a zombie. So the zygote's own parent, which is the supervisor or a host's agent, keeps a pidfd of each rank.

As long as all ranks run, a stopped zygote is left alone: they do not need it, and its orders continue it. In a job that
is suspended as a whole its parent is stopped as well, continues nothing, and counts no time.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence

from phalanx.system import processes
from phalanx.system.threads import AwakeClock
from phalanx.words import format_named

__all__ = ["SILENCE_S", "ZygoteWatch"]

#: How long a zygote may take to say that a rank has ended, and, beside the grace, that all have that were to end.
SILENCE_S = 20.0
# The zygote's word comes with the end of the rank, or a moment later on a busy machine. A stopped one is continued more
# than once, in case something stops it again.
_CONTINUE_AFTER_S = 0.3
_CONTINUE_EVERY_S = 1.0


class ZygoteWatch:
    """What is known of a zygote that owes a word.

    Args:
        whose: the ranks that are its, in words.
        host: where it is.
        numbers: their ranks in the world, in the order of their process ids.

    Attributes:
        refusal: why the job ends, as it is printed, and its exit code, once the zygote has been killed for its silence
            about a rank; None before.
    """

    def __init__(self, whose: str, host: str, numbers: Sequence[int]) -> None:
        self.refusal: tuple[str, int] | None = None
        self._whose, self._host, self._numbers = whose, host, numbers
        self._poll = select.epoll()
        self._handles: dict[int, int] = {}  # a pidfd of each rank of which the zygote has not said that it has ended
        self._ended: dict[int, float] = {}  # those of them that have ended, and when that was seen, by the clock
        self._clock = AwakeClock()
        self._next: float | None = None
        self._give_up_at: float | None = None

    def begin(self, pids: Sequence[int]) -> None:
        """The ranks run from now on, with these process ids."""
        for part, pid in enumerate(pids):
            # One that has been reaped already is on its way in a message; so is one whose number another process got.
            with contextlib.suppress(OSError):
                self._handles[part] = os.pidfd_open(pid)
                self._poll.register(self._handles[part], select.EPOLLIN)

    def fileno(self) -> int:
        """What is readable when a rank has ended, until :meth:`act` has seen it."""
        return self._poll.fileno()

    def told(self, part: int) -> None:
        """The zygote has said that a rank has ended."""
        self._ended.pop(part, None)
        handle = self._handles.pop(part, None)
        if handle is None:
            return
        os.close(handle)
        # After the last rank the zygote ends what they have left, which may take any time, and itself.
        if not self._ended:
            self._next = None if self._handles else self._clock.now() + _CONTINUE_AFTER_S

    def allow(self, patience_s: float) -> None:
        """The zygote has been ordered to end all ranks within so many seconds, and is killed if it does not."""
        until = time.monotonic() + patience_s + SILENCE_S
        self._give_up_at = until if self._give_up_at is None else min(until, self._give_up_at)

    def due_in_s(self) -> float | None:
        """When :meth:`act` has something to do; None for never."""
        due = [] if self._give_up_at is None else [self._give_up_at - time.monotonic()]
        due += [] if self._next is None else [self._next - self._clock.now()]
        return max(0.0, min(due)) if due else None

    def act(self, zygote: int) -> None:
        """See which ranks have ended, and continue or kill the zygote if it is time to.

        Args:
            zygote: its process id, which has not been waited for; 0 if there is none.
        """
        if self._poll.closed or not zygote:
            return
        if self._give_up_at is not None and time.monotonic() >= self._give_up_at:
            self._give_up_at = None
            os.kill(zygote, signal.SIGKILL)  # it is stopped, or hangs; without it the kernel ends the ranks
        seen = {handle for handle, _ in self._poll.poll(0)}
        for part, handle in self._handles.items():
            if handle in seen:
                self._poll.unregister(handle)
                self._ended[part] = self._clock.now()
                self._next = self._next or self._clock.now() + _CONTINUE_AFTER_S
        if self._next is None or self._clock.now() < self._next:
            return
        self._next = self._clock.now() + _CONTINUE_EVERY_S
        state = processes.state_of(zygote)
        if state == "t":
            # It is in the hands of a debugger, whose user knows why it does not answer.
            self._ended = dict.fromkeys(self._ended, self._clock.now())
        elif self._ended and self.refusal is None and self._clock.now() >= min(self._ended.values()) + SILENCE_S:
            self.refusal = self._explain(zygote, state), 1
            os.kill(zygote, signal.SIGKILL)
        else:
            os.kill(zygote, signal.SIGCONT)

    def _explain(self, zygote: int, state: str) -> str:
        ranks = format_named("rank", [self._numbers[part] for part in self._ended])
        have = "has" if len(self._ended) == 1 else "have"
        hint = "if it waits for a disk or for memory, the kernel's log says so (dmesg)"
        if state == "T":
            hint = "it was continued each second; look for what stops it again, such as a batch system or a script"
        what = "is stopped (state T)" if state == "T" else f"does not answer (state {state})"
        return (
            f"phalanx: the process that starts and watches {self._whose} {what}; the job ended with it\n"
            f"  {ranks} {have} ended, and for {SILENCE_S:g} s it has not said how, which nobody else can know\n"
            f"  host {self._host}, pid {zygote}; {hint}\n"
        )

    def close(self) -> None:
        """Nothing is expected of the zygote any more; may be called again."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()
        self._ended.clear()
        self._poll.close()
        self._next = self._give_up_at = None
