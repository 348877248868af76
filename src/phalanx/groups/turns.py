"""Turns: one rank does something before the others, and they learn whether it went well."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from phalanx.errors import PeerFailed, PhalanxError
from phalanx.groups.objects import ObjectCalls

__all__ = ["Turns"]

Result = TypeVar("Result")


class Turns(ObjectCalls):
    """The methods of a group by which rank 0 goes first, or alone."""

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """A block that rank 0 runs first, and the other ranks when rank 0 has left it. Every rank must enter it.

        For what is done once and then found by the others: a download, a cache, a compiled file. The others wait for at
        most the group's timeout.

        Raises:
            PeerFailed: on the other ranks, which do not run the block, if rank 0 has left it by an exception.
        """
        if self.rank == 0:
            try:
                yield
            except BaseException as error:
                # A group that is broken tells the others by itself.
                with contextlib.suppress(PhalanxError):
                    self.broadcast_object(_in_words(error))
                raise
            self.broadcast_object(None)
            return
        failure = self.broadcast_object()
        if failure is not None:
            raise PeerFailed.in_its_turn(0, "main_first()", failure)
        yield

    def _on_main(self, call: str, function: Callable[[], Result]) -> Result:
        """Call ``function`` on rank 0 and return its result on every rank; an error is raised on every rank, too."""
        if self.rank != 0:
            result, failure = self.broadcast_object()
            if failure is not None:
                raise PeerFailed.in_its_turn(0, call, failure)
            return result  # type: ignore[no-any-return]
        try:
            result = function()
        except BaseException as error:
            with contextlib.suppress(PhalanxError):
                self.broadcast_object((None, _in_words(error)))
            raise
        self.broadcast_object((result, None))
        return result


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
