"""all_to_all over several hosts: small parts go with the leaders' frames, large ones straight to their receivers.

How much one rank sends to another is known to these two alone, and so both know how it goes. Each rank gives its leader
its small parts, and tells it how much it sends to whom, and expects of whom. The leaders compare this before anything
large moves. Only what belongs elsewhere leaves a host; small parts take one way, and large ones two.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import torch

from phalanx.transports.contract import Communicator
from phalanx.transports.hosts.breaking import Differs
from phalanx.transports.hosts.frames import Frames
from phalanx.transports.hosts.lane import Engine, Transfer
from phalanx.transports.hosts.layout import Layout
from phalanx.transports.hosts.ways import Ways, wait_for

__all__ = ["Exchanging"]

_CALL = struct.Struct("<q")
_TAG = 1
_NONE = torch.empty(0, dtype=torch.uint8)


class Exchanging:
    """The exchanges of one group; every rank of it calls the same method.

    Args:
        layout, local, engine: see :class:`~phalanx.transports.hosts.communicator.HostsCommunicator`.
        ways: those to other ranks, which the group's other collectives use as well.
        frames: the leader's; None on other ranks.
        frame_bytes: the most data that one host sends another in a frame.
    """

    def __init__(
        self,
        layout: Layout,
        local: Communicator,
        engine: Engine,
        ways: Ways,
        frames: Frames | None,
        frame_bytes: int,
    ) -> None:
        self._layout = layout
        self._local = local
        self._engine = engine
        self._ways = ways
        self._frames = frames
        self._hosts = [number for number in range(len(layout.hosts)) if number != layout.host]
        self._others = [rank for number in self._hosts for rank in layout.hosts[number]]
        # Of one part: then a frame has room for those of all pairs of ranks.
        self._small_bytes = frame_bytes // max(map(len, layout.hosts)) ** 2

    def all_to_all(self, call: int, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Copy ``inputs[r]`` into ``outputs[rank]`` of rank r.

        Args:
            call: a number that is equal for equal calls.
            outputs, inputs: flat tensors, one for each rank.

        Raises:
            Differs: another rank makes another call, or sends another number of bytes than its peer expects.
        """
        here = self._layout.here
        given, expected = [part.nbytes for part in inputs], [part.nbytes for part in outputs]
        news = torch.empty(_CALL.size + sum(expected[rank] for rank in self._small(expected)), dtype=torch.uint8)
        self._exchange_small(call, inputs, torch.tensor([given, expected]), news)
        if _CALL.unpack_from(memoryview(news.numpy()))[0] != call:  # type: ignore[arg-type]
            raise Differs
        at = _CALL.size
        for rank in self._small(expected):
            outputs[rank].view(torch.uint8).copy_(news[at : at + expected[rank]])
            at += expected[rank]

        sources = [rank for rank in self._others if expected[rank] > self._small_bytes]
        targets = [rank for rank in self._others if given[rank] > self._small_bytes]

        def expect() -> list[Transfer]:
            return [self._engine.recv(outputs[rank], rank, _TAG) for rank in sources]

        transfers = self._ways.begin([*sources, *targets], lambda: None, expect)
        transfers += [self._engine.send(inputs[rank], rank, _TAG) for rank in targets]
        self._local.all_to_all([outputs[rank] for rank in here], [inputs[rank] for rank in here])
        wait_for(transfers)

    def _small(self, nbytes: Sequence[int]) -> Iterator[int]:
        """The ranks of other hosts to or from which so many bytes go in frames, by rank."""
        return (rank for rank in self._others if 0 < nbytes[rank] <= self._small_bytes)

    def _exchange_small(
        self, call: int, inputs: Sequence[torch.Tensor], sizes: torch.Tensor, news: torch.Tensor
    ) -> None:
        """Exchange what goes in frames, by way of the leaders.

        Args:
            call, inputs: see :meth:`all_to_all`.
            sizes: how many bytes this rank gives to each, and expects from each.
            news: gets the call, or another number if the calls or sizes differ, and what small parts have come.
        """
        layout, local = self._layout, self._local
        none = [_NONE] * len(layout.here)
        rows = [torch.empty_like(sizes) for _ in layout.here] if layout.leader else None
        local.gather(rows, sizes, 0)
        small = [inputs[rank].view(torch.uint8) for rank in self._small(sizes[0].tolist())]
        handed = [torch.cat(small) if small else _NONE, *none[1:]]
        if self._frames is None or rows is None:
            local.all_to_all(none, handed)
            local.all_to_all([news, *none[1:]], none)
            return
        tables = [row.tolist() for row in rows]
        brought = [
            torch.empty(sum(given[rank] for rank in self._small(given)), dtype=torch.uint8) for given, _ in tables
        ]
        local.all_to_all(brought, handed)
        local.all_to_all([news, *none[1:]], self._answers(self._frames, call, tables, rows, brought))

    def _answers(
        self,
        frames: Frames,
        call: int,
        tables: Sequence[Sequence[Sequence[int]]],
        rows: Sequence[torch.Tensor],
        brought: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """On the leader, exchange the frames: the news of each rank of this host.

        Args:
            frames, call: the leader's frames, and its call.
            tables: for each rank here, how many bytes it gives to each rank, and expects from each.
            rows: the same.
            brought: the small parts of each rank here.
        """
        layout = self._layout
        parts = [
            dict(zip(self._small(given), part.split([given[rank] for rank in self._small(given)]), strict=True))
            for (given, _), part in zip(tables, brought, strict=True)
        ]
        sizes = torch.stack([*rows])
        data = {}
        for number in self._hosts:
            there = layout.hosts[number]
            cells = [of_rank[rank] for of_rank in parts for rank in there if rank in of_rank]
            data[number] = torch.cat([sizes[:, 0, there].flatten().view(torch.uint8), *cells])
        calls, arrived = frames.exchange(call, data)
        same = all(other == call for other in calls.values())
        came: list[dict[int, torch.Tensor]] = [{} for _ in layout.here]
        for number in self._hosts if same else ():
            there, memory = layout.hosts[number], arrived[number]
            wanted = sizes[:, 1, there].t().contiguous()
            if not torch.equal(memory[: wanted.nbytes].view(torch.int64), wanted.flatten()):
                same = False
                break
            at = wanted.nbytes
            for rank in there:
                for place, (_, expected) in enumerate(tables):
                    if 0 < expected[rank] <= self._small_bytes:
                        came[place][rank] = memory[at : at + expected[rank]]
                        at += expected[rank]
        if not same:  # as long as the ranks expect
            length = [sum(expected[rank] for rank in self._small(expected)) for _, expected in tables]
            return [_verdict(~call, [torch.zeros(nbytes, dtype=torch.uint8)]) for nbytes in length]
        return [_verdict(call, [mine[rank] for rank in self._others if rank in mine]) for mine in came]


def _verdict(call: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.frombuffer(bytearray(_CALL.pack(call)), dtype=torch.uint8), *parts])
