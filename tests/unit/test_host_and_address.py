"""Which host this is, and by which address others reach it: one answer each, wherever they are asked for."""

from __future__ import annotations

import socket

import pytest

from phalanx.errors import InitializationError
from phalanx.launch.job.host_slots import parse_hosts
from phalanx.launch.job.job import make_job
from phalanx.launch.job.mpi_launcher import MpiLauncher
from phalanx.launch.job.target import Target
from phalanx.system import interfaces
from phalanx.system.host import machine_name
from phalanx.system.interfaces import is_other_host, listening_address, outward_address, outward_addresses

TARGET = Target("program", "true", "/bin/true", ("true",))
HYDRA = MpiLauncher("mpich", "Hydra", "/bin/mpiexec")


@pytest.fixture
def two_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a name that means loopback, a default route by eth0, and a network of its own for ib0."""
    here = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.3", "fd00::3"], "ib0": ["fd01::3", "10.1.0.3"], "down0": []}
    names = {machine_name(): ["127.0.1.1"], "other": ["10.0.0.4"], "fast": ["10.1.0.4"], "alias": ["10.0.0.3"]}
    ways = {"192.0.2.1": "10.0.0.3", "10.0.0.4": "10.0.0.3", "10.1.0.4": "10.1.0.3"}

    def resolve(name: str) -> list[str]:
        if name not in names and not name[0].isdigit():
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return names.get(name, [name])

    monkeypatch.delenv("PHALANX_INTERFACE", raising=False)
    monkeypatch.setattr(interfaces, "interface_addresses", lambda: here)
    monkeypatch.setattr(interfaces, "resolve", resolve)
    monkeypatch.setattr(
        interfaces,
        "_source_address",
        lambda target: target if any(target in own for own in here.values()) else ways.get(target),
    )


@pytest.mark.usefixtures("two_networks")
def test_others_reach_this_host_by_the_chosen_interface() -> None:
    assert outward_address() == "10.0.0.3"
    assert outward_address(["no-such-name", "alias", "fast"]) == "10.1.0.3"
    assert outward_address(["fast"], {"PHALANX_INTERFACE": "eth0"}) == "10.0.0.3"
    assert outward_address([], {"PHALANX_INTERFACE": "ib0"}) == "fd01::3"
    assert outward_addresses([], {"PHALANX_INTERFACE": "ib0"}) == ["10.1.0.3"]
    assert outward_addresses(["fast"]) == ["10.1.0.3", "10.0.0.3"]
    lists = (["fd00::3"], ["fd00::3", "fd01::3"], ["10.0.0.3", "10.1.0.3"])
    assert [*map(listening_address, lists)] == ["fd00::3", "::", "0.0.0.0"]
    with pytest.raises(InitializationError, match="has no address on it"):
        outward_address([], {"PHALANX_INTERFACE": "down0"})


@pytest.mark.usefixtures("two_networks")
def test_launcher_is_reached_by_the_same_address_and_knows_other_hosts() -> None:
    slurm = {"SLURM_JOB_ID": "7"}
    cases: list[tuple[str, str | None, dict[str, str], str]] = [
        ("alias:1,127.0.0.1:1", None, {}, "127.0.0.1"),
        ("alias:1,fast:1", None, {}, "10.1.0.3"),
        ("alias:1,other:1", "ib0", {}, "10.1.0.3"),
        ("alias:1,other:1", None, {"PHALANX_INTERFACE": "ib0"}, "10.1.0.3"),
        ("alias:1,fast:1", "hsn0", {}, "10.1.0.3"),  # an interface that only the ranks' hosts have
        ("", None, slurm, "10.0.0.3"),
        ("", "ib0", slurm, "10.1.0.3"),
    ]
    for hosts, interface, environment, address in cases:
        listed = parse_hosts(hosts) if hosts else ()
        ranks = None if hosts else 2
        job = make_job(ranks, TARGET, mpi=HYDRA, hosts=listed, interface=interface, environment=environment)
        assert job.addresses == (address,), (hosts, interface)
    assert is_other_host("other")
    assert not any(map(is_other_host, ("alias", machine_name(), "127.0.0.1", "no-such-name")))
