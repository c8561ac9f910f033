"""Reference losses from the papers, token by token in Python floats: no packing, ranks or vectors."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from slime_like.config.schema.algo import (
    CispoConfig,
    GspoConfig,
    ReinforcePlusPlusBaselineConfig,
    ReinforcePlusPlusConfig,
)
from slime_like.config.schema.policy import AlgoConfig, PolicyConfig, PolicyGradientConfig
from slime_like.types import Sample, SampleGroup, Source, Status
from tests.algo.simulate import Policies, Policy

Token = tuple[int, int]  # sample id, position


def reference(
    groups: Sequence[SampleGroup], config: AlgoConfig, policies: Policies, max_response_len: int
) -> tuple[float, Tensor]:
    """Return loss and gradient of one optimizer step over all groups."""
    samples = [s for g in groups for s in g.samples if s.status not in (Status.FAILED, Status.ABORTED)]
    masks_truncated = isinstance(config, PolicyConfig) and config.mask_truncated
    actions = {s.sample_id: [] if masks_truncated and s.status is Status.TRUNCATED else _actions(s) for s in samples}
    advantages = _advantages(groups, samples, actions, config, policies)
    num_tokens = sum(len(a) for a in actions.values())
    num_sequences = sum(1 for a in actions.values() if a)
    loss = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        positions = actions[sample.sample_id]
        share = {
            "token_mean": 1 / num_tokens,
            "sequence_mean": 1 / (num_sequences * max(len(positions), 1)),
            "dr_grpo": 1 / (num_sequences * max_response_len),
        }[config.aggregation]
        sample_advantages = [advantages.get((sample.sample_id, position), 0.0) for position in positions]
        if positions:
            loss = loss + share * sum(
                _sample_losses(sample, positions, sample_advantages, config, policies), start=torch.zeros(())
            )
    parameters = [policies.actor.embedding, policies.actor.head]
    gradients = torch.autograd.grad(loss, parameters)
    return float(loss.detach()), torch.cat([g.flatten() for g in gradients])


def _actions(sample: Sample) -> list[int]:
    return [t for span in sample.spans if span.source is Source.MODEL for t in range(span.start, span.stop) if t > 0]


def _logprob(policy: Policy, prefix: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the log-probability of the last token and the entropy of its distribution."""
    table = policy.logits(torch.tensor(prefix))[-1].log_softmax(-1)
    return table[prefix[-1]], -(table.exp() * table).sum()


def _constant_logprob(policy: Policy, sample: Sample, position: int) -> float:
    """Return the log-probability of one token without a gradient."""
    return _last_logprob(policy, tuple(sample.token_ids[: position + 1].tolist()))


@functools.lru_cache(1_000)
def _last_logprob(policy: Policy, prefix: tuple[int, ...]) -> float:
    with torch.no_grad():
        return float(_logprob(policy, prefix)[0])


def _advantages(
    groups: Sequence[SampleGroup],
    samples: Sequence[Sample],
    actions: dict[int, list[int]],
    config: AlgoConfig,
    policies: Policies,
) -> dict[Token, float]:
    if isinstance(config, ReinforcePlusPlusConfig):
        return _whitened(_returns(samples, actions, config, policies))
    advantages: dict[Token, float] = {}
    trained_samples = {s.sample_id: s for s in samples}
    for group in groups:
        scores = {s.sample_id: s.reward.score for s in group.samples if s.sample_id in trained_samples and s.reward}
        for sample_id, value in _baseline(scores, config).items():
            advantages |= {(sample_id, t): value for t in actions[sample_id]}
    if isinstance(config, ReinforcePlusPlusBaselineConfig):
        for sample_id, position in advantages:
            log_ratio = _log_ratio_to_reference(trained_samples[sample_id], position, policies)
            advantages[sample_id, position] -= config.kl_coef * _kl(config.kl_reward_type, log_ratio)
        return _whitened(advantages)
    return advantages


def _baseline(scores: dict[int, float], config: AlgoConfig) -> dict[int, float]:
    if not scores or config.group_advantage is None:
        return {}
    mean = statistics.fmean(scores.values())
    if len(set(scores.values())) == 1:
        return dict.fromkeys(scores, 0.0)
    if config.group_advantage == "rloo":
        total, num_others = sum(scores.values()), len(scores) - 1
        return {sample_id: score - (total - score) / num_others for sample_id, score in scores.items()}
    scale = 1 / (statistics.stdev(scores.values()) + 1e-6) if config.group_advantage == "grpo" else 1.0
    return {sample_id: (score - mean) * scale for sample_id, score in scores.items()}


def _log_ratio_to_reference(sample: Sample, position: int, policies: Policies) -> float:
    old_policy = policies.old or policies.actor
    return _constant_logprob(old_policy, sample, position) - _constant_logprob(policies.ref, sample, position)


def _returns(
    samples: Sequence[Sample], actions: dict[int, list[int]], config: ReinforcePlusPlusConfig, policies: Policies
) -> dict[Token, float]:
    returns: dict[Token, float] = {}
    for sample in samples:
        assert sample.reward is not None
        future_return, positions = 0.0, actions[sample.sample_id]
        for position in reversed(positions):
            reward = sample.reward.score if position == positions[-1] else 0.0
            log_ratio = _log_ratio_to_reference(sample, position, policies)
            future_return = (
                reward - config.kl_coef * _kl(config.kl_reward_type, log_ratio) + config.gamma * future_return
            )
            returns[sample.sample_id, position] = future_return
    return returns


def _whitened(values: dict[Token, float]) -> dict[Token, float]:
    mean = statistics.fmean(values.values())
    deviation = math.sqrt(max(statistics.pvariance(values.values()), 1e-8))
    return {token: (value - mean) / deviation for token, value in values.items()}


def _kl(name: str, log_ratio: float) -> float:
    match name:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio**2 / 2
        case _:
            return math.exp(-log_ratio) - 1 + log_ratio


def _sample_losses(
    sample: Sample, positions: Sequence[int], advantages: Sequence[float], config: AlgoConfig, policies: Policies
) -> list[Tensor]:
    """Return the loss of each trained token of one complete sequence, so that its ratio is a plain mean or sum."""
    token_scores = [_logprob(policies.actor, sample.token_ids[: t + 1].tolist()) for t in positions]
    if not isinstance(config, PolicyConfig):
        return [-logprob for logprob, _ in token_scores]
    old_logprobs = [
        float(logprob_now.detach()) if policies.old is None else _constant_logprob(policies.old, sample, t)
        for t, (logprob_now, _) in zip(positions, token_scores, strict=True)
    ]
    rollout = [float(sample.logprobs[t]) for t in positions]
    anchor = rollout if config.use_rollout_logprobs else old_logprobs
    log_ratios = [
        logprob_now - logprob_anchor for (logprob_now, _), logprob_anchor in zip(token_scores, anchor, strict=True)
    ]
    if isinstance(config, GspoConfig):
        log_ratios = [sum(log_ratios, start=torch.zeros(())) / len(log_ratios)] * len(log_ratios)
    keep_weight = is_kept(config, sum(old_logprobs) - sum(rollout), len(old_logprobs))
    losses: list[Tensor] = []
    for i, (logprob, entropy) in enumerate(token_scores):
        loss = surrogate(config, log_ratios[i].exp(), logprob, advantages[i])
        loss = loss * importance(config, math.exp(old_logprobs[i] - rollout[i]))
        log_ratio = logprob - _constant_logprob(policies.ref, sample, positions[i])
        k3 = torch.exp(-log_ratio) - 1 + log_ratio
        kl = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": k3, "low_var_kl": k3 if k3 < 10 else torch.tensor(10.0)}
        losses.append(
            keep_weight * (loss + config.kl_loss_coef * kl[config.kl_loss_type] - config.entropy_coef * entropy)
        )
    return losses


def is_kept(config: PolicyConfig, log_product: float, length: int) -> float:
    """Return 0 if rejection drops a sequence whose ratio of old to rollout policy is ``exp(log_product)``, else 1."""
    if config.rejection == "none":
        return 1.0
    ratio = math.exp(log_product / length if config.rejection == "geometric" else log_product)
    is_above_low = config.rejection_low is None or ratio >= config.rejection_low
    return float(is_above_low and (config.rejection_high is None or ratio <= config.rejection_high))


def importance(config: PolicyConfig, ratio: float) -> float:
    """Return the weight of a token with this ratio of old to rollout policy."""
    if config.use_tis:
        return max(min(ratio, config.tis_clip), config.tis_clip_low)
    if config.use_mis:
        return ratio if config.mis_low <= ratio <= config.mis_high else 0.0
    return 1.0


def surrogate(config: PolicyConfig, ratio: Tensor, logprob: Tensor, advantage: float) -> Tensor:
    """Return a token's loss. Ratios are bounded above for A >= 0 and below for A < 0, and on both sides for CISPO."""
    low = 1 - config.eps_clip
    high = 1 + (config.eps_clip if config.eps_clip_high is None else config.eps_clip_high)
    ratio_value = float(ratio.detach())
    if isinstance(config, CispoConfig):
        return -max(low, min(ratio_value, high)) * advantage * logprob
    assert isinstance(config, PolicyGradientConfig)
    if advantage >= 0:
        effective = ratio if ratio_value <= high else 0 * logprob + high
    else:
        ceiling = math.inf if config.eps_clip_c is None else config.eps_clip_c
        effective = ratio if low <= ratio_value <= ceiling else 0 * logprob + (low if ratio_value < low else ceiling)
    return -effective * advantage
