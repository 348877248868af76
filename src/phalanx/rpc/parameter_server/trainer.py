"""A trainer's side of a parameter server: ``rpc.parameters()``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from phalanx.errors import ArgumentError, ClosedError, RankError, WorkerLost
from phalanx.rpc import session
from phalanx.rpc.future import Future
from phalanx.rpc.members import Member
from phalanx.rpc.parameter_server.server import (
    ASK,
    ATTACH,
    BOUNDED,
    MODES,
    SYNCHRONOUS,
    Piece,
    Pulled,
    Settings,
    shared_out,
)
from phalanx.rpc.worker import Worker
from phalanx.wrong_arguments import require

__all__ = ["Parameters", "parameters"]

_PAUSE_S = 0.1
Server = str | int | Member


class Parameters:
    """A model whose parameters live on servers. Made by :func:`parameters`; used like an optimizer::

        for inputs, targets in loader:
            trained.zero_grad()
            loss(model(inputs), targets).backward()
            trained.step()

    Attributes:
        steps: how many steps the first server had taken when its values came.
    """

    def __init__(
        self,
        worker: Worker,
        model: nn.Module,
        on: Sequence[Server],
        settings: Settings,
        name: str,
        restore_s: float,
        *,
        trains: bool,
    ) -> None:
        self._worker, self._settings, self._name = worker, settings, name
        self._restore_s, self._trains = restore_s, trains
        self._servers, self._places = list(on), range(len(on))
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        embeddings = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
        sparse = [module for module in embeddings if module.sparse and module.weight.requires_grad]
        rare = {id(module.weight) for module in sparse}
        is_sparse = [id(parameter) in rare for parameter in self._parameters]
        self._pieces = shared_out([parameter.shape for parameter in self._parameters], is_sparse, len(self._servers))
        self.steps = 0
        self._open = True
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._hooks = [
            module.register_forward_pre_hook(partial(self._before_lookup, numbers[id(module.weight)]))
            for module in sparse
        ]
        for place in self._places:
            self._attach(place, settings)

    def step(self) -> None:
        """Push the gradients, and pull the new values into the model: one message to each server, and one back.

        With synchronous updates it returns when every trainer has pushed, or is gone. The rows of sparse embeddings
        are pulled when the model looks them up.

        Raises:
            WorkerLost: a server is gone, and has not come back in ``restore_s``.
            CallTimeout: another trainer has not pushed in time (``rpc.init(timeout_s=...)``).
        """
        for place, pulled in self._ask("push", {place: self._gradients(place) for place in self._places}):
            self._take(place, pulled)

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""
        for parameter in self._parameters:
            parameter.grad = None

    def pull(self, *, rows: bool = False) -> None:
        """Pull the values as they are now into the model, without waiting for other trainers.

        Args:
            rows: also all rows of the sparse embeddings, as before the model is saved.
        """
        for place, pulled in self._ask("pull", dict.fromkeys(self._places)):
            self._take(place, pulled)
        if rows:
            for number in sorted({piece.parameter for pieces in self._pieces for piece in pieces if piece.sparse}):
                self._fetch(number, None)

    def set(self, **options: Any) -> None:
        """Change options of the servers' optimizers, such as ``lr``. All trainers may call it with the same values."""
        list(self._ask("set", dict.fromkeys(self._places, options)))

    def save(self) -> None:
        """Have every server write its checkpoint now."""
        list(self._ask("save", dict.fromkeys(self._places)))

    def close(self) -> None:
        """Stop being a trainer: the others do not wait for this worker any more. The model keeps its values."""
        if not self._open:
            return
        self._open = False
        for hook in self._hooks:
            hook.remove()
        for server in self._servers:
            try:
                self._worker.request(server, ASK, (self._name, "leave", None)).wait()
            except (WorkerLost, ClosedError):
                continue  # a server that is gone waits for nobody, nor does one wait for a worker that has shut down

    def __enter__(self) -> Parameters:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # Messages

    def _ask(self, what: str, values: Mapping[int, Any]) -> Iterator[tuple[int, Any]]:
        """Ask servers at once, by their places for what each gets; yield their places and answers."""
        if not self._open:
            raise ArgumentError("these parameters were closed: make them again with rpc.parameters()")
        started = {place: self._start(place, what, value) for place, value in values.items()}
        for place, future in started.items():
            yield place, self._answer(place, future, what, values[place])

    def _start(self, place: int, what: str, value: Any) -> Future[Any]:
        return self._worker.request(self._servers[place], ASK, (self._name, what, value), asked="parameters")

    def _answer(self, place: int, started: Future[Any], what: str, value: Any) -> Any:
        """Wait for an answer; where the server has lost its shard, restore that, and ask again."""
        while True:
            try:
                answer = started.wait()
            except WorkerLost:
                answer = None
            if answer is not None:
                return answer
            self._attach(place, self._settings._replace(trainers=0))  # those that are left do not wait for others
            started = self._start(place, what, value)

    def _attach(self, place: int, settings: Settings) -> None:
        """Become a trainer of a server; wait for one that is gone, and bring it the values if it has none."""
        until = time.monotonic() + self._restore_s
        pieces = self._pieces[place]
        values: list[torch.Tensor] | None = None
        while True:
            asked = (self._name, settings, pieces, values, self._trains)
            try:
                pulled = self._worker.request(self._servers[place], ATTACH, asked, asked="parameters").wait()
            except (WorkerLost, RankError):
                if time.monotonic() > until:
                    raise
                time.sleep(_PAUSE_S)
                continue
            if pulled is not None:
                self._take(place, pulled)
                return
            values = [self._piece(piece).cpu().contiguous() for piece in pieces]

    # Pieces of the model

    def _piece(self, piece: Piece) -> torch.Tensor:
        whole = self._parameters[piece.parameter].detach()
        return whole[piece.first : piece.end] if whole.dim() else whole

    def _take(self, place: int, pulled: Pulled) -> None:
        steps, values = pulled
        dense = [piece for piece in self._pieces[place] if not piece.sparse]
        for piece, value in zip(dense, values, strict=True):
            self._piece(piece).copy_(value)
        if place == 0:
            self.steps = steps

    def _gradients(self, place: int) -> list[torch.Tensor | None]:
        return [self._gradient(piece) for piece in self._pieces[place]]

    def _gradient(self, piece: Piece) -> torch.Tensor | None:
        whole = self._parameters[piece.parameter].grad
        if whole is None or not whole.dim():
            return whole if whole is None else whole.cpu()
        if not whole.is_sparse:
            return whole[piece.first : piece.end].cpu()
        return whole.cpu().coalesce().narrow_copy(0, piece.first, piece.end - piece.first)

    def _before_lookup(self, number: int, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._fetch(number, inputs[0].unique())

    def _fetch(self, number: int, rows: torch.Tensor | None) -> None:
        """Pull rows of a sparse parameter; ``rows`` in order, all of them if None."""
        wanted: dict[int, list[tuple[int, int, torch.Tensor]]] = {}  # by server: piece, its first row, which rows
        for place, pieces in enumerate(self._pieces):
            for index, piece in enumerate(pieces):
                if piece.parameter == number:
                    where = torch.arange(piece.first, piece.end) if rows is None else rows
                    where = where[(where >= piece.first) & (where < piece.end)]
                    if len(where):
                        wanted.setdefault(place, []).append((index, piece.first, where))

        values = {
            place: [(index, (where - first).cpu()) for index, first, where in pieces]
            for place, pieces in wanted.items()
        }
        weight = self._parameters[number].detach()
        for place, found in self._ask("rows", values):
            for (_, _, where), rows_there in zip(wanted[place], found, strict=True):
                weight.index_copy_(0, where.to(weight.device), rows_there.to(weight.device))


def parameters(
    model: nn.Module,
    *,
    on: Sequence[Server],
    optimizer: Callable[..., torch.optim.Optimizer],
    sparse_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    sparse_options: dict[str, Any] | None = None,
    mode: str = SYNCHRONOUS,
    staleness: int | None = None,
    trainers: int = 0,
    name: str = "model",
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_steps: int = 100,
    restore_s: float = 60.0,
    trains: bool = True,
    **options: Any,
) -> Parameters:
    """Let the parameters of a model live on servers, where an optimizer trains them.

    Every trainer calls it, with a model of the same shape and the same arguments; one that comes later, or comes back,
    simply calls it too. The first one's values are the beginning; all models get the servers' values. Any worker can
    be a server: it needs ``rpc.init()`` and nothing else. The parameters are shared out over the servers by size, large
    ones cut by rows. Buffers, such as the statistics of a BatchNorm, stay with each trainer.

    Embeddings with ``sparse=True`` are pulled and pushed by row: before such a module looks rows up, these are pulled,
    and only gradients of rows are pushed.

    A trainer that is lost holds nobody back. A server that is lost is waited for: when a worker has come back under its
    name, it restores its shard from its checkpoint if it has one, else from the values of the first trainer that calls
    it; these lack the optimizer's state, and the rows of sparse embeddings that this trainer has not looked up lately.

    Args:
        model: its parameters that require gradients are trained.
        on: the servers: names or ranks. A name finds a server again that has come back.
        optimizer: makes the optimizer of a shard from a list of parameters, such as ``torch.optim.AdamW``. It must
            treat each element by itself, because a parameter may lie on several servers.
        sparse_optimizer, sparse_options: the same for the sparse embeddings, because some optimizers, such as AdamW,
            cannot take sparse gradients; by default ``optimizer`` and its options.
        mode: ``synchronous``: a step is taken when all trainers have pushed, with the mean of their gradients, and all
            go on from the same values. ``bounded``: each push is a step, and a trainer may be ahead of the slowest by
            ``staleness`` steps. ``asynchronous``: each push is a step, and nobody waits.
        staleness: for ``bounded``, at least 0.
        trainers: for ``synchronous``, how many trainers the first step waits for; otherwise the first to come begins.
        name: of the parameters, if servers have those of several models.
        checkpoint: a path at which each server keeps its shard in a file, to which it adds its own name; None for none.
        checkpoint_steps: after how many steps it writes it.
        restore_s: how long to wait for a server that is gone, in seconds.
        trains: whether this worker pushes. One that only pulls, as for evaluation, is not waited for by others.
        options: what ``optimizer`` gets beside the parameters, such as ``lr=1e-3``.

    Returns:
        The model's :class:`Parameters`; close them, or use them in a ``with``, so that others do not wait for this
        worker's next step while it still lives.

    Raises:
        ArgumentError: the mode is none of these, or another model has the name.
        WorkerLost, RankError: a server is not there.
    """
    require(parameters, model, on=on, optimizer=optimizer)
    if mode not in MODES:
        raise ArgumentError(f"mode={mode!r} is none of {', '.join(MODES)}")
    if (mode == BOUNDED) != (staleness is not None) or (staleness is not None and staleness < 0):
        raise ArgumentError(
            f"staleness={staleness} with mode={mode!r}: a bounded mode needs staleness= of at least 0, others take none"
        )
    if not on:
        raise ArgumentError("on=[] has no server")
    settings = Settings(
        mode,
        staleness or 0,
        trainers,
        optimizer,
        sparse_optimizer or optimizer,
        options,
        (sparse_options or {}) if sparse_optimizer is not None else options,
        os.fspath(checkpoint) if checkpoint is not None else "",
        checkpoint_steps,
    )
    return Parameters(session.worker(), model, on, settings, name, restore_s, trains=trains)
