"""The Kubernetes manifests of docs/clusters.md: they have only fields that exist, and say what the page says they do.

The fields are stated here as far as the manifests use them or might: those of TrainJob (v1alpha1, release 2.2) after
manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml of github.com/kubeflow/trainer; those of JobSet (v1alpha2) after
config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of github.com/kubernetes-sigs/jobset. An unknown field is an
error to the API server, or is dropped without a word.
"""

from __future__ import annotations

import re
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

# A mapping has its fields by name, "!" after the name of one that is required; a list has the form of its items; "*"
# stands for names that anybody may choose.
TEXTS = {"*": str}
META = {"name": str, "namespace": str, "labels": TEXTS, "annotations": TEXTS}
ENVIRONMENT = [{"name!": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath!": str, "apiVersion": str}}}]
MOUNTS = [{"name!": str, "mountPath!": str, "readOnly": bool, "subPath": str}]
VOLUMES = [
    {
        "name!": str,
        "emptyDir": {"medium": str, "sizeLimit": str},
        "hostPath": {"path!": str, "type": str},
        "persistentVolumeClaim": {"claimName!": str, "readOnly": bool},
    }
]
RESOURCES = {"limits": {"*": object}, "requests": {"*": object}}
CONTAINER = {
    "name!": str,
    "image": str,
    "command": [str],
    "args": [str],
    "env": ENVIRONMENT,
    "resources": RESOURCES,
    "volumeMounts": MOUNTS,
    "workingDir": str,
}
POD = {
    "containers!": [CONTAINER],
    "restartPolicy": str,
    "volumes": VOLUMES,
    "nodeSelector": TEXTS,
    "serviceAccountName": str,
    "subdomain": str,
}
JOB = {
    "parallelism": int,
    "completions": int,
    "completionMode": str,
    "backoffLimit": int,
    "template!": {"metadata": META, "spec": POD},
}
JOB_SET = {
    "apiVersion!": "jobset.x-k8s.io/v1alpha2",
    "kind!": "JobSet",
    "metadata!": META,
    "spec!": {
        "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
        "replicatedJobs": [
            {"name!": str, "replicas": int, "groupName": str, "template!": {"metadata": META, "spec": JOB}}
        ],
        "failurePolicy": {"maxRestarts": int, "restartStrategy": str},
        "suspend": bool,
        "ttlSecondsAfterFinished": int,
    },
}
PATCHED_POD = {
    "containers": [{"name!": str, "env": ENVIRONMENT, "volumeMounts": MOUNTS}],
    "volumes": VOLUMES,
    "nodeSelector": TEXTS,
    "serviceAccountName": str,
}
PATCHED_JOB = {"metadata": META, "spec": {"template": {"metadata": META, "spec": PATCHED_POD}}}
TRAIN_JOB = {
    "apiVersion!": "trainer.kubeflow.org/v1alpha1",
    "kind!": "TrainJob",
    "metadata!": META,
    "spec!": {
        "runtimeRef!": {"name!": str, "kind": str, "apiGroup": str},
        "trainer": {
            "image": str,
            "command": [str],
            "args": [str],
            "env": ENVIRONMENT,
            "numNodes": int,
            "numProcPerNode": int,
            "resourcesPerNode": RESOURCES,
        },
        "runtimePatches": [
            {
                "manager!": str,
                "trainingRuntimeSpec": {
                    "template": {
                        "metadata": META,
                        "spec": {"replicatedJobs": [{"name!": str, "template": PATCHED_JOB}]},
                    }
                },
            }
        ],
        "suspend": bool,
        "activeDeadlineSeconds": int,
    },
}
FORMS = {"TrainJob": TRAIN_JOB, "JobSet": JOB_SET}


def check(value: Any, form: Any, where: str) -> None:
    if isinstance(form, dict):
        assert isinstance(value, dict), where
        known = {name.rstrip("!"): own for name, own in form.items()}
        for name in form:
            assert not name.endswith("!") or name[:-1] in value, f"{where} has no {name[:-1]}"
        for name, own in value.items():
            assert name in known or "*" in known, f"{where}.{name} is not a field"
            check(own, known.get(name, known.get("*")), f"{where}.{name}")
    elif isinstance(form, list):
        assert isinstance(value, list), where
        for number, own in enumerate(value):
            check(own, form[0], f"{where}[{number}]")
    elif isinstance(form, type):
        assert type(value) is form or form is object, f"{where} is {value!r}"
    else:
        assert value == form, where


def test_there_is_one_of_each_kind() -> None:
    assert sorted(MANIFESTS) == sorted(FORMS)


@pytest.mark.parametrize("kind", FORMS)
def test_a_manifest_has_only_fields_that_exist(kind: str) -> None:
    check(MANIFESTS[kind], FORMS[kind], kind)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"numNode": 2}, "numNode is not a field"), ({"numNodes": "2"}, "numNodes is '2'"), ({"command": "x"}, "command")],
)
def test_the_check_notices_mistakes(change: dict[str, object], said: str) -> None:
    manifest = MANIFESTS["TrainJob"]
    spec = {**manifest["spec"], "trainer": {**manifest["spec"]["trainer"], **change}}
    with pytest.raises(AssertionError, match=re.escape(said)):
        check({**manifest, "spec": spec}, TRAIN_JOB, "TrainJob")


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
