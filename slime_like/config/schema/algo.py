"""algo.*: one schema per algorithm, chosen by ``algo=<name>``; a key that its loss does not read does not exist there."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config.schema.base import key, within
from slime_like.config.schema.policy import (
    AGGREGATIONS,
    KL_TYPES,
    AlgoConfig,
    PolicyConfig,
    PolicyGradientConfig,
    refuse_idle_kl,
)
from slime_like.errors import ConfigError


@dataclass(kw_only=True)
class GrpoConfig(PolicyGradientConfig):
    """GRPO: reward minus the group's mean, over its standard deviation."""

    name: str = key("grpo", "Algorithm.")
    group_advantage: str | None = key("grpo", "Advantage from the rewards of a group.")


@dataclass(kw_only=True)
class DrGrpoConfig(PolicyGradientConfig):
    """Dr. GRPO: no division by the standard deviation, no division by the length."""

    name: str = key("dr_grpo", "Algorithm.")
    group_advantage: str | None = key("dr_grpo", "Advantage from the rewards of a group.")
    aggregation: str = key("dr_grpo", "How token losses add up.", choices=AGGREGATIONS)


@dataclass(kw_only=True)
class RlooConfig(PolicyGradientConfig):
    """RLOO: reward minus the mean of the others in its group."""

    name: str = key("rloo", "Algorithm.")
    group_advantage: str | None = key("rloo", "Advantage from the rewards of a group.")


@dataclass(kw_only=True)
class DapoConfig(PolicyGradientConfig):
    """DAPO: GRPO with a wider upper clip range and a token-level loss; its other parts are options of every algorithm."""

    name: str = key("dapo", "Algorithm.")
    group_advantage: str | None = key("grpo", "Advantage from the rewards of a group.")
    eps_clip_high: float | None = key(0.28, "Upper clip range; null: eps_clip.")


@dataclass(kw_only=True)
class GspoConfig(PolicyGradientConfig):
    """GSPO: one ratio per sequence, the geometric mean of its tokens', clipped in a range of its own."""

    name: str = key("gspo", "Algorithm.")
    loss: str = key("gspo", "Token loss.")
    group_advantage: str | None = key("grpo", "Advantage from the rewards of a group.")
    aggregation: str = key("sequence_mean", "How token losses add up: GSPO's loss is one of sequences.")
    eps_clip: float = key(3e-4, "Lower clip range of the sequence ratio.")
    eps_clip_high: float | None = key(4e-4, "Upper clip range of the sequence ratio; null: eps_clip.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        if self.aggregation != "sequence_mean":
            raise ConfigError(
                f"{prefix}aggregation={self.aggregation!r} with algo=gspo: ratio and loss are those of whole sequences, "
                f"each of which counts once; set {prefix}aggregation=sequence_mean"
            )


@dataclass(kw_only=True)
class CispoConfig(PolicyConfig):
    """CISPO: the clipped ratio is a weight without gradient, so that no token loses its gradient."""

    name: str = key("cispo", "Algorithm.")
    loss: str = key("cispo", "Token loss.")
    group_advantage: str | None = key("grpo", "Advantage from the rewards of a group.")
    eps_clip: float = key(1.0, "Lower clip range of the weight; from 1 on there is none.")
    eps_clip_high: float | None = key(4.0, "Upper clip range: the largest weight is 1 + this; null: eps_clip.")


@dataclass(kw_only=True)
class ReinforcePlusPlusConfig(PolicyGradientConfig):
    """REINFORCE++: KL in the reward, returns per token, whitened over the whole batch."""

    name: str = key("reinforce_pp", "Algorithm.")
    token_advantage: str | None = key("reinforce_pp", "Advantage per token, computed on the ranks.")
    gamma: float = key(1.0, "Discount of later rewards.")
    kl_coef: float = key(0.0, "Weight of the KL to the reference taken off the reward of each token.")
    kl_reward_type: str = key("k1", "KL estimator in the reward.", choices=KL_TYPES)

    def check(self, prefix: str) -> None:
        super().check(prefix)
        within(prefix, self, 0.0, 1.0, "gamma")
        refuse_idle_kl(prefix, self, "kl_coef", "kl_reward_type")


@dataclass(kw_only=True)
class ReinforcePlusPlusBaselineConfig(PolicyGradientConfig):
    """REINFORCE++-baseline: reward minus the group's mean, less the KL at each token, whitened over the whole batch."""

    name: str = key("reinforce_pp_baseline", "Algorithm.")
    group_advantage: str | None = key("dr_grpo", "Advantage from the rewards of a group, before whitening.")
    token_advantage: str | None = key("reinforce_pp_baseline", "Advantage per token, computed on the ranks.")
    kl_coef: float = key(0.0, "Weight of the KL to the reference taken off the advantage of each token.")
    kl_reward_type: str = key("k1", "KL estimator in the advantage.", choices=KL_TYPES)

    def check(self, prefix: str) -> None:
        super().check(prefix)
        refuse_idle_kl(prefix, self, "kl_coef", "kl_reward_type")


@dataclass(kw_only=True)
class SftConfig(AlgoConfig):
    """Supervised fine-tuning: the label of each row is the response; no engine runs."""

    name: str = key("sft", "Algorithm.")
    loss: str = key("sft", "Token loss.")
