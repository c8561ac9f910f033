"""algo.*: one schema per algorithm, chosen by ``algo=<name>``; a key that its loss does not read does not exist there."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config.base import Config, key, within

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")
AGGREGATIONS = ("token_mean", "sequence_mean", "dr_grpo")


@dataclass(kw_only=True)
class AlgoConfig(Config):
    """What every algorithm has: names into the tables of ``config.names`` and how token losses add up."""

    name: str = key("grpo", "Algorithm.")
    loss: str = key("policy_gradient", "Token loss (table LOSSES).")
    group_advantage: str | None = key(None, "Advantage from the rewards of a group (table GROUP_ADVANTAGES).")
    token_advantage: str | None = key(None, "Advantage per token, computed on the ranks (table TOKEN_ADVANTAGES).")
    aggregation: str = key(
        "token_mean",
        "How token losses add up: token_mean, sequence_mean or dr_grpo (sum over max_response_len).",
        choices=AGGREGATIONS,
    )


@dataclass(kw_only=True)
class PolicyGradientConfig(AlgoConfig):
    """Keys of the clipped policy-gradient loss."""

    eps_clip: float = key(0.2, "Lower clip range of the ratio to the old policy.")
    eps_clip_high: float | None = key(None, "Upper clip range; null: eps_clip.")
    entropy_coef: float = key(0.0, "Weight of the entropy bonus.")
    kl_loss_coef: float = key(0.0, "Weight of the KL to the reference in the loss; 0: no reference is loaded for it.")
    kl_loss_type: str = key("k3", "KL estimator in the loss (low_var_kl is k3).", choices=KL_TYPES)
    use_tis: bool = key(False, "Truncated importance sampling between rollout and old policy.")
    tis_clip: float = key(2.0, "Largest importance weight under use_tis.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        within(prefix, self, 0.0, 10.0, "eps_clip", "eps_clip_high", "kl_loss_coef")
        within(prefix, self, 1.0, 1e6, "tis_clip")


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


@dataclass(kw_only=True)
class SftConfig(AlgoConfig):
    """Supervised fine-tuning: the label of each row is the response; no engine runs."""

    name: str = key("sft", "Algorithm.")
    loss: str = key("sft", "Token loss.")
