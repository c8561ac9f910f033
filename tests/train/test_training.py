"""Training on rollouts with several algorithms in split layouts, on a CPU in float32 and bfloat16."""

from __future__ import annotations

import pytest

from slime_like.config.schema.algo import (
    GrpoConfig,
    GspoConfig,
    ReinforcePlusPlusBaselineConfig,
    ReinforcePlusPlusConfig,
    SftConfig,
)
from slime_like.config.schema.resolved import Layout
from tests.train.jobs import SP, RankJob, Results

pytestmark = pytest.mark.ranks

LAYOUTS = {
    "tp2 sp": Layout(**SP),
    "pp2": Layout(pp=2),
    "dp2": Layout(dp=2),
    "cp2": Layout(cp=2),
    "vpp2": Layout(pp=2, vpp=2),
}
HYBRID_LAYOUTS = {"qwen3_5": Layout(**SP), "qwen3_next experts": Layout(cp=2)}  # kind of the model -> layout
ROLLOUTS = "tests.train.lifecycle:rollouts"
LEARN = {"temperature": 1.0, "optim": {"lr": 5e-3, "warmup_steps": 2}}
GRPO = GrpoConfig(kl_loss_coef=0.1, entropy_coef=0.01)
REINFORCE = ReinforcePlusPlusConfig(kl_coef=0.05)
BASELINE = ReinforcePlusPlusBaselineConfig(kl_coef=0.05)
GSPO = GspoConfig(eps_clip=0.01, eps_clip_high=0.02)
BF16 = {"dtype": "bfloat16", "model": {"recompute": "full"}, **LEARN}
JOBS = {
    1: [
        RankJob("no idle rank", "tests.train.training:idle_ranks", (Layout(),)),
        RankJob("another reference", "tests.train.training:another_reference", (Layout(),)),
        RankJob("rotary", "tests.train.training:rotary_frequencies"),
        RankJob("steps or rollouts", "tests.train.training:steps_or_rollouts", (Layout(),)),
        RankJob("durations", "tests.train.training:durations", (Layout(),)),
        RankJob("bad rows", "tests.train.training:bad_rows", (Layout(),)),
        RankJob("scheduling of one rank", "tests.train.training:scheduling", (Layout(),)),
    ],
    2: [
        RankJob("idle rank", "tests.train.training:idle_ranks", (Layout(dp=2),)),
        RankJob("scheduling", "tests.train.training:scheduling", (Layout(dp=2),)),
        *(RankJob(f"sft {name}", ROLLOUTS, (layout, SftConfig(), 1, 4, LEARN)) for name, layout in LAYOUTS.items()),
        *(RankJob(f"grpo {name}", ROLLOUTS, (layout, GRPO, 2, 2, {})) for name, layout in LAYOUTS.items()),
        *(RankJob(f"gspo {name}", ROLLOUTS, (layout, GSPO, 2, 1, {})) for name, layout in LAYOUTS.items()),
        *(RankJob(f"baseline {name}", ROLLOUTS, (layout, BASELINE, 1, 2, {})) for name, layout in LAYOUTS.items()),
        *(RankJob(f"reinforce {name}", ROLLOUTS, (layout, REINFORCE, 1, 2, {})) for name, layout in LAYOUTS.items()),
        RankJob("sft bfloat16 recompute", ROLLOUTS, (Layout(**SP), SftConfig(), 1, 4, BF16)),
        *(
            RankJob(f"sft {kind}", ROLLOUTS, (layout, SftConfig(), 1, 4, LEARN, kind))
            for kind, layout in HYBRID_LAYOUTS.items()
        ),
        RankJob("off policy", "tests.train.training:off_policy", (Layout(dp=2),)),
        RankJob("reference swap", "tests.train.training:reference_swap", (Layout(dp=2),)),
    ],
}


def metrics_of(results: Results, name: str) -> list[dict[str, float]]:
    """Return the metrics per rollout, which exactly one rank has."""
    (metrics,) = [rank for rank in results[name] if rank[0]]
    assert all(not rank[0] for rank in results[name] if rank is not metrics)
    return metrics


@pytest.mark.parametrize("name", [*(f"sft {n}" for n in (*LAYOUTS, *HYBRID_LAYOUTS)), "sft bfloat16 recompute"])
def test_supervised_loss_falls(name: str, results: Results) -> None:
    rollouts = metrics_of(results, name)
    assert rollouts[-1]["train/loss"] < 0.8 * rollouts[0]["train/loss"]
    assert [r["train/lr"] for r in rollouts] == pytest.approx([2.5e-3, 5e-3, 5e-3, 5e-3])


@pytest.mark.parametrize("algo", ["grpo", "gspo", "reinforce", "baseline"])
def test_layouts_report_the_same_metrics(algo: str, results: Results) -> None:
    runs = [metrics_of(results, f"{algo} {name}") for name in LAYOUTS]
    for rollout in zip(*runs, strict=True):
        for metric in ("train/loss", "train/pg_loss", "train/grad_norm", "train/ppo_kl", "train/num_tokens"):
            assert [r[metric] for r in rollout] == pytest.approx(
                [rollout[0][metric]] * len(LAYOUTS), rel=1e-4, abs=1e-6
            )


def test_reference_and_old_policy_have_the_expected_weights(results: Results) -> None:
    first, second = metrics_of(results, "grpo dp2")
    assert (
        0 < first["train/kl_loss"] < second["train/kl_loss"]
    )  # in the first of two optimizer steps the policy equals the reference
    assert first["train/ppo_kl"] != 0  # the second optimizer step compares with the policy before the first
    assert {"perf/log_probs_time", "perf/ref_log_probs_time", "perf/actor_train_time", "train/entropy"} <= first.keys()


def test_the_training_time_is_that_of_the_optimizer_steps(results: Results) -> None:
    (durations,) = results["durations"]
    assert durations == {"perf/log_probs_time": 10, "perf/ref_log_probs_time": 10, "perf/actor_train_time": 2}


def test_each_step_of_a_rollout_counts_its_own_tokens(results: Results) -> None:
    """Two steps with unequal numbers of tokens give the same gradients and weights in one rollout as in two."""
    ((one_rollout, two_rollouts),) = results["steps or rollouts"]
    assert one_rollout == two_rollouts


def test_the_second_step_of_a_rollout_has_ratios_of_sequences(results: Results) -> None:
    (only,) = metrics_of(results, "gspo dp2")
    assert only["train/ois"] != 1 != only["train/seq_ratio_max"]
    assert 0 < only["train/pg_clipfrac"] < 0.5  # none at the first step


def test_the_reference_swap_is_exact(results: Results) -> None:
    for rank in results["reference swap"]:
        assert all(rank.values()), rank


def test_drift_is_measured_only_on_tokens_of_the_trainers_version(results: Results) -> None:
    (result,) = [rank for rank in results["off policy"] if rank["metrics"]]
    metrics = result["metrics"]
    assert metrics["train/off_policy_token_ratio"] == pytest.approx(result["stale"] / result["all"])
    for suffix in ("", "_p99", "_max"):
        assert metrics[f"train/train_rollout_logprob_abs_diff{suffix}"] == pytest.approx(0.25, abs=1e-5)
    k3 = 2.718281828**-0.25 - 1 + 0.25
    assert metrics["train/train_rollout_kl_k3"] == pytest.approx(k3, abs=1e-5)


def test_ranks_without_trained_tokens_change_nothing(results: Results) -> None:
    (expected,) = results["no idle rank"]
    metrics, idle_metrics = results["idle rank"]
    assert idle_metrics == {}
    for metric in ("train/loss", "train/grad_norm", "train/entropy", "train/num_tokens"):
        assert metrics[metric] == pytest.approx(expected[metric], rel=1e-5)


def test_bad_rows_stop_before_the_weights_move(results: Results) -> None:
    (errors,) = results["bad rows"]
    assert errors["foreign token"].startswith("DataError: token id ")
    assert "vocabulary of 250" in errors["foreign token"]
    assert "nan" in errors["nan"].lower()
    assert errors["weights"] == "unchanged"


def test_the_reference_may_be_another_checkpoint(results: Results) -> None:
    (metrics,) = results["another reference"]
    assert metrics["train/kl_loss"] > 0.01


def test_rotary_frequencies_are_those_of_transformers(results: Results) -> None:
    (errors,) = results["rotary"]
    assert errors["default"] == errors["linear"] == errors["llama3"] == errors["yarn"] == 0
    unsupported = "ConfigError: config.json: rope_type='longrope' is not supported: the trainer supports only "
    assert errors["longrope"] == f"{unsupported}default, linear, llama3, yarn; train another model"


def test_ranks_with_peers_use_batch_scheduling(results: Results) -> None:
    assert results["scheduling"] == [True, True]
    assert results["scheduling of one rank"] == [False]
