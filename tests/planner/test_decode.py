"""Time of decode steps, collectives and prefill, compared with closed formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slime_like.hardware import Hardware, parse_hardware
from slime_like.planner.constants import BANDWIDTH_SHARE, COMPUTE_SHARE, KERNEL_SECONDS, LINK_SHARE
from slime_like.planner.decode import StepTime, decode_step
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.kernels import num_kernels
from slime_like.planner.links import all_gather_seconds, all_reduce_seconds
from slime_like.planner.models import find_shape
from slime_like.planner.speed import prefill_time

H20, H800 = parse_hardware("--on", "8xH20"), parse_hardware("--on", "4x8xH800")
R1, QWEN = find_shape("MODEL", "DeepSeek-R1"), find_shape("MODEL", "Qwen3-235B-A22B")
TENSOR = EngineSettings(8, weights="fp8", tuned=True)
GROUPS = replace(TENSOR, dp_attention=8, replicated_head=True)


def latent_step(settings: EngineSettings, requests: float, context: float = 2_048, on: Hardware = H20) -> StepTime:
    return decode_step(R1, settings, on, requests, context)


def test_sixteen_heads_of_latent_attention_take_as_long_as_a_tile_of_64() -> None:
    times = {tp: latent_step(EngineSettings(tp, weights="fp8"), 128, 4_096).attention for tp in (1, 2, 8)}
    assert times[8] == times[2] == pytest.approx(times[1] / 2)
    scores = 128 * 4_096 * 64 * 2 * (2 * 512 + 64)
    assert times[8] / 61 == pytest.approx(scores / (H20.gpu.bf16 * COMPUTE_SHARE.value))


def test_padding_of_attention_groups_computes_the_projections_of_all_requests() -> None:
    padded_settings = replace(GROUPS, padded_groups=True, graph_requests=160)
    plain_step, padded_step = latent_step(GROUPS, 144), latent_step(padded_settings, 144)
    projections = 61 * R1.mixer_parameters("latent")
    computing = 2 * projections * 144 / (H20.gpu.fp8 * COMPUTE_SHARE.value)
    assert padded_step.weights - plain_step.weights == pytest.approx(computing - projections / 2.74e12, rel=0.1)
    assert padded_step.attention > plain_step.attention
    assert latent_step(padded_settings, 168) == latent_step(GROUPS, 168)  # above the largest graph


def test_gathering_of_flow_mla_is_hidden_by_a_long_step_and_exposed_by_a_short_one() -> None:
    """Neither the all-reduces nor the DCP exchange hides it, as they use the same links."""
    flow = replace(GROUPS, flow_mla=("o_proj",))
    shard = 61 * 128 * 128 * 7_168 * 7 / 8  # bytes that enter a GPU
    long_step = latent_step(flow, 144)
    assert long_step.prefetch == pytest.approx(2 * shard / (H20.gpu.hbm * BANDWIDTH_SHARE.value))
    large = EngineSettings(32, dp_attention=32, replicated_head=True, flow_mla=("o_proj",), tuned=True)
    short_step = latent_step(large, 2_912, on=H800)
    links = 61 * 2 * 128 * 128 * 7_168 * 31 / 32 / (H800.gpu.link * LINK_SHARE.value)
    assert short_step.total == pytest.approx(short_step.collectives + links)
    assert latent_step(replace(large, flow_mla=()), 2_912, on=H800).prefetch == 0
    step = latent_step(replace(large, dp_attention=16, dcp=2), 320, on=H800)
    half_links = 61 * 2 * 128 * 128 * 7_168 / 2 * 15 / 16 / (H800.gpu.link * LINK_SHARE.value)
    assert step.exchange > 0
    assert step.total == pytest.approx(step.collectives + step.exchange + half_links)


def test_experts_are_read_as_far_as_the_batch_selects_them() -> None:
    at_1, at_24, at_480 = (latent_step(TENSOR, requests).weights for requests in (1, 24, 480))
    experts = R1.routed_parameters / 8 / (H20.gpu.hbm * BANDWIDTH_SHARE.value)
    assert at_24 - at_1 == pytest.approx(experts * ((1 - 1 / 32) - (1 - 1 / 32) ** 24), rel=0.02)
    assert at_480 > at_24


def test_parts_of_sequences_that_end_early_leave_multiprocessors_idle() -> None:
    per_request = {
        requests: decode_step(QWEN, EngineSettings(8), H20, requests, 16_384).attention / requests
        for requests in (1, 78, 156, 1_560)
    }
    assert per_request[78] / per_request[1] == pytest.approx(1 / 0.75, rel=0.01)
    assert per_request[156] / per_request[1] == pytest.approx(2, rel=0.01)  # one part per sequence
    assert per_request[1_560] / per_request[1] == pytest.approx(1.1, rel=0.01)  # ten waves


def test_kernels_are_counted_per_layer() -> None:
    assert num_kernels(QWEN, fp8=False) == 94 * 20
    assert num_kernels(find_shape("MODEL", "Qwen3-4B"), fp8=False) == 36 * 15
    assert num_kernels(R1, fp8=True) == 61 * 18 + 3 * 7 + 58 * 18
    step = decode_step(QWEN, EngineSettings(8, dcp=2), H20, 1e-9, 1)
    assert step.exchange == pytest.approx(94 * 3 * KERNEL_SECONDS.value)


def test_collectives_take_the_share_of_the_link_that_nccl_reaches() -> None:
    link, network = 200e9 * LINK_SHARE.value, 50e9 * LINK_SHARE.value
    assert all_reduce_seconds(H20, 8, 1e9) == pytest.approx(2 * 7 / 8 * 1e9 / (450e9 * LINK_SHARE.value))
    expected = 2 * 7 / 8 * 1e9 / link + 2 * 3 / 4 * 1e9 / (8 * network) + 55e-6
    assert all_reduce_seconds(H800, 32, 1e9) == pytest.approx(expected)
    assert all_gather_seconds(H800, 32, 1e9) == pytest.approx(31 / 32 * 1e9 / link)
    slow = Hardware(replace(H800.gpu, network=10e9), 8, 4)
    assert all_gather_seconds(slow, 32, 1e9) == pytest.approx(3 / 4 * 1e9 / (8 * 10e9 * LINK_SHARE.value))
    assert all_reduce_seconds(H20, 1, 1e9) == 0


def test_a_prompt_under_data_parallel_attention_has_one_groups_attention() -> None:
    tensor, single_prompt = prefill_time(R1, TENSOR, H20), prefill_time(R1, GROUPS, H20, arrivals=1e-6)
    attention = 2 * 61 * R1.mixer_parameters("latent") / (H20.gpu.fp8 * COMPUTE_SHARE.value)
    assert single_prompt.token - tensor.token == pytest.approx(attention * 7 / 8)
    assert single_prompt.square == pytest.approx(8 * tensor.square)
    many_prompts = prefill_time(R1, GROUPS, H20, arrivals=100)
    assert (many_prompts.token, many_prompts.square) == (pytest.approx(tensor.token), pytest.approx(tensor.square))
