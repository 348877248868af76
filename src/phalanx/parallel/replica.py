"""One rank's replica of a model, torch's ``DistributedDataParallel`` with ways to exchange less; accumulation."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import ArgumentError
from phalanx.parallel.exchange import Exchange
from phalanx.parallel.gradients import WholeGradient, narrow_hook
from phalanx.parallel.local_steps import LocalSteps, average_optimizer
from phalanx.parallel.shared import SharedBuckets
from phalanx.words import tell

__all__ = ["Replica", "accumulated"]

Batch = TypeVar("Batch")

_replicas: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Replica]] = weakref.WeakKeyDictionary()


class Replica(DistributedDataParallel):
    """One rank's replica, as ``world.data_parallel()`` returns it; torch's DDP in everything else."""

    compress = "none"  # how gradients travel; with "auto" what was chosen
    sync_every = 1  # after how many steps the replicas are averaged; 1 where gradients are exchanged in every step
    _exchange: Exchange | None = None
    _local_steps: LocalSteps | None = None

    def __init__(self, module: torch.nn.Module, *, share_buckets: bool = False, **options: Any) -> None:
        self._shares_buckets = share_buckets
        super().__init__(module, **options)
        _replicas[module] = weakref.ref(self)

    def _ddp_init_helper(self, *arguments: Any) -> None:
        allocate = getattr(self.process_group, "empty", None)
        if not self._shares_buckets or allocate is None:
            super()._ddp_init_helper(*arguments)  # type: ignore[no-untyped-call]
            return
        exchanged = self._exchanged()
        buckets = SharedBuckets(allocate, sum(p.nbytes for p in exchanged), len(exchanged))
        with buckets:
            super()._ddp_init_helper(*arguments)  # type: ignore[no-untyped-call]
        if not self.find_unused_parameters:  # else they stay as they are
            self._rebuilding = buckets
            self._pre_forward = self._rebuild_before_forward  # type: ignore[method-assign]

    @staticmethod
    def of(module: object) -> Replica | None:
        """The replica that a module was made into last, if there is one still."""
        return _replicas[module]() if isinstance(module, torch.nn.Module) and module in _replicas else None

    def exchange_by(self, exchange: Exchange) -> None:
        """Have gradients exchanged by ``exchange``; ``data_parallel`` calls it."""
        self.compress, self._exchange = exchange.name, exchange
        if exchange.name in ("bf16", "fp16"):
            self.register_comm_hook(self.process_group, narrow_hook(exchange.name))
        elif exchange.name != "none":
            self.register_comm_hook(WholeGradient(self._exchanged(), exchange), WholeGradient.hook)

    def step_locally(self, exchange: Exchange, every: int, outer: str | None) -> None:
        """Have no gradients exchanged, and the replicas averaged every so many steps; ``data_parallel`` calls it."""
        self.compress, self._exchange, self.sync_every = exchange.name, exchange, every
        self.require_backward_grad_sync = False
        self._local_steps = LocalSteps(self.module, self.process_group, exchange, every, outer)

    def _rebuild_before_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Have DDP make its buckets anew, in shared memory, as it does before the second forward.

        Within ``join()`` DDP does it itself: the ranks must do it between the same collectives.
        """
        rebuilt = self._join_config.enable
        if torch.is_grad_enabled() and not rebuilt:
            with self._rebuilding:
                rebuilt = self.reducer._rebuild_buckets()
        if rebuilt:
            del self._pre_forward, self._rebuilding
        return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _exchanged(self) -> list[torch.nn.Parameter]:
        ignored = self.parameters_to_ignore
        return [p for name, p in self.module.named_parameters() if p.requires_grad and name not in ignored]

    def synchronize(self) -> None:
        """Make the replicas the same now: give each the mean of all parameters and buffers. Every rank must call it.

        Call it before the replicas are evaluated, and at the end of training; ``world.save`` does it by itself. The
        period of K steps goes on. With ``sync_every`` of 1, or right after an average, it changes nothing.
        """
        if self._local_steps is not None:
            self._local_steps.synchronize()

    def prepare_checkpoint(self, optimizers: Iterable[torch.optim.Optimizer] = ()) -> dict[str, Any]:
        """Make everything the same on all ranks that a resumed run needs; ``world.save`` calls it. All ranks must.

        One replica, the state of each of this model's ``optimizers``, and what this returns for
        :meth:`load_exchange_state` are then a whole checkpoint, for any number of ranks. Parameters and buffers are
        averaged, with ``sync_every`` the tensors in the optimizers' states too, and of what rounding has left out every
        rank gets an equal part.
        """
        self.synchronize()
        state: dict[str, Any] = {"compress": self.compress, "exchange": {}, "local_steps": None}
        if self._local_steps is not None:
            for optimizer in optimizers:
                average_optimizer(optimizer, self.process_group)
            state["local_steps"] = self._local_steps.state_dict()
        if self._exchange is not None:
            self._exchange.settle()
            state["exchange"] = self._exchange.state_dict()
        return state

    def load_exchange_state(self, state: dict[str, Any] | None) -> None:
        """Go on from what :meth:`prepare_checkpoint` returned, once the parameters are loaded; ``world.load`` does.

        None, or the state of another way to exchange, begins anew.
        """
        if self._local_steps is not None:
            self._local_steps.load_state_dict(None if state is None else state["local_steps"])
        if self._exchange is None:
            return
        same = state is not None and state["compress"] == self.compress
        self._exchange.load_state_dict(state["exchange"] if state is not None and same else {})
        if state is not None and not same and state["exchange"] and dist.get_rank(self.process_group) == 0:
            tell(
                f"note: the checkpoint was made with compress={state['compress']!r}, this run has {self.compress!r}; "
                f"what rounding had left out is dropped"
            )

    def join(self, *arguments: Any, **options: Any) -> Any:
        """The context for uneven inputs, as in torch."""
        if self._local_steps is not None:
            raise ArgumentError(
                "join() is for ranks with unequally many batches, but with sync_every all must make the same steps "
                "between two averages; give them equally many batches, as world.loader() does"
            )
        return super().join(*arguments, **options)


# -- gradient accumulation: those of several batches are exchanged once, with those of the last ----


def accumulated(module: torch.nn.Module, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Go through the batches of one optimizer step; all but the last leave the gradients on their rank.

    ``module`` is the model as it is called: DDP, FSDP, or what ``fully_shard`` has made. One batch more than is handed
    out has been taken, to know which one is the last.
    """
    held_back = _holding_back(module)
    iterator = iter(batches)
    for batch in iterator:
        for following in iterator:
            with held_back():
                yield batch
            batch = following
        yield batch
        return


def _holding_back(module: Any) -> Any:
    """A function that makes a context in which ``module`` exchanges no gradients."""
    if hasattr(module, "no_sync"):
        return module.no_sync
    if hasattr(module, "set_requires_gradient_sync"):

        @contextlib.contextmanager
        def without_sync() -> Iterator[None]:
            module.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                module.set_requires_gradient_sync(True)

        return without_sync
    raise ArgumentError(
        f"{type(module).__name__} exchanges no gradients; give accumulate() what world.data_parallel() has returned"
    )
