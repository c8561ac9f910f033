"""One cluster of three nodes for all tests of this folder, and a small job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nodes.cluster import RayNodes, ray_nodes
from tests.nodes.job import SmallJob, make_job
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


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    """Return a job with a small random model, in a folder that all nodes share."""
    return make_job(tmp_path_factory.mktemp("job"))
