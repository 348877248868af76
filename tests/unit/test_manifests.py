"""The Kubernetes manifests of docs/clusters.md: they have only fields that exist, and say what the page says they do.

The fields are those that the manifests use, after manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml (v1alpha1,
release 2.2) of github.com/kubeflow/trainer and config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml (v1alpha2) of
github.com/kubernetes-sigs/jobset. An unknown field is an error to the API server, or is dropped without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from phalanx.place.environment import read_environment

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"
MANIFESTS: dict[str, dict[str, Any]] = {
    manifest["kind"]: manifest
    for manifest in map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
}

# The kind of value in each field; a list is "[]".
COMMON = {"apiVersion": str, "kind": str, "metadata.name": str}
CONTAINER = {"name": str, "volumeMounts[].mountPath": str, "volumeMounts[].name": str}
POD = {"volumes[].name": str, "volumes[].emptyDir.medium": str}
POD |= {f"containers[].{name}": kind for name, kind in CONTAINER.items()}
OWN_POD = {"containers[].image": str, "containers[].command[]": str, "containers[].env[].name": str}
OWN_POD |= {"containers[].env[].valueFrom.fieldRef.fieldPath": str, "restartPolicy": str}
OF_JOB = {"backoffLimit": int, "completionMode": str, "completions": int, "parallelism": int}
OF_JOB |= {f"template.spec.{name}": kind for name, kind in (POD | OWN_POD).items()}
OF_JOB_SET: dict[str, type] = {"network.enableDNSHostnames": bool, "network.subdomain": str}
OF_JOB_SET |= {"replicatedJobs[].name": str, "replicatedJobs[].replicas": int}
OF_JOB_SET |= {f"replicatedJobs[].template.spec.{name}": kind for name, kind in OF_JOB.items()}
OF_TRAINER = {"command[]": str, "image": str, "numNodes": int, "numProcPerNode": int}
PATCH = "runtimePatches[].trainingRuntimeSpec.template.spec.replicatedJobs[]."
OF_TRAIN_JOB: dict[str, type] = {"runtimeRef.name": str, "runtimePatches[].manager": str, f"{PATCH}name": str}
OF_TRAIN_JOB |= {f"{PATCH}template.spec.template.spec.{name}": kind for name, kind in POD.items()}
OF_TRAIN_JOB |= {f"trainer.{name}": kind for name, kind in OF_TRAINER.items()}
FORMS: dict[str, tuple[str, dict[str, type]]] = {
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", OF_TRAIN_JOB),
    "JobSet": ("jobset.x-k8s.io/v1alpha2", OF_JOB_SET),
}


def fields(value: Any, where: str = "") -> Iterator[tuple[str, type]]:
    if isinstance(value, dict):
        for name, own in value.items():
            yield from fields(own, f"{where}.{name}".lstrip("."))
    elif isinstance(value, list):
        for own in value:
            yield from fields(own, f"{where}[]")
    else:
        yield where, type(value)


@pytest.mark.parametrize("kind", FORMS)
def test_manifest_has_only_fields_that_exist(kind: str) -> None:
    version, of_spec = FORMS[kind]
    known = COMMON | {f"spec.{name}": own for name, own in of_spec.items()}
    assert MANIFESTS[kind]["apiVersion"] == version
    assert [(name, own) for name, own in fields(MANIFESTS[kind]) if known.get(name) is not own] == []
    assert MANIFESTS.keys() == FORMS.keys()


def test_the_pods_of_the_job_set_are_the_nodes_of_one_torchrun() -> None:
    manifest = MANIFESTS["JobSet"]
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    # How JobSet names the pod of the first index: its own name, the replicated job's, the job's number, the index.
    first = f"{manifest['metadata']['name']}-{replicated['name']}-0-0.{manifest['spec']['network']['subdomain']}"
    (variable,) = container["env"]
    for index in range(job["completions"]):
        words = [word.replace(f"$({variable['name']})", str(index)) for word in container["command"]]
        assert words[0] == "torchrun"
        read = get_args_parser().parse_args(words[1:])
        assert (int(read.nnodes), int(read.node_rank), read.master_addr) == (job["completions"], index, first)
        assert read.training_script == "train.py"


def test_without_torchrun_a_pod_of_a_train_job_finds_its_place() -> None:
    trainer = MANIFESTS["TrainJob"]["spec"]["trainer"]
    for pod in range(trainer["numNodes"]):
        found = read_environment(
            {
                "KUBERNETES_SERVICE_HOST": "10.96.0.1",
                "PET_NNODES": str(trainer["numNodes"]),
                "PET_NPROC_PER_NODE": "1",
                "PET_NODE_RANK": str(pod),
                "PET_MASTER_ADDR": "train-node-0-0.train",
                "PET_MASTER_PORT": "29500",
            },
            [],
        ).place()
        assert (found.rank, found.world_size) == (pod, trainer["numNodes"])
