"""One cluster of three nodes for all tests of this folder, and a small job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime_like.quickstart.arithmetic import ArithmeticSpec
from slime_like.quickstart.model import ModelSpec, write_model
from tests.nodes.cluster import RayNodes, ray_nodes
from tests.nodes.machine import missing_permission


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    """Return a cluster of three nodes; the head is the first."""
    if reason := missing_permission():
        pytest.skip(reason)
    with ray_nodes(3, tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.fixture
def all_nodes(cluster: RayNodes) -> RayNodes:
    """Return the cluster with all nodes alive."""
    cluster.start(*(node for node in cluster.nodes if not node.alive()))
    return cluster


@dataclass(frozen=True, slots=True)
class SmallJob:
    """Model and data of a job, as overrides."""

    folder: Path

    def overrides(self, *changes: str) -> tuple[str, ...]:
        """Return the overrides of short rollouts of a random model; ``changes`` follow them."""
        return (
            "+recipe=quickstart",
            "run.prepare=null",
            f"model.hf_checkpoint={self.folder / 'model'}",
            f"data.train={self.folder / 'train.jsonl'}",
            "evaluation.datasets={}",
            "reward.name=tests.e2e.custom:num_digits",
            "rollout.batch_size=8",
            "rollout.n_samples_per_prompt=4",
            "optim.warmup_steps=0",
            "health.first_wait_s=0",
            "health.interval_s=1",
            "health.timeout_s=4",
            *changes,
        )


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    """Return a job with a small random model, in a folder that all nodes share."""
    folder = tmp_path_factory.mktemp("job")
    ArithmeticSpec().write(folder)
    write_model(folder / "model", ModelSpec())
    return SmallJob(folder)
