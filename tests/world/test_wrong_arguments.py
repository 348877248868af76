"""Wrong arguments of public functions: a call succeeds, or an error of Phalanx says what it takes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from tests.support.worlds import join_world
from torch.utils.data import DataLoader

import phalanx
from phalanx import rpc
from phalanx.errors import PhalanxError

WRONG = (lambda: None, lambda: "a text", lambda: [2.5, 7.5], object)
Functions = dict[str, Callable[..., Any]]


class Counter:
    def add(self, count: int) -> int:
        return count


# What is right in a world of one, by the parameter's name; every parameter without a default is here.
RIGHT: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("tensor", "output"), lambda: torch.ones(2)),
    **dict.fromkeys(("tensor_list", "gather_list", "scatter_list", "input_list"), lambda: [torch.ones(2)]),
    **dict.fromkeys(("output_tensor_list", "input_tensor_list"), lambda: [torch.ones(2)]),
    **dict.fromkeys(("object_list", "objects", "output_list", "batches", "dataset"), lambda: [1]),
    **dict.fromkeys(("src", "dst", "color", "to", "seed", "number", "obj", "value"), lambda: 0),
    **dict.fromkeys(("module", "model"), lambda: torch.nn.Linear(2, 2)),
    **dict.fromkeys(("kind", "interface", "thing"), lambda: Counter),
    **dict.fromkeys(("ranks", "on", "group"), lambda: [0]),
    **dict.fromkeys(("function", "callback"), lambda: print),
    **dict.fromkeys(("batch_size", "n", "context_id"), lambda: 1),
    **dict.fromkeys(("text", "name", "path"), lambda: "run.pt"),
    **dict.fromkeys(("args", "p2p_op_list"), list),
    "methods": lambda: ["add"],
    "optimizer": lambda: torch.optim.SGD,
    "reference": lambda: rpc.make(0, Counter),
    "roots": lambda: [torch.ones((), requires_grad=True)],
    "state": dict,
}
# These are given although they have a default. Torch itself says, in a ValueError, that the root must give the first.
OF_ROOT = ("gather_list", "scatter_list", "input_list")
GIVEN = (*OF_ROOT, "objects", "src", "args", "n")


def public(owner: Any, names: list[str]) -> Functions:
    found = {name: getattr(owner, name) for name in names if not name.startswith("_")}
    return {name: each for name, each in found.items() if callable(each) and not isinstance(each, type)}


def followed(function: Callable[..., Any], then: Callable[[], Any]) -> Callable[..., Any]:
    return wraps(function)(lambda **named: (function(**named), then()))


def complaints(functions: Functions, *leave_out: str) -> list[str]:
    """The calls that end by another's error, with each argument wrong in turn and with a name that there is not."""
    found = []
    for name, function in functions.items():
        every = inspect.signature(function).parameters
        known = [each for each in every.values() if "*" not in str(each)]
        right = [each.name for each in known if each.default is each.empty or each.name in GIVEN]
        cases: list[tuple[str, Any]] = [(p.name, wrong()) for p in known if p.name not in leave_out for wrong in WRONG]
        cases += [("misspelled", 1)] if known and len(known) == len(every) else []
        for which, wrong in cases:
            try:
                answer = function(**{**{each: RIGHT[each]() for each in right}, which: wrong})
                for each in answer if isinstance(answer, list) else [answer]:
                    if isinstance(each, rpc.Future):
                        each.wait()
                    elif isinstance(each, (Iterator, DataLoader)):
                        list(each)
            except Exception as error:
                of_torch = which in OF_ROOT and wrong is None and isinstance(error, ValueError)
                if not (of_torch or isinstance(error, PhalanxError)):
                    found.append(f"{name}({which}={wrong!r}): {error!r}")
    return found


def test_every_public_function_explains_wrong_arguments(tmp_path: Path) -> None:
    def body(member: Member) -> None:
        os.chdir(tmp_path)
        outside = public(phalanx, phalanx.__all__)
        outside["init"] = followed(phalanx.init, phalanx.close)
        assert outside.keys() == {"close", "empty", "init", "label", "launch"}
        assert complaints(outside, "quiet", "prefix") == []
        with phalanx.init(quiet=True) as world:
            world.save("run.pt", {"step": 1})
            of_rpc = public(rpc, rpc.__all__)
            join, leave = of_rpc.pop("init"), of_rpc.pop("shutdown")
            assert complaints({"init": followed(join, leave)}) == []
            join()
            assert complaints({**of_rpc, "shutdown": followed(leave, join)}, "thing") == []  # which may be anything
            leave()
            assert complaints(public(world, dir(world))) == []

    on_ranks(body, 1)


def test_the_error_says_what_is_taken_and_what_to_write(tmp_path: Path) -> None:
    def body(member: Member) -> None:
        world: Any = join_world(member)
        tensor, one = torch.ones(2), torch.nn.Linear(1, 1)
        (tmp_path / "broken").write_bytes(b"\x80garbage" * 9)
        for call, words in (
            (lambda: world.all_reduce([1]), "takes tensor: torch.Tensor; got [1] (list). Write torch.as_tensor([1])"),
            (lambda: world.all_reduce(np.ones(1)), "got array([1.]) (ndarray). Write torch.as_tensor(array([1.]))"),
            (lambda: world.all_reduce(tensor, asyn_op=True), "argument 'asyn_op'. Did you mean async_op?"),
            (lambda: world.all_reduce(tensor, op="summ"), "op='summ' is not a reduction; write 'sum', 'avg'"),
            (lambda: world.broadcast(tensor, src="0"), "broadcast() takes src: int; got '0' (str)"),
            (lambda: dist.broadcast(tensor, src=7), "rank 7 is not in the group"),
            (lambda: world.split("a" if member.rank else 0), "[(0, 0), ('a', 0)]"),
            (lambda: world.loader(DataLoader([1]), 1), "the .dataset of a DataLoader"),  # type: ignore[arg-type]
            (lambda: world.loader([1], 1, num_worker=2), "Did you mean num_workers?"),
            (lambda: world.loader([1, 2], 1, num_workers="2"), "takes num_workers: int; got '2'"),
            (lambda: world.data_parallel(one, find_unused=True), "Did you mean find_unused_parameters?"),
            (lambda: world.load(tmp_path / "broken"), "is not a whole checkpoint"),
            (lambda: world.save(tmp_path / "new", {"f": lambda: 1}), "new was not written: Can't pickle"),
            (lambda: world.save("/nonexist/x.pt", {}), "There is no directory /nonexist for the checkpoint"),
        ):
            with pytest.raises(PhalanxError) as caught:
                call()
            assert words in str(caught.value)
        world.all_reduce(value := torch.tensor([member.rank + 1.0]), op="max")
        assert value.item() == 2

    on_ranks(body, 2)
