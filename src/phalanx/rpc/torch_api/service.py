"""The callee's side: running what others call through torch's API, and answering."""

from __future__ import annotations

from typing import Any

import torch

from phalanx.rpc import session
from phalanx.rpc.autograd.requests import running_in, unwrap, wrap
from phalanx.rpc.future import Future as OwnFuture
from phalanx.rpc.objects import Owned, table_of
from phalanx.rpc.torch_api import profiling
from phalanx.rpc.torch_api.agent import agent
from phalanx.rpc.torch_api.calls import CALL, FETCH, Answer, Call, noted_references, pickle_errors
from phalanx.rpc.torch_api.torch_names import internal
from phalanx.rpc.worker import Incoming, Member, Worker

__all__: list[str] = []


def _equip(own: Worker) -> None:
    own.serve(CALL, _on_call)
    own.serve(FETCH, _on_fetch)


session.on_init(_equip)


def _on_call(incoming: Incoming, message: tuple[Any, ...]) -> Any:
    peer, call = incoming.peer, Call(*message)
    agent()  # which raises where this process is no worker of torch's API
    tensors = unwrap(peer, call.tensors, call.autograd)
    owned = _value(peer, call.into._number) if call.into is not None else None
    with running_in(call.autograd), profiling.profiled(call.profile) as events:
        try:
            result = _run(call, tensors)
            if call.profile is not None and isinstance(result, OwnFuture):
                result = result.wait()  # on this thread, whose profile it belongs to
        except Exception as error:
            if owned is not None:
                owned.value.set_exception(error)
            raise
        if isinstance(result, OwnFuture):
            return result.then(lambda value: _answer(peer, call, owned, value, events))
        return _answer(peer, call, owned, result, events)


def _value(holder: Member, name: Any) -> Owned:
    """The value of a name of this worker's table, which may not have been made yet; ``holder`` has a reference."""
    table = table_of(session.worker())
    table.note(holder, [name], [])
    return table.find(name)


def _on_fetch(incoming: Incoming, message: tuple[Any, ...]) -> OwnFuture[Any]:
    name, autograd = message
    unwrap(incoming.peer, [], autograd)  # enters the caller's context here
    made: OwnFuture[Any] = _value(incoming.peer, name).value
    return made.then(lambda value: _encoded(incoming.peer, autograd, value, []))


def _run(call: Call, tensors: list[torch.Tensor]) -> Any:
    """The function's value, or an ``OwnFuture`` of it if the function is asynchronous."""
    with pickle_errors():
        given = internal.deserialize(call.payload, tensors)
    result = internal._run_function(given)
    if isinstance(result, internal.RemoteException) or not hasattr(given.func, "_wrapped_async_rpc_function"):
        return result
    return _later(result)


def _later(result: Any) -> Any:
    if not isinstance(result, torch._C.Future):
        return internal.RemoteException(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but got "
            f"{type(result).__module__}.{type(result).__qualname__}",
            RuntimeError,
        )
    later: OwnFuture[Any] = OwnFuture()

    def done(future: Any) -> None:
        try:
            later.set_result(future.value())
        except Exception as error:
            text = f"On {agent().get_worker_info()}:\n{error!r}"
            later.set_result(internal.RemoteException(text, type(error)))

    result.add_done_callback(done)
    return later


def _answer(peer: Member, call: Call, owned: Owned | None, value: Any, events: list[Any]) -> tuple[Any, ...]:
    if owned is not None:
        owned.value.set_result(value)
        return tuple(Answer(events=events))
    return _encoded(peer, call.autograd, value, events)


def _encoded(peer: Member, context: Any, value: Any, events: list[Any]) -> tuple[Any, ...]:
    with pickle_errors():
        payload, tensors = internal.serialize(value)
    references = noted_references()
    with running_in(context):
        sent, autograd = wrap(peer, tensors)
    return tuple(Answer(payload, sent, references, autograd, events))
