"""Shape of a model from its config.json: parts of attention that only the model's family determines."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import pytest

from slime_like.config.schema.family_entry import FamilyEntry
from slime_like.config.schema.names import FAMILIES
from slime_like.planner.config_json import shape_of
from slime_like.planner.models import MODELS

VALUES = MODELS["Llama-3.1-8B"] | {"model_type": "mine"}
PARTS = {"output_gate": "gated", "head_norms": "normed", "qkv_bias": "bias"}


@pytest.mark.parametrize("part", PARTS)
def test_an_entry_of_families_determines_a_part_of_attention(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry, changes = FamilyEntry("own:Mine"), dict[str, Any]({part: True})
    monkeypatch.setitem(FAMILIES, "mine", entry)
    plain = shape_of(VALUES, "mine")
    monkeypatch.setitem(FAMILIES, "mine", replace(entry, **changes))
    shape = shape_of(VALUES, "mine")
    assert plain.attention is not None and shape.attention is not None
    assert getattr(shape.attention, PARTS[part]) and not getattr(plain.attention, PARTS[part])
    assert shape.parameters > plain.parameters


def test_model_family_determines_them_for_another_model_type() -> None:
    values = MODELS["Qwen3-4B"]
    qwen3 = shape_of(values, "mine")
    assert replace(shape_of(values | {"model_type": "mine"}, "mine", family="qwen3"), name="mine") == qwen3
    assert shape_of(values | {"model_type": "qwen2"}, "mine", family="qwen3") == qwen3, (
        "as the trainer reads the weights"
    )
    for family in ("auto", "my_package.my_module:Family"):
        assert shape_of(values, "mine", family=family) == qwen3


def test_an_unknown_model_type_has_none_of_them() -> None:
    attention = shape_of(VALUES, "mine").attention
    assert attention is not None and astuple(attention)[3:] == (False, False, False)
