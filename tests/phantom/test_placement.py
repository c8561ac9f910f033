"""GPUs that Ray gives to the processes of a run, on four phantom GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.phantom.device import PhantomGpu
from tests.train.ranks import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_each_process_sees_its_gpus(tmp_path: Path) -> None:
    """Ranks request a GPU from Ray; engines request none, and see the GPUs that the run has reserved for them."""
    environment = PhantomGpu(num_devices=4).environment()
    (values,) = run_ranks("tests.phantom.placement_checks:observe", 1, tmp_path, environment=environment)
    assert (values["devices"], values["ray"], values["free"]) == (4, 4, 0)
    assert values["reserved"] == ["0", "1", "2", "3"], "sorted, in whatever order Ray gives them to the bundles"
    assert [values[f"trainer {rank}"] for rank in range(2)] == [[0], [1]]
    assert [values[f"engine {index}"] for index in range(2)] == [[2], [3]]
