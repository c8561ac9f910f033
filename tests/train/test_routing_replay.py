"""Replay of experts: loss, gradients and logprobs equal transformers' with the same experts in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_like.config.schema.resolved import Layout
from slime_like.train.megatron.model.expert_choice import ExpertChoice, GroupLimitedChoice
from tests.hypothesis_examples import num_examples
from tests.train.jobs import SP, RankJob, Results
from tests.train.parity import REPLAYED, comparison
from tests.train.routing import OldChoice

BOUND = 1e-5
BLOCKS: dict[str, Any] = {"recompute": "full"}
EXPERTS: dict[str, Any] = {"recompute": "selective", "recompute_modules": ["core_attn", "layernorm", "moe"]}
PARITY = "tests.train.parity:compare"
CASES: dict[int, dict[str, tuple[Layout, dict[str, Any]]]] = {
    2: {
        "replay tp2 sp ep2": (Layout(ep=2, **SP), {}),
        "replay pp2 vpp2, recomputed blocks": (Layout(pp=2, vpp=2), BLOCKS),
        "replay cp2 ep2, recomputed experts": (Layout(cp=2, ep=2), EXPERTS),
    },
}
FAULT = "experts_of_the_next_token"
OLD = {"old ep2": Layout(dp=2, ep=2), "old pp2": Layout(pp=2)}
JOBS = {
    size: [RankJob(name, PARITY, (REPLAYED, *case, None)) for name, case in cases.items()]
    for size, cases in CASES.items()
}
JOBS[1] = [RankJob(FAULT, PARITY, (REPLAYED, Layout(), {}, FAULT))]
JOBS[2] += [RankJob(name, "tests.train.routing:old_choice", (layout, {})) for name, layout in OLD.items()]


@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_equals_hf_with_the_same_experts(name: str, results: Results) -> None:
    errors = comparison(results, name)
    assert errors.worst <= BOUND, errors
    assert errors.score <= BOUND, errors


@pytest.mark.ranks
def test_experts_of_other_tokens_exceed_the_bound(results: Results) -> None:
    errors = comparison(results, FAULT)
    assert errors.worst > 100 * BOUND, errors


@pytest.mark.ranks
@pytest.mark.parametrize("name", OLD)
def test_the_choice_of_the_old_policy_is_replayed(name: str, results: Results) -> None:
    choices: list[OldChoice] = results[name]
    assert max(choice.unchanged for choice in choices) == 0
    assert max(choice.moved for choice in choices) > 1e-3
    assert len({(choice.share, choice.gap) for choice in choices}) == 1
    assert choices[0].share > 0.5 and choices[0].gap > 0
    (metrics,) = [choice.metrics for choice in choices if "train/loss" in choice.metrics]
    assert 0 < metrics["train/routed_experts_differ"] <= metrics["train/routed_experts_differ_max"] < 1


# ---- one router, without ranks ---------------------------------------------------------------------------------------
def best_of_all(scores: torch.Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None) -> Any:
    return scores.topk(topk, 1)


def choose(choice: ExpertChoice, scores: torch.Tensor, groups: tuple[int | None, int | None] = (None, None)) -> Any:
    return choice.get_replay_topk(scores, 2, *groups, best_of_all)


def test_weights_of_replayed_experts_have_gradients_and_unknown_tokens_choose() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]], requires_grad=True)
    choice = ExpertChoice()
    choice.padding = torch.zeros(2, dtype=torch.bool)
    choice.replayed_experts = {choice.padding.data_ptr(): torch.tensor([[2, 1], [0, 0]], dtype=torch.int16)}
    choice.compares = True
    values, indices = choose(choice, scores)
    assert indices.tolist() == [[2, 1], [0, 1]] and values.tolist() == [[1.0, 2.0], [3.0, 2.0]]
    values.sum().backward()
    assert scores.grad is not None and scores.grad.tolist() == [[0.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
    counts = choice.counts
    assert (float(counts.num_tokens), float(counts.num_different), float(counts.max_gap)) == (1.0, 1.0, 1.0)
    choice.padding = torch.zeros(2, dtype=torch.bool)  # another micro-batch, for which nothing is recorded
    assert choose(choice, scores)[1].tolist() == [[0, 1], [0, 1]]


def is_chosen(
    choice: ExpertChoice, groups: tuple[int | None, int | None], scores_E: torch.Tensor, expert: int, rise: float
) -> bool:
    """Return True if the router itself chooses ``expert`` when the score of this expert alone rises by ``rise``."""
    raised_E = scores_E.clone()
    raised_E[expert] += rise
    return expert in choose(choice, raised_E[None], groups)[1][0].tolist()


def is_best_group(scores_E: torch.Tensor, num_ranked: int, group: int, rise: float) -> bool:
    """Return True if ``group`` is one of the best two of three groups when its sum of scores alone rises by ``rise``."""
    sums: list[float] = [sum(sorted(scores, reverse=True)[:num_ranked]) for scores in scores_E.reshape(3, 2).tolist()]
    sums[group] += rise
    return group in sorted(range(3), key=lambda index: -sums[index])[:2]


@settings(max_examples=num_examples(50), deadline=None)
@given(seed=st.integers(0, 10_000), num_ranked=st.integers(1, 2))
def test_a_gap_is_the_least_rise_with_which_the_router_chooses_each_expert(seed: int, num_ranked: int) -> None:
    """The router chooses each expert whose score alone rises by the gap, and with a smaller rise not all of them.

    If the router's groups do not include all experts, the same is true of the scores and the choice of groups. The gap is 0
    only for the router's own set.
    """
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy(rng.normal(size=(4, 6)))
    random_choice = torch.from_numpy(rng.random((4, 6)).argsort(-1)[:, :2].copy())
    for choice, groups in ((ExpertChoice(), (None, None)), (GroupLimitedChoice(num_ranked), (3, 2))):
        own = choose(choice, scores, groups)[1]
        assert choice.gap(scores, own, own.flip(1), *groups).abs().max() == 0
        gaps = choice.gap(scores, own, random_choice, *groups).tolist()
        for scores_E, gap, own_set, experts in zip(scores, gaps, own.tolist(), random_choice.tolist(), strict=True):
            assert (gap > 0) == (set(own_set) != set(experts))
            in_groups = groups == (None, None) or all(is_best_group(scores_E, num_ranked, e // 2, 0) for e in experts)
            for rise, is_enough in ((gap + 1e-9, True), (gap - 1e-9, gap == 0)):
                are_chosen = [
                    is_chosen(choice, groups, scores_E, expert, rise)
                    if in_groups
                    else is_best_group(scores_E, num_ranked, expert // 2, rise)
                    for expert in experts
                ]
                assert all(are_chosen) == is_enough
