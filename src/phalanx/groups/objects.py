"""Base of a group's methods: objects between its ranks, and turns, in which rank 0 goes first, or alone.

The ranks must trust each other, since a pickled object can run code where it is read: every rank can run code in every
other. Whoever can change packets between hosts can do the same.
"""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from phalanx.c10d.torch_versions import uncompiled
from phalanx.errors import ArgumentError, PeerFailed, PhalanxError
from phalanx.wrong_arguments import explained

__all__ = ["Members", "ObjectCalls"]

Result = TypeVar("Result")
_NOT_GIVEN: Any = object()


class Members(ABC):
    """The ranks of a group, as seen from one of them. :class:`phalanx.group.Group` is one."""

    rank: int
    size: int

    def __init_subclass__(cls) -> None:
        for name in [name for name, value in vars(cls).items() if name[0] != "_" and inspect.isfunction(value)]:
            setattr(cls, name, explained(vars(cls)[name]))
        uncompiled(cls)

    @abstractmethod
    def _use(self, *tensors: torch.Tensor) -> dist.ProcessGroup:
        """The process group, after checking that it is open and that its backend serves the tensors' devices."""

    @abstractmethod
    def _member(self, rank: int) -> int:
        """The rank, after checking that the group has it."""

    @abstractmethod
    def _other(self, rank: int) -> int:
        """The rank, after checking that the group has it and that it is not this one."""

    @abstractmethod
    def _device_of_numbers(self) -> torch.device:
        """A device that the backend serves, for numbers that are not on any."""


class ObjectCalls(Members):
    """The methods of a group that move objects.

    Those that end in ``_list`` are torch's, and fill lists. The others return what they have received, so they need no
    list; they are the ones to use in new code.

    All of them unpickle what comes, by which a rank can run code in every other; between hosts so can whoever can
    change packets between hosts (docs/security.md).
    """

    def send_object_list(self, object_list: list[Any], dst: int) -> None:
        """Send the objects in ``object_list`` to rank ``dst``."""
        dist.send_object_list(object_list, group=self._use(), group_dst=self._other(dst))

    def recv_object_list(self, object_list: list[Any], src: int) -> int:
        """Fill ``object_list`` (of the sender's length) from rank ``src``; returns that rank. torch takes no other."""
        dist.recv_object_list(object_list, group=self._use(), group_src=self._other(src))
        return src

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Return the ``obj`` of rank ``src`` on every rank; what the other ranks give is ignored.

        It is unpickled there, so ``src`` can run code on every rank, and so can whoever can change packets on
        the way between hosts.
        """
        box = [obj]
        self.broadcast_object_list(box, src)
        return box[0]

    def broadcast_object_list(self, object_list: list[Any], src: int = 0) -> None:
        """Replace every entry of ``object_list`` by that of rank ``src``; same length everywhere."""
        dist.broadcast_object_list(object_list, group=self._use(), group_src=self._member(src))

    def scatter_object(self, objects: list[Any] | None = None, src: int = 0) -> Any:
        """Return ``objects[r]`` of rank ``src`` on rank r. Only ``src`` gives ``objects``, one for each rank.

        They are unpickled there; see :meth:`broadcast_object` on whom that trusts.

        Raises:
            ArgumentError: this is rank ``src``, and it did not give one object for each rank.
        """
        if self._member(src) == self.rank and (objects is None or len(objects) != self.size):
            given = "none" if objects is None else str(len(objects))
            raise ArgumentError(
                f"scatter_object: rank {src} must give {self.size} objects, one for each rank; got {given}"
            )
        box = [None]
        self.scatter_object_list(box, objects if self.rank == src else None, src)
        return box[0]

    def scatter_object_list(self, output_list: list[Any], input_list: list[Any] | None = None, src: int = 0) -> None:
        """Put ``input_list[r]`` of rank ``src`` into ``output_list[0]`` of rank r."""
        dist.scatter_object_list(output_list, input_list, group=self._use(), group_src=self._member(src))

    def gather_object(self, obj: Any, object_gather_list: list[Any] | None = None, dst: int = 0) -> list[Any] | None:
        """Collect every rank's ``obj`` on rank ``dst``, which unpickles them and so trusts every rank.

        Args:
            obj: what this rank gives.
            object_gather_list: a list of the group's size for rank ``dst`` to fill, as torch wants it; may be left out.
            dst: the rank that gathers.

        Returns:
            The objects in rank order on ``dst``, None on the other ranks.
        """
        group = self._use()
        if self._member(dst) == self.rank and object_gather_list is None:
            object_gather_list = [None] * self.size
        dist.gather_object(obj, object_gather_list, group=group, group_dst=dst)
        return object_gather_list

    @overload
    def all_gather_object(self, obj: Any, /) -> list[Any]: ...
    @overload
    def all_gather_object(self, object_list: list[Any], obj: Any) -> list[Any]: ...
    def all_gather_object(self, object_list: Any, obj: Any = _NOT_GIVEN) -> list[Any]:
        """Return every rank's object in rank order, on every rank: ``losses = group.all_gather_object(loss)``.

        With two arguments, as torch has it, the first is a list of the group's size, which is filled and returned. The
        objects are unpickled, so every rank trusts every other.
        """
        if obj is _NOT_GIVEN:
            object_list, obj = [None] * self.size, object_list
        if not isinstance(object_list, list):
            raise ArgumentError(f"all_gather_object: to fill, it takes a list; got a {type(object_list).__name__}")
        dist.all_gather_object(object_list, obj, group=self._use())
        return object_list

    # -- turns -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """A block that rank 0 runs first, and the other ranks when rank 0 has left it. Every rank must enter it.

        For what is done once and then found by the others: a download, a cache, a compiled file. The others wait for at
        most the group's timeout.

        Raises:
            PeerFailed: on the other ranks, which do not run the block, if rank 0 has left it by an exception.
        """
        if self.rank == 0:
            try:
                yield
            except BaseException as error:
                # A group that is broken tells the others by itself.
                with contextlib.suppress(PhalanxError):
                    self.broadcast_object(_in_words(error))
                raise
            self.broadcast_object(None)
            return
        failure = self.broadcast_object()
        if failure is not None:
            raise PeerFailed.in_its_turn(0, "main_first()", failure)
        yield

    def _on_main(self, call: str, function: Callable[[], Result]) -> Result:
        """Call ``function`` on rank 0 and return its result on every rank; an error is raised on every rank, too."""
        if self.rank != 0:
            result, failure = self.broadcast_object()
            if failure is not None:
                raise PeerFailed.in_its_turn(0, call, failure)
            return result  # type: ignore[no-any-return]
        try:
            result = function()
        except BaseException as error:
            with contextlib.suppress(PhalanxError):
                self.broadcast_object((None, _in_words(error)))
            raise
        self.broadcast_object((result, None))
        return result


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
