"""all_to_all over several hosts: what one host sends to another goes with the leaders' frames if it is small.

How much each rank sends to each other is known to these two alone. So the ranks of a host first tell each other how
much they send. What a host sends to another in all is then either in its leader's frame, behind a table of the sizes,
or each rank sends its own parts to their receivers as soon as the frames have told them the sizes. Either way only what
belongs elsewhere leaves a host, and there is one way for small data, and two for large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from phalanx.transports.contract import Communicator
from phalanx.transports.hosts.breaking import Differs
from phalanx.transports.hosts.lane import Engine, Transfer
from phalanx.transports.hosts.layout import Layout
from phalanx.transports.hosts.small import Small

__all__ = ["Exchanging"]

_TAG = 1
_NONE = torch.empty(0, dtype=torch.uint8)


class Exchanging:
    """The exchanges of one group; every rank of it calls the same method.

    Args:
        layout, local, engine: see :class:`~phalanx.transports.hosts.communicator.HostsCommunicator`.
        small: the group's small collectives, which exchange the frames.
    """

    def __init__(self, layout: Layout, local: Communicator, engine: Engine, small: Small) -> None:
        self._layout = layout
        self._local = local
        self._engine = engine
        self._small = small
        self._others = [number for number in range(len(layout.hosts)) if number != layout.host]

    def all_to_all(self, call: int, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Copy ``inputs[r]`` into ``outputs[rank]`` of rank r.

        Args:
            call: a number that is equal for equal calls.
            outputs, inputs: flat tensors, one for each rank.

        Raises:
            Differs: another rank makes another call, or sends another number of bytes than this one expects.
        """
        layout = self._layout
        given = [_bytes(tensor) for tensor in inputs]
        sizes = torch.tensor([tensor.numel() for tensor in given])
        rows = [torch.empty_like(sizes) for _ in layout.here]
        self._local.all_gather(rows, sizes)
        table = torch.stack(rows)  # of this host's ranks, to all
        leaving = {number: table[:, layout.hosts[number]] for number in self._others}
        handed = {number: part for number, part in leaving.items() if part.sum() <= self._small.frame_bytes}
        coming, arrived = self._meet(call, leaving, self._to_leader(handed, given))

        expected = [output.nbytes for output in outputs]
        for number in self._others:
            if coming[number][:, layout.local].tolist() != [expected[rank] for rank in layout.hosts[number]]:
                raise Differs
        large = [number for number in self._others if coming[number].sum() > self._small.frame_bytes]
        transfers: list[Transfer] = []
        for number in self._others:
            for rank in layout.hosts[number]:
                if number in large and expected[rank]:
                    transfers.append(self._engine.recv(outputs[rank], rank, _TAG))
                if number not in handed and given[rank].numel():
                    transfers.append(self._engine.send(inputs[rank], rank, _TAG))
        self._local.all_to_all([outputs[rank] for rank in layout.here], [inputs[rank] for rank in layout.here])
        self._from_leader({number: part for number, part in coming.items() if number not in large}, arrived, outputs)
        for transfer in transfers:
            transfer.wait()

    def _to_leader(
        self, handed: Mapping[int, torch.Tensor], given: Sequence[torch.Tensor]
    ) -> Mapping[int, Sequence[torch.Tensor]]:
        """Bring what this host's ranks send in frames to the leader.

        Args:
            handed: for each host that is sent little, how much each rank here sends to each there.
            given: this rank's parts, as bytes.

        Returns:
            On the leader: for those hosts, the parts of each rank here.
        """
        here = self._layout.here
        counts = [[int(part[place].sum()) for part in handed.values()] for place in range(len(here))]
        if not any(map(sum, counts)):
            return {}
        inputs = [_NONE] * len(here)
        inputs[0] = torch.cat([given[rank] for number in handed for rank in self._layout.hosts[number]])
        outputs = [torch.empty(sum(row) if self._layout.leader else 0, dtype=torch.uint8) for row in counts]
        self._local.all_to_all(outputs, inputs)
        if not self._layout.leader:
            return {}
        split = [output.split(row) for output, row in zip(outputs, counts, strict=True)]
        return {number: [of_rank[turn] for of_rank in split] for turn, number in enumerate(handed)}

    def _meet(
        self, call: int, leaving: Mapping[int, torch.Tensor], together: Mapping[int, Sequence[torch.Tensor]]
    ) -> tuple[dict[int, torch.Tensor], Mapping[int, torch.Tensor]]:
        """Exchange frames.

        Args:
            call: see :meth:`all_to_all`.
            leaving: for each other host, how much each rank here sends to each there.
            together: what :meth:`_to_leader` returned.

        Returns:
            On every rank: for each other host, how much each rank there sends to each here. On the leader: what
            followed in the frames.
        """
        layout = self._layout
        shapes = {number: (len(layout.hosts[number]), len(layout.here)) for number in self._others}
        nbytes = {number: 8 * rows * columns for number, (rows, columns) in shapes.items()}
        arrived: dict[int, torch.Tensor] = {}

        def tables(parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
            arrived.update((number, parts[number][count:]) for number, count in nbytes.items())
            return torch.cat([parts[number][:count] for number, count in nbytes.items()])

        data = {}
        if layout.leader:
            for number, part in leaving.items():
                data[number] = torch.cat([_bytes(part.flatten()), *together.get(number, ())])
        found = self._small.meet(call, data, tables, sum(nbytes.values()))
        split = zip(shapes.items(), found.split([*nbytes.values()]), strict=True)
        return {number: table.view(torch.int64).view(shape) for (number, shape), table in split}, arrived

    def _from_leader(
        self, coming: Mapping[int, torch.Tensor], arrived: Mapping[int, torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """Give each rank of this host what came for it in the frames of the hosts in ``coming``."""
        layout = self._layout
        totals = [sum(int(part[:, place].sum()) for part in coming.values()) for place in range(len(layout.here))]
        if not any(totals):
            return
        inputs = [_NONE] * len(layout.here)
        if layout.leader:
            found: list[list[torch.Tensor]] = [[] for _ in layout.here]
            for number, part in coming.items():
                cells = arrived[number][: int(part.sum())].split(part.flatten().tolist())
                for place, mine in enumerate(found):
                    mine += cells[place :: len(layout.here)]
            inputs = [torch.cat(mine) for mine in found]
        received = [_NONE] * len(layout.here)
        received[0] = torch.empty(totals[layout.local], dtype=torch.uint8)
        self._local.all_to_all(received, inputs)
        ranks = [rank for number in coming for rank in layout.hosts[number]]
        for rank, part in zip(ranks, received[0].split([outputs[rank].nbytes for rank in ranks]), strict=True):
            if part.numel():
                _bytes(outputs[rank]).copy_(part)


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8) if flat.numel() else _NONE
