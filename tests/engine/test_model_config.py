"""Config overrides for an engine, computed from files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_like.errors import CheckpointError
from slime_like.rollout.engine.model_config import merge_overrides, other_models, override_args

L, F = "linear_attention", "full_attention"
HYBRID: dict[str, Any] = {"layer_types": [L, L, L, F, L, L, L, F]}


def overrides(folder: Path, config: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return override_args(str(folder))


def test_models_of_one_kind_of_layer_need_nothing(tmp_path: Path) -> None:
    for config in ({}, {"layer_types": [F, F]}, {"layer_types": None}, "{", "[]"):
        assert overrides(tmp_path, config) == {}
    assert override_args("somebody/a-model-of-the-hub") == {}


def test_no_model_module_is_left_out_if_the_architecture_is_not_known(tmp_path: Path) -> None:
    """SGLang reports what is wrong with the file."""
    for config in ("{", "[]", "{}", '{"architectures": null}', '{"architectures": [1]}', '{"architectures": ["No"]}'):
        (tmp_path / "config.json").write_text(config)
        assert other_models(str(tmp_path)) == []
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert "qwen3" not in (others := other_models(str(tmp_path))) and "llama" in others


BIASED = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "deepseek_v3"}, BIASED),
        ({"model_type": "kimi_k2"}, BIASED),
        ({"model_type": "deepseek_v3", **BIASED}, {}),
        ({"model_type": "deepseek_v3", **BIASED, "moe_layer_freq": 2}, {}),
        (
            {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "n_group": 4},
            {"moe_layer_freq": 1, "scoring_func": "softmax"},
        ),
        (
            {"model_type": "deepseek_v2", "topk_method": "greedy", "n_group": None, "moe_layer_freq": 1},
            {"scoring_func": "softmax", "n_group": 1, "topk_group": 1},
        ),
    ],
)
def test_fields_of_experts_that_transformers_leaves_out(
    config: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    assert overrides(tmp_path, config) == expected


def test_the_rotated_channels_of_minimax(tmp_path: Path) -> None:
    config = {"model_type": "minimax_m2", "head_dim": 128}
    rope = {"rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}}
    added = overrides(tmp_path, config | rope)
    assert added["rotary_dim"] == 64 and added["use_qk_norm"] is added["use_routing_bias"] is True
    assert "rotary_dim" not in overrides(tmp_path, config | rope | {"rotary_dim": 64})  # as released


def test_the_interval_that_transformers_leaves_out(tmp_path: Path) -> None:
    assert overrides(tmp_path, HYBRID) == {"full_attention_interval": 4}
    assert overrides(tmp_path, HYBRID | {"full_attention_interval": 4}) == {}
    assert overrides(tmp_path, {"layer_types": [L, L]}) == {"full_attention_interval": 3}


@pytest.mark.parametrize("types", [[L, F, F, L], [F, L, L], [L, L, F, L, F]])
def test_layers_without_an_interval_are_refused(tmp_path: Path, types: list[str]) -> None:
    with pytest.raises(CheckpointError, match="the full-attention layers in layer_types are not evenly"):
        overrides(tmp_path, {"layer_types": types})


def test_the_rotated_part_is_that_of_rope_parameters(tmp_path: Path) -> None:
    config = HYBRID | {"full_attention_interval": 4, "partial_rotary_factor": 0.25}
    assert overrides(tmp_path, config | {"rope_parameters": {"partial_rotary_factor": 0.5}}) == {
        "partial_rotary_factor": 0.5
    }
    assert overrides(tmp_path, config | {"rope_parameters": {"partial_rotary_factor": 0.25}}) == {}


def test_the_rotary_base_is_that_of_rope_parameters(tmp_path: Path) -> None:
    """transformers 5 writes the base only there; SGLang's Qwen3-Next reads it at the top level (default 10000)."""
    config = HYBRID | {"full_attention_interval": 4, "rope_parameters": {"rope_theta": 1e7}}
    assert overrides(tmp_path, config) == {"rope_theta": 1e7}
    assert overrides(tmp_path, config | {"rope_theta": 1e7}) == {}


def test_the_text_part_of_a_vision_model_is_served(tmp_path: Path) -> None:
    assert overrides(tmp_path, {"text_config": HYBRID}) == {
        "text_config": {"full_attention_interval": 4},
        "language_model_only": True,
    }
    text_config = HYBRID | {"full_attention_interval": 4}
    assert overrides(tmp_path, {"text_config": text_config, "vision_config": {}}) == {"language_model_only": True}


def test_user_overrides_of_a_nested_config_keep_its_other_fields() -> None:
    defaults = {"text_config": {"full_attention_interval": 4, "x": 1}, "language_model_only": True}
    user_overrides = {"text_config": {"x": 2}, "rope_theta": 7}
    assert merge_overrides(defaults, user_overrides) == {
        "text_config": {"full_attention_interval": 4, "x": 2},
        "language_model_only": True,
        "rope_theta": 7,
    }
