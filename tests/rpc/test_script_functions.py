"""Script functions that use RPC, in a program written for torch.distributed.rpc: they run as the Python they are."""

# mypy: disable-error-code="no-any-return,attr-defined,untyped-decorator"

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.rpc import RRef, functions
from torch.futures import Future

import phalanx.rpc.autograd.engine  # noqa: F401 - once, and not on every forked rank
from tests.rpc.torch_workers import started
from tests.support.ranks import Member, run_ranks, values

torch_autograd: Any = dist_autograd


@torch.jit.script
def scaled(tensor: Tensor, factor: int = 2) -> Tensor:
    return tensor * factor


def plain(tensor: Tensor) -> Tensor:
    return tensor + 0.5


@torch.jit.script
def calls(to: str, tensor: Tensor) -> Tensor:
    future = rpc.rpc_async(to, scaled, (tensor,), {"factor": 3})
    if bool(tensor.sum() > 0):
        return future.wait() + rpc.rpc_sync(to, scaled, (tensor,))
    return rpc.remote(to, scaled, (tensor,)).to_here()


@torch.jit.script
def forks(to: str, tensor: Tensor) -> Tensor:
    return torch.jit._wait(torch.jit._fork(calls, to, tensor))


@torch.jit.script
def sum_of(references: list[RRef[Tensor]]) -> Tensor:
    total = torch.zeros(2)
    for reference in references:
        total = total + reference.to_here()
    return total


@torch.jit.script
def local(reference: RRef[Tensor]) -> Tensor:
    return reference.local_value()


@functions.async_execution
@torch.jit.script
def passed_on(to: str, tensor: Tensor) -> Future[Tensor]:
    return rpc.rpc_async(to, scaled, (tensor,))


@torch.jit.script
def gradients(context_id: int, loss: Tensor) -> dict[Tensor, Tensor]:
    torch_autograd.backward(context_id, [loss])
    return torch_autograd.get_gradients(context_id)


@torch.jit.script
def usual(tensor: Tensor) -> Tensor:
    return tensor + int(torch.jit.is_scripting())


def program(member: Member) -> dict[str, Any]:
    api = started(member)
    to = f"worker{(member.rank + 1) % member.size}"
    ones = torch.ones(2)
    made = api.remote(to, scaled, args=(ones, 5))
    with dist_autograd.context() as context_id:
        leaf = torch.ones(2, requires_grad=True)
        loss = calls(to, leaf).sum()
        found = gradients(context_id, loss)[leaf].tolist()
    if member.size > 1:
        with pytest.raises(RuntimeError, match=r"local_value\(\) on a non-owner"):
            local(made)
    result = {
        "calls": calls(to, ones).tolist(),
        "otherwise": calls(to, -ones).tolist(),
        "forks": forks(to, ones).tolist(),
        "references": sum_of([made, api.RRef(ones)]).tolist(),
        "remotely": api.rpc_sync(to, sum_of, args=([made, made],)).tolist(),
        "on its owner": api.rpc_sync(to, local, args=(made,)).tolist(),
        "asynchronous": api.rpc_sync(to, passed_on, args=(f"worker{member.rank}", ones)).tolist(),
        "gradients": found,
        "usual": api.rpc_sync(to, usual, args=(ones,)).tolist(),
    }
    api.shutdown()
    return result


@pytest.mark.parametrize("size", [1, 2, 3])
def test_script_functions_make_calls_and_hold_references(size: int) -> None:
    for result in values(run_ranks(program, size)):
        assert result == {
            "calls": [5.0, 5.0],
            "otherwise": [-2.0, -2.0],
            "forks": [5.0, 5.0],
            "references": [6.0, 6.0],
            "remotely": [10.0, 10.0],
            "on its owner": [5.0, 5.0],
            "asynchronous": [2.0, 2.0],
            "gradients": [5.0, 5.0],
            "usual": [2.0, 2.0],  # compiled, as it was
        }


def test_a_loaded_function_that_uses_rpc_is_refused_with_the_reason() -> None:
    def rank(member: Member) -> str:
        api = started(member)
        function = torch._C.CompilationUnit(
            """
            def lost(reference: RRef[Tensor]) -> Tensor:
                return reference.to_here()
            """
        ).find_function("lost")
        with pytest.raises(RuntimeError) as error:
            function(api.RRef(torch.ones(1)))
        api.shutdown()
        return str(error.value)

    [text] = values(run_ranks(rank, 1))
    assert "uses RPC inside TorchScript" in text
    assert "has not compiled it from a Python function" in text


class NameBesideACompilation(str):
    """A name in torch's list of compiled functions; whoever reads it meets another thread that compiles one."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        compiling = threading.Thread(target=torch.jit.script, args=(compiled_meanwhile,))
        compiling.start()
        compiling.join()
        return str.__eq__(self, other)


def compiled_meanwhile(tensor: Tensor) -> Tensor:
    return tensor + 1.5


def test_functions_may_be_compiled_while_another_thread_first_calls_one() -> None:
    def rank(member: Member) -> Any:
        compiled = torch.jit._state._jit_caching_layer
        compiled[plain] = NameBesideACompilation("plain")
        others = [function for function in compiled if function is not plain]
        for function in others:  # so that the name is read before that of the function that is called
            compiled[function] = compiled.pop(function)
        api = started(member)
        value = calls(f"worker{member.rank}", torch.ones(2)).tolist()
        api.shutdown()
        return value

    assert values(run_ranks(rank, 2)) == [[5.0, 5.0]] * 2
