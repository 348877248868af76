"""torch's ``RRef``, over remote objects (:mod:`phalanx.rpc.objects`).

The worker that makes a value with ``remote`` names it by an :class:`Identity`, because the owner has not made it yet.
Under that name the owner's table has the value, with the workers that hold it. What torch knows of more than that, a
number for each reference (*fork*), only appears in texts here.

``PyRRef`` stands in for the class of that name in torch's C++, with its methods, docstrings and errors; ``RRef`` is
what ``torch.distributed.rpc.api`` makes of it.
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
import itertools
import time
import weakref
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.futures import Future

from phalanx.errors import CallTimeout, PhalanxError
from phalanx.rpc.autograd import engine
from phalanx.rpc.future import Future as OwnFuture
from phalanx.rpc.objects import Owned, RemoteObject, Table, table_of
from phalanx.rpc.torch_api.agent import agent
from phalanx.rpc.torch_api.calls import call, fetch, note_reference, operator_call
from phalanx.rpc.torch_api.torch_names import api, autograd, cpp, internal, rref_proxy, stand_in
from phalanx.rpc.worker import Member
from phalanx.words import tell

__all__ = ["Identity", "PyRRef", "RRef"]

T = TypeVar("T")
UNSET = cpp._UNSET_RPC_TIMEOUT
_LOOK_S = 0.005
_TYPE_NAME = "RRef"  # of the remote objects
_TorchRRef = cpp.PyRRef

_numbers = itertools.count()
_users: weakref.WeakSet[PyRRef] = weakref.WeakSet()  # the references to values of other workers


class Identity(NamedTuple):
    """The name of a value: the worker that chose it, a number there, and that worker's incarnation."""

    created_on: int
    local_id: int
    incarnation: int

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"

    @staticmethod
    def new() -> Identity:
        """A name that nothing else in this job has."""
        me = agent().phalanx.me
        return Identity(me.rank, next(_numbers), me.incarnation)


def _table() -> Table:
    return table_of(agent().phalanx)


@stand_in
class PyRRef:
    """A reference to a value of a worker.

    The owner's table has the value while other workers hold it, or it is on its way to them. A reference of another
    worker, which is a *user*, has that worker hold it.
    """

    def __init__(self, value: Any, type_hint: Any = None) -> None:
        """A reference to a value of this process."""
        if type_hint is not None or isinstance(value, torch.jit.ScriptModule):
            raise PhalanxError("an RRef over Phalanx cannot hold a TorchScript module; give it the Python module")
        made: OwnFuture[Any] = OwnFuture()
        made.set_result(value)
        self._set(agent().phalanx.me, Identity.new(), Owned(made))

    def _set(self, owner: Member, identity: Identity, owned: Owned | None = None) -> None:
        self._owner, self._identity, self._owned = owner, identity, owned  # None on a user
        self._confirmed = True  # whether the call that makes the value has returned
        self._deleted = False  # whether it was given up at shutdown
        self._failure: BaseException | None = None  # why the value was never made; a use of the reference raises that
        self._creation: Future[Any] | None = None
        self._profiling: Future[Any] | None = None
        self._type: Any = None
        if owned is None:
            self._fork = Identity.new()
            _table().hold(owner, identity, known=True)  # by the message that brings the name there, or has brought it
            self._let_go = weakref.finalize(self, _table().release, owner, identity)
            self._let_go.atexit = False
            _users.add(self)

    def _give_up(self) -> None:
        self._deleted = True
        self._let_go()

    def _require_usable(self, use: str) -> None:
        if self._failure is not None:
            raise self._failure
        if self._deleted:
            raise PhalanxError(f"{self._in_errors()} has been deleted. Cannot call {use} after deletion.")

    def _in_errors(self) -> str:
        return f"UserRRef(rref_id={self._identity}, fork_id={self._fork})"

    def __str__(self) -> str:
        if self._owned is not None:
            return f"OwnerRRef({self._identity})"
        return f"UserRRef(RRefId = {self._identity}, ForkId = {self._fork})"

    def is_owner(self) -> bool:
        return self._owned is not None

    def confirmed_by_owner(self) -> bool:
        return self._confirmed

    def owner(self) -> Any:
        return agent().get_worker_info(None if self._owned is not None else self._owner.name)

    def owner_name(self) -> str:
        return str(self.owner().name)

    def local_value(self) -> Any:
        if self._owned is None:
            where = f"user {agent().get_worker_info()}. Call it on owner {self.owner()}"
            raise PhalanxError(
                f"Can't call RRef.local_value() on a non-owner RRef. "
                f"For {self._in_errors()}, can't call localValue() on {where}"
            )
        value = self._owned.value.wait()
        internal._handle_exception(value)
        return value

    def to_here(self, timeout: float = UNSET) -> Any:
        if self._owned is not None:
            return self.local_value()
        self._require_usable("to_here() on it")
        name = f"to_here#({agent().get_worker_info().name})->({self._owner.name})"
        with autograd.profiler.record_function(name) if autograd._profiler_enabled() else contextlib.nullcontext():
            return fetch(self._owner, tuple(self._identity), timeout)

    def rpc_sync(self, timeout: float = UNSET) -> Any:
        return rref_proxy.RRefProxy(self, api.rpc_sync, timeout)

    def rpc_async(self, timeout: float = UNSET) -> Any:
        return rref_proxy.RRefProxy(self, api.rpc_async, timeout)

    def remote(self, timeout: float = UNSET) -> Any:
        return rref_proxy.RRefProxy(self, api.remote, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        if self._owned is not None:
            _backward_of(self, dist_autograd_ctx_id, retain_graph)
            return
        if dist_autograd_ctx_id == -1:
            raise PhalanxError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        self._require_usable("backward() on it")
        payload, tensors = internal.serialize(
            internal.PythonUDF(_backward_of, (self, dist_autograd_ctx_id, retain_graph), {})
        )
        call(self._owner, payload, tensors, UNSET, asked="backward()").wait()

    def _get_type(self, timeout: float = UNSET, blocking: bool = True) -> Any:
        if self._type is None:
            if self.is_owner():
                self._type = api._rref_typeof_on_owner(self, blocking)
            else:
                self._type = api._rref_typeof_on_user(self, timeout, blocking)
        return self._type

    def _get_future(self) -> Future[Any]:
        if self._creation is None:
            raise PhalanxError(
                "Future that corresponds to the creation of this RRef on the remote node has not been set."
            )
        return self._creation

    def _get_profiling_future(self) -> Future[Any]:
        if self._profiling is None:
            raise PhalanxError("Profiling future has not been set!")
        return self._profiling

    def _set_profiling_future(self, future: Future[Any]) -> None:
        self._profiling = future

    def _serialize(self) -> tuple[Any, ...]:
        if self._owned is None:
            self._require_usable("fork an UserRRef")
        note_reference(RemoteObject(self._owner, self._identity, _TYPE_NAME))  # which holds it on the way
        if self._owned is not None:
            _table().keep(self._identity, self._owned)
        return self._owner, tuple(self._identity)

    @staticmethod
    def _deserialize(data: tuple[Any, ...]) -> RRef[Any]:
        return _made(data[0], Identity(*data[1]))

    def __getstate__(self) -> Any:
        raise PhalanxError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.__getstate__()


for _name, _method in inspect.getmembers(_TorchRRef):
    if _name in vars(PyRRef) and callable(getattr(PyRRef, _name)) and not _name.startswith("__"):
        getattr(PyRRef, _name).__doc__ = _method.__doc__


class RRef(PyRRef, Generic[T]):
    """A reference to a value of type ``T`` on a worker."""

    __doc__ = _TorchRRef.__doc__


def _made(owner: Member, identity: Identity) -> RRef[Any]:
    made: RRef[Any] = RRef.__new__(RRef)
    made._set(owner, identity, _table().find(identity) if owner == agent().phalanx.me else None)
    return made


def _backward_of(reference: PyRRef, context: int, retain_graph: bool) -> None:
    """Begin a backward pass at a value of this worker: a distributed one, or a local one if ``context`` is -1."""
    value = reference.local_value()
    if not isinstance(value, torch.Tensor):
        raise PhalanxError("RRef should contain a tensor for .backward()")
    if context == -1:
        torch.autograd.backward([value], retain_graph=retain_graph)
        return
    engine.backward(context, [value], retain_graph)


@stand_in
def _invoke_remote_builtin(dst: Any, name: str, timeout: float, *args: Any, **kwargs: Any) -> Any:
    return _remote(dst, *operator_call(name, args, kwargs), timeout, asked=name)


@stand_in
def _invoke_remote_python_udf(
    dst: Any, payload: bytes, tensors: list[torch.Tensor], timeout: float, asynchronous: bool
) -> Any:
    return _remote(dst, payload, tensors, timeout)


def _remote(
    dst: Any, payload: bytes, tensors: list[torch.Tensor], timeout: float, *, asked: str = "a function"
) -> RRef[Any]:
    member, identity = agent().member(dst), Identity.new()
    into = RemoteObject(member, identity, _TYPE_NAME)
    if member == agent().phalanx.me:
        _table().tell(member)  # which makes an entry
    reference = _made(member, identity)
    creation = call(dst, payload, tensors, timeout, asked=asked, into=into)
    if reference.is_owner():
        reference._creation = creation
        return reference
    reference._confirmed = False

    def made(done: Future[Any]) -> None:
        try:
            done.wait()
        except CallTimeout:
            reference._failure = PhalanxError(
                f"RRef creation via rpc.remote() to {member.name} timed out, and it is possible that the RRef on the "
                f"owner node does not exist."
            )
            raise
        except Exception as error:
            reference._failure = error
            raise
        finally:
            reference._confirmed = True

    reference._creation = creation.then(made)
    return reference


@stand_in
def _rref_context_get_debug_info() -> dict[str, str]:
    named = _table().named_for_others()
    counts = {
        "num_owner_rrefs": len(named),
        "num_pending_futures": 0,
        "num_pending_users": sum(not user._confirmed for user in list(_users)),
        "num_forks": sum(len(holders) for _, holders in named),
    }
    return {name: str(count) for name, count in counts.items()}


@stand_in
def _delete_all_user_and_unforked_owner_rrefs(timeout: datetime.timedelta = datetime.timedelta(seconds=100)) -> None:
    """Before a shutdown that all take part in: settle what is under way, then give up every reference."""
    until = time.monotonic() + timeout.total_seconds()
    table = _table()
    table.hurry.set()
    agent().join(timeout=timeout.total_seconds())
    for user in list(_users):
        user._give_up()
    while table.named_for_others():
        if time.monotonic() > until:
            tell("warning: rpc.shutdown() does not wait any longer for values of this worker that others refer to")
            return
        time.sleep(_LOOK_S)


@stand_in
def _destroy_rref_context(ignore_leaks: bool) -> None:
    """Do nothing: what others still hold is freed with this worker."""
