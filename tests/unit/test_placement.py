"""The picture of where ranks run: its facts as text and as boxes, its colours, and names that are no XML."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import product

import pytest

from phalanx.topology.placement import DARK, LIGHT, placement_svg
from phalanx.topology.table import RankRow

SVG = "{http://www.w3.org/2000/svg}"


def placed(*hosts: int, name: str = "node{}", device: str = "cpu") -> list[RankRow]:
    """Place so many ranks on each host, one host after the other."""
    places = [(node, local) for node, count in enumerate(hosts) for local in range(count)]
    return [
        RankRow(rank, node, name.format(node), local, device.format(local), None, None, None)
        for rank, (node, local) in enumerate(places)
    ]


def boxes(picture: str, kind: str) -> list[list[str]]:
    """The lines of text directly in each box of a kind."""
    groups = [group for group in ET.fromstring(picture).iter(f"{SVG}g") if group[0].get("class") == kind]
    return [[text.text or "" for text in group.findall(f"{SVG}text")] for group in groups]


@pytest.mark.parametrize("hosts", [(1,), (8,), (4, 4), (1, 3, 2), (32, 32)], ids=str)
def test_picture_has_every_rank_once(hosts: tuple[int, ...]) -> None:
    rows = placed(*hosts, device="cuda:{}")
    picture = placement_svg(rows[::-1])
    root = ET.fromstring(picture)
    assert (root.get("role"), root.get("viewBox", "").split()[2]) == ("img", "360")
    assert min(int(size) for size in re.findall(r"(\d+)px \w", picture)) >= 11
    assert boxes(picture, "host") == [[f"node{node}"] for node in range(len(hosts))]
    expected = [[f"rank {row.rank}", f"local rank {row.local_rank}", f"cuda:{row.local_rank}"] for row in rows]
    assert boxes(picture, "rank") == expected
    for rank, local, device in expected:
        assert str(root[1].text).count(f"{rank} ({local}, {device})") == 1


def test_large_job_has_its_first_and_last_host() -> None:
    picture = placement_svg(placed(*[2] * 40))
    assert '<title id="placement-title">80 ranks on 40 hosts: first and last drawn</title>' in picture
    assert boxes(picture, "host") == [["node0"], ["node39"]]
    assert [box[0] for box in boxes(picture, "rank")] == ["rank 0", "rank 1", "rank 78", "rank 79"]


def test_names_are_escaped_and_wrapped() -> None:
    name, device = "a<b>&\"'\x01\udcff" + "x" * 40, "cuda:0 A100-SXM4-80GB"
    picture = placement_svg(placed(1, 2, name=name, device=device))
    assert "".join(boxes(picture, "host")[0]) == name.replace("\x01", "\ufffd").replace("\udcff", "\ufffd")
    assert boxes(picture, "rank")[0][2:] != [device]
    assert "".join(boxes(picture, "rank")[0][2:]).replace(" ", "") == device.replace(" ", "")


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast_is_that_of_the_wcag(scheme: dict[str, str]) -> None:
    def luminance(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for (over, least), under in product([("text", 4.5), ("line", 3.0)], ["page", "host", "rank", "fresh"]):
        low, high = sorted(luminance(scheme[part]) for part in (over, under))
        assert (high + 0.05) / (low + 0.05) >= least, (over, under)
