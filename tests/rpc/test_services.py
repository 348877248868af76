"""Typed services: calls in which nothing is unpickled."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from phalanx import rpc
from phalanx.errors import ArgumentError, EncodingError
from phalanx.rpc import session
from phalanx.rpc.codecs import Codec
from tests.rpc import workers
from tests.rpc.workers import next_of, with_workers
from tests.support.ranks import Member, on_ranks


@dataclass
class Batch:
    rows: torch.Tensor
    labels: list[int]


class Trainer:
    """What is served, and the interface by which it is called."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def whose(self) -> int:
        return self.rank

    def scaled(self, rows: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        return rows * by

    def counted(self, batch: Batch) -> dict[str, int]:
        return {"rows": batch.rows.shape[0], "labels": sum(batch.labels)}

    async def later(self, *numbers: int) -> int:
        return sum(numbers)

    def fail(self, text: str) -> None:
        raise KeyError(text)

    def lies(self) -> int:
        return "text"  # type: ignore[return-value]

    def hidden(self) -> int:
        return 1

    def items(self) -> Any:
        yield 1

    def untold(self, x):  # type: ignore[no-untyped-def]
        return x


METHODS = ["whose", "scaled", "counted", "later", "fail", "lies"]


def serve(member: Member) -> None:
    rpc.serve("trainer", Trainer(member.rank), METHODS)


def with_services(body: Any, size: int, *, typed_only: bool) -> list[Any]:
    def run(member: Member) -> Any:
        return body(member, rpc.service(next_of(member), "trainer", Trainer))

    return with_workers(run, size, before=serve, typed_only=typed_only)


@pytest.mark.parametrize(("size", "typed_only"), [(1, False), (3, True)])
def test_methods_are_called_with_values_and_tensors(size: int, typed_only: bool) -> None:
    def body(member: Member, client: Trainer) -> Any:
        large = torch.arange(300_000.0)
        started: Any = rpc.start(client, "scaled", torch.ones(2), by=3)  # type: ignore[arg-type]
        return (
            client.whose(),
            client.scaled(large, by=0.5).equal(large * 0.5),
            client.counted(Batch(torch.zeros(3, 2), [4, 5])),
            started.wait().tolist(),
            rpc.call(client, "later", 1, 2, 3, timeout_s=30),  # type: ignore[arg-type]
        )

    outcomes = with_services(body, size, typed_only=typed_only)
    assert outcomes == [((rank + 1) % size, True, {"rows": 3, "labels": 9}, [3.0, 3.0], 6) for rank in range(size)]


def test_wrong_values_are_refused_by_parameter_and_pickles_by_the_worker() -> None:
    def body(member: Member, client: Any) -> Any:
        with pytest.raises(rpc.RemoteError, match=r"parameter by of Trainer.scaled") as wrong:
            client.scaled(torch.ones(1), by="much")
        assert wrong.value.type_name == "EncodingError"
        with pytest.raises(rpc.RemoteError, match=r"parameter batch of Trainer.counted"):
            client.counted({"rows": 1, "labels": []})
        with pytest.raises(EncodingError, match=r"parameter by of Trainer.scaled"):
            client.scaled(torch.ones(1), by=object())
        with pytest.raises(ArgumentError, match="cannot be called so"):
            client.scaled()
        with pytest.raises(EncodingError, match="Expected `int`"):
            client.lies()
        with pytest.raises(rpc.RemoteError, match="KeyError: 'this key'") as caught:
            client.fail("this key")
        assert caught.value.type_name == "KeyError"
        assert "raise KeyError(text)" in str(caught.value.__cause__)
        wider = rpc.service(next_of(member), "trainer", Wider)  # type: ignore[type-abstract]
        for method in (wider.hidden, lambda: wider.other(1)):
            with pytest.raises(rpc.RemoteError, match=r"has no method.*whose, scaled"):
                method()
        with pytest.raises(AttributeError, match="nothing"):
            client.nothing()
        with pytest.raises(rpc.RemoteError, match="serves nothing called"):
            rpc.service(next_of(member), "nobody", Trainer).whose()
        to = next_of(member)
        for ask in (
            lambda: rpc.call(to, workers.pid),
            lambda: rpc.make(to, workers.Account, 1.0),
            lambda: rpc.each([to], workers.pid),
        ):
            with pytest.raises(EncodingError, match="typed_only=True"):
                ask()
        return client.whose()

    assert with_services(body, 2, typed_only=True) == [1, 0]


class Wider(Protocol):
    def hidden(self) -> int: ...

    def other(self, number: int) -> int: ...


def test_what_cannot_be_served_is_refused_at_once() -> None:
    for method, text in (("nothing", "no method 'nothing'"), ("items", "generator"), ("untold", "parameter x")):
        with pytest.raises(ArgumentError, match=text):
            rpc.serve("refused", Trainer(0), [method])


class Bomb:
    """Its pickle writes a file when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def _bomb(value: Any) -> tuple[bytes, list[memoryview]]:
    return pickle.dumps(value, protocol=5), []


class Bombed(Exception):
    """The same as an exception; the file's name ends with the process that loads it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __reduce__(self) -> Any:
        return _explode, (self.path,)


def _explode(path: str) -> Bombed:
    Path(f"{path}.{os.getpid()}").touch()
    return Bombed(path)


def test_pickle_sent_to_a_typed_worker_is_never_loaded(tmp_path: Path) -> None:
    path = tmp_path / "loaded"
    names = ["call", "objects.make", "objects.method", "objects.lease", "stream.next", "cancel", "receipt"]

    def run(member: Member) -> None:
        serve(member)
        workers.begin(member, typed_only=member.rank == 0)
        if member.rank:
            attacker = Codec(_bomb, lambda head, buffers: None, unpickles=False)
            failed = []
            for name in [*names, "typed:trainer"]:
                with pytest.raises(rpc.RemoteError) as caught:
                    session.agent().request(0, name, Bomb(str(path)), codec=attacker).wait()
                failed.append(str(caught.value))
                session.agent().notify(0, name, Bomb(str(path)))
            assert all("typed_only=True" in text for text in failed[:5]), failed
            with pytest.raises(rpc.RemoteError, match="typed_only=True"):
                rpc.call(0, workers.pid)
            assert rpc.service(0, "trainer", Trainer).whose() == 0
        rpc.shutdown()

    on_ranks(run, 2)
    assert not path.exists()


def test_pickle_in_the_answer_of_a_typed_service_is_never_loaded(tmp_path: Path) -> None:
    path = tmp_path / "loaded"

    def run(member: Member) -> int:
        serve(member)
        workers.begin(member)
        if member.rank:  # it pretends to be the service, and answers with pickles
            evil = Codec(_bomb, lambda head, buffers: bytes(head), unpickles=True)

            def handler(incoming: Any, head: bytes) -> Any:
                if b"fail" in head:
                    raise Bombed(str(path))
                return Bomb(str(path))

            session.agent().serve("typed:trainer", handler, codec=evil)
        member.meet("serves")
        if member.rank == 0:
            client = rpc.service(1, "trainer", Trainer)
            with pytest.raises(EncodingError):
                client.whose()
            with pytest.raises(rpc.RemoteError, match="Bombed"):
                client.fail("x")
        rpc.shutdown()
        return os.getpid()

    receiver, sender = on_ranks(run, 2)
    assert not path.exists()
    assert not Path(f"{path}.{receiver}").exists()
    assert Path(f"{path}.{sender}").exists()  # the sender has loaded it, so the receiver could have
