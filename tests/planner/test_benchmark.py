"""Simulated benchmarks of an engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slime_like.hardware import parse_hardware
from slime_like.planner.benchmark import random_lengths, simulate
from slime_like.planner.decode import decode_step
from slime_like.planner.engine import engine_memory
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.models import find_shape
from slime_like.planner.speed import prefill_time

HARDWARE, SHAPE = parse_hardware("--on", "8xH20"), find_shape("MODEL", "Qwen3-235B-A22B")
PLAIN = EngineSettings(8, tuned=True)


def small(tokens: int) -> EngineSettings:
    return replace(PLAIN, max_tokens=tokens)


def test_lengths_are_those_of_pull_request_14982() -> None:
    lengths = random_lengths(32_000, 4_000, 10)
    assert sum(prompt for prompt, _ in lengths) == 124_262
    assert sum(output for _, output in lengths) == 20_099


def test_one_client_pays_for_each_prompt_and_each_token() -> None:
    lengths = [(1_000, 11), (2_000, 21)]
    prefill = prefill_time(SHAPE, PLAIN, HARDWARE)
    seconds = sum(prefill.seconds(prompt, prompt**2) for prompt, _ in lengths)
    for prompt, output in lengths:  # the first token comes from prefill
        contexts = range(prompt + 1, prompt + output)
        seconds += sum(decode_step(SHAPE, PLAIN, HARDWARE, 1, context + 0.5).total for context in contexts)
    result = simulate(SHAPE, PLAIN, HARDWARE, lengths, clients=1)
    assert result.seconds == pytest.approx(seconds)
    assert result.output_per_second == pytest.approx(32 / seconds)
    assert result.total_per_second == pytest.approx(3_032 / seconds)


def test_clients_beyond_the_cache_wait() -> None:
    lengths = [(1_000, 200)] * 12
    unlimited, two, one = (
        simulate(SHAPE, small(tokens), HARDWARE, lengths, 4).seconds for tokens in (9_000, 2_500, 1_300)
    )
    assert engine_memory(SHAPE, small(2_500), HARDWARE).tokens == 2_500
    assert unlimited < two < one
    assert two == pytest.approx(simulate(SHAPE, PLAIN, HARDWARE, lengths, 2).seconds)
    assert one == pytest.approx(simulate(SHAPE, PLAIN, HARDWARE, lengths, 1).seconds)


def test_a_request_that_grows_beyond_the_cache_is_retracted_and_prefilled_again() -> None:
    lengths = [(10, 1_000), (10, 1_000)]  # the second is admitted, since a tenth of the first's tokens is reserved
    settings = small(1_300)
    result = simulate(SHAPE, settings, HARDWARE, lengths, 2)
    two_clients, one_client = (simulate(SHAPE, PLAIN, HARDWARE, lengths, clients).seconds for clients in (2, 1))
    assert two_clients < result.seconds < one_client
    assert result.output_tokens == 2_000


def test_responses_of_one_token_end_after_prefill() -> None:
    prefill = prefill_time(SHAPE, PLAIN, HARDWARE).seconds(100, 100**2)
    assert simulate(SHAPE, PLAIN, HARDWARE, [(100, 1)] * 3, 2).seconds == pytest.approx(3 * prefill)
