"""Remote objects: made on a worker, used from others, and freed when nobody holds them.

A process *holds* an object while it has at least one :class:`RemoteObject` for it. Each owner knows which processes
hold which objects: a holder tells it once when it begins to hold and once when it has let go, in batches, never for
each copy of a reference. A hold ends with its process too: the owner sees the link to it end. So nothing depends on the
order in which garbage is collected, and a holder that dies leaves nothing behind.

An object is named by a number of its owner's; or by a tuple that another process has chosen, because the owner has not
made it yet (``torch_api/rref.py``). Word of such a name makes an entry, whose value is a future.

On the way from A to B a reference is A's until B's hold is known to the owner (``codec.py``).
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from phalanx.diagnosis.call_site import capture, text_of
from phalanx.errors import CallTimeout, ObjectLost, WorkerLost
from phalanx.rpc import codec, session, streams, verbs
from phalanx.rpc.autograd import requests
from phalanx.rpc.codec import pickled_parts
from phalanx.rpc.future import Future
from phalanx.rpc.members import Member
from phalanx.rpc.serving import NOBODY
from phalanx.rpc.worker import Incoming, Worker
from phalanx.system import threads

__all__ = ["Name", "ObjectInfo", "Owned", "RemoteObject", "Table", "local", "make", "objects", "table_of"]

_MAKE, _METHOD, _HOLDS = "objects.make", "objects.method", "objects.holds"
_OF_METHOD = pickled_parts("object", "function", "args", "kwargs")
_MAKING = pickled_parts("function", "args", "kwargs", "line", "serial")
# How soon an owner learns that a process has let go of objects.
RELEASE_S = 0.25
Name = int | tuple[Any, ...]


class ObjectInfo(NamedTuple):
    """An object that lives in this process for others.

    Attributes:
        number: of the object here, or its name.
        type_name: its type.
        made_by: the worker that made it.
        made_at: where its program did, as ``file:line``; empty if Phalanx made it by itself.
        holders: the workers that hold it.
    """

    number: Name
    type_name: str
    made_by: str
    made_at: str
    holders: tuple[str, ...]


@dataclass(eq=False)
class Owned:
    """An object on its owner."""

    value: Any
    made_by: str = ""
    made_at: str = ""
    turn: contextlib.AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)  # a lock, if serial
    holders: dict[int, Member] = field(default_factory=dict)


class Table:
    """The objects of one worker: those that live here, and those elsewhere that this process holds."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.lock = threading.RLock()
        self.numbers = itertools.count(1)
        self.owned: dict[Name, Owned] = {}
        self.held: dict[Member, Counter[Name]] = {}  # how many references this process has, by owner and name
        self.told: dict[Member, set[Name]] = {}  # the holds that the owner knows of
        self.telling: dict[Member, threading.Lock] = {}  # so that two batches for one owner arrive in their order
        self.unsure: set[Member] = set()  # owners that have not said whether they know
        # References that are no more. Garbage collection adds to it at any instruction, so this must take no lock.
        self.dropped: queue.SimpleQueue[tuple[Member, Name] | None] = queue.SimpleQueue()
        self.hurry = threading.Event()  # owners are told at once from now on
        self.gone: set[int] = set()  # incarnations: what one of them said last may be read after its end
        self.thread = threading.Thread(target=self._let_go, name="phalanx-rpc-objects", daemon=True)
        threads.start(self.thread)

    def add(self, owned: Owned) -> int:
        """Keep a new object; the caller makes a reference to it."""
        with self.lock:
            number = next(self.numbers)
            self.owned[number] = owned
            return number

    def find(self, number: Name) -> Owned:
        """The object of a number, or of a name."""
        with self.lock:
            owned = self.owned.get(number)
            if owned is None and isinstance(number, tuple):
                owned = self.owned[number] = Owned(Future())
        if owned is None:
            raise ObjectLost(f"object {number} of {self.worker.me} is gone: nobody held it any more")
        return owned

    def hold(self, owner: Member, number: Name, *, known: bool = False) -> None:
        """Count one more reference of this process; the owner may know by other means that it has one."""
        with self.lock:
            self.held.setdefault(owner, Counter())[number] += 1
            if known:
                self.told.setdefault(owner, set()).add(number)

    def release(self, owner: Member, number: Name) -> None:
        """Count one less, soon. Then the owner is told."""
        self.dropped.put((owner, number))

    def keep(self, name: Name, owned: Owned) -> None:
        """Let an object of this process be found under a name that this process holds, and be freed with its holds."""
        self.tell(self.worker.me, name)
        with self.lock:
            if (entry := self.find(name)) is not owned:
                owned.holders = entry.holders
                self.owned[name] = owned

    def named_for_others(self) -> list[tuple[Name, list[str]]]:
        """The objects with names that other workers hold, and these workers' names."""
        me = self.worker.me.incarnation
        with self.lock:
            named = [(name, owned.holders) for name, owned in self.owned.items() if isinstance(name, tuple)]
            found = [(name, [each.name for each in held.values() if each.incarnation != me]) for name, held in named]
        return [(name, holders) for name, holders in found if holders]

    def is_known(self, owner: Member, number: Name) -> bool:
        """Return whether an owner has said that it knows of this process's hold, and no other word is on its way."""
        with self.lock:
            telling = self.telling.get(owner)
            is_told = number in self.told.get(owner, ()) and owner not in self.unsure
            return is_told and telling is not None and not telling.locked()

    def tell(self, owner: Member, number: Name = 0) -> None:
        """Make this process's holds known to an owner, or one of them; return when they are."""
        with self.lock:
            telling = self.telling.setdefault(owner, threading.Lock())
        with telling:
            with self.lock:
                told, held = self.told.setdefault(owner, set()), set(self.held.get(owner, ()))
                if number in told and owner not in self.unsure:
                    return
                begun = list(held if owner in self.unsure else held - told)
                ended = list(told - held)
                if not begun and not ended:
                    return
                self.told[owner] = held
            if owner == self.worker.me:
                self.note(self.worker.me, begun, ended)
                return
            try:
                self.worker.request(owner, _HOLDS, (begun, ended), asked="to note who holds its objects").wait()
                self.unsure.discard(owner)
            except CallTimeout:  # it is slow, and may have taken this note or not: the next one says it again
                with self.lock:
                    self.told[owner] = self.told.get(owner, set()) | told
                    self.unsure.add(owner)
            except Exception:  # the owner is gone, and its objects with it
                self._forget_owner(owner)

    def note(self, holder: Member, begun: list[Name], ended: list[Name]) -> None:
        """As an owner, note which objects a process holds and which it has let go of."""
        freed = []
        with self.lock:
            for number in begun if holder.incarnation not in self.gone else ():
                if number in self.owned or isinstance(number, tuple):
                    self.find(number).holders[holder.incarnation] = holder
            for number in ended:
                owned = self.owned.get(number)
                if owned is not None:
                    owned.holders.pop(holder.incarnation, None)
                    if not owned.holders:
                        freed.append(self.owned.pop(number))
        del freed  # without the lock: the end of an object may run any code

    def forget(self, gone: Member) -> None:
        """A process is gone: it holds nothing, and its objects are no more."""
        with self.lock:
            self.gone.add(gone.incarnation)
            numbers = [number for number, owned in self.owned.items() if gone.incarnation in owned.holders]
        self._forget_owner(gone)
        self.note(gone, [], numbers)

    def close(self) -> None:
        """End the thread, and let go of everything."""
        self.hurry.set()
        self.dropped.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join()
        with self.lock:
            freed = list(self.owned.values())
            self.owned.clear()
        del freed

    def _forget_owner(self, owner: Member) -> None:
        with self.lock:
            for table in (self.held, self.told, self.telling):
                table.pop(owner, None)
            self.unsure.discard(owner)

    def _let_go(self) -> None:
        while (dropped := self.dropped.get()) is not None:
            self.hurry.wait(RELEASE_S)
            owners = set()
            while dropped is not None:
                if self._is_last(*dropped):
                    owners.add(dropped[0])
                if self.dropped.empty():
                    break
                dropped = self.dropped.get()
            for owner in owners:
                if owner == self.worker.me:
                    self.tell(owner)
                else:
                    self.worker.run(self.tell, owner)  # beside each other: one that is slow holds up none
            if dropped is None:
                return

    def _is_last(self, owner: Member, number: Name) -> bool:
        with self.lock:
            counts = self.held.get(owner)
            if counts is None:
                return False
            counts[number] -= 1
            if counts[number] > 0:
                return False
            del counts[number]
            return True


_tables: dict[Worker, Table] = {}


def table_of(worker: Worker) -> Table:
    """The objects of a worker."""
    return _tables[worker]


def _table() -> Table:
    return _tables[session.worker()]


class _Method:
    def __init__(self, target: RemoteObject, name: str, *, waits: bool) -> None:
        self._target, self._name, self._waits = target, name, waits

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        future = start_on(self._target, self._name, args, kwargs, None)
        return future.wait() if self._waits else future

    def __repr__(self) -> str:
        return f"<method {self._name} of {self._target!r}; for an attribute: rpc.call(object, getattr, {self._name!r})>"

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} is neither true nor false: call it")


class _Start:
    def __init__(self, target: RemoteObject) -> None:
        self._target = target

    def __getattr__(self, name: str) -> _Method:
        return _Method(self._target, name, waits=False)


class RemoteObject:
    """A reference to an object on another worker (or on this one). ``obj.method(x)`` is a call there.

    ``obj.start.method(x)`` returns a future. ``rpc.call(obj, "method", x, timeout_s=5)`` gives one call its own
    timeout, and ``rpc.call(obj, function, x)`` calls ``function(the object, x)`` there, as ``rpc.call(obj, getattr,
    "name")`` and ``rpc.call(obj, setattr, "name", value)`` do for an attribute. It can be sent to other workers.
    """

    def __init__(self, owner: Member, number: Name, type_name: str) -> None:
        self._owner, self._number, self._type_name = owner, number, type_name
        table = _table()
        table.hold(owner, number)
        weakref.finalize(self, table.release, owner, number).atexit = False

    @property
    def start(self) -> Any:
        """The same methods, each of which returns a future at once."""
        return _Start(self)

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("__"):
            raise AttributeError(name)  # Python asks for these by itself, and they are not methods of the object
        return _Method(self, name, waits=True)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("_owner", "_number", "_type_name"):
            raise AttributeError(f"{self!r} lives elsewhere: rpc.call(object, setattr, {name!r}, value) sets {name}")
        super().__setattr__(name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return start_on(self, "__call__", args, kwargs, None).wait()

    def _start_call(
        self, function: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float | None
    ) -> Future[Any]:
        return start_on(self, function, args, kwargs, timeout_s)

    def __repr__(self) -> str:
        return f"<{self._type_name} {self._number} on {self._owner}>"

    def __reduce__(self) -> tuple[Any, ...]:
        codec.keep(self)
        return _arrive, (self._owner, self._number, self._type_name)


def _arrive(owner: Member, number: Name, type_name: str) -> RemoteObject:
    reference = RemoteObject(owner, number, type_name)
    table = _table()
    if not table.is_known(owner, number):
        codec.arrived(lambda: table.tell(owner, number))
    return reference


def make(
    to: str | int | Member,
    kind: Callable[..., Any],
    *args: Any,
    timeout_s: float | None = None,
    serial: bool = True,
    **kwargs: Any,
) -> RemoteObject:
    """Make an object on another worker, and return a reference to it.

    The object lives there until no process has a reference to it, or until that worker ends. One of its methods runs at
    a time, whoever calls it, except for those that are ``async`` or generators.

    Args:
        to: the worker's name, rank, or ``Member``.
        kind: the object's class, or a function that returns the object.
        args, kwargs: its arguments.
        timeout_s: how long that may take, in seconds.
        serial: False for an object that can be called several times at once, or whose methods wait for each other.

    Raises:
        Exception: what making it raised.
        WorkerLost, CallTimeout, EncodingError: as for ``rpc.call``.
    """
    made: Future[RemoteObject] = requests.request(
        session.worker(),
        to,
        _MAKE,
        (kind, args, kwargs, text_of(capture()), serial),
        timeout_s,
        asked=f"to make a {verbs.name_of(kind)}",
        codec=_MAKING,
    )
    return made.wait()


def local(reference: RemoteObject) -> Any:
    """The object itself, on the worker where it lives.

    Raises:
        ObjectLost: it lives elsewhere; call its methods, or ``rpc.call(reference, function)``.
    """
    if reference._owner != session.worker().me:
        raise ObjectLost(f"{reference!r} does not live on {session.worker().me}; rpc.call(reference, function) does")
    return _table().find(reference._number).value


def objects() -> list[ObjectInfo]:
    """The objects that live in this process for others: what they are, who made them where, and who holds them."""
    table = _table()
    with table.lock:
        return [
            ObjectInfo(
                number,
                type(owned.value).__qualname__,
                owned.made_by,
                owned.made_at,
                tuple(sorted(member.name for member in owned.holders.values())),
            )
            for number, owned in table.owned.items()
        ]


def start_on(
    target: RemoteObject,
    function: str | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout_s: float | None,
) -> Future[Any]:
    """Begin a call of a method, or of a function with the object as its first argument."""
    name = function if isinstance(function, str) else verbs.name_of(function)
    # With the reference among what is sent, the object lives until the call has returned.
    return requests.request(
        session.worker(),
        target._owner,
        _METHOD,
        (target, function, args, kwargs),
        timeout_s,
        asked=f"{target._type_name}.{name}",
        made=partial(streams.received, timeout_s=timeout_s),
        failed=partial(_failed, target),
        codec=_OF_METHOD,
    )


def _failed(target: RemoteObject, error: BaseException) -> BaseException:
    """Make the error of a call of an object, which is lost with its owner but not with a worker that it called."""
    if not isinstance(error, WorkerLost) or error.incarnation != target._owner.incarnation:
        return error
    lost = ObjectLost(f"{target!r} is gone with its worker: {error}. Make it again")
    vars(lost).update(vars(error))
    return lost


def _on_make(incoming: Incoming, asked: tuple[Any, ...]) -> RemoteObject:
    kind, args, kwargs, line, serial = asked
    verbs.refuse_timeout(kind, kwargs)
    value = kind(*args, **kwargs)
    table = _table()
    turn = threading.Lock() if serial else contextlib.nullcontext()
    number = table.add(Owned(value, str(incoming.peer), line, turn))
    reference = RemoteObject(table.worker.me, number, type(value).__qualname__)
    table.tell(table.worker.me)
    return reference


def _on_method(incoming: Incoming, value: tuple[Any, ...]) -> Any:
    target, function, args, kwargs = value
    thing = local(target)
    incoming.thread = NOBODY  # while it waits for its turn it has not begun
    with _table().find(target._number).turn:
        incoming.thread, incoming.began = threading.get_ident(), time.monotonic()
        if incoming.given_up:
            return None
        if isinstance(function, str):
            return verbs.perform(incoming, getattr(thing, function), args, kwargs)
        return verbs.perform(incoming, function, (thing, *args), kwargs)


def _method_of(value: tuple[Any, ...]) -> Callable[..., Any]:
    target, function, *_ = value
    method: Callable[..., Any] = getattr(local(target), function) if isinstance(function, str) else function
    return method


def _on_holds(incoming: Incoming, holds: tuple[list[Name], list[Name]]) -> None:
    _table().note(incoming.peer, *holds)


def _equip(worker: Worker) -> None:
    _tables[worker] = table = Table(worker)
    requests.serve(worker, _MAKE, _on_make, operator.itemgetter(0))
    requests.serve(worker, _METHOD, _on_method, _method_of)
    worker.serve(_HOLDS, _on_holds, quick=True)
    worker.on_change(lambda member, _: table.forget(member))

    def end() -> None:
        table.close()
        del _tables[worker]

    worker.on_close(end)


session.on_init(_equip)
