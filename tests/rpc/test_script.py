"""TorchScript in a program written for torch.distributed.rpc: it makes calls, and holds references, as Python does."""

# mypy: disable-error-code="no-any-return,attr-defined,untyped-decorator"

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import rpc
from torch.distributed.nn.jit import instantiator
from torch.distributed.rpc import RRef

from tests.rpc.workers import torch_started
from tests.support.ranks import Member, on_ranks


@torch.jit.script
def scaled(tensor: Tensor, factor: int = 2) -> Tensor:
    return tensor * factor


@torch.jit.script
def calls(to: str, tensor: Tensor) -> Tensor:
    future = rpc.rpc_async(to, scaled, (tensor,), {"factor": 3})
    return future.wait() + rpc.rpc_sync(to, scaled, (tensor,)) + rpc.remote(to, scaled, (tensor,)).to_here()


@torch.jit.script
def sum_of(references: list[RRef[Tensor]]) -> Tensor:
    total = torch.zeros(2)
    for reference in references:
        total = total + reference.to_here()
    return total


def test_script_functions_make_calls_and_take_references() -> None:
    def body(member: Member) -> None:
        api, to, ones = torch_started(member), f"worker{1 - member.rank}", torch.ones(2)
        assert calls(to, ones).tolist() == [7.0, 7.0]
        made = api.remote(to, scaled, args=(ones, 5))
        assert sum_of([made, api.RRef(ones)]).tolist() == [6.0, 6.0]
        assert api.rpc_sync(to, sum_of, args=([made, made],)).tolist() == [10.0, 10.0]
        with pytest.raises(RuntimeError, match=r"^scaled\(\) expected at most 2 argument\(s\) but received 3"):
            api.rpc_async(to, scaled, args=(ones, 3, 4))
        api.shutdown()

    on_ranks(body, 2)


@torch.jit.interface
class Interface:
    def forward(self, tensor: Tensor) -> Tensor:  # type: ignore[empty-body]
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
