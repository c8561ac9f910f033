"""Keys shared by several algorithms. ``names.ALGORITHMS`` maps each algorithm to its schema."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime_like.config.schema.base import Config, key, within
from slime_like.config.schema.names import KL_ESTIMATORS
from slime_like.config.schema.unused_keys import refuse_unused_keys
from slime_like.errors import ConfigError

KL_TYPES = tuple(KL_ESTIMATORS)
AGGREGATIONS = ("token_mean", "sequence_mean", "dr_grpo")
ROUTING_REPLAYS = ("off", "rollout", "old")
REJECTIONS = ("none", "product", "geometric")
MAX_LOG_RATIO = 20.0  # limit for importance ratios: exp(20) = 5e8 is finite in bfloat16 and float32


@dataclass(kw_only=True)
class AlgoConfig(Config):
    """Keys of every algorithm: its name, loss and advantages, and the aggregation of token losses.

    The loader sets ``name`` to the algorithm's key in ``ALGORITHMS``. The schemas of this project also have that key as the
    default of ``name``, for code that constructs them without the loader.
    """

    name: str = key("grpo", "Algorithm.")
    loss: str = key(
        "policy_gradient",
        "Token loss: a name registered in LOSSES, or an import path such as my_pkg.my_mod:MyLoss; by default the algorithm's.",
    )
    group_advantage: str | None = key(
        None,
        "Advantage from the rewards of a group: a name registered in GROUP_ADVANTAGES, or an import path such as "
        "my_pkg.my_mod:function.",
    )
    token_advantage: str | None = key(
        None,
        "Advantage per token, computed on the trainer ranks: a name registered in TOKEN_ADVANTAGES, or an import path such as "
        "my_pkg.my_mod:MyAdvantage.",
    )
    aggregation: str = key(
        "token_mean",
        "Aggregation of token losses: token_mean, sequence_mean or dr_grpo (sum divided by max_response_len).",
        choices=AGGREGATIONS,
    )


@dataclass(kw_only=True)
class PolicyConfig(AlgoConfig):
    """Keys of losses that weight tokens by an advantage and a clipped ratio to the old policy."""

    eps_clip: float = key(0.2, "Lower clip range: the ratio to the old policy is clipped at 1 - eps_clip.")
    eps_clip_high: float | None = key(None, "Upper clip range; null: eps_clip.")
    entropy_coef: float = key(0.0, "Weight of the entropy bonus.")
    kl_loss_coef: float = key(0.0, "Weight of the KL to the reference in the loss; 0: no reference model is needed.")
    kl_loss_type: str = key(
        "low_var_kl",
        "KL estimator in the loss (low_var_kl: k3 clamped to 10).",
        choices=KL_TYPES,
        table="KL_ESTIMATORS",
    )
    mask_truncated: bool = key(
        False, "Exclude samples truncated at the length limit from the loss (DAPO's overlong filtering)."
    )
    mask_offpolicy: bool = key(
        False, "For samples continued under new weights, train only on the tokens of the sample's newest weights."
    )
    use_rollout_logprobs: bool = key(False, "Use the engine's log-probabilities for the old policy.")
    off_policy: str = key(
        "importance",
        "Correction for tokens sampled by another policy: a name registered in OFF_POLICY, or an import path such as "
        "my_pkg.my_mod:function; importance reads use_tis, use_mis and rejection.",
    )
    use_tis: bool = key(False, "Truncated importance sampling between rollout policy and old policy.")
    tis_clip: float = key(2.0, "Maximum importance weight under use_tis.")
    tis_clip_low: float = key(0.0, "Minimum importance weight under use_tis.")
    use_mis: bool = key(False, "Masked importance sampling: a weight outside [mis_low, mis_high] becomes 0.")
    mis_low: float = key(0.5, "Minimum importance weight that use_mis keeps.")
    mis_high: float = key(5.0, "Maximum importance weight that use_mis keeps.")
    rejection: str = key(
        "none",
        "Drop sequences by their ratio of old policy to rollout policy: the product over tokens, or the geometric mean.",
        choices=REJECTIONS,
    )
    rejection_low: float | None = key(None, "Minimum sequence ratio that rejection keeps; null: no bound.")
    rejection_high: float | None = key(None, "Maximum sequence ratio that rejection keeps; null: no bound.")

    routing_replay: str = key(
        "off",
        "Experts that the policy's passes replay: rollout (the engine's), old (those of the old-log-probability pass) or off.",
        choices=ROUTING_REPLAYS,
    )
    routing_replay_reference: bool = key(
        False, "Replay the engine's experts in the reference's pass too; by default the reference chooses its own."
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        within(prefix, self, 0.0, 10.0, "eps_clip", "eps_clip_high", "kl_loss_coef")
        within(prefix, self, 1.0, 1e6, "tis_clip", "mis_high")
        within(prefix, self, 0.0, 1.0, "tis_clip_low", "mis_low")
        within(prefix, self, 0.0, 1.0, "rejection_low")
        within(prefix, self, 1.0, 1e30, "rejection_high")
        _refuse_disabled(prefix, self, "use_tis", "tis_clip", "tis_clip_low")
        _refuse_disabled(prefix, self, "use_mis", "mis_low", "mis_high")
        refuse_idle_kl(prefix, self, "kl_loss_coef", "kl_loss_type")
        if self.routing_replay != "rollout":
            setting = f"{prefix}routing_replay={self.routing_replay}"
            refuse_unused_keys(prefix, self, ("routing_replay_reference",), setting, f"{prefix}routing_replay=rollout")
        self._check_corrections(prefix)

    def _check_corrections(self, prefix: str) -> None:
        if self.use_tis and self.use_mis:
            raise ConfigError(
                f"{prefix}use_tis=true with {prefix}use_mis=true: a token has one importance weight, truncated or "
                f"masked; set {prefix}use_tis=false or {prefix}use_mis=false"
            )
        bounds = (self.rejection_low, self.rejection_high)
        if self.rejection == "none" and bounds != (None, None):
            name = "rejection_low" if self.rejection_low is not None else "rejection_high"
            raise ConfigError(
                f"{prefix}{name}={getattr(self, name):g} has no effect with {prefix}rejection=none: "
                f"set {prefix}rejection=geometric or product, or remove {prefix}{name}"
            )
        if self.rejection != "none" and not self.rejection_low and self.rejection_high is None:
            raise ConfigError(
                f"{prefix}rejection={self.rejection} has no bounds: set {prefix}rejection_low or {prefix}rejection_high, "
                "such as 0.99 and 1.01 for the geometric mean"
            )
        for name in ("rejection_low", "rejection_high"):
            bound = getattr(self, name)
            if bound and abs(math.log(bound)) >= MAX_LOG_RATIO:
                raise ConfigError(
                    f"{prefix}{name}={bound:g} never drops a sequence, because ratios are clamped to "
                    f"[{math.exp(-MAX_LOG_RATIO):.3g}, {math.exp(MAX_LOG_RATIO):.3g}]: set a bound inside this range, or "
                    f"remove {prefix}{name}"
                )
        corrections = [
            f"{prefix}{name}"
            for name, is_set in (
                ("use_tis", self.use_tis),
                ("use_mis", self.use_mis),
                ("rejection", self.rejection != "none"),
                ("off_policy", self.off_policy != PolicyConfig.off_policy),
            )
            if is_set
        ]
        if self.use_rollout_logprobs and corrections:
            raise ConfigError(
                f"{prefix}use_rollout_logprobs=true with {corrections[0]}: the old policy is then the rollout policy, so "
                f"there is nothing to correct; remove {prefix}use_rollout_logprobs or {corrections[0]}"
            )


@dataclass(kw_only=True)
class PolicyGradientConfig(PolicyConfig):
    """Keys of the clipped policy-gradient loss."""

    eps_clip_c: float | None = key(None, "Dual clip: maximum ratio for tokens with a negative advantage; null: off.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        if self.eps_clip_c is not None and not 1.0 < self.eps_clip_c <= 1e6:
            raise ConfigError(
                f"{prefix}eps_clip_c={self.eps_clip_c!r} must be above 1: it bounds the ratio from above, such as 3"
            )


def refuse_idle_kl(prefix: str, config: Config, coef: str, kind: str) -> None:
    """Raise ``ConfigError`` if the KL weight ``coef`` is 0, but the KL estimator ``kind`` differs from its default."""
    if getattr(config, coef) == 0:
        refuse_unused_keys(prefix, config, (kind,), f"{prefix}{coef}=0", f"{prefix}{coef} above 0")


def _refuse_disabled(prefix: str, config: Config, switch: str, *names: str) -> None:
    """Raise ``ConfigError`` if ``switch`` is off, but one of the keys ``names`` that it enables differs from its default."""
    if not getattr(config, switch):
        refuse_unused_keys(prefix, config, names, f"{prefix}{switch}=false", f"{prefix}{switch}=true")
