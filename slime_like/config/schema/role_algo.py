"""Algorithms that need a second role: a critic or a teacher. The keys of these roles are in ``schema.roles``."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config.schema.base import key, within
from slime_like.config.schema.policy import KL_TYPES, PolicyGradientConfig, refuse_idle_kl


@dataclass(kw_only=True)
class PpoConfig(PolicyGradientConfig):
    """PPO: advantages per token from a critic's values (critic.*)."""

    name: str = key("ppo", "Algorithm.")
    token_advantage: str | None = key("gae", "Advantage per token, computed on the trainer ranks.")
    gamma: float = key(1.0, "Discount factor.")
    lambd: float = key(
        1.0, "GAE's lambda: 1 estimates returns from rewards alone, 0 from a reward and the critic's next value."
    )
    kl_coef: float = key(0.0, "Weight of the per-token KL to the reference that is subtracted from the reward.")
    kl_reward_type: str = key("k1", "KL estimator in the reward.", choices=KL_TYPES, table="KL_ESTIMATORS")
    normalize_advantages: bool = key(True, "Whiten advantages over the trained tokens of a rollout.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        within(prefix, self, 0.0, 1.0, "gamma", "lambd")
        refuse_idle_kl(prefix, self, "kl_coef", "kl_reward_type")


@dataclass(kw_only=True)
class DistillConfig(PolicyGradientConfig):
    """On-policy distillation from a teacher (teacher.*).

    By default, the advantage of a token is its log-probability under the teacher minus that under the policy.
    """

    name: str = key("distill", "Algorithm.")
    token_advantage: str | None = key("distill", "Advantage per token, computed on the trainer ranks.")
    group_advantage: str | None = key(None, "Advantage from the rewards of a group, added to the teacher's.")
    opd_kl_coef: float = key(1.0, "Weight of the reverse KL to the teacher.")
    reward_coef: float = key(0.0, "Weight of the sequence's reward, added at each of its trained tokens.")
    normalize_advantages: bool = key(False, "Whiten advantages over the trained tokens of a rollout.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        within(prefix, self, 0.0, 1e3, "opd_kl_coef", "reward_coef")
