"""Calls of a training script on its world: shares of data, replicas, seeds, accumulation, checkpoints."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset

from phalanx.data.loader import ShardedLoader, sharded_loader
from phalanx.diagnosis import recorder
from phalanx.errors import ArgumentError, CheckpointError, PhalanxError
from phalanx.group import Group
from phalanx.parallel.data_parallel import data_parallel
from phalanx.parallel.integers import Lanes
from phalanx.parallel.replica import Replica, accumulated
from phalanx.training import checkpoint
from phalanx.training.should_stop import Stopper, stopper_of
from phalanx.words import tell

__all__ = ["TrainingCalls"]

Batch = TypeVar("Batch")


class TrainingCalls(Group):
    """The methods of a world that a training loop is written with."""

    device: torch.device
    _stopper: Stopper | None = None

    def should_stop(self, every: int = 1) -> bool:
        """Return whether the job is to stop; True on every rank at the same call. Every rank calls it once a step.

        ``if world.should_stop(): world.save(...); break`` ends a loop in step after a signal (SIGTERM, SIGUSR1) to the
        launcher or any rank, ``phalanx stop --gently``, or the times of ``phalanx run --stop-before`` and
        ``--max-hours``. Once True it stays so. Under ``phalanx run`` it costs less than a microsecond and sends
        nothing; elsewhere the ranks exchange a number (all_reduce). The first call, on the main thread, takes over
        these signals; a handler that the script has set before is called as well.

        Args:
            every: without ``phalanx run``, at how many calls the ranks exchange it; the same on all. A stop is then
                noticed at such a call only.

        Raises:
            ArgumentError: ``every`` is less than 1.
        """
        if self._stopper is None:
            cpu = "cpu" in self._session.device_types
            self._stopper = stopper_of(self, "cpu" if cpu else self.device, every)
        return self._stopper.should_stop(every)

    def step(self, number: int) -> None:
        """Say which step of its training this rank begins; operations from now on are recorded with it.

        The launcher's reports of ranks that fail or hang say it. It costs less than a microsecond; other ranks need not
        call it. ``with phalanx.label("evaluation"):`` names other parts of a program.

        Args:
            number: the step, from 0 to 2³¹ - 1; -1 for none.

        Raises:
            ArgumentError: it is another number.
        """
        if not -1 <= number < 1 << 31:
            raise ArgumentError(f"step: {number} is not a number from 0 to 2147483647")
        recorder.mark(step=int(number))

    def data_parallel(
        self,
        module: torch.nn.Module,
        *,
        comm_hook: str | Callable[..., Any] | None = None,
        compress: str | None = None,
        sync_every: int = 1,
        outer: str | None = None,
        **options: Any,
    ) -> Replica:
        """Keep a replica of ``module`` on every rank: gradients are averaged while backward computes.

        Every rank calls it, with a module of the same shape; rank 0's parameters and buffers are copied to the others.
        Over slow links ``compress`` (``"bf16"``, ``"fp16"``, ``"int8"``, ``"powersgd"``, ``"auto"``), ``sync_every=K``
        and ``outer="diloco"`` send less. What each of them means and costs:
        :func:`phalanx.parallel.data_parallel.data_parallel`.
        """
        return data_parallel(
            module,
            self._use(),
            self.device,
            comm_hook=comm_hook,
            compress=compress,
            sync_every=sync_every,
            outer=outer,
            lanes=self._lanes,
            **options,
        )

    def _lanes(self) -> Lanes:
        """The groups by which hosts exchange integers. Every rank must call it, because they are made here."""
        world: Any = self  # a World, which knows the hosts
        group, sizes = self._use(), [len(node.ranks) for node in world.nodes]
        if len(sizes) == 1 or max(sizes) == 1:
            return Lanes.flat(group)
        inside, across = world.node_group, world.peers_group
        return Lanes(
            everyone=group,
            inside=inside._use() if inside.size > 1 else None,
            across=across._use() if world.local_rank < min(sizes) else None,
            hosts=len(sizes),
            count=min(sizes),
            own=world.local_rank,
        )

    def loader(
        self,
        dataset: Dataset[Any] | Sized,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> ShardedLoader:
        """A ``DataLoader`` over this rank's share of ``dataset``; no item is dropped, and none is in two shares.

        ``batch_size`` is per rank. The loader's ``state_dict()`` says where it stands, also inside an epoch. See
        :func:`phalanx.data.loader.sharded_loader`.
        """
        return sharded_loader(
            dataset,
            batch_size,
            rank=self.rank,
            world_size=self.size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            **options,
        )

    def accumulate(self, module: torch.nn.Module, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Go through the batches of one optimizer step; only the last backward exchanges the gradients.

        Gradients add up, as always in torch, so divide each loss by the number of batches::

            batches = iter(loader)
            while some := list(itertools.islice(batches, 4)):  # the last step of a pass may have fewer
                for x, y in world.accumulate(model, some):
                    (loss_of(model(x), y) / len(some)).backward()
                optimizer.step()
                optimizer.zero_grad()

        Args:
            module: what :meth:`data_parallel` returned (or FSDP's wrapper). Call it within the loop.
            batches: the batches of one step, equally many on every rank; parts of one batch by ``zip(x.chunk(4), …)``.

        Raises:
            ArgumentError: the module exchanges no gradients.
        """
        return accumulated(module, iter(batches))

    def print(self, *values: object, **options: Any) -> None:
        """``print`` on rank 0, at once; nothing on the other ranks."""
        if self.rank == 0:
            builtins.print(*values, **{"flush": True, **options})

    def seed(self, seed: int) -> None:
        """Seed the random numbers of Python, numpy (if it is installed) and torch with ``seed + rank``.

        So every rank draws others, for dropout and augmentation, and the same ones in every run. Rank 0's do not depend
        on the number of ranks, nor does a model that is made after this: :meth:`data_parallel` copies rank 0's. Workers
        of torch's ``DataLoader`` are seeded from torch's generator, each with another number; those of
        :meth:`loader` from the loader's own seed, epoch and rank.
        """
        checkpoint.seed_generators(seed + self.rank)

    def check_writable(self, path: str | os.PathLike[str]) -> None:
        """Refuse a path to which :meth:`save` could not write: call it before training. Every rank must call it.

        Raises:
            CheckpointError: the directory is missing or cannot be written to. On the other ranks: PeerFailed.
        """
        self._on_main("check_writable()", lambda: checkpoint.check_writable(path))

    def save(self, path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
        """Write a training state to a file that is whole at every moment. Every rank must call it; rank 0 writes.

        ``world.save("run.pt", {"model": model, "optimizer": optimizer, "loader": loader, "step": step})``

        Args:
            path: the file. An earlier one of that name is replaced when the new one is on the disk.
            state: by name, anything with a ``state_dict()`` (modules, without their wrappers; optimizers, schedulers,
                loaders), and numbers, texts, tensors, dicts and lists, as rank 0 has them. The states of all ranks'
                random number generators are added.

        The file is also what ``torch.load(path, weights_only=True)`` reads: ``["model"]`` is the model's state dict.

        Raises:
            CheckpointError: on rank 0, it could not be written; the earlier file is intact. On the others: PeerFailed.
            ArgumentError: the state's tensors are divided among the ranks (FSDP, tensor parallel).
        """
        optimizers = [entry for entry in state.values() if isinstance(entry, torch.optim.Optimizer)]
        exchanges = {name: replica.prepare_checkpoint(optimizers) for name, replica in _replicas_in(state)}
        contents = checkpoint.contents_of(state)
        states = self.gather_object(checkpoint.random_state(self.device))
        self._on_main("save()", lambda: checkpoint.write(path, contents, states or [], exchanges))

    def load(self, path: str | os.PathLike[str], state: dict[str, Any] | None = None) -> dict[str, Any]:
        """Read what :meth:`save` wrote, on any number of ranks. Every rank must call it, and reads the file.

        Args:
            path: the file.
            state: what to restore, by the names given to :meth:`save`: objects by their ``load_state_dict``, and other
                values are replaced in this dict. Names that are not here are only returned.

        Returns:
            The entries that are not in ``state``, with their tensors on the CPU; state dicts in the place of objects.

        The random number generators continue from the file if the number of ranks is the same; if not, they stay as
        they are, and rank 0 says so.

        Raises:
            CheckpointError: on every rank, the file is missing on one, cut short, foreign, without a name in ``state``,
                or not the same on all ranks.
        """
        contents, failure = None, ""
        try:
            contents = checkpoint.read(path)
        except PhalanxError as error:
            failure = str(error)
        outcomes = self.all_gather_object((failure, contents and contents[checkpoint.MARK]["id"]))
        failed = [rank for rank, (text, _) in enumerate(outcomes) if text]
        if contents is None or failed:
            raise CheckpointError(failure or f"rank {failed[0]} could not load it: {outcomes[failed[0]][0]}")
        if len({identity for _, identity in outcomes}) > 1:
            raise CheckpointError(
                f"the ranks have read different files as {path}; do their hosts share that directory?"
            )
        others = checkpoint.restore(path, contents, {} if state is None else state)
        for name, replica in _replicas_in(state or {}):
            replica.load_exchange_state(contents[checkpoint.MARK].get("exchanges", {}).get(name))
        states = contents[checkpoint.MARK]["random"]
        if len(states) == self.size:
            checkpoint.set_random_state(states[self.rank], self.device)
        elif self.rank == 0:
            tell(
                f"note: {path} was saved by {len(states)} ranks and loaded by {self.size}, so random number generators "
                f"were not restored; world.seed() seeds them"
            )
        return others


def _replicas_in(state: Mapping[str, Any]) -> list[tuple[str, Replica]]:
    """The replicas among the entries of a state, with their names; an entry may be the plain module of one."""
    found = [(name, Replica.of(checkpoint.plain(entry))) for name, entry in state.items()]
    return [(name, replica) for name, replica in found if replica is not None]
