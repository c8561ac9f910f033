"""The same losses once more, from their papers, token by token in Python floats: no packing, no ranks, no vectors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from slime_like.config.algo import AlgoConfig, PolicyGradientConfig, ReinforcePlusPlusConfig
from slime_like.types import Sample, SampleGroup, Source, Status
from tests.algo.simulate import Policies, Policy

Token = tuple[int, int]  # sample id, position


def reference(
    groups: Sequence[SampleGroup], config: AlgoConfig, policies: Policies, max_response_len: int
) -> tuple[float, Tensor]:
    """Loss and gradient of one optimizer step over all groups."""
    samples = [s for g in groups for s in g.samples if s.status not in (Status.FAILED, Status.ABORTED)]
    actions = {s.sample_id: _actions(s) for s in samples}
    advantages = _advantages(groups, samples, actions, config, policies)
    num_tokens = sum(len(a) for a in actions.values())
    num_sequences = sum(1 for a in actions.values() if a)
    loss = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        mine = actions[sample.sample_id]
        share = {
            "token_mean": 1 / num_tokens,
            "sequence_mean": 1 / (num_sequences * max(len(mine), 1)),
            "dr_grpo": 1 / (num_sequences * max_response_len),
        }[config.aggregation]
        for position in mine:
            advantage = advantages.get((sample.sample_id, position), 0.0)
            loss = loss + share * _token_loss(sample, position, advantage, config, policies)
    parameters = [policies.actor.embedding, policies.actor.head]
    gradients = torch.autograd.grad(loss, parameters)
    return float(loss.detach()), torch.cat([g.flatten() for g in gradients])


def _actions(sample: Sample) -> list[int]:
    return [t for span in sample.spans if span.source is Source.MODEL for t in range(span.start, span.stop) if t > 0]


def _logprob(policy: Policy, sample: Sample, position: int) -> tuple[Tensor, Tensor]:
    """Log-probability of one token and the entropy it was drawn with, from its prefix alone."""
    prefix = torch.tensor(sample.token_ids[: position + 1], dtype=torch.int64)
    table = policy.logits(prefix)[-1].log_softmax(-1)
    return table[prefix[-1]], -(table.exp() * table).sum()


def _advantages(
    groups: Sequence[SampleGroup],
    samples: Sequence[Sample],
    actions: dict[int, list[int]],
    config: AlgoConfig,
    policies: Policies,
) -> dict[Token, float]:
    if isinstance(config, ReinforcePlusPlusConfig):
        return _reinforce(samples, actions, config, policies)
    found: dict[Token, float] = {}
    kept = {s.sample_id for s in samples}
    for group in groups:
        scores = {s.sample_id: s.reward.score for s in group.samples if s.sample_id in kept and s.reward}
        for sample_id, value in _baseline(scores, config).items():
            found |= {(sample_id, t): value for t in actions[sample_id]}
    return found


def _baseline(scores: dict[int, float], config: AlgoConfig) -> dict[int, float]:
    if not scores or config.group_advantage is None:
        return {}
    mean = statistics.fmean(scores.values())
    if len(set(scores.values())) == 1:
        return dict.fromkeys(scores, 0.0)
    scale = 1 / (statistics.stdev(scores.values()) + 1e-6) if config.group_advantage == "grpo" else 1.0
    return {sample_id: (score - mean) * scale for sample_id, score in scores.items()}


def _reinforce(
    samples: Sequence[Sample], actions: dict[int, list[int]], config: ReinforcePlusPlusConfig, policies: Policies
) -> dict[Token, float]:
    old = policies.old or policies.actor
    returns: dict[Token, float] = {}
    for sample in samples:
        assert sample.reward is not None
        later, mine = 0.0, actions[sample.sample_id]
        for position in reversed(mine):
            reward = sample.reward.score if position == mine[-1] else 0.0
            log_ratio = float(
                (_logprob(old, sample, position)[0] - _logprob(policies.ref, sample, position)[0]).detach()
            )
            later = reward - config.kl_coef * _kl(config.kl_reward_type, log_ratio) + config.gamma * later
            returns[sample.sample_id, position] = later
    mean = statistics.fmean(returns.values())
    deviation = math.sqrt(max(statistics.pvariance(returns.values()), 1e-8))
    return {token: (value - mean) / deviation for token, value in returns.items()}


def _kl(name: str, log_ratio: float) -> float:
    match name:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio**2 / 2
        case _:
            return math.exp(-log_ratio) - 1 + log_ratio


def _token_loss(sample: Sample, position: int, advantage: float, config: AlgoConfig, policies: Policies) -> Tensor:
    logprob, entropy = _logprob(policies.actor, sample, position)
    if not isinstance(config, PolicyGradientConfig):
        return -logprob
    old = float((logprob if policies.old is None else _logprob(policies.old, sample, position)[0]).detach())
    ref = float(_logprob(policies.ref, sample, position)[0].detach())
    ratio = torch.exp(logprob - old)
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    plain = float(ratio.detach())
    bounded = min(max(plain, 1 - config.eps_clip), 1 + high)
    loss = -ratio * advantage if plain * advantage <= bounded * advantage else 0 * logprob - bounded * advantage
    if config.use_tis:
        loss = loss * min(math.exp(old - float(sample.logprobs[position])), config.tis_clip)
    log_ratio = logprob - ref
    kl = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": torch.exp(-log_ratio) - 1 + log_ratio}
    name = "k3" if config.kl_loss_type == "low_var_kl" else config.kl_loss_type
    return loss + config.kl_loss_coef * kl[name] - config.entropy_coef * entropy
