"""Log-probability, entropy and their gradients against float64 autograd, for any chunk size and padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_like.train.megatron.model.vocab import VocabularyPart, vocab_scores
from tests.hypothesis_examples import num_examples


def reference(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@settings(max_examples=num_examples(40), deadline=None)
@given(
    n=st.integers(0, 9),
    real=st.integers(1, 12),
    padding=st.integers(0, 3),
    chunk=st.integers(1, 10),
    temperature=st.floats(0.1, 3.0),
    entropy=st.booleans(),
    seed=st.integers(0, 9),
)
def test_equals_float64_autograd(
    n: int, real: int, padding: int, chunk: int, temperature: float, entropy: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(n, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(real + padding, 5, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, real, (n,))
    factors = torch.randn(2, n, dtype=torch.float64)
    logprobs, entropies = reference(hidden, weight[:real], target, temperature)
    (logprobs @ factors[0] + (entropies @ factors[1] if entropy else 0)).backward()

    inputs = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    part = VocabularyPart(0, real, None)
    actual_logprobs, actual_entropies = vocab_scores(
        inputs[0], inputs[1], target, part=part, temperature=temperature, chunk=chunk, entropy=entropy
    )
    total = actual_logprobs @ factors[0].float()
    assert (actual_entropies is not None) == entropy
    if actual_entropies is not None:
        total = total + actual_entropies @ factors[1].float()
        torch.testing.assert_close(actual_entropies.double(), entropies, atol=1e-4, rtol=1e-4)
    total.backward()
    torch.testing.assert_close(actual_logprobs.double(), logprobs, atol=1e-4, rtol=1e-4)
    for actual, exact in zip(inputs, (hidden, weight), strict=True):
        assert actual.grad is not None and exact.grad is not None
        scale = float(exact.grad.abs().max()) if exact.grad.numel() else 0.0
        torch.testing.assert_close(actual.grad.double(), exact.grad, atol=1e-5 * max(scale, 1.0), rtol=1e-4)


def test_logits_exist_one_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime_like.train.megatron.model import vocab

    chunk_sizes: list[int] = []
    stock = vocab._logits

    def counting_logits(hidden: Tensor, *args: object) -> Tensor:
        chunk_sizes.append(len(hidden))
        return stock(hidden, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(vocab, "_logits", counting_logits)
    hidden, weight = torch.randn(10, 4, requires_grad=True), torch.randn(6, 4)
    part = VocabularyPart(0, 6, None)
    logprobs, _ = vocab_scores(
        hidden, weight, torch.zeros(10, dtype=torch.long), part=part, temperature=1.0, chunk=4, entropy=False
    )
    logprobs.sum().backward()
    assert chunk_sizes == [4, 4, 2, 4, 4, 2]


def test_a_rank_with_only_padding_contributes_nothing() -> None:
    part = VocabularyPart(8, 0, None)
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    logprobs, _ = vocab_scores(
        hidden, weight, torch.zeros(3, dtype=torch.long), part=part, temperature=1.0, chunk=2, entropy=True
    )
    logprobs.sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    assert not hidden.grad.any() and not weight.grad.any()
