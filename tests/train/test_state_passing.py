"""model.gdn.cp_mode=state in a whole model: equal to transformers, as the layers that give every rank a share of the heads are."""

from __future__ import annotations

import pytest

from slime_like.config.gdn import GDNConfig
from slime_like.config.resolved import Layout
from tests.train.jobs import SP, Job, Results
from tests.train.parity import comparison
from tests.train.test_hybrid import BOUND, DECAY_BOUND

pytestmark = pytest.mark.ranks

CASES = {
    2: {"state cp2": ("qwen3_5", Layout(cp=2)), "state cp2 qwen3_next": ("qwen3_next", Layout(cp=2))},
    4: {"state cp4": ("qwen3_5", Layout(cp=4)), "state tp2 cp2 sp": ("qwen3_5", Layout(cp=2, **SP))},
}
MODEL = {"gdn": GDNConfig(cp_mode="state")}
JOBS = {
    size: [Job(name, "tests.train.parity:compare", (*case, MODEL, None)) for name, case in cases.items()]
    for size, cases in CASES.items()
}


@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_equals_hf(name: str, results: Results) -> None:
    found = comparison(results, name)
    assert found.worst <= BOUND, found
    assert found.score <= BOUND, found
    assert found.decay <= DECAY_BOUND, found
