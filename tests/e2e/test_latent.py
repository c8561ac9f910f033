"""+recipe=quickstart_latent, shortened, without a warm start: two trainer ranks replay the engine's experts.

The engine has four ranks in two groups of data-parallel attention. The groups hold different requests and share the
attention weights (FlowMLA); in each group, the latents of a sequence are spread over two ranks (DCP). Every rank has a
quarter of the experts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.quickstart.arithmetic import ArithmeticSpec
from slime_like.quickstart.model import LATENT, write_model
from tests.e2e import checks
from tests.e2e.conftest import SMALL_ROLLOUTS
from tests.e2e.runs import metrics, train
from tests.e2e.worker_server import forking_workers

pytestmark = pytest.mark.e2e
ROLLOUTS = 3
MAX_DIFFERENT = 0.01  # share of a layer's tokens for which rounding decides between experts
# The learning rate is 0 in the last step, so the weights that sampled the last rollout are the exported weights.
SHAPE = (
    "optim.schedule=wsd",
    "optim.min_lr=0",
    "optim.warmup_steps=0",
    f"optim.decay_steps={ROLLOUTS}",
    "optim.wsd_decay_steps=1",
)


def test_two_ranks_replay_the_experts_of_a_latent_model(tmp_path: Path) -> None:
    model, run_dir = tmp_path / "model", tmp_path / "run"
    write_model(model, LATENT)
    ArithmeticSpec().write(tmp_path)
    result = train(
        "+recipe=quickstart_latent",
        "run.prepare=null",
        f"model.hf_checkpoint={model}",
        f"data.train={tmp_path / 'train.jsonl'}",
        "reward.workers=1",
        "reward.name=tests.e2e.custom:digits",  # random answers have different scores
        "evaluation.datasets={}",
        "evaluation.interval=null",
        *SMALL_ROLLOUTS,
        *SHAPE,
        "rollout.tp=4",
        "rollout.dp_attention=2",
        "rollout.dcp=2",
        "rollout.sglang.ep_size=4",
        "rollout.flow_mla.enabled=true",
        "rollout.flow_mla.weights=[o_proj,q_proj,kv_b_proj,a_proj]",
        f"run.dir={run_dir}",
        f"loop.num_rollout={ROLLOUTS}",
        "run.save_hf=true",
        "run.dump_rollouts=true",
        log=tmp_path / "log",
        environment=forking_workers(),
    )
    assert result.code == 0, result.output
    assert "2 trainer ranks" in result.output
    rows = metrics(run_dir)
    checks.check_consistency(rows)
    checks.check_documented(rows)
    assert rows[1]["train/grad_norm"] > 0
    log = (run_dir / "logs" / "engine_0.log").read_text()
    assert "DCP enabled, dcp_size=2, tp_size=4" in log
    assert log.count("FlowMLA shards o_proj, q_proj, kv_b_proj, a_proj of 3 layers over 2 ranks") == 4
    for row in rows[1:]:
        assert row["rollout/dcp_exchange_time"] > 0
        assert row["probe/routed_experts_gap_max"] <= checks.MAX_LOGPROB_DIFFERENCE
        assert row["train/routed_experts_differ_max"] <= MAX_DIFFERENT
    checks.check_export(run_dir, ROLLOUTS - 1, {ROLLOUTS - 1}, temperature=1.0)
