"""Hybrid models (Qwen3.5, Qwen3-Next): invalid layouts and folders are refused at load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.planner import make_plan
from slime_like.config.load.loader import load_config
from slime_like.config.rules.files import family_of
from slime_like.config.rules.hf import read_hf_config
from slime_like.config.schema.names import FAMILIES
from slime_like.errors import CheckpointError, ConfigError, SlimeLikeError
from tests.config.bad_input import refusal
from tests.config.model_folder import SHAPE, write_model

HYBRID: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def options(argv: list[str], folder: Path) -> list[str]:
    return [arg for arg in argv if not arg.startswith("model.hf_checkpoint=")] + [f"model.hf_checkpoint={folder}"]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (
            "parallel.tp=2 parallel.cp=4 model.gdn.cp_mode=head",
            ["model.gdn.cp_mode=head", "tp 2 * cp 4", "4 key heads", "model.gdn.cp_mode=auto"],
        ),
        ("rollout.tp=8", ["rollout.tp=8", "4 linear attention key heads"]),
        (
            "algo=ppo critic.tp=2 critic.cp=4 model.gdn.cp_mode=head",
            ["model.gdn.cp_mode=head", "tp 2 * cp 4", "4 key heads"],
        ),
    ],
)
def test_linear_attention_heads_must_divide_evenly(
    extra: str, words: list[str], argv: list[str], tmp_path: Path
) -> None:
    model_argv = options(argv, write_model(tmp_path / "model", **HYBRID))
    with refusal(words, SlimeLikeError):
        load_config([*model_argv, *extra.split()], files=True)


@pytest.mark.parametrize(
    ("layout", "mode", "words"),
    [
        ("parallel.tp=2 parallel.cp=2", "head", "tp 2 * cp 2 divides 4 key and 8 value heads"),
        ("parallel.tp=2 parallel.cp=4", "state", "tp 2 * cp 4 does not divide the 4 key heads of linear attention"),
        ("parallel.tp=4 parallel.cp=4", "state", "does not divide the 4 key heads and the 8 value heads"),
    ],
)
def test_the_plan_explains_the_context_parallel_mode(
    layout: str, mode: str, words: str, argv: list[str], tmp_path: Path
) -> None:
    model_argv = options(argv, write_model(tmp_path / "model", **HYBRID))
    plan = make_plan(load_config([*model_argv, *layout.split()], files=True), Machine(0, 16, 64 * 2**30, ()))
    (decision,) = (d for d in plan.decisions if d.key == "model.gdn.cp_mode")
    assert decision.value == mode
    assert words in decision.reason


@pytest.mark.parametrize("key", [key for key in HYBRID if key.startswith("linear_")])
def test_a_missing_size_of_linear_attention_is_named(key: str, argv: list[str], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **{name: value for name, value in HYBRID.items() if name != key})
    with refusal(
        [f"model.hf_checkpoint={str(folder)!r}", "config.json", repr(key), "download or export the model again"],
        CheckpointError,
    ):
        load_config(options(argv, folder))


@pytest.mark.parametrize("composite", [False, True])
def test_the_language_part_of_a_vision_model_is_found(composite: bool, argv: list[str], tmp_path: Path) -> None:
    shape = {"model_type": "qwen3_5", "text_config": HYBRID | TEXT} if composite else HYBRID
    folder = write_model(tmp_path / "model", **shape)
    cfg = load_config([*options(argv, folder), "parallel.tp=2", "parallel.cp=2"], files=True)
    model = read_hf_config("model.hf_checkpoint", str(folder))
    assert FAMILIES[family_of(cfg, model)] == FAMILIES["qwen3_5"]
    assert model.gdn is not None and (model.gdn.key_heads, model.gdn.value_heads) == (4, 8)


TEXT = {name: value for name, value in SHAPE.items() if name != "model_type"}


def test_decays_in_float32_need_the_distributed_optimizer(argv: list[str], tmp_path: Path) -> None:
    model_argv = options(argv, write_model(tmp_path / "model", **HYBRID))
    plain = "parallel.distributed_optimizer=false"
    make_plan(load_config([*model_argv, plain]), Machine(0, 4, 16 * 2**30, ()))  # float32 on a CPU: one dtype
    with pytest.raises(ConfigError, match=f"{plain} with Gated DeltaNet layers in bfloat16"):
        make_plan(load_config([*model_argv, plain, "model.dtype=bfloat16"]), Machine(0, 4, 16 * 2**30, ()))
