"""Which worker keeps a backward pass that does not end in time, and where it is.

A worker's part waits for other workers' parts, so the one that called ``backward`` seldom waits for the one to blame.
It asks its way along: each worker says for whom its part waits, until one computes, or does not answer.
"""

from __future__ import annotations

import contextlib

from phalanx.diagnosis.call_site import capture, shown, text_of
from phalanx.errors import CallTimeout, PeerLost, PhalanxError
from phalanx.rpc.agent import Agent
from phalanx.rpc.autograd.passes import Pass
from phalanx.rpc.codec import FACTS
from phalanx.rpc.inquiry import Finding
from phalanx.rpc.members import Member
from phalanx.rpc.peer import facts_of

__all__ = ["STATE", "overdue"]

STATE = "autograd.state"
_PATIENCE_S = 1.0


def overdue(
    agent: Agent, part: Pass, key: tuple[int, tuple[int, int]], others: set[Member], timeout_s: float
) -> CallTimeout | None:
    """The error for a pass that has not ended in time; None if nobody is found who keeps it.

    Args:
        agent: this worker, which has called ``backward``.
        part: its part.
        key: by which the others know the pass.
        others: the workers that take part, as far as they are known.
        timeout_s: how long the pass could take.
    """
    found = _found(agent, part, key, others | part.asked)
    if found is None:
        return None
    blamed, finding = found
    line = text_of(capture())
    return CallTimeout.not_answered(
        str(blamed),
        f"its part of backward() ({shown(line)})" if line else "its part of backward()",
        timeout_s,
        finding.text,
        cause=finding.cause,
        at=finding.at,
        **facts_of(blamed, "backward()", line),
    )


def _found(
    agent: Agent, part: Pass, key: tuple[int, tuple[int, int]], others: set[Member]
) -> tuple[Member, Finding] | None:
    pending = [agent.me]
    seen: set[str] = set()
    last: tuple[Member, Finding] | None = None
    while True:
        if not pending:  # nobody waits for these
            pending = [other for other in others if other.name not in seen]
        if not pending:
            return last
        member = pending.pop()
        if member.name in seen:
            continue
        seen.add(member.name)
        try:
            if member == agent.me:
                state = part.state()
            else:
                question = [key[0], *key[1]]
                state = agent.request(member, STATE, question, _PATIENCE_S, asked="backward()", codec=FACTS).wait()
        except CallTimeout:
            return member, agent.inquiries.of_worker(member)
        except PeerLost:
            return member, Finding("gone", "It is gone.")
        if "for_s" in state:
            at = str(state["at"])
            where = f" and is at {shown(at)}" if at else ""
            return member, Finding("handler", f"It has computed that for {state['for_s']:.1f} s{where}.", at)
        if state["waits_for"]:
            names = ", ".join(state["waits_for"])
            last = last or (member, Finding("handler", f"It waits for {names}."))
            for name in state["waits_for"]:
                with contextlib.suppress(PhalanxError):  # nobody has that name any more
                    pending.append(agent.member(name))
