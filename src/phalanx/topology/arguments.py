"""The place that a script gives itself: ``init_method="tcp://h1:29500"``, ``rank``, ``world_size``, as for torch."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import parse_qs, urlsplit

from phalanx.errors import InitializationError, LauncherEnvironmentError
from phalanx.topology.environment import Reading, read_environment
from phalanx.topology.place import Place
from phalanx.topology.readers import Finding, whole_number

__all__ = ["place_with"]


def place_with(reading: Reading | None, init_method: str | None, rank: int | None, world_size: int | None) -> Place:
    """This process's place, by its launcher and by what the script gives; where both give a fact they must agree.

    Args:
        reading: what the launcher says; read from ``os.environ`` by default.
        init_method: ``tcp://host:port``, with ``?rank=…&world_size=…`` if wanted, ``env://``, or None.
        rank, world_size: the place; None, or -1 as in torch, to leave it to the launcher.

    Raises:
        InitializationError: ``init_method`` is of another kind, or only one of rank and world size is known.
        LauncherEnvironmentError: what was given contradicts the launcher, or describes no process.
    """
    reading = read_environment() if reading is None else reading
    address = port = None
    if init_method is not None and init_method != "env://":
        address, port, query = _parse(init_method)
        rank = query.get("rank") if rank is None else rank
        world_size = query.get("world_size") if world_size is None else world_size
    # Scripts written for torch pass -1 for "not given", and for "not distributed".
    rank, world_size = (None if number == -1 else number for number in (rank, world_size))
    if rank is None and world_size == 1 and reading.launcher is None:
        rank = 0
    place = _agree(reading, rank, world_size)
    if address is None:
        return place
    said = f"init_method={init_method}"
    return replace(
        place,
        master_addr=address,
        master_port=port,
        first_of_allocation=False,
        keeps_store=False,
        sources={**place.sources, "master_addr": said, "master_port": said},
    )


def _agree(reading: Reading, rank: int | None, world_size: int | None) -> Place:
    given = {
        name: Finding(value, f"{name}={value} in phalanx.init()")
        for name, value in (("rank", rank), ("world_size", world_size))
        if value is not None
    }
    if not given:
        return reading.place()
    if reading.launcher is None:
        # No launcher is recognised, so the script is its own.
        if len(given) != 2:
            raise InitializationError(
                f"{next(iter(given.values())).source}, but the other is not known; pass both rank and world_size"
            )
        return _checked(Place("env", int(rank or 0), int(world_size or 0), None, None, None, None), given)
    for name, finding in given.items():
        own = reading.number(name)
        if own is not None and own != finding.value:
            raise LauncherEnvironmentError(
                f"{finding.source}, but {reading.name} says {reading.said(name)}; leave {name} out, or correct the "
                f"one that is wrong"
            )
    return _checked(replace(reading, found={**given, **reading.found}).place(), given)


def _checked(place: Place, given: dict[str, Finding]) -> Place:
    if place.world_size < 1 or not 0 <= place.rank < place.world_size:
        said = " and ".join(finding.source for finding in given.values())
        raise LauncherEnvironmentError(
            f"{said}: {place.rank} is not a rank of a world of {place.world_size}; ranks count from 0"
        )
    if place.world_size == 1:
        return replace(place, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1)
    return place


def _parse(init_method: str) -> tuple[str, int, dict[str, int]]:
    parts = urlsplit(init_method)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or not port:
        raise InitializationError(
            f"init_method={init_method!r} is neither tcp://host:port nor env://; for another rendezvous call "
            f"torch.distributed.init_process_group('phalanx', …) itself"
        )
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    numbers: dict[str, int] = {}
    for name in ("rank", "world_size"):
        if name in query:
            numbers[name] = whole_number(f"{name} in init_method", query[name])
    return parts.hostname, port, numbers
