"""Values as messages: pickle protocol 5, with the memory of tensors and of other large objects beside it.

Any value that pickle takes can be sent, and functions and classes that cannot be found by name as well if cloudpickle
is installed. A function of the script itself (``__main__``) is found by its name, so the other worker must run the same
script. Tensors arrive as torch's own pickles leave them: with their dtype, strides, device and ``requires_grad``, and
without their history, hooks and gradient.

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
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.errors import EncodingError, PhalanxError
from phalanx.rpc import large_heads
from phalanx.rpc.pickling import Writer
from phalanx.rpc.reducing import Reducer, Table

__all__ = ["decode", "decoding_context", "encode"]

# Writers that nobody uses. One that has written a large head has a large memo, which takes long to clear.
_spare: list[Writer] = []
_MOST_SPARE = 16
_SMALL_BYTES = 16 * 1024


def encode(
    value: Any,
    *,
    reducers: Mapping[type, Reducer] | None = None,
    restart: Callable[[], None] | None = None,
    names: Sequence[str] = (),
) -> tuple[bytes, list[memoryview]]:
    """A value as bytes, and the memory beside them.

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
        writer = Writer(pickle.Pickler, Table())
    try:
        head, buffers = writer.write(value, reducers, restart)
    except PhalanxError:
        raise
    except Exception as error:
        # Only now, because most processes never send a value that needs cloudpickle.
        from phalanx.rpc import closures

        if restart is not None:
            restart()
        return closures.encode(value, reducers, restart, names, error)
    if len(head) <= _SMALL_BYTES and len(_spare) < _MOST_SPARE:
        _spare.append(writer)
    return head, buffers


def decode(head: bytes | memoryview, buffers: Sequence[memoryview] = (), *, context: Any = None) -> Any:
    """The value that ``encode`` made a head and buffers of.

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
        before, _decoding.context = _decoding.context, context
        try:
            return decode(head, buffers)
        finally:
            _decoding.context = before
    try:
        if head[:1] != large_heads.FIRST_BYTE:
            if not buffers:
                return pickle.loads(head)
            remaining = iter(buffers)
            value = pickle.loads(head, buffers=remaining)
        else:
            pieces, others = large_heads.take_apart(head, buffers)
            remaining = iter(others)
            value = pickle.Unpickler(pieces, buffers=remaining).load()
    except PhalanxError:
        raise
    except Exception as error:
        raise EncodingError.not_rebuilt(error) from error
    if next(remaining, None) is not None:
        raise EncodingError.damaged("memory that no part of its value lies in")
    return value


class _Decoding(threading.local):
    context: Any = None


_decoding = _Decoding()


def decoding_context() -> Any:
    """What ``decode`` was given as ``context``, within a function that it calls on this thread; else None."""
    return _decoding.context
