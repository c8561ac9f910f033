"""Estimated memory of a run on a CPU, above which the run is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_like.cluster.plan import fit, roles
from slime_like.errors import ConfigError
from tests.config.machines import LAPTOP
from tests.config.model_folder import write_model

GIB_PARAMETERS = 2**30
PROCESS = fit.PROCESS_BYTES / 2**30  # GiB
TWO_RANKS = "placement.actor_num_gpus_per_node=2"
PLAIN = "parallel.distributed_optimizer=false"


@pytest.fixture(autouse=True)
def large_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every model 2**30 parameters."""
    for module in (fit, roles):
        monkeypatch.setattr(module, "check_weights", lambda *_: GIB_PARAMETERS)


def needed_gib(plan: Any, *settings: str) -> float:
    """Return the GiB in the message that refuses the run on a machine without memory."""
    with pytest.raises(ConfigError, match="GiB of memory") as error_info:
        plan(*settings, "placement.device=cpu", machine=replace(LAPTOP, memory_bytes=0))
    match = re.search(r"about ([\d.]+) GiB", str(error_info.value))
    assert match is not None
    return float(match[1])


@pytest.mark.parametrize(
    ("settings", "per_parameter", "processes"),
    [
        ([], 16 + 4, 2),
        (["model.dtype=bfloat16"], 18 + 2, 2),
        (["rollout.num_engines=3", "model.dtype=bfloat16"], 18 + 3 * 2, 4),
        ([TWO_RANKS], 2 * 8 + 8 + 4, 3),
        ([TWO_RANKS, PLAIN], 2 * 16 + 4, 3),
        ([TWO_RANKS, "algo=ppo"], 2 * (2 * 8 + 8) + 4, 5),
        ([TWO_RANKS, PLAIN, "algo=ppo"], 2 * 2 * 16 + 4, 5),
        (["algo=ppo", "critic.dp=4", "model.dtype=bfloat16"], 18 + 4 * 6 + 12 + 2, 6),
    ],
)
def test_optimizer_state_counts_once_if_it_is_sharded(
    plan: Any, settings: list[str], per_parameter: int, processes: int
) -> None:
    assert needed_gib(plan, *settings) == pytest.approx(per_parameter + processes * PROCESS, abs=0.06)


@pytest.mark.parametrize(("dtype", "per_parameter"), [("float32", 4), ("bfloat16", 2)])
def test_a_teacher_has_weights_in_the_dtype_of_the_run(
    plan: Any, tmp_path: Path, dtype: str, per_parameter: int
) -> None:
    teacher = f"teacher.hf_checkpoint={write_model(tmp_path / 'deeper', num_hidden_layers=6)}"
    settings = ("algo=distill", teacher, f"model.dtype={dtype}")
    one, two = (needed_gib(plan, *settings, f"teacher.dp={dp}") for dp in (1, 2))
    assert two - one == pytest.approx(per_parameter + PROCESS, abs=0.11)


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        (["rollout.remote_experts.policy=required"], 1),
        (["rollout.remote_experts.policy=fallback"], 2),
        (
            [
                "rollout.remote_experts.policy=required",
                "rollout.remote_experts.workers=[10.0.0.2:7000]",
                "rollout.remote_experts.key_file=KEY",
            ],
            0,
        ),
    ],
)
def test_remote_experts_count_once_per_copy_on_the_machine(
    plan: Any, tmp_path: Path, settings: list[str], copies: int
) -> None:
    experts = {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "intermediate_size": 1024}
    model = write_model(tmp_path / "moe", model_type="qwen3_moe", hidden_size=1024, **experts)
    key = tmp_path / "key"
    key.write_text("0" * 16)
    key.chmod(0o600)
    remote = [setting.replace("KEY", str(key)) for setting in ("rollout.remote_experts.count=32", *settings)]
    without = needed_gib(plan, f"model.hf_checkpoint={model}")
    change = 4 * (4 * 32 * 3 * 1024 * 1024) / 2**30 * (copies - 1)
    assert needed_gib(plan, f"model.hf_checkpoint={model}", *remote) - without == pytest.approx(change, abs=0.11)
