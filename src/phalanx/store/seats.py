"""The seats of a world: which ranks have joined, and why a process is refused one."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from phalanx.store.claim import Claim, Verdict
from phalanx.store.company import neighbours
from phalanx.words import format_named, format_spans

__all__ = ["Seats"]


class Seats:
    """The ranks of one world, entered as they join.

    Args:
        own: rank 0's claim; all others must be of the same job, attempt, opening and world size.
        hosts: the hosts of the job by node rank, if the launcher names them.
        num_nodes: how many hosts there are, if that is known.
    """

    def __init__(self, own: Claim, hosts: Sequence[str] = (), num_nodes: int | None = None) -> None:
        self.own = own
        self._hosts = hosts
        self._num_nodes = num_nodes
        self._taken: dict[int, Claim] = {0: own}
        self._refused = ""  # why, for the last process that was

    @property
    def missing(self) -> list[int]:
        """The ranks that have not come."""
        return [rank for rank in range(self.own.world_size) if rank not in self._taken]

    @property
    def complete(self) -> bool:
        """Whether all have come."""
        return len(self._taken) == self.own.world_size

    def describe_missing(self) -> str:
        """The missing ranks, for people, and what may be the reason: one was refused, or no rank of a node came."""
        refused = f" (refused: {self._refused})" if self._refused else ""
        return self._describe_missing() + refused

    def _describe_missing(self) -> str:
        text = f"{format_named('rank', self.missing)} of {self.own.world_size}"
        nodes = {claim.node_rank for claim in self._taken.values()}
        if None in nodes or not self._num_nodes:
            return text
        absent = [node for node in range(self._num_nodes) if node not in nodes]
        if not absent:
            return text
        if len(self._hosts) == self._num_nodes and len(absent) <= 16:
            names = ", ".join(f"{node} ({self._hosts[node]})" for node in absent)
        else:
            names = format_spans(absent)
        return f"{text}; no rank has come from node{'s' if len(absent) > 1 else ''} {names}"

    def judge(self, claim: Claim) -> Verdict:
        """Rank 0's verdict on a claim: the process gets its seat, or the reason why it gets none."""
        verdict = self._judge(claim)
        if verdict.kind == "refused":
            self._refused = verdict.reason
        return verdict

    def _judge(self, claim: Claim) -> Verdict:
        own = self.own
        if claim.job != own.job:
            return Verdict("other")
        if (claim.attempt, claim.opening) > (own.attempt, own.opening):
            return Verdict("earlier", f"rank 0 ({own.name}) is still in attempt {own.attempt}, world {own.opening}")
        who = f"rank {claim.rank} ({claim.name})"
        if claim.attempt != own.attempt:
            return Verdict(
                "refused",
                f"{who} is of attempt {claim.attempt}, which is over; rank 0 ({own.name}) is of attempt {own.attempt}",
            )
        if claim.opening != own.opening:
            return Verdict(
                "refused",
                f"{who} opens its world number {claim.opening}, and rank 0 ({own.name}) its number {own.opening}; "
                f"every rank must call phalanx.init() the same number of times",
            )
        if claim.world_size != own.world_size:
            return Verdict(
                "refused",
                f"{who} was started for a world of {claim.world_size}, rank 0 ({own.name}) for {own.world_size}",
            )
        if not 0 <= claim.rank < own.world_size:
            return Verdict("refused", f"there is no rank {claim.rank} in a world of {own.world_size} ({claim.name})")
        if claim.rank not in self._taken:
            self._taken[claim.rank] = claim
        elif not self._same(claim):
            other = self._taken[claim.rank]
            return Verdict("refused", f"there are two of rank {claim.rank}: {claim.name} and {other.name}")
        return Verdict("welcome", rank_0=own.without_token())

    def _same(self, claim: Claim) -> bool:
        """Whether this is another connection of the process that has the seat."""
        token = self._taken[claim.rank].token
        return bool(token) and secrets.compare_digest(claim.token.encode(), token.encode())

    def neighbours(self, rank: int) -> list[Claim]:
        """The ranks that this one may look at, when all have come."""
        return neighbours([self._taken[each].without_token() for each in range(self.own.world_size)], rank)

    def leave(self, rank: int) -> bool:
        """Free a rank's seat if not all have come, so that no rank has gone on yet; return whether it was freed."""
        return not self.complete and rank != 0 and self._taken.pop(rank, None) is not None
