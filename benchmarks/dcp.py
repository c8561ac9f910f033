"""Benchmark of decode context parallelism on this CPU: engines of two ranks without it, and with each value of rollout.dcp_comm.

    python benchmarks/dcp.py --write
    python benchmarks/dcp.py --rounds 5 --case narrow

The first command takes about five minutes on an idle machine. All engines of a case stay up for all its rounds and serve
the same random Qwen3 with one KV head, by C kernels. They are measured in turn in each round, so that a busy machine
slows all of them; quote the ratios. In a round, each engine first decodes one request. Then it gets more simultaneous
requests than its small KV cache holds. Requests are greedy; the table counts the responses that are equal to those of
the engine without DCP.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

import torch  # noqa: E402  (after the lines above, as the imports below)

from benchmarks.decode import DecodeShape, make_model  # noqa: E402
from benchmarks.options import at_least  # noqa: E402
from benchmarks.run import PAGES, machine, write  # noqa: E402
from slime_like.config.schema.resolved import EngineSpec  # noqa: E402
from slime_like.interfaces import Completion, Sampling  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.rollout.engine.client import EngineClient  # noqa: E402
from slime_like.rollout.engine.connection import KvUsage  # noqa: E402
from slime_like.rollout.engine.server import EngineServer  # noqa: E402

KEY = "bench"
ARMS: Mapping[str, tuple[int, str, bool]] = {
    "TP2": (1, "ag_rs", False),
    "TP2, DCP2, `ag_rs`": (2, "ag_rs", False),
    "TP2, DCP2, `a2a`": (2, "a2a", False),
    "TP2, DCP2, `a2a`, replicated Q": (2, "a2a", True),
}
"""Engine -> rollout.dcp, rollout.dcp_comm and rollout.dcp_replicate_q."""


@dataclass(frozen=True, slots=True)
class DcpCase:
    """Model, KV cache and requests of a comparison."""

    shape: DecodeShape
    rows: int  # tokens in the KV cache of a rank
    prompt: int  # tokens of a request
    response: int
    num_requests: int  # sent to an engine at the same time


CASES: Mapping[str, DcpCase] = {
    "wide": DcpCase(
        DecodeShape(512, 1024, 4, heads=8, kv_heads=1, head_dim=64, mlp=3072, dtype=torch.float32), 384, 96, 96, 8
    ),
    "narrow": DcpCase(
        DecodeShape(512, 128, 4, heads=4, kv_heads=1, head_dim=64, mlp=256, dtype=torch.float32), 1024, 60, 120, 32
    ),
}


@dataclass(frozen=True, slots=True)
class DcpRound:
    """Measurements of one engine in one round."""

    token_s: float  # seconds per decode step with one request
    requests_s: float  # seconds until the last of all requests has ended
    usage: KvUsage
    responses: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class DcpArm:
    """Running engine, and a client of it."""

    server: EngineServer
    client: EngineClient

    async def generate(self, prompts: Sequence[np.ndarray], tokens: int) -> tuple[float, list[Completion]]:
        """Clear the engine's cache and send ``prompts`` together; return the seconds to the last reply, and greedy replies."""
        await self.client.flush()
        sampling, start = Sampling(temperature=0.0, max_new_tokens=tokens), time.perf_counter()
        replies = await asyncio.gather(*(self.client.generate(ids, [0], sampling) for ids in prompts))
        return time.perf_counter() - start, [completion for (completion,) in replies]

    async def measure(self, prompts: Sequence[np.ndarray], tokens: int) -> DcpRound:
        """Generate 1 token for the first prompt, ``tokens`` for it, and ``tokens`` for each of all prompts sent together.

        Return the measurements, with the responses of the last part. ``tokens`` must be above 1.
        """
        first, _ = await self.generate(prompts[:1], 1)
        single, _ = await self.generate(prompts[:1], tokens)
        await self.client.kv_usage()  # resets its counts
        seconds, completions = await self.generate(prompts, tokens)
        responses = tuple(tuple(int(token) for token in completion.token_ids) for completion in completions)
        return DcpRound((single - first) / (tokens - 1), seconds, await self.client.kv_usage(), responses)


def start(name: str, model: Path, case: DcpCase) -> EngineServer:
    """Start an engine of ``ARMS`` and return its server before it is ready; the caller has to stop it."""
    dcp, exchange, replicated = ARMS[name]
    spec = EngineSpec(
        model_path=str(model),
        device="cpu",
        dtype="float32",
        tp=2,
        context_length=case.prompt + case.response + 16,
        seed=0,
        log_path=str(model.parent / f"engine_{dcp}_{exchange}_{replicated}.log"),
        start_deadline_s=300,
        max_running_requests=64,
        cpu_kernels="c",
        dcp=dcp,
        dcp_comm=exchange,
        dcp_replicate_q=replicated,
        sglang={"max_total_tokens": case.rows},
    )
    server = EngineServer(spec, admin_key=KEY)
    server.start()
    return server


async def measure(servers: Mapping[str, EngineServer], rounds: int, case: DcpCase) -> dict[str, list[DcpRound]]:
    """Run ``rounds`` rounds after a warm-up round, in each of which the engines take turns. Return the results by engine."""
    arms = {
        name: DcpArm(server, EngineClient(server.url, admin_key=KEY, name=name)) for name, server in servers.items()
    }
    results: dict[str, list[DcpRound]] = {name: [] for name in arms}
    try:
        for number in range(rounds + 1):
            generator = np.random.default_rng(number)
            prompts = list(generator.integers(2, case.shape.vocab, (case.num_requests, case.prompt)).astype(np.int32))
            for name, arm in arms.items():
                result = await arm.measure(prompts if number else prompts[:1], case.response)
                line = f"round {number}, {name}: {1e3 * result.token_s:.1f} ms/token, {result.requests_s:.1f} s"
                print(visible(line), file=sys.stderr, flush=True)
                if number:
                    results[name].append(result)
    finally:
        for arm in arms.values():
            await arm.client.close()
    return results


def table(results: Mapping[str, Sequence[DcpRound]]) -> list[str]:
    """Return the Markdown table, with ratios to the first engine in brackets.

    Values and ratios are medians over the rounds, with two exceptions: the number of simultaneous requests is a maximum, and
    the number of responses equal to those of the first engine is a sum.
    """
    base = next(iter(results.values()))
    lines = [
        "| engine | `max_total_num_tokens` | one request, ms/token | all requests, tokens/s | at once | exchanges | retractions per "
        "round | responses equal to the first row's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rounds in results.items():
        pairs = list(zip(rounds, base, strict=True))
        slower = statistics.median(round_.token_s / base_round.token_s for round_, base_round in pairs)
        faster = statistics.median(base_round.requests_s / round_.requests_s for round_, base_round in pairs)
        rate = statistics.median(sum(map(len, round_.responses)) / round_.requests_s for round_ in rounds)
        exchanges = statistics.median((r.usage.dcp_exchange_s or 0.0) / r.requests_s for r in rounds)
        equal = sum(
            a == b for round_, base_round in pairs for a, b in zip(round_.responses, base_round.responses, strict=True)
        )
        lines.append(
            f"| {name} | {rounds[0].usage.capacity_tokens:,} | {1e3 * statistics.median(r.token_s for r in rounds):.1f} "
            f"({slower:.2f}) | {rate:,.0f} ({faster:.2f}) | {max(r.usage.running_requests_max for r in rounds)} "
            f"| {exchanges:.0%} | {statistics.median(r.usage.retractions for r in rounds):g} | {equal} of {sum(len(r.responses) for r in rounds)} |"
        )
    return lines


def section(results: Mapping[str, Sequence[DcpRound]], case: DcpCase) -> str:
    """Return the part of the page about one model."""
    base, *other_results = results.values()
    shape, needed_tokens = case.shape, case.num_requests * (case.prompt + case.response)
    by_round = "; ".join(
        f"{name}: {', '.join(f'{base_round.requests_s / round_.requests_s:.2f}' for round_, base_round in zip(rounds, base, strict=True))}"
        for name, rounds in zip(list(results)[1:], other_results, strict=True)
    )
    return "\n".join(
        [
            f"{shape.layers} layers, hidden {shape.hidden}, MLP {shape.mlp}, {shape.heads} query heads and {shape.kv_heads} KV head "
            f"of {shape.head_dim}; {case.rows:,} tokens of KV cache per rank. First one request of {case.prompt} prompt tokens and "
            f"{case.response} response tokens, of which only the decode steps are timed; then {case.num_requests} such requests sent "
            f"together, which need {needed_tokens:,} tokens of KV cache. {len(base)} rounds.",
            "",
            *table(results),
            "",
            f"Throughput relative to {next(iter(results))}, by round: {by_round}.",
            "",
        ]
    )


def page(sections: Mapping[str, str], machine_line: str, command: str) -> str:
    """Return the page; ``sections`` maps the name of each case to its section."""
    head = [
        "# Decode context parallelism, measured",
        "",
        machine_line,
        "",
        f"Command: `{command}`. Engines of two ranks, one thread each, C kernels, float32, over gloo, with random Qwen3 models. Each "
        'engine is named by `rollout.tp`, `rollout.dcp` and `rollout.dcp_comm`; "replicated Q" is '
        "`rollout.dcp_replicate_q=true`. The engines take turns in each round. Throughput counts the time until the "
        'last of all requests has ended. "Exchanges" is the share of this time that rank 0 spent in exchanges of DCP, '
        'waits for the other rank included. "At once" is the largest number of requests that ran at the same time. '
        "Values are medians over rounds, but the number of requests at once is a maximum, and that of equal responses "
        "a sum. In brackets: the median of the ratios to the first row in the same round.",
        "",
    ]
    return "\n".join([*head, *(f"## A {name} model\n\n{text}" for name, text in sections.items())])


def run_case(case: DcpCase, rounds: int) -> dict[str, list[DcpRound]]:
    """Start the engines of a case and return their measurements.

    Raises ``SystemExit`` if one decodes without C kernels.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = Path(folder) / "model"
        make_model(case.shape, model)
        servers: dict[str, EngineServer] = {}
        for name in ARMS:
            servers[name] = start(name, model, case)
            stack.callback(servers[name].stop)
        for name, server in servers.items():
            server.wait_ready()
            if "C kernels" not in server.decode_method():
                raise SystemExit(f"the engine {name} decodes without C kernels: {server.decode_method()}")
        return asyncio.run(measure(servers, rounds, case))


def main(argv: list[str]) -> int:
    """Measure the cases and print their page; with ``--write``, also write it. Return 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--case", choices=CASES, help="model and requests; default: all")
    parser.add_argument("--write", action="store_true", help="write docs/measurements/dcp.md, which has all cases")
    options = parser.parse_args(argv)
    if options.write and options.case:
        parser.error("--write needs all cases: remove --case")
    os.environ["OMP_NUM_THREADS"] = "1"
    machine_line = machine(os.getloadavg()[0])
    names = [options.case] if options.case else list(CASES)
    sections = {name: section(run_case(CASES[name], options.rounds), CASES[name]) for name in names}
    text = page(sections, machine_line, f"python benchmarks/dcp.py {' '.join(argv)}".strip())
    print(visible(text))
    if options.write:
        write(PAGES / "dcp.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
