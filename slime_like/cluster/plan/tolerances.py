"""Tolerances for differences between trainer and engine, by device and dtype."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.cluster.plan.types import PlanDecisions
from slime_like.config.schema.root import TrainConfig
from slime_like.metrics.drift import ROUNDING

# In float32, engine and trainer differ only in the order of summation: a few 1e-6 per layer. Bfloat16 has an 8-bit
# mantissa and each layer rounds, so the largest difference among a few hundred log-probabilities reaches 0.1. Missing
# weights cause far larger differences.
FLOAT32 = {"cpu": 1e-4, "cuda": 1e-3}  # on a CPU more than ten times the measured value (docs/architecture.md)
BFLOAT16_PROBE = 0.15
UNLIMITED = float("inf")


@dataclass(frozen=True, slots=True)
class LogprobTolerances:
    """Limits of the difference |trainer - engine| of log-probabilities in a run."""

    probe: float  # for the probe's sequences after a push
    samples: float | None  # for sampled tokens, before the optimizer step that trains on them; None: not checked
    rounding: float  # mean over a rollout's samples below which there is no warning


def logprob_tolerances(cfg: TrainConfig, device: str, dtype: str, decisions: PlanDecisions) -> LogprobTolerances:
    """Return the tolerances set in ``weights.*``, or the defaults for device and dtype.

    With ``run.deterministic`` on a CPU, ``probe`` and ``samples`` are 0; ``check_bitwise`` rejects other values. With
    ``run.mode=train_only``, ``samples`` is None, because other weights may have generated the rollouts.
    """
    reason = samples_reason = f"rounding of {dtype} on {device}"
    samples: float | None
    if dtype == "float32":
        probe = samples = FLOAT32[device]
    else:
        probe, samples = BFLOAT16_PROBE, UNLIMITED
        samples_reason = (
            f"single tokens of low probability differ a lot in {dtype}; weights.drift_warning monitors the mean"
        )
    if cfg.run.deterministic and device == "cpu":
        probe = samples = 0.0
        reason = samples_reason = "run.deterministic: engine and trainer are bitwise identical"
    elif cfg.weights.probe_tolerance is not None:
        probe = cfg.weights.probe_tolerance
    if cfg.run.mode == "train_only":
        samples, samples_reason = None, "run.mode=train_only: other weights may have generated the rollouts"
    elif cfg.weights.sample_tolerance is not None:
        samples = cfg.weights.sample_tolerance
    if cfg.weights.probe_tolerance is None:
        decisions.add("weights.probe_tolerance", probe, reason)
    if cfg.weights.sample_tolerance is None:
        decisions.add("weights.sample_tolerance", samples, samples_reason)
    return LogprobTolerances(probe, samples, ROUNDING[dtype])
