"""What a handler raised, on its way to the caller: its own type where that can be, with the remote traceback."""

from __future__ import annotations

import contextlib
import sys
import traceback
from dataclasses import dataclass

from phalanx.rpc.encoding import decode, encode
from phalanx.rpc.members import Member

__all__ = ["Failure", "RemoteError", "RemoteTraceback"]


class RemoteTraceback(Exception):
    """The traceback on the other worker; the cause of the exception that the caller gets."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


class RemoteError(RuntimeError):
    """An exception of another worker whose own type cannot be made here.

    Attributes:
        type_name: the name of its type.
    """

    def __init__(self, message: str, type_name: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name


@dataclass(frozen=True)
class Failure:
    """An exception as it travels.

    Attributes:
        pickled: the exception, or nothing if it cannot be pickled.
        type_name, text: its type and what it says, for a caller that cannot make one.
        traceback: as Python prints it.
    """

    pickled: bytes
    type_name: str
    text: str
    traceback: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        """The failure for an exception that a handler raised."""
        pickled = b""
        with contextlib.suppress(Exception):
            head, buffers = encode(error)
            if not buffers and type(decode(head, ())) is type(error):
                pickled = bytes(head)
        shown = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        cause = error.__cause__
        if isinstance(cause, RemoteTraceback):
            shown = f"{cause.text}\n{shown}"
        return Failure(pickled, type(error).__qualname__, str(error), shown)

    def rebuilt(self, where: Member) -> BaseException:
        """The exception for the caller, who asked ``where``."""
        error: BaseException | None = None
        if self.pickled:
            with contextlib.suppress(Exception):
                error = decode(self.pickled, ())
        # What ends a program, such as SystemExit, has ended a call there, and must not end the caller's program here.
        if not isinstance(error, Exception):
            error = RemoteError(f"{self.type_name}: {self.text}", self.type_name)
        note = f"raised on {where}"
        if sys.version_info >= (3, 11):
            error.add_note(note)
        error.__cause__ = RemoteTraceback(f"On {where}:\n{self.traceback}")
        return error
