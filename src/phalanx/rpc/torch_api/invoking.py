"""What torch's ``rpc_sync``, ``rpc_async`` and ``remote`` ask of C++, by its names and with its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.futures import Future

from phalanx.errors import CallTimeout, PhalanxError
from phalanx.rpc.torch_api import current
from phalanx.rpc.torch_api.calls import BUILTIN, PYTHON, call
from phalanx.rpc.torch_api.references import Identity, User
from phalanx.rpc.torch_api.rref import wrapped
from phalanx.rpc.torch_api.torch_names import internal

__all__ = ["STAND_INS"]


def _invoke_rpc_builtin(dst: Any, name: str, timeout: float, *args: Any, **kwargs: Any) -> Future[Any]:
    payload, tensors = internal.serialize((args, kwargs))
    return call(dst, BUILTIN, name, payload, tensors, timeout)


def _invoke_rpc_python_udf(
    dst: Any, payload: bytes, tensors: list[torch.Tensor], timeout: float, asynchronous: bool
) -> Future[Any]:
    return call(dst, PYTHON, "", payload, tensors, timeout, asynchronous=asynchronous)


def _invoke_rpc_torchscript(dst: str, name: str, *_: Any) -> NoReturn:
    raise PhalanxError(
        f"{name} is a TorchScript function, which cannot be called on {dst} over Phalanx. Pass the Python function, or "
        f"run without --replace rpc"
    )


def _invoke_remote_builtin(dst: Any, name: str, timeout: float, *args: Any, **kwargs: Any) -> Any:
    payload, tensors = internal.serialize((args, kwargs))
    return _remote(dst, BUILTIN, name, payload, tensors, timeout, False)


def _invoke_remote_python_udf(
    dst: Any, payload: bytes, tensors: list[torch.Tensor], timeout: float, asynchronous: bool
) -> Any:
    return _remote(dst, PYTHON, "", payload, tensors, timeout, asynchronous)


def _remote(
    dst: Any, kind: str, name: str, payload: bytes, tensors: list[torch.Tensor], timeout: float, asynchronous: bool
) -> Any:
    agent = current.agent()
    references = agent.references
    member = agent.member(dst)
    if member.incarnation == references.me.incarnation:
        owned = references.new_value()
        references.keep(owned, owned.identity, 0)  # until the call is over
        into = owned.identity, owned.identity
        created = call(dst, kind, name, payload, tensors, timeout, asynchronous=asynchronous, into=into)
        return wrapped(owned, created.then(lambda done: _own_is_made(done, owned.identity)))
    user = references.new_user(member)
    into = user.identity, user.fork
    created = call(dst, kind, name, payload, tensors, timeout, asynchronous=asynchronous, into=into)
    return wrapped(user, created.then(lambda done: _is_made(done, user)))


def _own_is_made(done: Future[Any], identity: Identity) -> None:
    references = current.agent().references
    references.release(identity, identity)
    done.wait()


def _is_made(done: Future[Any], user: User) -> None:
    failure: BaseException | None = None
    try:
        done.wait()
    except CallTimeout:
        failure = PhalanxError(
            f"RRef creation via rpc.remote() to {user.owner.name} timed out, and it is possible that the RRef on the "
            f"owner node does not exist."
        )
        raise
    except Exception as error:
        failure = error
        raise
    finally:
        if current.is_set():
            current.agent().references.confirm(user, failure)


STAND_INS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        _invoke_rpc_builtin,
        _invoke_rpc_python_udf,
        _invoke_rpc_torchscript,
        _invoke_remote_builtin,
        _invoke_remote_python_udf,
    )
}
STAND_INS["_invoke_remote_torchscript"] = _invoke_rpc_torchscript
