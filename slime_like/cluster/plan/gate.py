"""Tolerances of trainer against engine, by device and dtype."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.cluster.plan.types import Notes
from slime_like.config.schema.root import TrainConfig
from slime_like.metrics.drift import ROUNDING

# Float32 engines and trainers differ by the order of their sums alone: a few 1e-6 per layer. Bfloat16 has 8 bits of
# mantissa, each layer rounds, and the largest of some hundred log-probabilities strays by up to a tenth; weights that
# did not arrive are off by far more.
FLOAT32 = {"cpu": 1e-4, "cuda": 1e-3}  # on a CPU over ten times what was measured (docs/architecture.md)
BFLOAT16_PROBE = 0.15
ANY_NUMBER = float("inf")


@dataclass(frozen=True, slots=True)
class Gates:
    """Largest |trainer - engine| log-probability that a run goes on with."""

    probe: float  # of the probe's sequences after a push
    samples: float | None  # of sampled tokens before the optimizer step that trains on them; None: not judged
    rounding: float  # the mean over a rollout's samples that needs no warning


def gates(cfg: TrainConfig, device: str, dtype: str, notes: Notes) -> Gates:
    """The keys of ``weights.*``, or what device and dtype allow."""
    why = why_samples = f"rounding of {dtype} on {device}"
    samples: float | None
    if dtype == "float32":
        probe = samples = FLOAT32[device]
    else:
        probe, samples = BFLOAT16_PROBE, ANY_NUMBER
        why_samples = f"single tokens of low probability differ much in {dtype}: weights.drift_warning watches the mean"
    if cfg.run.deterministic and device == "cpu":
        probe = samples = 0.0
        why = why_samples = "run.deterministic: engine and trainer agree in every bit"
    elif cfg.weights.probe_tolerance is not None:
        probe = cfg.weights.probe_tolerance
    if cfg.run.mode == "train_only":
        samples, why_samples = None, "run.mode=train_only: the rollouts may be of other weights"
    elif cfg.weights.sample_tolerance is not None:
        samples = cfg.weights.sample_tolerance
    if cfg.weights.probe_tolerance is None:
        notes.add("weights.probe_tolerance", probe, why)
    if cfg.weights.sample_tolerance is None:
        notes.add("weights.sample_tolerance", samples, why_samples)
    return Gates(probe, samples, ROUNDING[dtype])
