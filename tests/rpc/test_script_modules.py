"""Script modules that hold remote references, in a program written for torch.distributed.rpc."""

# mypy: disable-error-code="no-any-return,attr-defined,untyped-decorator,no-untyped-call,empty-body"

from __future__ import annotations

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.nn.api.remote_module import _RemoteModule
from torch.distributed.nn.jit import instantiator
from torch.futures import Future

import phalanx.rpc.autograd.engine  # noqa: F401 - once, and not on every forked rank
from tests.rpc.torch_workers import started
from tests.support.ranks import Member, run_ranks, values
from tests.support.waiting import soon


@torch.jit.script
def doubled(tensor: Tensor) -> Tensor:
    return tensor * 2


class Held(nn.Module):
    """The types of its attributes are inferred, except that of the empty list."""

    def __init__(self, one: Any, others: list[Any]) -> None:
        super().__init__()
        self.one, self.others = one, others
        self.named, self.pair = {"one": one}, (one, 3)
        self.later = torch.jit.Attribute([], list[rpc.RRef[Tensor]])
        self.calls = [0]
        self.offset = 10
        self.layer = nn.Linear(2, 2, bias=False)
        nn.init.ones_(self.layer.weight)

    def forward(self, scale: float) -> Tensor:
        self.calls.append(len(self.calls))
        total = self.one.to_here() * scale + self.offset
        for other in self.others:
            total = total + other.to_here()
        for name in self.named:
            total = total + self.named[name].to_here() * self.pair[1]
        for other in self.later:
            total = total + other.to_here()
        return self.layer(total)

    @torch.jit.export
    def count(self) -> int:
        return len(self.calls)

    @torch.jit.export
    def compiled(self) -> int:
        return self.offset + int(torch.jit.is_scripting())


class Outer(nn.Module):
    def __init__(self, inner: Held) -> None:
        super().__init__()
        self.inner = inner
        self.seen = [0]

    def forward(self) -> Tensor:
        self.seen.append(self.inner.count())
        return self.inner(1.0) + len(self.seen)


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = [0]

    def forward(self, to: str) -> Tensor:
        self.seen.append(1)
        return rpc.rpc_sync(to, doubled, (torch.ones(2) * len(self.seen),))

    @torch.jit.export
    def count(self) -> int:
        return len(self.seen)


class OldStyle(torch.jit.ScriptModule):
    def __init__(self, references: list[Any]) -> None:
        super().__init__()
        self.references = references

    @torch.jit.script_method
    def forward(self) -> Tensor:
        total = torch.zeros(2)
        for reference in self.references:
            total += reference.to_here()
        return total


class Misspelt(nn.Module):
    def __init__(self, reference: Any) -> None:
        super().__init__()
        self.reference = reference

    def forward(self) -> Tensor:
        return self.reference.too_here()


@torch.jit.interface
class Interface:
    def forward(self, tensor: Tensor, scale: int) -> Tensor:
        pass


@torch.jit.interface
class Both:
    def forward(self, tensor: Tensor, scale: int) -> Tensor:
        pass

    def forward_async(self, tensor: Tensor, scale: int) -> Future[Tensor]:
        pass


@torch.jit.interface
class Other:
    def forward(self, text: str) -> str:
        pass


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))

    def forward(self, tensor: Tensor, scale: int) -> Tensor:
        return tensor * self.weight * scale


class Hybrid(nn.Module):
    def __init__(self, remote: Any) -> None:
        super().__init__()
        self.remote = remote
        self.bias = 1

    def forward(self, tensor: Tensor) -> Tensor:
        return self.remote.forward(tensor, 4) + self.bias


@torch.jit.script
def run(module: Interface, tensor: Tensor) -> Tensor:
    return module.forward(tensor, 5)


@torch.jit.script
def run_later(module: Both, tensor: Tensor) -> Tensor:
    return module.forward_async(tensor, 5).wait()


def here_and_there(member: Member) -> tuple[Any, str]:
    return started(member), f"worker{(member.rank + 1) % member.size}"


def holding(member: Member) -> dict[str, Any]:
    api, to = here_and_there(member)
    made = [api.remote(to, doubled, args=(torch.ones(2) * n,)) for n in range(3)]
    module = torch.jit.script(Held(made[1], made))
    first = module(1.0).tolist()
    module.later = [api.RRef(torch.ones(2))]
    result = {
        "first": first,
        "with one more": module(2.0).tolist(),
        "count": module.count(),
        "compiled": module.compiled(),
        "outer": torch.jit.script(Outer(Held(made[1], made)))().tolist(),
        "old style": OldStyle(made)().tolist(),
        "read": module.one.to_here().tolist(),
    }
    with pytest.raises(RuntimeError, match="too_here"):
        torch.jit.script(Misspelt(made[0]))
    api.shutdown()
    return result


def test_a_script_module_uses_its_references_and_is_checked_by_the_compiler() -> None:
    for size in (1, 2, 3):
        for result in values(run_ranks(holding, size)):
            assert result == {
                "first": [2 * (2.0 + 10 + 6 + 6)] * 2,
                "with one more": [2 * (4.0 + 10 + 6 + 6 + 1)] * 2,
                "count": 3,
                "compiled": 11,  # it runs as it was compiled
                "outer": [2 * (2.0 + 10 + 6 + 6) + 2] * 2,
                "old style": [6.0, 6.0],
                "read": [2.0, 2.0],
            }


def with_interface(member: Member) -> dict[str, Any]:
    """One rank after the other, because torch cannot compile on two threads, and one that serves compiles here."""
    api, to = here_and_there(member)
    if member.rank:
        assert soon((member.folder / f"over{member.rank - 1}").exists)
    ones = torch.ones(2)
    remote = _RemoteModule(f"{to}/cpu", Scaled, _module_interface_cls=Interface)
    script = torch.jit.script(remote)
    result = {
        "python": remote.forward(ones, 2).tolist(),
        "script": script.forward(ones, 3).tolist(),
        "called": script(ones, 2).tolist(),
        "future": script.forward_async(ones, 4).wait().tolist(),
        "in a script": run(script, ones).tolist(),
        "in a script, later": run_later(script, ones).tolist(),
        "in a module": torch.jit.script(Hybrid(remote))(ones).tolist(),
        "local": run(torch.jit.script(Scaled()), ones).tolist(),
    }
    with pytest.raises(RuntimeError, match="Expected a value of type 'int' for argument 'scale'"):
        script.forward(ones, "three")
    with pytest.raises(RuntimeError, match=r"is not a subtype of the type hint: .*Other"):
        _RemoteModule(f"{to}/cpu", Scaled, _module_interface_cls=Other)
    (member.folder / f"over{member.rank}").touch()
    api.shutdown()
    return result


def test_a_remote_module_with_an_interface_is_a_script_module() -> None:
    for size in (1, 2, 3):
        for result in values(run_ranks(with_interface, size)):
            assert result == {
                "python": [6.0, 6.0],
                "script": [9.0, 9.0],
                "called": [6.0, 6.0],
                "future": [12.0, 12.0],
                "in a script": [15.0, 15.0],
                "in a script, later": [15.0, 15.0],
                "in a module": [13.0, 13.0],
                "local": [15.0, 15.0],
            }


def calling(member: Member) -> list[Any]:
    api, to = here_and_there(member)
    module = torch.jit.script(Caller())
    first = module(to).tolist()
    again = copy.deepcopy(module)
    result = [first, again(to).tolist(), again.count(), module.count()]
    api.shutdown()
    return result


def test_a_script_module_that_makes_calls_keeps_its_lists_when_it_is_copied() -> None:
    for size in (1, 2):
        assert values(run_ranks(calling, size)) == [[[4.0, 4.0], [6.0, 6.0], 3, 2]] * size


def test_threads_that_make_the_same_template_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    own: Any = instantiator._StringLoader.exec_module

    def slow(self: Any, module: Any) -> None:
        time.sleep(0.3)
        own(self, module)

    def rank(member: Member) -> list[int]:
        import phalanx.rpc.torch_api  # noqa: F401 - it installs itself

        monkeypatch.setattr(instantiator._StringLoader, "exec_module", slow)

        def make(_: int) -> int:
            made = instantiator.instantiate_scriptable_remote_module_template(Interface, False)
            return len(made._generated_methods)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(make, range(2)))

    assert values(run_ranks(rank, 1)) == [[2, 2]]


def refused(member: Member) -> None:
    api, to = here_and_there(member)
    if member.rank:
        api.shutdown()
        return
    reference = api.remote(to, doubled, args=(torch.ones(2),))
    module = OldStyle([reference])
    with pytest.raises(RuntimeError, match=r"remote references \(references\) cannot be saved, copied or sent"):
        torch.jit.save(module, member.folder / "module.pt")
    with pytest.raises(RuntimeError, match=r"remote references \(references\) cannot be saved, copied"):
        copy.deepcopy(module._actual_script_module)
    script = torch.jit.script(_RemoteModule(f"{to}/cpu", Scaled, _module_interface_cls=Interface))
    with pytest.raises(torch.jit.Error, match="can only be pickled when using RPC"):
        torch.save(script, member.folder / "script.pt")
    with pytest.raises(RuntimeError, match="Passing a script RemoteModule over RPC is not supported"):
        api.rpc_sync(to, type, args=(script,))
    with pytest.raises(RuntimeError, match="type_hint should only be specified"):
        api.RRef(torch.ones(2), Interface)
    api.shutdown()


def test_modules_with_references_are_not_copied_without_them() -> None:
    values(run_ranks(refused, 2))


def test_a_remote_module_of_another_workers_module_has_its_interface() -> None:
    def rank(member: Member) -> list[float]:
        api, to = here_and_there(member)
        if member.rank:
            api.shutdown()
            return [9.0, 9.0]
        remote = _RemoteModule(f"{to}/cpu", Scaled, _module_interface_cls=Interface)
        again = RemoteModule.init_from_module_rref(f"{to}/cpu", remote.get_module_rref(), Interface)
        result = again.forward(torch.ones(2), 3).tolist()
        api.shutdown()
        return result

    assert values(run_ranks(rank, 2)) == [[9.0, 9.0]] * 2
