"""The callee's side: running what others call through torch's API, and answering."""

from __future__ import annotations

import sys
from typing import Any

import torch

from phalanx.errors import ClosedError
from phalanx.rpc.agent import Incoming, Member
from phalanx.rpc.autograd.requests import running_in, unwrap, wrap
from phalanx.rpc.future import Future as OwnFuture
from phalanx.rpc.torch_api import current, profiling, rref
from phalanx.rpc.torch_api.calls import BACKWARD, CALL, FETCH, PYTHON, Answer, Call, pickle_errors
from phalanx.rpc.torch_api.references import Identity, Owned
from phalanx.rpc.torch_api.torch_names import internal

__all__ = ["Service"]

# How long a request waits for the end of this worker's own init_rpc.
START_S = 300.0


class Service:
    """What one agent runs for others.

    Args:
        agent: torch's side of it.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self.running = 0  # requests under way; only for people, so no lock
        agent.phalanx.serve(CALL, self._call)
        agent.phalanx.serve(FETCH, self._fetch)
        agent.phalanx.serve(BACKWARD, self._backward)

    def _started(self) -> None:
        if not current.started(self._agent, START_S):
            raise ClosedError(f"{self._agent.me.name} has not finished init_rpc(), or has shut RPC down")

    def _call(self, incoming: Incoming, message: tuple[Any, ...]) -> Any:
        self._started()
        self.running += 1
        try:
            return self._answered(incoming.peer, Call(*message))
        finally:
            self.running -= 1

    def _answered(self, peer: Member, call: Call) -> Any:
        tensors = unwrap(peer, call.tensors, call.autograd)
        with running_in(call.autograd), profiling.global_profiler.around(), profiling.profiled(call.profile) as events:
            owned = self._value_for(peer, call)
            try:
                result = self._run(call, tensors)
                if call.profile is not None and isinstance(result, OwnFuture):
                    result = result.wait()  # on this thread, whose profile it belongs to
            except Exception as error:
                if owned is not None:
                    owned.value.set_exception(error)
                    if call.kind != PYTHON:
                        return tuple(Answer(b"", [], None, events))
                raise
            if isinstance(result, OwnFuture):
                return result.then(lambda value: self._finish(peer, call, owned, value, events))
            return self._finish(peer, call, owned, result, events)

    def _value_for(self, peer: Member, call: Call) -> Owned | None:
        if call.into is None:
            return None
        identity, fork = (Identity(*part) for part in call.into)
        references = self._agent.references
        owned: Owned = references.own(identity)
        if identity != fork:
            references.keep(owned, fork, peer.incarnation)
        return owned

    def _run(self, call: Call, tensors: list[torch.Tensor]) -> Any:
        """The function's value, or an ``OwnFuture`` of it if the function is asynchronous."""
        references = self._agent.references
        received = references.collect_received()
        try:
            with pickle_errors():
                given = internal.deserialize(call.payload, tensors)
        finally:
            references.stop_collecting()
        for user in received:
            user.confirmed.wait()
        if call.kind == PYTHON:
            result = internal._run_function(given)
            if not call.asynchronous or isinstance(result, internal.RemoteException):
                return result
            return self._later(result)
        if isinstance(given, AttributeError):
            raise given
        args, kwargs = given
        function, _ = torch._C._jit_get_operation(call.name)
        return function(*args, **kwargs)

    def _later(self, result: Any) -> Any:
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
                text = f"On {self._agent.get_worker_info()}:\n{error!r}"
                later.set_result(internal.RemoteException(text, type(error)))

        result.add_done_callback(done)
        return later

    def _finish(
        self, peer: Member, call: Call, owned: Owned | None, value: Any, events: list[list[profiling.Event]]
    ) -> tuple[Any, ...]:
        if owned is not None:
            owned.value.set_result(value)
            return tuple(Answer(b"", [], None, events))
        with running_in(call.autograd):
            return tuple(self._encoded(peer, value, events))

    def _encoded(self, peer: Member, value: Any, events: list[list[profiling.Event]]) -> Answer:
        with pickle_errors():
            payload, tensors = internal.serialize(value)
        self._agent.references.sent_to(peer)
        sent, autograd = wrap(peer, tensors)
        return Answer(payload, sent, autograd, events)

    def _fetch(self, incoming: Incoming, message: tuple[Any, ...]) -> Any:
        self._started()
        identity, autograd = message
        unwrap(incoming.peer, [], autograd)  # enters the caller's context here
        answer: OwnFuture[Any] = OwnFuture()

        def encode(done: OwnFuture[Any]) -> None:
            try:
                value = done.wait(0)
                with running_in(autograd):
                    answer.set_result(tuple(self._encoded(incoming.peer, value, [])))
            except Exception as error:
                answer.set_exception(error)

        def found(done: OwnFuture[Owned]) -> None:
            try:
                done.wait(0).value.add_done_callback(encode)
            except Exception as error:
                answer.set_exception(error)

        self._agent.references.find(Identity(*identity)).add_done_callback(found)
        return answer

    def _backward(self, incoming: Incoming, message: tuple[Any, ...]) -> None:
        self._started()
        identity, context, retain_graph = message
        owned = self._agent.references.find(Identity(*identity)).wait()
        value = owned.value.wait()
        internal._handle_exception(value)
        try:
            rref.backward(value, context, retain_graph)
        except Exception as error:
            print(f"backward() for {incoming.peer}: {error!r}\n", end="", file=sys.stderr)
            raise
