"""Manifest of a KubeRay ``RayJob``: a cluster for one run, with token authentication, a shared volume and keys from a secret.

The fields follow the reference of ray.io/v1 (docs.ray.io, "KubeRay CRD API reference"); ``authOptions`` needs KubeRay 1.5.1.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from slime_like.cluster.jobs.layout import JOINED, NodeLayout
from slime_like.errors import ConfigError

LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
QUANTITY = re.compile(r"[1-9]\d*(\.\d+)?([KMGT]i?)?")
IMAGE = re.compile(r"[\w][\w./:@-]*")
MAX_NAME = 47  # KubeRay appends a suffix to the name of a RayJob, and a label has at most 63 characters
STOP_S = 900  # between SIGTERM, on which a run saves, and SIGKILL
CODE = "/slime_like"  # in the image of docker/Dockerfile
RAY_VERSION = "2.60.0"


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """Image, resources of each pod, shared storage, secret and time limit of a job."""

    image: str
    claim: str  # PersistentVolumeClaim with access mode ReadWriteMany
    mount: str = "/shared"
    cpus: int = 64
    memory: str = "512Gi"
    shared_memory: str = "64Gi"
    secret: str | None = None  # name; its entries become environment variables, such as WANDB_API_KEY
    hours: int = 24


def ray_job(layout: NodeLayout, options: KubernetesOptions) -> dict[str, Any]:
    """Return the manifest of the ``RayJob``.

    Raises ``ConfigError`` naming an option that is invalid.
    """
    _check(options, layout)
    workers = layout.num_nodes - 1
    head = {
        "rayStartParams": {"dashboard-host": "0.0.0.0"},
        "template": _pod("ray-head", layout, options),
    }  # settings of the head's pod
    groups = [
        {
            "groupName": "gpu",
            "replicas": workers,
            "minReplicas": workers,
            "maxReplicas": workers,
            "rayStartParams": {},
            "template": _pod("ray-worker", layout, options),
        }
    ]
    cluster = {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": False,
        "headGroupSpec": head,
        **({"workerGroupSpecs": groups} if workers else {}),
    }
    command = shlex.join([f"{CODE}/.venv/bin/python", "train.py", *layout.arguments, JOINED])
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": _name(layout.run_name)},
        "spec": {
            "entrypoint": f"cd {CODE} && exec {command}",
            "runtimeEnvYAML": yaml.safe_dump({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_S)}}),
            "submissionMode": "K8sJobMode",
            "backoffLimit": 0,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "activeDeadlineSeconds": options.hours * 3600,
            "rayClusterSpec": cluster,
        },
    }


def manifest(layout: NodeLayout, options: KubernetesOptions) -> str:
    """Return the manifest as YAML."""
    return yaml.safe_dump(ray_job(layout, options), sort_keys=False, width=120)


def _pod(name: str, layout: NodeLayout, options: KubernetesOptions) -> dict[str, Any]:
    """Return the template of a pod that takes all GPUs of a node."""
    resources = {"cpu": str(options.cpus), "memory": options.memory, "nvidia.com/gpu": str(layout.gpus_per_node)}
    container: dict[str, Any] = {
        "name": name,
        "image": options.image,
        "env": [{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
        **({"envFrom": [{"secretRef": {"name": options.secret}}]} if options.secret else {}),
        "resources": {"limits": dict(resources), "requests": dict(resources)},
        "securityContext": {"runAsNonRoot": True, "allowPrivilegeEscalation": False},
        "volumeMounts": [{"name": "shared", "mountPath": options.mount}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": options.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}},
    ]
    return {"spec": {"terminationGracePeriodSeconds": STOP_S, "containers": [container], "volumes": volumes}}


def _name(run_name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", run_name.lower())[:MAX_NAME].strip("-") or "run"


def _check(options: KubernetesOptions, layout: NodeLayout) -> None:
    names = (("--claim", options.claim), ("--secret", options.secret))
    for flag, value in names:
        if value is not None and (not LABEL.fullmatch(value) or len(value) > 63):
            raise ConfigError(f"{flag} {value!r} is not a Kubernetes name: use lower-case letters, digits and -")
    for flag, value in (("--memory", options.memory), ("--shm", options.shared_memory)):
        if not QUANTITY.fullmatch(value):
            raise ConfigError(f"{flag} {value!r} is not a Kubernetes quantity: write e.g. 512Gi")
    if not IMAGE.fullmatch(options.image):
        raise ConfigError(f"--image {options.image!r} is not the name of an image: write e.g. REGISTRY/NAME:TAG")
    if not options.mount.startswith("/"):
        raise ConfigError(f"--mount {options.mount!r} is not an absolute path: begin it with /")
    if options.cpus < layout.gpus_per_node:
        raise ConfigError(
            f"--cpus {options.cpus} is below --gpus-per-node {layout.gpus_per_node}: a rank needs a CPU; raise --cpus"
        )
    if options.hours < 1:
        raise ConfigError(f"--hours {options.hours} must be 1 or more")
