"""Weights of public models: each family lists as many parameters as the planner counts, without weights or ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from slime_like.config.schema.names import FAMILIES
from slime_like.planner.config_json import shape_of
from slime_like.planner.models import MODELS
from slime_like.train.megatron.families.base import family_class
from slime_like.train.megatron.families.hf import HFFolder

# The planner leaves out biases of experts, and the norms of GLM-4 after attention and MLP.
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_a_family_has_the_parameters_that_the_planner_counts(name: str, tmp_path: Path) -> None:
    values = MODELS[name] | {"rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert values["model_type"] in FAMILIES
    weights = family_class(values["model_type"])(HFFolder(tmp_path).config(), 1).weights()
    distinct = {id(weight): weight for weight in weights.values()}  # tied embeddings are one weight under two keys
    total = sum(math.prod(shape) for weight in distinct.values() for shape in weight.shapes)
    assert total == pytest.approx(shape_of(values, name).parameters, rel=TOLERANCE)
