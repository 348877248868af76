"""Exceptions of handlers on their way to the caller: of their own type where that can be, with the remote traceback."""

from __future__ import annotations

import contextlib
import sys
import traceback

import msgspec

from phalanx.errors import EncodingError
from phalanx.rpc.codec import decode, encode
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

    It is raised in place of that type if the type cannot be imported or unpickled in this process.

    Example:
        Odd: batch 7 has no items

    What to do:
        1. Read the traceback above it: it is that of the other worker.
        2. To catch the type itself, define it in a module that both workers can import.

    Attributes:
        type_name: the name of its type.
    """

    def __init__(self, message: str, type_name: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name


class Failure(msgspec.Struct, frozen=True):
    """An exception as it travels. Only the exception within it is pickled, so that any caller can read the rest.

    Attributes:
        pickled: the exception, or nothing if it cannot be pickled, or is not to be.
        type_name, text: its type and what it says, for a caller that cannot make one.
        traceback: as Python prints it.
    """

    pickled: bytes
    type_name: str
    text: str
    traceback: str

    @staticmethod
    def of(error: BaseException, *, with_pickle: bool = True) -> Failure:
        """Make the failure for an exception that a handler raised."""
        pickled = b""
        if with_pickle:
            with contextlib.suppress(Exception):
                head, buffers = encode(error)
                if not buffers and type(decode(head, ())) is type(error):
                    pickled = bytes(head)
        text = ""
        with contextlib.suppress(Exception):
            text = str(error)
        shown = f"{type(error).__qualname__}: {text}\n"
        # CPython parses each line of a traceback, and that can fail while another thread parses too.
        with contextlib.suppress(Exception):
            shown = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        cause = error.__cause__
        if isinstance(cause, RemoteTraceback):
            shown = f"{cause.text}\n{shown}"
        return Failure(pickled, _sendable(type(error).__qualname__), _sendable(text), _sendable(shown))

    def encode(self) -> bytes:
        """Encode it."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(head: bytes | memoryview) -> Failure:
        """Decode what :meth:`encode` has made.

        Raises:
            EncodingError: it did not.
        """
        try:
            return _failures.decode(head)
        except (msgspec.MsgspecError, ValueError) as error:
            raise EncodingError.damaged(f"a failure that cannot be read ({error})") from error

    def rebuilt(self, where: Member, *, unpickle: bool = True) -> BaseException:
        """Make the exception for the caller, who asked ``where``.

        Args:
            where: the worker on which it was raised.
            unpickle: whether it may be of its own type, which is unpickled; else it is a ``RemoteError``.
        """
        error: BaseException | None = None
        if self.pickled and unpickle:
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


def _sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


_failures = msgspec.msgpack.Decoder(Failure)
