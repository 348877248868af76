"""The server's side: shards of models, by name, and which server has which. Every worker can be a server.

A shard is one server's pieces of the parameters, with their optimizer and the trainers that push to it. Its lock guards
all of it, and no thread holds that while it waits for another worker. Gradients are applied on the thread that brings
them. The answer to a push is a future, completed with the new values when the mode lets the trainer go on. What waited
for a trainer that is lost is looked at again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from phalanx.errors import ArgumentError, CheckpointError
from phalanx.rpc import session
from phalanx.rpc.future import Future
from phalanx.rpc.members import Member
from phalanx.rpc.worker import Incoming, Worker
from phalanx.training import checkpoint
from phalanx.words import tell

__all__ = ["ASK", "ATTACH", "BOUNDED", "MODES", "SYNCHRONOUS", "Piece", "Pulled", "Settings", "shared_out"]

# Services: to become a trainer, and to ask a shard for one of _ACTIONS.
ATTACH, ASK = "parameters.attach", "parameters.ask"

SYNCHRONOUS, BOUNDED, _ = MODES = ("synchronous", "bounded", "asynchronous")

# How many steps have been taken, and the values of the pieces that are not sparse.
Pulled: TypeAlias = tuple[int, list[torch.Tensor]]
_Due: TypeAlias = tuple[Future[Pulled], Pulled | Exception]


class Settings(NamedTuple):
    """Settings of the training; the same for all shards. ``rpc.parameters()`` describes them."""

    mode: str
    staleness: int
    trainers: int
    optimizer: Callable[..., torch.optim.Optimizer]
    sparse_optimizer: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]
    sparse_options: dict[str, Any]
    checkpoint: str  # empty for none
    checkpoint_steps: int


class Piece(NamedTuple):
    """Some rows of a parameter, which one server has.

    Attributes:
        parameter: the number of the parameter in the model.
        first, end: its rows (indices of the first dimension); 0 and 1 for a parameter without dimensions.
        sparse: whether its gradients are those of a few rows, as ``nn.Embedding(sparse=True)`` makes them.
    """

    parameter: int
    first: int
    end: int
    sparse: bool


def shared_out(shapes: Sequence[Sequence[int]], sparse: Sequence[bool], servers: int) -> list[list[Piece]]:
    """The pieces of each server. Every worker computes the same from the same shapes.

    A parameter with more elements than one server's share is cut into as many pieces as there are servers, if it has
    the rows for it. Then the largest piece that is left goes to the server that has the least.
    """
    sizes = [math.prod(shape) for shape in shapes]
    share = sum(sizes) / servers
    pieces: list[tuple[int, Piece]] = []
    for number, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
        rows = shape[0] if len(shape) else 1
        parts = min(servers, max(1, rows)) if size > share else 1
        row = size // max(1, rows)
        for part in range(parts):
            first, end = rows * part // parts, rows * (part + 1) // parts
            pieces.append(((end - first) * row, Piece(number, first, end, sparse[number])))
    found: list[list[Piece]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for size, piece in sorted(pieces, key=lambda each: (-each[0], each[1])):
        least = loads.index(min(loads))
        found[least].append(piece)
        loads[least] += size
    return [sorted(each) for each in found]


class _Trainer:
    """A trainer, as a shard knows it."""

    def __init__(self, member: Member, steps: int) -> None:
        self.member = member
        self.steps = steps  # its pushes, and those of the slowest trainer when it came
        self.gradients: Sequence[torch.Tensor | None] | None = None  # for the next step
        self.waiting: Future[Pulled] | None = None  # the answer that it waits for


class Shard:
    """The pieces of one server.

    Args:
        settings: see there.
        pieces: which pieces of the parameters it has.
        values: their values, which the shard keeps as its own.
        path: of this server's checkpoint, or None.
    """

    def __init__(
        self, settings: Settings, pieces: Sequence[Piece], values: Sequence[torch.Tensor], path: Path | None
    ) -> None:
        self._settings, self.pieces, self._path = settings, pieces, path
        self._lock = threading.Lock()
        self._trainers: dict[int, _Trainer] = {}
        self._values = [torch.nn.Parameter(value.detach().clone()) for value in values]
        self._sparse = [piece.sparse for piece in pieces]
        dense = [value for value, sparse in zip(self._values, self._sparse, strict=True) if not sparse]
        rows = [value for value, sparse in zip(self._values, self._sparse, strict=True) if sparse]
        self._optimizers: list[torch.optim.Optimizer] = []
        if dense:
            self._optimizers.append(settings.optimizer(dense, **settings.options))
        if rows:
            self._optimizers.append(settings.sparse_optimizer(rows, **settings.sparse_options))
        self.steps = 0
        self._begun = False  # whether so many trainers have come

    @classmethod
    def restored(cls, settings: Settings, pieces: Sequence[Piece], path: Path) -> Shard:
        """The shard of a checkpoint.

        Raises:
            ArgumentError: it is that of another model, or of another number of servers.
        """
        found = checkpoint.read(path)
        if found["pieces"] != [list(piece) for piece in pieces]:
            raise ArgumentError(
                f"{path} has other parameters, or was made with another number of servers. Give checkpoint= another "
                f"path, or remove the file"
            )
        shard = cls(settings, pieces, found["values"], path)
        for optimizer, state in zip(shard._optimizers, found["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        shard.steps = found["steps"]
        return shard

    def _write(self) -> None:
        contents = {
            "pieces": [list(piece) for piece in self.pieces],
            "values": [value.detach() for value in self._values],
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "steps": self.steps,
        }
        if self._path is not None:
            checkpoint.write(self._path, contents, [])

    # What trainers ask for

    def add(self, member: Member) -> Pulled:
        """Count a worker among the trainers, as quick as the slowest of them, and return the values."""
        with self._lock:
            steps = min((trainer.steps for trainer in self._trainers.values()), default=0)
            self._trainers[member.incarnation] = _Trainer(member, steps)
            self._begun = self._begun or len(self._trainers) >= self._settings.trainers
            return self._pulled()

    def drop(self, member: Member, _: None = None) -> bool:
        """A trainer is gone, or pushes no more: nobody waits for it."""
        with self._lock:
            due = self._settle() if self._trainers.pop(member.incarnation, None) is not None else []
        _answer(due)
        return True

    def push(self, member: Member, gradients: Sequence[torch.Tensor | None]) -> Future[Pulled] | None:
        """Take a trainer's gradients, one for each piece.

        Returns:
            A future of the values after a step with them; None if the worker is no trainer, or no more.
        """
        answer: Future[Pulled] = Future()
        with self._lock:
            trainer = self._trainers.get(member.incarnation)
            if trainer is None:
                return None
            trainer.gradients, trainer.waiting = gradients, answer
            due = self._settle()
        _answer(due)
        return answer

    def pull(self, _: Member, __: None = None) -> Pulled:
        """The values as they are."""
        with self._lock:
            return self._pulled()

    def rows(self, _: Member, wanted: Sequence[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
        """Return rows of pieces, by the pieces' numbers and the rows' within them."""
        with self._lock, torch.no_grad():
            return [self._values[number].index_select(0, rows) for number, rows in wanted]

    def set(self, _: Member, options: dict[str, Any]) -> bool:
        """Change options of the optimizers, such as ``lr``."""
        with self._lock:
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group.update({name: value for name, value in options.items() if name in group})
        return True

    def save(self, _: Member, __: None) -> bool:
        """Write the checkpoint.

        Raises:
            CheckpointError: it could not be written.
        """
        with self._lock:
            self._write()
        return True

    # With the lock

    def _settle(self) -> list[_Due]:
        """Take the steps that are due, and find the answers that are."""
        trainers = list(self._trainers.values())
        pushed = [trainer for trainer in trainers if trainer.gradients is not None]
        if self._settings.mode == SYNCHRONOUS and (not self._begun or len(pushed) < len(trainers)):
            return []
        # In the order of their names, so that a sum has the same bits each time.
        pushed.sort(key=lambda trainer: trainer.member.name)
        try:
            if pushed:
                self._step([trainer.gradients for trainer in pushed if trainer.gradients is not None])
        except Exception as error:  # of the optimizer: all who have pushed for this step must know
            return [(trainer.waiting, error) for trainer in pushed if trainer.waiting is not None]
        finally:
            for trainer in pushed:
                trainer.gradients = None
                trainer.steps += 1
        slowest = min((trainer.steps for trainer in trainers), default=0)
        ahead = self._settings.staleness if self._settings.mode == BOUNDED else float("inf")
        free = [trainer for trainer in trainers if trainer.steps - slowest <= ahead]
        pulled: Pulled | None = None
        due: list[_Due] = []
        for trainer in free:
            if trainer.waiting is not None:
                pulled = pulled or self._pulled()
                due.append((trainer.waiting, pulled))
                trainer.waiting = None
        return due

    def _step(self, pushed: Sequence[Sequence[torch.Tensor | None]]) -> None:
        for value, *gradients in zip(self._values, *pushed, strict=True):
            value.grad = _mean(gradients)
        try:
            for optimizer in self._optimizers:
                optimizer.step()
        finally:
            for value in self._values:
                value.grad = None
        self.steps += 1
        if self._path is not None and self.steps % self._settings.checkpoint_steps == 0:
            try:
                self._write()
            except CheckpointError as error:
                tell(f"warning: {error}")

    def _pulled(self) -> Pulled:
        # Copies: the message is sent later, when the next step may have begun.
        dense = zip(self._values, self._sparse, strict=True)
        return self.steps, [value.detach().clone() for value, sparse in dense if not sparse]


def _mean(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The mean over all trainers; one that has none counts as zeros."""
    found = [gradient for gradient in gradients if gradient is not None]
    if not found:
        return None
    total = found[0]
    for gradient in found[1:]:
        total = total + gradient
    return total / len(gradients) if len(gradients) > 1 else total


def _answer(due: Sequence[_Due]) -> None:
    for future, outcome in due:
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


_ACTIONS: dict[str, Callable[[Shard, Member, Any], Any]] = {
    "push": Shard.push,
    "pull": Shard.pull,
    "rows": Shard.rows,
    "set": Shard.set,
    "save": Shard.save,
    "leave": Shard.drop,
}


class _Server:
    """The shards of one worker, by name."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._shards: dict[str, Shard] = {}
        worker.serve(ATTACH, self._on_attach)
        worker.serve(ASK, self._on_ask)
        worker.on_change(self._on_change)

    def _on_change(self, member: Member, _: str) -> None:
        for shard in list(self._shards.values()):
            shard.drop(member)

    def _on_attach(
        self,
        incoming: Incoming,
        asked: tuple[str, Settings, Sequence[Piece], Sequence[torch.Tensor] | None, bool],
    ) -> Pulled | None:
        """Count the caller among the trainers, if it is to be. None: there is no shard, so come with values."""
        name, settings, pieces, values, trains = asked
        with self._lock:
            shard = self._shards.get(name)
            if shard is None:
                path = Path(f"{settings.checkpoint}.{self._worker.me.name}") if settings.checkpoint else None
                if path is not None and path.exists():
                    shard = Shard.restored(settings, pieces, path)
                elif values is not None:
                    shard = Shard(settings, pieces, values, path)
                else:
                    return None
                self._shards[name] = shard
        if list(shard.pieces) != list(pieces):
            raise ArgumentError(
                f"{self._worker.me} has other parameters under the name {name!r}: all trainers must give the same "
                f"model and the same servers, and two models need two names"
            )
        if not trains:
            return shard.pull(incoming.peer)
        pulled = shard.add(incoming.peer)
        if incoming.peer in self._worker.directory.known_gone():  # it died before there was a trainer to drop
            shard.drop(incoming.peer)
        return pulled

    def _on_ask(self, incoming: Incoming, asked: tuple[str, str, Any]) -> Any:
        """Do something with a shard. None: there is no shard, or the caller is no trainer of it."""
        name, what, value = asked
        shard = self._shards.get(name)
        return _ACTIONS[what](shard, incoming.peer, value) if shard is not None else None


def _equip(worker: Worker) -> None:
    _Server(worker)


session.on_init(_equip)
