"""A network of nodes without Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nodes.machine import Network, missing_permission, network


@pytest.fixture
def net() -> Iterator[Network]:
    """Return a network without nodes."""
    if reason := missing_permission():
        pytest.skip(reason)
    with network() as net:
        yield net
