"""What a server does for trainers. Every worker can be one; its shards have names, as there may be several models."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from phalanx.errors import ArgumentError
from phalanx.rpc import session
from phalanx.rpc.agent import Agent, Incoming
from phalanx.rpc.future import Future
from phalanx.rpc.members import Member
from phalanx.rpc.parameter_server.shard import Pulled, Settings, Shard
from phalanx.rpc.parameter_server.sharing import Piece

__all__ = ["ATTACH", "LEAVE", "OPTIONS", "PULL", "PUSH", "ROWS", "WRITE"]

ATTACH, PUSH, PULL, ROWS = "parameters.attach", "parameters.push", "parameters.pull", "parameters.rows"
OPTIONS, WRITE, LEAVE = "parameters.options", "parameters.write", "parameters.leave"


class _Server:
    """The shards of one worker, by name."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._shards: dict[str, tuple[Shard, Sequence[Piece]]] = {}
        agent.serve(ATTACH, self._attach)
        agent.serve(PUSH, self._push)
        agent.serve(PULL, lambda _, name: self._shards[name][0].pull() if name in self._shards else None)
        agent.serve(ROWS, self._rows)
        agent.serve(OPTIONS, self._options)
        agent.serve(WRITE, self._write)
        agent.serve(LEAVE, self._leave)
        agent.on_change(self._changed)

    def _changed(self, member: Member, _: str) -> None:
        for shard, _pieces in list(self._shards.values()):
            shard.drop(member)

    def _attach(
        self,
        incoming: Incoming,
        asked: tuple[str, Settings, Sequence[Piece], Sequence[torch.Tensor] | None, bool],
    ) -> Pulled | None:
        """Count the caller among the trainers, if it is to be. None: there is no shard, so come with values."""
        name, settings, pieces, values, trains = asked
        with self._lock:
            known = self._shards.get(name)
            if known is None:
                path = Path(f"{settings.checkpoint}.{self._agent.me.name}") if settings.checkpoint else None
                if path is not None and path.exists():
                    shard = Shard.restored(settings, pieces, path)
                elif values is not None:
                    shard = Shard(settings, pieces, values, path)
                else:
                    return None
                known = self._shards[name] = shard, pieces
        shard, present = known
        if list(present) != list(pieces):
            raise ArgumentError(
                f"{self._agent.me} has other parameters under the name {name!r}: all trainers must give the same model "
                f"and the same servers, and two models need two names"
            )
        if not trains:
            return shard.pull()
        pulled = shard.add(incoming.peer)
        if incoming.peer in self._agent.known_gone():  # it died meanwhile, before there was a trainer to drop
            shard.drop(incoming.peer)
        return pulled

    def _push(self, incoming: Incoming, asked: tuple[str, Sequence[torch.Tensor | None]]) -> Future[Pulled] | None:
        name, gradients = asked
        known = self._shards.get(name)
        return known[0].push(incoming.peer, gradients) if known is not None else None

    def _rows(
        self, incoming: Incoming, asked: tuple[str, Sequence[tuple[int, torch.Tensor | None]]]
    ) -> list[torch.Tensor] | None:
        name, wanted = asked
        known = self._shards.get(name)
        return known[0].rows(wanted) if known is not None else None

    def _options(self, incoming: Incoming, asked: tuple[str, dict[str, Any]]) -> bool | None:
        name, options = asked
        known = self._shards.get(name)
        if known is None:
            return None
        known[0].set_options(options)
        return True

    def _write(self, incoming: Incoming, name: str) -> bool | None:
        known = self._shards.get(name)
        if known is None:
            return None
        known[0].write()
        return True

    def _leave(self, incoming: Incoming, name: str) -> bool:
        known = self._shards.get(name)
        if known is not None:
            known[0].drop(incoming.peer)
        return True


def _equip(agent: Agent) -> None:
    _Server(agent)


session.on_init(_equip)
