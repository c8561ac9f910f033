"""Weights of public models: each family lists the parameters that the planner counts, without weights or ranks."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from slime_like.config.schema.names import FAMILIES
from slime_like.planner.config_json import shape_of
from slime_like.planner.models import MODELS
from slime_like.planner.trainer import TrainerSettings, stage_parameters
from slime_like.train.megatron.families.base import family_class
from slime_like.train.megatron.families.hf import HFFolder

# The planner leaves out biases of experts, and the norms of GLM-4 after attention and MLP.
TOLERANCE = 1e-4
SMALL = 2**17  # elements of a tensor; norms and biases have fewer


@pytest.mark.parametrize("name", MODELS)
def test_a_family_has_the_tensors_that_the_planner_counts(name: str, tmp_path: Path) -> None:
    values = MODELS[name] | {"rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert values["model_type"] in FAMILIES
    weights = family_class(values["model_type"])(HFFolder(tmp_path).config(), 1).weights()
    distinct = {id(weight): weight for weight in weights.values()}  # tied embeddings are one weight under two keys
    sizes = Counter(sum(map(math.prod, weight.shapes)) for weight in distinct.values())
    shape = shape_of(values, name)
    assert sum(sizes.elements()) == pytest.approx(shape.parameters, rel=TOLERANCE)
    parameters, planned = stage_parameters(shape, TrainerSettings(), 0), Counter[float]()
    for tensors in (*parameters.dense_tensors, *parameters.expert_tensors):
        planned[tensors.size] += tensors.num_tensors  # pyright: ignore[reportArgumentType]
    assert _large(sizes) == _large(planned)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_entry_has_the_norms_and_biases_of_its_class(name: str) -> None:
    entry, family = FAMILIES[name], family_class(name)
    assert getattr(family, "qk_norm", entry.head_norms) == entry.head_norms
    assert getattr(family, "qkv_bias", entry.qkv_bias) == entry.qkv_bias
    assert family.projection_norms == entry.projection_norms


def _large(sizes: Counter[int] | Counter[float]) -> dict[float, float]:
    return {size: count for size, count in sizes.items() if size > SMALL}
