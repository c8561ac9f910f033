"""GRPO with the KV cache of each sequence spread over both ranks of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.quickstart.arithmetic import ArithmeticSpec, write_datasets
from slime_like.quickstart.model import ModelSpec, write_model
from tests.e2e import checks
from tests.e2e.conftest import SMALL_ROLLOUTS
from tests.e2e.runs import metrics, train

pytestmark = pytest.mark.e2e
ROLLOUTS = 3


def test_engine_and_trainer_agree(tmp_path: Path) -> None:
    """Groups are aborted, and continued under new weights."""
    write_datasets(tmp_path, ArithmeticSpec())
    shape = ModelSpec(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_key_value_heads=1, head_dim=16)
    write_model(tmp_path / "model", shape)
    done = train(
        "+recipe=quickstart",
        *SMALL_ROLLOUTS,
        "run.prepare=null",
        f"model.hf_checkpoint={tmp_path / 'model'}",
        f"data.train={tmp_path / 'train.jsonl'}",
        "evaluation.datasets={}",
        "reward.name=tests.e2e.custom:digits",
        "rollout.tp=2",
        "rollout.dcp=2",
        "rollout.over_sampling_batch_size=24",
        "rollout.partial_rollout=true",
        f"run.dir={tmp_path / 'run'}",
        f"loop.num_rollout={ROLLOUTS}",
        "optim.schedule=constant",
        "optim.warmup_steps=0",
        log=tmp_path / "log",
    )
    assert done.code == 0, done.output
    assert "DCP enabled, dcp_size=2, tp_size=2" in (tmp_path / "run" / "logs" / "engine_0.log").read_text()
    rows = metrics(tmp_path / "run")
    assert rows[-1]["step"] == ROLLOUTS
    checks.check_consistency(rows)
