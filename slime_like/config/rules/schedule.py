"""Lengths of the learning-rate schedule: unset keys are filled in, and values that do not fit the run are rejected."""

from __future__ import annotations

from dataclasses import replace

from slime_like.config.schema.model import OptimConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError


def actor_steps(cfg: TrainConfig) -> tuple[int, str]:
    """Return the actor's number of optimizer steps in the run, and a formula for it in terms of config keys."""
    warmup, formula = cfg.critic.warmup_rollouts, "loop.num_rollout * loop.steps_per_rollout"
    if warmup:
        formula = "(loop.num_rollout - critic.warmup_rollouts) * loop.steps_per_rollout"
    return (cfg.loop.num_rollout - warmup) * cfg.loop.steps_per_rollout, formula


def without_schedule(cfg: TrainConfig) -> TrainConfig:
    """Return a copy of ``cfg`` with a constant schedule and no warm-up; ``cfg`` itself if loop.num_epoch is not set.

    The copy is for plans made before the rows of data.train are counted. loop.num_rollout is then unknown, so it cannot be
    checked whether a decay or a warm-up fits into the run. No process of a run uses the copy.
    """
    if cfg.loop.num_epoch is None:
        return cfg
    optim = replace(
        cfg.optim, schedule="constant", warmup_steps=0, warmup_fraction=None, decay_steps=None, wsd_decay_steps=None
    )
    return replace(cfg, optim=optim, critic=replace(cfg.critic, warmup_rollouts=0, lr_warmup_steps=0))


def resolve_schedule(
    optim: OptimConfig, num_steps: int, formula: str = "", warmup_key: str = "optim.warmup_steps"
) -> OptimConfig:
    """Return ``optim`` with warmup_steps, decay_steps and, for wsd, wsd_decay_steps filled in, all in optimizer steps.

    ``num_steps`` is the number of optimizer steps in the run, computed by ``formula``. ``warmup_key`` is the key that
    sets the warm-up. Raises ``ConfigError`` if the schedule is longer than the run or leaves no steps for the decay, if two
    keys set the warm-up, or if optim.min_lr is above optim.lr. A key that only other schedules read is an error too, unless
    its value is ``num_steps``: an earlier call may have filled that in.
    """
    if optim.min_lr > optim.lr:
        raise ConfigError(f"optim.min_lr={optim.min_lr:g} is above optim.lr={optim.lr:g}: lower optim.min_lr")
    decays, is_wsd = optim.schedule != "constant", optim.schedule == "wsd"
    for name, value, read_by in (
        ("decay_steps", optim.decay_steps, "linear, cosine and wsd" if not decays else None),
        ("wsd_decay_steps", optim.wsd_decay_steps, "wsd" if not is_wsd else None),
    ):
        if value is not None and read_by and value != num_steps:
            raise ConfigError(
                f"optim.{name}={value} is read only by optim.schedule {read_by}, not by {optim.schedule}: "
                f"remove optim.{name}, or choose a schedule that reads it"
            )
    decay = (optim.decay_steps if decays else None) or num_steps
    run = f"{num_steps} optimizer steps" + (f" ({formula})" if formula else "")
    _check_fits("optim.decay_steps", decay, num_steps, run, "the learning rate would not decay to optim.min_lr")
    warmup = optim.warmup_steps
    if optim.warmup_fraction is not None:
        if warmup:
            raise ConfigError(
                f"optim.warmup_steps={warmup} and optim.warmup_fraction={optim.warmup_fraction:g}: both set the length of the warm-up; "
                "remove optim.warmup_steps or optim.warmup_fraction"
            )
        warmup = round(optim.warmup_fraction * decay)
    _check_fits(warmup_key, warmup, num_steps, run, "the learning rate would never reach optim.lr")
    tail = (optim.wsd_decay_steps or max(1, decay // 10)) if is_wsd else 0
    if decays and warmup + tail >= decay + is_wsd:
        tail_text = f" and optim.wsd_decay_steps={tail} leave" if is_wsd else " leaves"
        raise ConfigError(
            f"{warmup_key}={warmup}{tail_text} none of {decay} optimizer steps for "
            f"optim.schedule={optim.schedule}: lower {warmup_key}, or raise optim.decay_steps"
        )
    return replace(
        optim,
        warmup_steps=warmup,
        warmup_fraction=None,
        decay_steps=decay,
        wsd_decay_steps=tail if is_wsd else None,
    )


def _check_fits(key: str, value: int, num_steps: int, run: str, harm: str) -> None:
    if value > num_steps:
        raise ConfigError(
            f"{key}={value} is longer than the run, which takes {run}: {harm}; set {key}={num_steps} or less, "
            "or raise loop.num_rollout"
        )
