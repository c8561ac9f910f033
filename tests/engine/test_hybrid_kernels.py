"""Replacements for SGLang's Triton kernels of hybrid models agree with their definitions in float64. No engine runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_like_plugins.qwen_gdn.causal_conv import causal_conv
from slime_like_plugins.sglang_cpu.hybrid import checkpoints, conv, delta_rule, layers, states
from tests.hypothesis_examples import num_examples

WIDTH, CHANNELS, SLOTS = 4, 6, 7
HEADS, VALUE_HEADS, KEY, VALUE = 2, 4, 8, 6
LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=5)
SEEDS = st.integers(0, 99)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def slots(seed: int, count: int) -> Tensor:
    return torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[:count].int()


# ---- convolution -----------------------------------------------------------------------------------------------------
def convolve(x_TD: Tensor, before_HD: Tensor, weight_DW: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of one sequence by definition, and the last inputs, which the next token needs."""
    inputs = torch.cat([before_HD, x_TD]).double()
    taps = [(inputs[t : t + WIDTH] * weight_DW.double().t()).sum(0) for t in range(len(x_TD))]
    return F.silu(torch.stack(taps)).float(), inputs[-(WIDTH - 1) :].float()


@settings(deadline=None, max_examples=num_examples(50))
@given(lengths=LENGTHS, padding=st.integers(0, 3), seed=SEEDS)
def test_convolution_of_a_prefill_equals_the_definition(lengths: list[int], padding: int, seed: int) -> None:
    total, weight = sum(lengths), random(seed, CHANNELS, WIDTH)
    x_TD, pool = random(seed + 1, total + padding, CHANNELS), random(seed + 2, SLOTS, CHANNELS, WIDTH - 1)
    pool_before, rows = pool.clone(), slots(seed, len(lengths))
    starts = torch.tensor([index % 2 == 1 for index in range(len(lengths))])
    pool[rows[~starts].long()] = float("nan")  # values of an earlier request have no effect
    out_DT = conv.causal_conv1d_fn(
        x_TD.t(),
        weight,
        None,
        conv_states=pool,
        has_initial_state=starts,
        cache_indices=rows,
        query_start_loc=bounds(lengths),
        seq_lens_cpu=lengths,
    )
    first = 0
    for length, row, continued in zip(lengths, rows.tolist(), starts.tolist(), strict=True):
        state_before = pool_before[row].t() if continued else torch.zeros(WIDTH - 1, CHANNELS)
        expected, state = convolve(x_TD[first : first + length], state_before, weight)
        torch.testing.assert_close(out_DT[:, first : first + length].t(), expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(pool[row].t(), state, atol=0, rtol=0)
        first += length
    assert not out_DT[:, total:].any()
    unused_rows = [row for row in range(SLOTS) if row not in rows.tolist()]
    assert torch.equal(pool[unused_rows], pool_before[unused_rows])


@settings(deadline=None, max_examples=num_examples(20))
@given(length=st.integers(1, 12), seed=SEEDS)
def test_convolution_token_by_token_equals_a_prefill(length: int, seed: int) -> None:
    weight, x_TD = random(seed, CHANNELS, WIDTH), random(seed + 1, length, CHANNELS)
    pool, row = torch.zeros(SLOTS, CHANNELS, WIDTH - 1), slots(seed, 1)
    steps = [
        conv.causal_conv1d_update(x_TD[t : t + 1], pool, weight, None, "silu", conv_state_indices=row)
        for t in range(length)
    ]
    expected, state = convolve(x_TD, torch.zeros(WIDTH - 1, CHANNELS), weight)
    torch.testing.assert_close(torch.cat(steps), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(pool[int(row)].t(), state, atol=0, rtol=0)


def test_bfloat16_is_rounded_once_and_as_in_the_trainer() -> None:
    lengths = [25, 3, 15]
    x_TD, weight = random(0, sum(lengths), 32).bfloat16(), random(1, 32, WIDTH).bfloat16()
    pool, rows = torch.zeros(SLOTS, 32, WIDTH - 1, dtype=torch.bfloat16), slots(0, 3)
    has_state, update_pool = torch.zeros(3, dtype=torch.bool), pool.clone()
    prefill = conv.causal_conv1d_fn(
        x_TD.t(),
        weight,
        None,
        conv_states=pool,
        has_initial_state=has_state,
        cache_indices=rows,
        query_start_loc=bounds(lengths),
        seq_lens_cpu=lengths,
    ).t()
    assert torch.equal(prefill, causal_conv(x_TD[None], weight, cu_seqlens_cpu=bounds(lengths))[0])
    steps = [
        conv.causal_conv1d_update(x_TD[t : t + 1], update_pool, weight, None, "silu", conv_state_indices=rows[:1])
        for t in range(lengths[0])
    ]
    expected, _ = convolve(x_TD[: lengths[0]].float(), torch.zeros(WIDTH - 1, 32), weight.float())
    torch.testing.assert_close(torch.cat(steps).float(), expected, atol=2**-16, rtol=2**-8)


def test_states_that_round_their_inputs_are_refused() -> None:
    pool = torch.zeros(SLOTS, CHANNELS, WIDTH - 1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="SGLANG_MAMBA_CONV_DTYPE=float32"):
        conv.causal_conv1d_update(
            random(0, 1, CHANNELS), pool, random(1, CHANNELS, WIDTH), None, "silu", conv_state_indices=slots(0, 1)
        )


# ---- delta rule ------------------------------------------------------------------------------------------------------
class RequestInputs:
    """Random inputs of one request, with the projections of its gates and its initial state."""

    def __init__(self, seed: int, length: int) -> None:
        self.q, self.k = random(seed, length, HEADS, KEY), random(seed + 1, length, HEADS, KEY)
        self.v = random(seed + 2, length, VALUE_HEADS, VALUE)
        self.a, self.b = random(seed + 3, length, VALUE_HEADS), random(seed + 4, length, VALUE_HEADS)
        self.state = random(seed + 5, VALUE_HEADS, VALUE, KEY)

    def by_definition(self, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs [T, HV, V] and last state [HV, V, K], computed token by token in float64."""
        ratio = VALUE_HEADS // HEADS
        state, out = self.state.double(), torch.empty(self.v.shape, dtype=torch.float64)
        for t in range(len(self.v)):
            for head in range(VALUE_HEADS):
                q, k = self.q[t, head // ratio].double(), self.k[t, head // ratio].double()
                q, k = q / (q @ q + 1e-6).sqrt(), k / (k @ k + 1e-6).sqrt()
                gate = self.a[t, head].double() + dt_bias[head].double()
                decayed_state = state[head] * torch.exp(-a_log[head].double().exp() * F.softplus(gate))
                error = self.v[t, head].double() - decayed_state @ k
                state[head] = decayed_state + torch.outer(error * self.b[t, head].double().sigmoid(), k)
                out[t, head] = state[head] @ q / KEY**0.5
        return out.float(), state.float()


@settings(deadline=None, max_examples=num_examples(25))
@given(lengths=LENGTHS, seed=SEEDS)
def test_delta_rule_of_a_prefill_and_a_decode_equals_the_definition(lengths: list[int], seed: int) -> None:
    """All but the last token of each request are one packed prefill, and the last tokens one decode step.

    Requests of one token have no prefill. Slots of other requests do not change.
    """
    a_log, dt_bias = random(seed + 7, VALUE_HEADS), random(seed + 8, VALUE_HEADS)
    requests = [RequestInputs(seed + 10 * index, length) for index, length in enumerate(lengths)]
    rows = slots(seed, len(lengths))
    pool = random(seed + 9, SLOTS, VALUE_HEADS, VALUE, KEY)
    pool_before_use = pool.clone()
    for row, request in zip(rows.tolist(), requests, strict=True):
        pool[row] = request.state
    long_indices = [index for index, length in enumerate(lengths) if length > 1]
    out = [torch.empty(0, VALUE_HEADS, VALUE) for _ in requests]
    if long_indices:
        packed_inputs = [torch.cat([getattr(requests[i], name)[:-1] for i in long_indices])[None] for name in "qkvab"]
        gates = delta_rule.fused_gdn_gating(a_log, packed_inputs[3][0], packed_inputs[4][0], dt_bias)
        ends = bounds([lengths[i] - 1 for i in long_indices])
        q, k, v = packed_inputs[:3]
        actual, *_ = delta_rule.extend(
            None, q, k, v, *gates, ssm_states=pool, cache_indices=rows[long_indices], query_start_loc=ends
        )
        for index, start, stop in zip(long_indices, ends[:-1], ends[1:], strict=True):
            out[index] = actual[0, start:stop]
    tokens = {name: torch.stack([getattr(request, name)[-1] for request in requests]) for name in "qkvab"}
    last = delta_rule.fused_sigmoid_gating_delta_rule_update(
        A_log=a_log,
        dt_bias=dt_bias,
        q=tokens["q"][None],
        k=tokens["k"][None],
        v=tokens["v"][None],
        a=tokens["a"],
        b=tokens["b"],
        initial_state_source=pool,
        initial_state_indices=rows,
    )
    for index, (row, request) in enumerate(zip(rows.tolist(), requests, strict=True)):
        expected, state = request.by_definition(a_log, dt_bias)
        torch.testing.assert_close(torch.cat([out[index], last[0, index : index + 1]]), expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(pool[row], state, atol=2e-5, rtol=1e-4)
    unused_rows = [row for row in range(SLOTS) if row not in rows.tolist()]
    assert torch.equal(pool[unused_rows], pool_before_use[unused_rows])


@settings(deadline=None, max_examples=num_examples(25))
@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4), seed=SEEDS, data=st.data())
def test_states_between_chunks_are_those_of_shorter_prefills(
    lengths: list[int], seed: int, data: st.DataObject
) -> None:
    """The prefix cache keeps states at multiples of 64 tokens, which does not change outputs and last states."""
    chunks = [data.draw(st.sampled_from([-1, *range(1, (length - 1) // 64 + 1)])) for length in lengths]
    requests = [RequestInputs(seed + 10 * index, length) for index, length in enumerate(lengths)]
    rows, pool = slots(seed, len(lengths)), random(seed + 9, SLOTS, VALUE_HEADS, VALUE, KEY)

    def prefill(counts: list[int], **tracked: Any) -> tuple[Tensor, Tensor]:
        q, k, v, a, b = (
            torch.cat([getattr(r, name)[:n] for r, n in zip(requests, counts, strict=True)])[None] for name in "qkvab"
        )
        gates = delta_rule.fused_gdn_gating(random(1, VALUE_HEADS), a[0], b[0], random(2, VALUE_HEADS))
        states = pool.clone()
        out, *_ = delta_rule.extend(
            None, q, k, v, *gates, ssm_states=states, cache_indices=rows, query_start_loc=bounds(counts), **tracked
        )
        return out, states[rows.long()]

    states = torch.full((len(lengths), VALUE_HEADS, VALUE, KEY), 7.0)
    actual = prefill(lengths, track_state=states, track_chunk_idx=torch.tensor(chunks))
    torch.testing.assert_close(actual, prefill(lengths), atol=2e-5, rtol=1e-4)
    _, shorter = prefill([64 * chunk if chunk > 0 else 1 for chunk in chunks])
    tracked = torch.tensor(chunks) > 0
    torch.testing.assert_close(states[tracked], shorter[tracked], atol=2e-5, rtol=1e-4)
    assert bool((states[~tracked] == 7).all())


def test_masked_requests_copy_their_states_to_the_prefix_cache() -> None:
    pools = random(1, 3, SLOTS, 4), random(2, 3, SLOTS, 2, 2)
    before = [pool.clone() for pool in pools]
    checkpoints.copy_states_of_all_layers(
        *pools, torch.tensor([3, 1, 4]), torch.tensor([True, False, True]), torch.tensor([0, 2, 5]), 2
    )
    for pool, old in zip(pools, before, strict=True):
        old[:, 0] = old[:, 3]
        assert torch.equal(pool, old)
    slot, mask, target = torch.tensor([4]), torch.tensor([True]), torch.tensor([1])
    checkpoints.copy_states(pools[0][0], pools[1][0], slot, mask, target, 1)
    assert torch.equal(pools[0][0, 1], before[0][0, 4]) and torch.equal(pools[0][1:], before[0][1:])


def test_a_gated_norm_with_options_is_refused_by_their_names() -> None:
    x = random(0, 2, 4)
    module = SimpleNamespace(weight=random(1, 4), eps=1e-6, activation="silu")
    assert layers.fused_norm_forward(module, x, x, residual=None, prenorm=False).shape == x.shape
    with pytest.raises(NotImplementedError, match=r"do not support a gated norm with residual"):
        layers.fused_norm_forward(module, x, x, residual=x, prenorm=False)


def test_speculative_decoding_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="speculative"):
        delta_rule.fused_sigmoid_gating_delta_rule_update(
            A_log=random(0, 1),
            dt_bias=random(0, 1),
            q=random(0, 1, 1, 1, 1),
            k=random(0, 1, 1, 1, 1),
            v=random(0, 1, 1, 1, 1),
            a=random(0, 1, 1),
            b=random(0, 1, 1),
            initial_state_source=random(0, 1, 1, 1, 1),
            initial_state_indices=torch.zeros(1),
            disable_state_update=True,
        )


# ---- norms, gates and projections ------------------------------------------------------------------------------------
@given(seed=SEEDS, activation=st.sampled_from(["silu", "swish", "sigmoid"]))
@settings(deadline=None, max_examples=num_examples(20))
def test_gated_norm_equals_the_definition(seed: int, activation: str) -> None:
    x, gate, weight = random(seed, 3, KEY), random(seed + 1, 3, KEY), random(seed + 2, KEY)
    row, gate64 = x.double(), gate.double()
    activated_gate = gate64.sigmoid() if activation == "sigmoid" else F.silu(gate64)
    expected = row * (row.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double() * activated_gate
    actual = layers.layernorm_fn(x, weight, None, z=gate, eps=1e-6, is_rms_norm=True, activation=activation)
    torch.testing.assert_close(actual, expected.float(), atol=1e-6, rtol=1e-5)


def test_gates_of_attention_and_of_the_shared_expert_equal_the_definition() -> None:
    out, gate = random(0, 3, 8), random(1, 3, 2, 4)
    expected = out * gate.reshape(3, 8).sigmoid()
    torch.testing.assert_close(layers.fused_sigmoid_mul(out, gate), expected)
    assert layers.fused_sigmoid_mul(out, gate, inplace=True) is out
    torch.testing.assert_close(out, expected)
    hidden, weight, shared, routed = random(2, 3, 5), random(3, 5), random(4, 3, 5), random(5, 3, 5)
    expected = routed + (hidden @ weight).sigmoid()[:, None] * shared
    layers.fused_gate_sigmoid_mul_add(hidden, weight, shared, routed)
    torch.testing.assert_close(routed, expected)


def test_both_orders_of_projections_are_split_alike() -> None:
    """Qwen3-Next interleaves the projections by key head; Qwen3.5 concatenates them."""
    tokens, ratio = 3, VALUE_HEADS // HEADS
    q, k = random(0, tokens, HEADS, KEY), random(1, tokens, HEADS, KEY)
    v, z = random(2, tokens, HEADS, ratio, VALUE), random(3, tokens, HEADS, ratio, VALUE)
    b, a = random(4, tokens, HEADS, ratio), random(5, tokens, HEADS, ratio)
    by_key_head = torch.cat([q, k, v.flatten(2), z.flatten(2)], -1).flatten(1), torch.cat([b, a], -1).flatten(1)
    contiguous = torch.cat([part.flatten(1) for part in (q, k, v, z)], -1), torch.cat([b.flatten(1), a.flatten(1)], -1)
    sizes = HEADS, VALUE_HEADS, KEY, VALUE
    expected = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], -1), z.flatten(1, 2), b.flatten(1), a.flatten(1)
    for actual in (layers.split_by_key_head(*by_key_head, *sizes), layers.split_contiguous(*contiguous, *sizes)):
        for actual_part, expected_part in zip(actual, expected, strict=True):
            assert torch.equal(actual_part, expected_part)


class LayerConfig:
    linear_layer_ids = (0, 1, 2)
    linear_num_key_heads, linear_key_head_dim = 2, 16
    linear_num_value_heads, linear_value_head_dim = 4, 24
    linear_conv_kernel_dim = 4


def test_small_states_get_four_slots_per_running_request() -> None:
    assert states.state_bytes(LayerConfig) == 3 * 4 * ((2 * 32 + 96) * 3 + 96 * 16)
    assert states.slots(LayerConfig, 64) == 4 * 64
    assert states.slots(LayerConfig, None) == 4 * states.RUNNING
    assert states.slots(LayerConfig, 10**6) is None
    assert states.slots(object(), None) is None  # no linear attention


@pytest.mark.parametrize(("config", "strategy"), [(LayerConfig, "extra_buffer"), (object(), "no_buffer")])
@pytest.mark.parametrize("max_running_requests", [8, 10**6])
def test_dcp_and_drafts_with_states_of_any_size(
    config: object, strategy: str, max_running_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.arg_groups import overrides

    from slime_like_plugins.sglang_cpu.platform import PlainCpu

    model = SimpleNamespace(hf_text_config=config)
    monkeypatch.setattr(overrides, "model_config_of", lambda server_args: model)  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    fields = dict.fromkeys(
        (
            "attention_backend",
            "max_total_tokens",
            "mem_fraction_static",
            "max_mamba_cache_size",
            "speculative_algorithm",
        )
    )
    arguments = SimpleNamespace(
        **fields,
        **dict.fromkeys(("tp_size", "pp_size"), 1),
        mamba_radix_cache_strategy="auto",
        dcp_size=2,
        attn_dp_size=1,
        max_running_requests=max_running_requests,
        disable_radix_cache=False,
    )
    PlainCpu().apply_server_args_defaults(arguments)
    assert (arguments.mamba_radix_cache_strategy, arguments.disable_radix_cache) == (strategy, False)
    arguments.speculative_algorithm = "NGRAM"
    message = r"rollout\.sglang\.speculative_algorithm=NGRAM is not supported on a CPU: remove rollout\.sglang"
    with pytest.raises(SystemExit, match=message):
        PlainCpu().apply_server_args_defaults(arguments)
