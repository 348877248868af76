"""TorchScript in a program written for torch.distributed.rpc: it makes calls, and holds references, as Python does."""

# mypy: disable-error-code="no-any-return,attr-defined,untyped-decorator,no-untyped-call,empty-body"

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.nn.jit import instantiator
from torch.distributed.rpc import RRef, functions
from torch.futures import Future

import phalanx.rpc.autograd.engine  # noqa: F401 - once, and not on every forked rank
from tests.rpc.torch_workers import started
from tests.support.ranks import Member, on_ranks


@torch.jit.script
def scaled(tensor: Tensor, factor: int = 2) -> Tensor:
    return tensor * factor


@torch.jit.script
def calls(to: str, tensor: Tensor) -> Tensor:
    future = rpc.rpc_async(to, scaled, (tensor,), {"factor": 3})
    if bool(tensor.sum() > 0):
        return future.wait() + rpc.rpc_sync(to, scaled, (tensor,))
    return rpc.remote(to, scaled, (tensor,)).to_here()


@torch.jit.script
def sum_of(references: list[RRef[Tensor]]) -> Tensor:
    total = torch.zeros(2)
    for reference in references:
        total = total + reference.to_here()
    return total


@functions.async_execution
@torch.jit.script
def passed_on(to: str, tensor: Tensor) -> Future[Tensor]:
    return rpc.rpc_async(to, scaled, (tensor,))


class Held(nn.Module):
    """A module that holds references."""

    def __init__(self, others: list[Any]) -> None:
        super().__init__()
        self.others = others
        self.layer = nn.Linear(2, 2, bias=False)
        nn.init.ones_(self.layer.weight)

    def forward(self, scale: float) -> Tensor:
        total = torch.zeros(2)
        for other in self.others:
            total = total + other.to_here() * scale
        return self.layer(total)


def test_script_functions_and_modules_make_calls_and_hold_references() -> None:
    def body(member: Member) -> dict[str, Any]:
        api, to = started(member), f"worker{1 - member.rank}"
        ones = torch.ones(2)
        made = api.remote(to, scaled, args=(ones, 5))
        module = torch.jit.script(Held([made, made]))
        result = {
            "calls": calls(to, ones).tolist(),
            "otherwise": calls(to, -ones).tolist(),
            "references": sum_of([made, api.RRef(ones)]).tolist(),
            "remotely": api.rpc_sync(to, sum_of, args=([made, made],)).tolist(),
            "asynchronous": api.rpc_sync(to, passed_on, args=(f"worker{member.rank}", ones)).tolist(),
            "module": module(2.0).tolist(),
        }
        with pytest.raises(RuntimeError, match=r"^scaled\(\) expected at most 2 argument\(s\) but received 3"):
            api.rpc_async(to, scaled, args=(ones, 3, 4))
        with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor"):
            api.rpc_sync(to, scaled, args=(api.RRef(ones),))
        with pytest.raises(RuntimeError, match="cannot be saved, copied or sent"):
            torch.jit.save(module, member.folder / "module.pt")
        api.shutdown()
        return result

    assert on_ranks(body, 2) == 2 * [
        {
            "calls": [5.0, 5.0],
            "otherwise": [-2.0, -2.0],
            "references": [6.0, 6.0],
            "remotely": [10.0, 10.0],
            "asynchronous": [2.0, 2.0],
            "module": [40.0, 40.0],
        }
    ]


@torch.jit.interface
class Interface:
    def forward(self, tensor: Tensor) -> Tensor:
        pass


def test_remote_modules_that_two_threads_make_at_once_are_whole() -> None:
    def body(_: Member) -> list[int]:
        import phalanx.rpc.torch_api  # noqa: F401 - it installs itself

        make, own = instantiator.instantiate_scriptable_remote_module_template, instantiator._StringLoader.exec_module

        def slow(*given: Any) -> None:
            time.sleep(0.2)
            own(*given)

        instantiator._StringLoader.exec_module = slow  # type: ignore[assignment,method-assign]
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda _: len(make(Interface, False)._generated_methods), range(2)))

    assert on_ranks(body, 1) == [[2, 2]]
