"""Another rank's side of the meeting: find rank 0, prove that this process belongs to the job, and join.

A port that was derived from the job's id may be in use by another program, so a listener that does not know this job is
skipped and the search goes on. A port that the launcher or the user gave should be rank 0's, so a listener there that
proves another key, or nothing, is an error at once.
"""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed import DistStoreError

from phalanx import settings
from phalanx.errors import InitializationError
from phalanx.rendezvous.addresses import Unresolved, addresses_of_rank_0, source_address
from phalanx.rendezvous.meeting_point import MeetingPoint
from phalanx.rendezvous.opening import FIRST_ANSWER_S, REMIND_S
from phalanx.store.claim import Claim
from phalanx.store.client import Connections, JobStore, connect
from phalanx.store.company import Company
from phalanx.system.host import this_host
from phalanx.system.interfaces import is_loopback
from phalanx.system.threads import AwakeClock
from phalanx.topology.place import Place
from phalanx.wire.dial import Line
from phalanx.wire.key import Key
from phalanx.wire.proof import NoProof, WrongKey
from phalanx.words import format_limit, tell

__all__ = ["find_store"]

# How long to wait for the greeting of whatever accepted the connection, where only rank 0 should listen.
ANSWER_S = 2.0
# The same where the port is one of several, and has been silent before; the first time it is FIRST_ANSWER_S. So a
# stranger who listens there and says nothing delays the meeting by less than a second.
LATER_ANSWER_S = 0.75
# The pause between two rounds is an eighth of the time that the search has taken, within these limits: it delays the
# meeting by little, and ranks that wait for a long time do not flood rank 0's host.
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.25


# The connection, where it leads, and what rank 0 says of itself.
_Found = tuple[Line, tuple[str, int], Claim | None]


def find_store(place: Place, point: MeetingPoint, key: Key, claim: Claim, timeout_s: float) -> JobStore:
    """Search for rank 0 until it is found, join, and wait until every rank has joined.

    Args:
        place, point: this process, and where rank 0 should listen.
        key: the job's key.
        claim: what this process says of itself.
        timeout_s: how long to wait, in seconds.

    Raises:
        InitializationError: rank 0 refuses this process, proves another key, was not found in time, or gave up
            waiting for other ranks.
    """
    clock = AwakeClock()
    line, where, rank_0 = _find(place, point, key, claim, timeout_s, clock)
    company = Company()
    if rank_0 is not None:
        company.know_rank_0(rank_0)
    connections = Connections(line, where, key, claim, source_address(where[0]), company)
    store = JobStore(connections, timedelta(seconds=timeout_s))
    try:
        missing = store.wait_for_all(max(0.001, timeout_s - clock.now()))
    except DistStoreError as error:
        stopped = company.find_stopped() if company.rank_0_is_stopped() else None
        store.end()
        if stopped is not None:
            raise stopped from error
        raise InitializationError(f"rank {place.rank} had joined, but {error}") from error
    except BaseException:
        store.end()
        raise
    if missing:
        store.end()
        raise InitializationError.ranks_missing(
            missing, timeout_s, at=f"rank 0 at {where[0]} port {where[1]}", before=f"rank {place.rank} had joined, but"
        )
    return store


def _find(place: Place, point: MeetingPoint, key: Key, claim: Claim, timeout_s: float, clock: AwakeClock) -> _Found:
    remind_s = REMIND_S
    silent: list[int] = []  # the ports where something accepts connections and says nothing
    while True:
        trouble, addresses = "nothing listens there", [point.address]
        try:
            addresses = addresses_of_rank_0(place, point)
        except Unresolved as error:
            if not error.may_pass:
                raise InitializationError(str(error)) from error.__cause__
            trouble, addresses = str(error), []
        again = silent[:1]  # of those only one in each round, so that many of them delay it no more than one does
        del silent[:1]
        for port in [*(port for port in point.ports if port not in (*silent, *again)), *again]:
            patience_s = ANSWER_S if point.fixed else LATER_ANSWER_S if port in again else FIRST_ANSWER_S
            for address in addresses:
                limit_s = min(patience_s, max(0.05, timeout_s - clock.now()))
                try:
                    return _try(place, point, (address, port), key, claim, limit_s)
                except ConnectionRefusedError:
                    continue
                except TimeoutError:
                    trouble = f"no rank 0 answers at port {port}"
                    if port not in silent:
                        silent.append(port)
                except OSError as error:
                    trouble = error.strerror or str(error)
                except _NotHere as error:
                    trouble = str(error)
        now = clock.now()
        if now >= timeout_s:
            raise InitializationError(
                f"rank {place.rank} on {claim.host} waited {format_limit(timeout_s)} for rank 0 at "
                f"{_where(point, addresses)}: {trouble}. {_advice(place, addresses)}"
            )
        if now >= remind_s:
            remind_s += REMIND_S
            hint = _advice(place, addresses) if addresses and all(map(is_loopback, addresses)) else ""
            tell(
                f"rank {place.rank} on {claim.host} searches for rank 0 at {_where(point, addresses)} "
                f"({point.source}): {trouble}; {now:.0f} s so far{f'. {hint}' if hint else ''}"
            )
        time.sleep(min(max(SHORTEST_PAUSE_S, now / 8), LONGEST_PAUSE_S))


class _NotHere(Exception):
    """The process that listens there is not rank 0 of this job, or not yet."""


def _try(place: Place, point: MeetingPoint, where: tuple[str, int], key: Key, claim: Claim, limit_s: float) -> _Found:
    """Try to join at one port.

    Raises:
        OSError, _NotHere: rank 0 does not listen there, but may at another port, or later.
        InitializationError: this process cannot join the listener, and need not search further.
    """
    at = f"{where[0]} port {where[1]}"
    try:
        line, verdict = connect(where, key, claim, limit_s, source_address(where[0]))
    except NoProof:
        if point.fixed:
            raise InitializationError(
                f"rank {place.rank}: what listens on {at} ({point.source}) is not rank 0 of Phalanx. Set "
                f"MASTER_PORT to a port that is free on rank 0's host, for all ranks"
            ) from None
        raise _NotHere(f"something else listens on port {where[1]}") from None
    except WrongKey:
        if point.fixed:
            raise InitializationError(
                f"rank {place.rank} was refused: rank 0 at {at} proves another key than this process has "
                f"({key.source or 'none'}). Give every rank the same {settings.KEY_FILE}, or none"
            ) from None
        raise _NotHere(f"what listens on port {where[1]} proves another key ({key.source or 'none here'})") from None
    if verdict.kind == "welcome":
        return line, where, verdict.rank_0
    line.close()
    if verdict.kind == "refused":
        raise InitializationError.rank_refused(place.rank, verdict.reason)
    raise _NotHere(verdict.reason or f"another job's rank 0 listens on port {where[1]}")


def _where(point: MeetingPoint, addresses: list[str]) -> str:
    meaning = "" if addresses in ([], [point.address]) else f" ({', '.join(addresses)})"
    return f"{point.address}{meaning}, port{'s' if len(point.ports) > 1 else ''} {', '.join(map(str, point.ports))}"


def _advice(place: Place, addresses: list[str]) -> str:
    if addresses and all(map(is_loopback, addresses)):
        return (
            f"That is {this_host().name} itself (loopback): if rank 0 is on another host, set MASTER_ADDR to its "
            f"name or address, and MASTER_PORT, for all ranks"
        )
    return "Check whether rank 0 was started, and on the host that MASTER_ADDR names; a firewall may block the way"
