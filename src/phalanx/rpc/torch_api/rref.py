"""torch's ``RRef``, over :mod:`phalanx.rpc.torch_api.references`.

``PyRRef`` stands in for the class of that name in torch's C++, with its methods, docstrings and errors; ``RRef`` is
what ``torch.distributed.rpc.api`` makes of it.
"""

from __future__ import annotations

import inspect
from typing import Any, Generic, TypeVar

import torch
from torch.futures import Future

from phalanx.errors import PhalanxError
from phalanx.rpc.torch_api import calls, current
from phalanx.rpc.torch_api.references import Forked, Identity, Owned, Owner, User
from phalanx.rpc.torch_api.torch_names import api, cpp, cpp_autograd, internal, rref_proxy

__all__ = ["PyRRef", "RRef"]

T = TypeVar("T")
UNSET = cpp._UNSET_RPC_TIMEOUT
_TorchRRef = cpp.PyRRef

_NEEDS_TENSOR = "RRef should contain a tensor for .backward()"


class PyRRef:
    """A reference to a value of a worker, of this one or of another."""

    def __init__(self, value: Any, type_hint: Any = None) -> None:
        """A reference to a value of this process."""
        if type_hint is not None or isinstance(value, torch.jit.ScriptModule):
            raise PhalanxError("an RRef over Phalanx cannot hold a TorchScript module; give it the Python module")
        owned = current.agent().references.new_value()
        owned.value.set_result(value)
        self._set(owned)

    def _set(self, reference: Owned | User, creation: Future[Any] | None = None) -> None:
        self._reference = reference
        self._creation = creation
        self._profiling: Future[Any] | None = None
        self._type: Any = None

    def is_owner(self) -> bool:
        return isinstance(self._reference, Owned)

    def confirmed_by_owner(self) -> bool:
        return isinstance(self._reference, Owned) or self._reference.confirmed.done()

    def owner(self) -> Any:
        if isinstance(self._reference, Owned):
            return current.agent().get_worker_info()
        return cpp.WorkerInfo(self._reference.owner.name, self._reference.owner.rank)

    def owner_name(self) -> str:
        return str(self.owner().name)

    def local_value(self) -> Any:
        if not isinstance(self._reference, Owned):
            where = f"user {current.agent().get_worker_info()}. Call it on owner {self.owner()}"
            raise PhalanxError(
                f"Can't call RRef.local_value() on a non-owner RRef. "
                f"For {self._reference.in_errors()}, can't call localValue() on {where}"
            )
        value = self._reference.value.wait()
        internal._handle_exception(value)
        return value

    def to_here(self, timeout: float = UNSET) -> Any:
        if isinstance(self._reference, Owned):
            return self.local_value()
        return calls.fetch(self._reference, timeout)

    def rpc_sync(self, timeout: float = UNSET) -> Any:
        return rref_proxy.RRefProxy(self, api.rpc_sync, timeout)

    def rpc_async(self, timeout: float = UNSET) -> Any:
        return rref_proxy.RRefProxy(self, api.rpc_async, timeout)

    def remote(self, timeout: float = UNSET) -> Any:
        return rref_proxy.RRefProxy(self, api.remote, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        if isinstance(self._reference, Owned):
            backward(self.local_value(), dist_autograd_ctx_id, retain_graph)
            return
        if dist_autograd_ctx_id == -1:
            raise PhalanxError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        calls.backward(self._reference, dist_autograd_ctx_id, retain_graph)

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
        if isinstance(self._reference, User):
            calls.usable(self._reference, "fork an UserRRef", on_it="")
        return tuple(map(tuple, current.agent().references.hand_on(self._reference)))

    @staticmethod
    def _deserialize(data: tuple[Any, ...]) -> PyRRef:
        identity, fork, owner, parent = data
        forked = Forked(Identity(*identity), Identity(*fork), Owner(*owner), Owner(*parent))
        return wrapped(current.agent().references.receive(forked))

    def __str__(self) -> str:
        return str(self._reference)

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


def wrapped(reference: Owned | User, creation: Future[Any] | None = None) -> RRef[Any]:
    """What the user sees of a reference."""
    made: RRef[Any] = RRef.__new__(RRef)
    made._set(reference, creation)
    return made


def backward(value: Any, context: int, retain_graph: bool) -> None:
    """Begin a backward pass at a value of this worker: a distributed one, or a local one if ``context`` is -1."""
    if not isinstance(value, torch.Tensor):
        raise PhalanxError(_NEEDS_TENSOR)
    if context == -1:
        torch.autograd.backward([value], retain_graph=retain_graph)
        return
    cpp_autograd.backward(context, [value], retain_graph)
