"""JSON schemas of a RayJob: the fields that this project writes, by the reference of ray.io/v1, and KubeRay's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

CRD_VARIABLE = "SLIME_LIKE_RAYJOB_CRD"  # path of KubeRay's ray.io_rayjobs.yaml


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


TEXT = {"type": "string", "minLength": 1}
WORDS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0}
QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([KMGTPE]i?|m)?$"}
NAME = {"type": "string", "pattern": r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", "maxLength": 63}
RESOURCES = {"type": "object", "additionalProperties": QUANTITY}
CONTAINER = _object(
    ("name", "image"),
    name=NAME,
    image=TEXT,
    env={"type": "array", "items": _object(("name", "value"), name=TEXT, value={"type": "string"})},
    envFrom={"type": "array", "items": _object(("secretRef",), secretRef=_object(("name",), name=NAME))},
    resources=_object(limits=RESOURCES, requests=RESOURCES),
    securityContext=_object(runAsNonRoot={"type": "boolean"}, allowPrivilegeEscalation={"type": "boolean"}),
    volumeMounts={"type": "array", "items": _object(("name", "mountPath"), name=NAME, mountPath={"pattern": "^/"})},
)
VOLUME = _object(
    ("name",),
    name=NAME,
    persistentVolumeClaim=_object(("claimName",), claimName=NAME),
    emptyDir=_object(medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
)
POD = _object(
    ("spec",),
    spec=_object(
        ("containers",),
        terminationGracePeriodSeconds=COUNT,
        containers={"type": "array", "minItems": 1, "items": CONTAINER},
        volumes={"type": "array", "items": VOLUME},
    ),
)
CLUSTER = _object(
    ("headGroupSpec",),
    rayVersion=TEXT,
    authOptions=_object(mode={"enum": ["disabled", "token"]}),
    enableInTreeAutoscaling={"type": "boolean"},
    headGroupSpec=_object(("template",), rayStartParams=WORDS, template=POD),
    workerGroupSpecs={
        "type": "array",
        "items": _object(
            ("groupName", "template", "minReplicas", "maxReplicas"),
            groupName=NAME,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            rayStartParams=WORDS,
            template=POD,
        ),
    },
)
RAY_JOB = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=_object(("name",), name={**NAME, "maxLength": 47}),
    spec=_object(
        entrypoint=TEXT,
        runtimeEnvYAML=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        backoffLimit=COUNT,
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        activeDeadlineSeconds={"type": "integer", "minimum": 1},
        rayClusterSpec=CLUSTER,
    ),
)


def published_schema(definition: Path) -> dict[str, Any]:
    """Return the schema of ray.io/v1 in KubeRay's CustomResourceDefinition. It refuses unknown fields, as ``kubectl create`` does."""
    versions = yaml.load(definition.read_text(), yaml.CSafeLoader)["spec"]["versions"]
    return _strict(next(version for version in versions if version["name"] == "v1")["schema"]["openAPIV3Schema"])


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return ``schema`` with additional properties forbidden wherever it lists properties."""
    result = dict(schema)
    if "properties" in schema:
        result["properties"] = {name: _strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result.setdefault("additionalProperties", False)
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            result[name] = _strict(schema[name])
    return result
