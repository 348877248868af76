"""The manifests of docs/clusters.md have only fields that the platforms know, of the right types."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx.launch.job.platforms import find_platform

ROOT = Path(__file__).parents[2]
SECTIONS = (ROOT / "tests/data/platforms/fields.txt").read_text().split("\n## ")[1:]
KNOWN = {section.partition(":")[0]: section.splitlines()[1:] for section in SECTIONS}
TITLES = {"Job": "Volcano", "task": "dstack", "multinode": "AWS Batch", None: "SkyPilot"}
TYPES = {dict: "object", list: "array", str: "string", int: "integer", bool: "boolean"}


def manifests() -> dict[str, Any]:
    """The manifests of the page, by their platforms or kinds."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs/clusters.md").read_text(), re.DOTALL | re.MULTILINE)
    found = [manifest for block in blocks for manifest in yaml.safe_load_all(block)]
    kinds = [manifest.get("kind", manifest.get("type")) for manifest in found]
    return {TITLES.get(kind, kind): manifest for kind, manifest in zip(kinds, found, strict=True)}


def fields(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each field of a manifest, with its value: ``spec.tasks[].name``."""
    yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from fields(item, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield from fields(item, f"{path}[]")


def mistakes(title: str, manifest: Any) -> Iterator[str]:
    """List what the platform would refuse, or leave out without a word."""
    lines = [line.split() for line in KNOWN[title] if line]
    found = list(fields(manifest))
    for path, value in found[1:]:
        known = next((line for line in lines if re.fullmatch(re.escape(line[0]).replace(r"\*", ".+"), path)), None)
        if known is None:
            yield f"{path}: no such field"
        elif TYPES[type(value)] != known[1]:
            yield f"{path}: {value!r} is no {known[1]}"
        elif known[-2] == "of" and value not in known[-1].split(","):
            yield f"{path}: {value!r} is none of {known[-1]}"
    counts = Counter(path for path, _ in found)
    for path, *said in lines:
        parent = path.rpartition(".")[0]
        if "required" in said and counts[path] < counts[parent]:
            yield f"{path}: is missing"


def test_page_has_a_manifest_for_each_platform() -> None:
    assert manifests().keys() == KNOWN.keys()


@pytest.mark.parametrize("title", KNOWN)
def test_manifest_has_only_fields_of_the_platform(title: str) -> None:
    assert not list(mistakes(title, manifests()[title]))


def test_mistakes_in_a_manifest_are_found() -> None:
    job = manifests()["AWS Batch"]
    container = job["nodeProperties"]["nodeRangeProperties"][0]["container"]
    del job["nodeProperties"]["mainNode"]
    job["shared"] = 1
    container["linuxParameters"]["sharedMemorySize"] = "1G"
    container["resourceRequirements"][0]["type"] = "TPU"
    assert sorted(each.rpartition(".")[2] for each in mistakes("AWS Batch", job)) == [
        "mainNode: is missing",
        "shared: no such field",
        "sharedMemorySize: '1G' is no integer",
        "type: 'TPU' is none of GPU,VCPU,MEMORY",
    ]


def test_manifest_of_a_jobset_says_what_jobset_does_not() -> None:
    jobset = manifests()["JobSet"]
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    given = {one["name"]: one for one in spec["template"]["spec"]["containers"][0]["env"]}
    annotations = {"jobset-name": jobset["metadata"]["name"], "replicatedjob-name": job["name"]}
    environment = {"JOB_COMPLETION_INDEX": "1"}
    for name, one in given.items():
        path = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        found = re.fullmatch(r"metadata\.annotations\['jobset\.sigs\.k8s\.io/(.*)'\]", path)
        environment[name] = annotations[found[1]] if found else one["value"]
    nodes = find_platform(environment)
    assert nodes is not None
    assert (nodes.nodes, nodes.node_rank, nodes.master_addr) == ("2", 1, "train-node-0-0.train")
    assert spec["parallelism"] == spec["completions"] == 2
