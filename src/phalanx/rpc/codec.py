"""Values as messages: a head, and the memory of tensors and of other large objects beside it.

Any value that pickle or cloudpickle takes can be sent. A function of the script itself (``__main__``) is found by its
name, so the other worker must run the same script. Tensors (``tensors.py``) arrive as torch's own pickles leave them,
without their history, hooks and gradient, and each with memory of its own. Typed services (``services.py``) have
codecs in which nothing is unpickled.

A layer above can replace objects on their way. The sending side gives ``encode`` reducers, by type; the function that
a reducer names is called on the other side, where ``decoding_context()`` gives it the ``context`` of ``decode``.
Distributed autograd, for instance, replaces tensors that require a gradient::

    def reduce(tensor):
        if not tensor.requires_grad:
            return NotImplemented          # the usual way
        sent.append(tensor)
        return received, (len(sent) - 1, tensor.detach())

    encode(value, reducers={torch.Tensor: reduce}, restart=sent.clear)

    def received(number, tensor):          # on the other side, within decode(head, buffers, context=arrived)
        decoding_context()[number] = tensor
        return tensor

What must stay alive while a message is on its way is noted by ``keep`` while it is encoded, and what must be settled
before its receiver goes on by ``arrived`` while it is decoded: a reference to a remote object that travels from A to B
is held by A until B's own hold is known to the object's owner. The worker, which knows when a message has been
received, keeps and settles these.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import json
import pickle
import socket
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from phalanx.errors import EncodingError, PhalanxError
from phalanx.rpc.tensors import Reducer, Table

__all__ = [
    "FACTS",
    "NUMBER",
    "PICKLED",
    "Codec",
    "Kept",
    "arrived",
    "decode",
    "decoding_context",
    "encode",
    "keep",
    "pickled_parts",
    "receiving",
    "sending",
]

T = TypeVar("T")

# Something that a receiver relies on, and what is to be called when the receiver of an answer has made use of it.
Kept = tuple[Any, Callable[[], object] | None]

# Pickle collects what it writes in frames of at most 128 KiB and writes larger ``bytes`` out as they are. So such a
# piece is the content of one object, and becomes a buffer without a copy. The head then begins with a byte that no
# pickle begins with, and says how many buffers are the pickle.
_PIECE_BYTES = 256 * 1024
_IN_PIECES = 1
_PIECES = struct.Struct("<BI")
# Writers that nobody uses. One that has written a large head has a large memo, which takes long to clear.
_spare: list[_Writer] = []
_MOST_SPARE = 16
_SMALL_BYTES = 16 * 1024


class _Local(threading.local):
    context: Any = None
    kept: list[Kept] | None = None
    to_settle: list[Callable[[], None]] | None = None


_local = _Local()


# -- pickles ---------------------------------------------------------------------------------------


class _Chunks(list[bytes]):
    """File that keeps what pickle writes to it, piece by piece."""

    write = list.append


class _Writer:
    """Pickler with what it needs. Made once for many values, because making it takes longer than a small value does."""

    def __init__(self, pickler: Callable[..., pickle.Pickler] = pickle.Pickler, table: Table | None = None) -> None:
        self._table = table if table is not None else Table()
        self._found: list[pickle.PickleBuffer] = []
        self._chunks = _Chunks()
        self._pickler = pickler(self._chunks, 5, buffer_callback=self._found.append)
        self._pickler.dispatch_table = self._table

    def write(self, value: Any, reducers: Mapping[type, Reducer] | None) -> tuple[bytes, list[memoryview]]:
        """Encode a value. After an exception the writer is not to be used again."""
        table, found, chunks = self._table, self._found, self._chunks
        if reducers:
            table.use(reducers)
        try:
            self._pickler.dump(value)
            self._pickler.clear_memo()
            buffers = table.buffers(found) if found else []
        finally:
            table.reset()
            found.clear()
        if len(chunks) == 1:
            head = chunks[0]
        elif any(len(chunk) >= _PIECE_BYTES for chunk in chunks):
            head = _PIECES.pack(_IN_PIECES, len(chunks))
            buffers = [*(memoryview(chunk) for chunk in chunks), *buffers]
        else:
            head = b"".join(chunks)
        chunks.clear()
        return head, buffers


class _Pieces(io.RawIOBase):
    """File for reading, of pieces of memory in order."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = [piece for piece in reversed(pieces) if piece.nbytes]

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        if not self._pieces:
            return 0
        piece = self._pieces.pop()
        count = min(len(target), len(piece))
        target[:count] = piece[:count]
        if count < len(piece):
            self._pieces.append(piece[count:])
        return count


def encode(
    value: Any,
    *,
    reducers: Mapping[type, Reducer] | None = None,
    restart: Callable[[], None] | None = None,
    names: Sequence[str] = (),
) -> tuple[bytes, list[memoryview]]:
    """Encode a value as bytes, and the memory beside them.

    Args:
        value: what to send.
        reducers: for objects of exactly these types, functions that return what ``__reduce__`` returns, or
            ``NotImplemented`` for the usual way. A ``torch.nn.Parameter`` is a type of its own. Functions, classes and
            what Python builds in (numbers, text, lists, dicts, ...) are never asked about.
        restart: called when pickling begins anew, so that reducers will see the same objects again, and when it has
            failed. Reducers that note what they see forget it then.
        names: for errors: what the parts of the tuple ``value`` are called. Those of a named tuple are called as they
            are; any other value is called ``value``.

    Returns:
        The head, and the buffers. These are the memory of the value's tensors itself wherever it is on the CPU and in
        order, so it must not change until they have been sent; they keep it alive.

    Raises:
        EncodingError: a part of the value cannot be pickled; the text says which, and what to do.
    """
    try:
        writer = _spare.pop()  # so that a reducer that encodes a value itself does not find this one
    except IndexError:
        writer = _Writer()
    try:
        head, buffers = writer.write(value, reducers)
    except PhalanxError:
        raise
    except Exception:
        if restart is not None:
            restart()
        return _encode_by_code(value, reducers, restart, names)
    if len(head) <= _SMALL_BYTES and len(_spare) < _MOST_SPARE:
        _spare.append(writer)
    return head, buffers


def decode(head: bytes | memoryview, buffers: Sequence[memoryview] = (), *, context: Any = None) -> Any:
    """Decode what ``encode`` has made.

    This unpickles, so it runs code that the sender chooses: call it only after the sender has proven the job's key.

    Args:
        head: the head.
        buffers: the buffers, in the same order, writable and not used for anything else. Tensors are built over them
            without a copy, and keep them alive; they cannot be resized to more. Memory that begins at a multiple of 16
            serves every dtype; other memory may have to be copied.
        context: what functions that were named by reducers get from ``decoding_context()`` meanwhile.

    Raises:
        EncodingError: the message is damaged, or this process lacks what the value is made of.
    """
    if context is not None:
        before, _local.context = _local.context, context
        try:
            return decode(head, buffers)
        finally:
            _local.context = before
    try:
        if not buffers:
            return pickle.loads(head)
        if head[0] != _IN_PIECES:
            remaining = iter(buffers)
            value = pickle.loads(head, buffers=remaining)
        else:
            count = _PIECES.unpack(head)[1]
            remaining = iter(buffers[count:])
            pieces: Any = io.BufferedReader(_Pieces(buffers[:count]))
            value = pickle.Unpickler(pieces, buffers=remaining).load()
    except PhalanxError:
        raise
    except Exception as error:
        raise EncodingError.not_rebuilt(error) from error
    if next(remaining, None) is not None:
        raise EncodingError.damaged("memory that no part of its value lies in")
    return value


def decoding_context() -> Any:
    """Return what ``decode`` was given as ``context``, within a function that it calls on this thread; else None."""
    return _local.context


# -- what must stay alive, and be settled ----------------------------------------------------------


def keep(thing: Any, taken: Callable[[], object] | None = None) -> None:
    """Note, while a message is encoded on this thread, what its receiver relies on until it has settled.

    Args:
        thing: stays alive until then.
        taken: is called then if the message is an answer for which its caller still waited.
    """
    if _local.kept is not None:
        _local.kept.append((thing, taken))


def arrived(settle: Callable[[], None]) -> None:
    """Note, while a message is decoded on this thread, what is to be called before its receiver goes on."""
    if _local.to_settle is None:
        settle()
    else:
        _local.to_settle.append(settle)


def sending(encode: Callable[..., T], *arguments: Any) -> tuple[T, list[Kept]]:
    """Return what ``encode(*arguments)`` returns, and what :func:`keep` was called with meanwhile."""
    kept: list[Kept] = []
    before, _local.kept = _local.kept, kept
    try:
        return encode(*arguments), kept
    finally:
        _local.kept = before


def receiving(decode: Callable[..., T], *arguments: Any) -> tuple[T, list[Callable[[], None]]]:
    """Return what ``decode(*arguments)`` returns, and what :func:`arrived` was called with meanwhile."""
    to_settle: list[Callable[[], None]] = []
    before, _local.to_settle = _local.to_settle, to_settle
    try:
        return decode(*arguments), to_settle
    finally:
        _local.to_settle = before


# -- codecs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Codec:
    """Encoding of a service's values. The callee's decodes requests and encodes answers, the caller's the reverse.

    Attributes:
        encode: makes a head and buffers of a value.
        decode: makes the value of a head and buffers.
        unpickles: whether ``decode`` runs what the sender has chosen.
    """

    encode: Callable[[Any], tuple[bytes, list[memoryview]]]
    decode: Callable[[bytes | memoryview, Sequence[memoryview]], Any]
    unpickles: bool


_NUMBER = struct.Struct("!Q")


def _decode_number(head: bytes | memoryview, buffers: Sequence[memoryview]) -> int:
    if len(head) != _NUMBER.size or buffers:
        raise EncodingError.damaged(f"{len(head)} bytes where the number of a call should be")
    number: int = _NUMBER.unpack(head)[0]
    return number


def _decode_facts(head: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
    try:
        return json.loads(bytes(head))
    except (ValueError, RecursionError) as error:
        raise EncodingError.damaged(f"{len(head)} bytes where JSON should be ({error})") from error


def pickled_parts(*names: str) -> Codec:
    """Make a :data:`PICKLED` for a tuple whose parts have names, which errors use."""
    return Codec(partial(encode, names=names), decode, unpickles=True)


PICKLED = Codec(encode, decode, unpickles=True)
NUMBER = Codec(lambda number: (_NUMBER.pack(number), []), _decode_number, unpickles=False)
# What workers ask each other about themselves: numbers and text, as JSON. Such a question is not asked about in turn.
FACTS = Codec(lambda value: (json.dumps(value).encode(), []), _decode_facts, unpickles=False)


# -- what plain pickle does not take ---------------------------------------------------------------


def _encode_by_code(
    value: Any, reducers: Mapping[type, Reducer] | None, restart: Callable[[], None] | None, names: Sequence[str]
) -> tuple[bytes, list[memoryview]]:
    """Encode a value by cloudpickle, which sends the code of functions and classes that have no name elsewhere."""
    try:
        return _closure_writer().write(value, reducers)
    except Exception as error:
        if restart is not None:
            restart()
        if isinstance(error, PhalanxError):
            raise
        raise _explained(value, names, error) from error


def _closure_writer() -> _Writer:
    pickler = _closure_pickler()
    return _Writer(pickler, Table(pickler.__base__.dispatch_table))


@functools.cache
def _closure_pickler() -> Any:
    import cloudpickle  # only now, because most processes never send a value that needs it

    class ClosurePickler(cloudpickle.Pickler):  # type: ignore[misc]
        # Pickle's own attribute, which cloudpickle's class has hidden by a table of that name.
        dispatch_table = pickle.Pickler.dispatch_table

        def reducer_override(self, obj: Any) -> Any:
            return NotImplemented if _is_of_script(obj) else super().reducer_override(obj)

    return ClosurePickler


def _is_of_script(value: Any) -> bool:
    """Find out whether a value is a function or class of the script that every worker runs, found there by its name.

    Cloudpickle alone would send its code and all that it refers to.
    """
    if getattr(value, "__module__", None) != "__main__" or not hasattr(value, "__qualname__"):
        return False
    found: Any = sys.modules.get("__main__")
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


_OF_THIS_PROCESS = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Thread,
    threading.Event,
    threading.Condition,
    io.IOBase,
    socket.socket,
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    types.FrameType,
    types.TracebackType,
)
_DEEPEST = 50  # levels; a path longer than this says no more


def _explained(value: Any, names: Sequence[str], error: Exception) -> Exception:
    """Make the error for a value that cannot be pickled: it names the innermost part that cannot."""
    path, part, seen = "value", value, {id(value)}
    if not names and isinstance(value, tuple):
        names = getattr(value, "_fields", ())
    parts: Any = zip(names, value, strict=False) if names else _parts(value, path)
    for _ in range(_DEEPEST):
        for where, item in parts:
            if id(item) not in seen and (why := _attempt(item)) is not None:
                path, part, error = where, item, why
                break
        else:
            break
        seen.add(id(part))
        parts = _parts(part, path)
    if isinstance(error, PhalanxError):
        return EncodingError(f"{path} cannot be sent: {error}")
    kind, name = type(part), getattr(part, "__qualname__", None)
    text = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    remedy = "Leave it out, or give its class a method __reduce__ that says how to make it anew"
    if isinstance(part, _OF_THIS_PROCESS):
        remedy = "It belongs to this process: leave it out, or make it on the worker that needs it"
    elif isinstance(part, types.ModuleType):
        remedy = "Import it on the other worker instead"
    said = f"{text} ({name})" if isinstance(name, str) else text
    return EncodingError.cannot_send(path, said, str(error) or type(error).__name__, remedy)


def _attempt(part: Any) -> Exception | None:
    try:
        _closure_writer().write(part, None)
    except Exception as why:
        return why
    return None


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r:.50}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        names = getattr(value, "_fields", None) or range(len(value))
        places = (f".{name}" if isinstance(name, str) else f"[{name}]" for name in names)
        yield from ((path + place, item) for place, item in zip(places, value, strict=False))
    elif isinstance(value, functools.partial):
        yield from ((f"{path}.func", value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            variables = inspect.getclosurevars(value)
            for name, item in (*variables.nonlocals.items(), *variables.globals.items()):
                yield f"the variable {name} of {path}", item
    elif not isinstance(value, (type, *_OF_THIS_PROCESS)):
        yield from ((f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items())
