"""Simulation of SGLang's ``bench_serving --max-concurrency``: a fixed number of clients send requests to one engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slime_like.hardware import Hardware
from slime_like.planner import constants
from slime_like.planner.decode import decode_step
from slime_like.planner.engine import engine_memory
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.shapes import ModelShape
from slime_like.planner.speed import prefill_time

SEED = 1  # seed of bench_serving


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """Result of a benchmark."""

    seconds: float
    input_tokens: int
    output_tokens: int

    @property
    def output_per_second(self) -> float:
        """Response tokens per second."""
        return self.output_tokens / self.seconds

    @property
    def total_per_second(self) -> float:
        """Prompt and response tokens per second."""
        return (self.input_tokens + self.output_tokens) / self.seconds


@dataclass(slots=True)
class _SimulatedRequest:
    prompt: int
    output: int
    generated: int = 0

    @property
    def context(self) -> int:
        return self.prompt + self.generated

    @property
    def num_remaining(self) -> int:
        return self.output - self.generated


@dataclass(slots=True)
class _SimulatedEngine:
    """Running requests of an engine, its clock, and the clients' waiting requests."""

    capacity: int  # tokens of the KV cache
    waiting: list[_SimulatedRequest]
    clients: int
    running: list[_SimulatedRequest] = field(default_factory=list[_SimulatedRequest])
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(request.context for request in self.running)

    def admit(self) -> list[_SimulatedRequest]:
        """Start the next waiting requests and return them.

        A request starts if fewer than ``clients`` requests run, and its prompt and full response fit the cache that running
        requests neither use nor reserve.
        """
        reserve = constants.NEW_TOKENS.value * sum(request.num_remaining for request in self.running)
        free_tokens, new_requests = self.capacity - self.num_tokens - reserve, list[_SimulatedRequest]()
        while self.waiting and len(self.running) < self.clients:
            length = self.waiting[0].prompt + self.waiting[0].output
            if length > free_tokens:
                break
            free_tokens -= length
            new_requests.append(self.waiting.pop(0))
            self.running.append(new_requests[-1])
        return new_requests

    def retract(self) -> None:
        """Move the request with the fewest generated tokens back to the front of the queue."""
        shortest = min(self.running, key=lambda request: request.generated)
        self.running.remove(shortest)
        self.waiting.insert(0, shortest)


def random_lengths(max_prompt: int, max_response: int, num_requests: int) -> list[tuple[int, int]]:
    """Return (prompt, response) lengths of ``num_requests`` requests, drawn uniformly up to these limits as by bench_serving."""
    random = np.random.RandomState(SEED)
    prompts = random.randint(1, max_prompt + 1, size=num_requests)
    outputs = random.randint(1, max_response + 1, size=num_requests)
    return [(int(prompt), int(output)) for prompt, output in zip(prompts, outputs, strict=True)]


def simulate(
    shape: ModelShape,
    settings: EngineSettings,
    hardware: Hardware,
    lengths: Sequence[tuple[int, int]],
    clients: int,
) -> BenchmarkResult:
    """Return the result of a benchmark with requests of (prompt, response) ``lengths``, at most ``clients`` at a time.

    As in SGLang, prefill comes before decoding, and requests are admitted in order. Each request alone has to fit the KV
    cache; an assertion fails otherwise.
    """
    engine = _SimulatedEngine(
        engine_memory(shape, settings, hardware).tokens, [_SimulatedRequest(*length) for length in lengths], clients
    )
    prefill = prefill_time(shape, settings, hardware)
    steps: dict[int, tuple[float, float]] = {}  # requests -> seconds of a step: without context, and per token of it
    while engine.waiting or engine.running:
        while new_requests := engine.admit():  # fewer tokens are reserved for a request once it runs
            for request in new_requests:
                engine.seconds += prefill.seconds(request.context, request.context**2)
                request.generated += 1
        requests = len(engine.running)
        assert requests, "each request fits the KV cache"
        num_tokens = engine.num_tokens
        fewest_remaining = min(request.num_remaining for request in engine.running)
        rounds = min(fewest_remaining, (engine.capacity - num_tokens) // requests)
        if rounds < 1 and all(request.num_remaining for request in engine.running):
            engine.retract()
            continue
        if requests not in steps:
            empty, full = (decode_step(shape, settings, hardware, requests, context).total for context in (0, 1e5))
            steps[requests] = empty, (full - empty) / (1e5 * requests)
        empty_seconds, token_seconds = steps[requests]
        engine.seconds += rounds * (empty_seconds + token_seconds * (num_tokens + requests * rounds / 2))
        for request in engine.running:
            request.generated += rounds
        engine.running = [request for request in engine.running if request.num_remaining]
    return BenchmarkResult(engine.seconds, sum(prompt for prompt, _ in lengths), sum(output for _, output in lengths))
