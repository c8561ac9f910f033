"""Rollout throughput on long-tailed lengths: the synchronous loop, over-sampling, and over-sampling with partial rollouts.

    python benchmarks/rollout.py --rounds 8 --out docs/measurements/rollout.md

Two engines serve a random Qwen3. The maximum length of each sample is drawn from a log-normal distribution, seeded by
prompt and index in the group, because a random model has no realistic lengths. A sample that draws the end token is
shorter. A round is a rollout of each arm in turn on the same engines, so that a busy machine slows all of them. Each
rollout follows a push of all weights (not timed), as in training. Only ``collect`` is timed: a synchronous loop waits for
it. A second table compares two scheduling policies, each on one engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.options import at_least  # noqa: E402  (found by the line above)
from benchmarks.run import BELOW, machine, write_below  # noqa: E402
from slime_like.config.schema.faults import HealthConfig  # noqa: E402
from slime_like.config.schema.resolved import EngineSpec  # noqa: E402
from slime_like.config.schema.rollout import DataConfig, EvalConfig, RewardConfig, RolloutConfig  # noqa: E402
from slime_like.config.schema.run import LoopConfig  # noqa: E402
from slime_like.data.group_metrics import group_metrics  # noqa: E402
from slime_like.data.prompts import FileSource, SourceContext  # noqa: E402
from slime_like.data.tokenizer import open_tokenizer  # noqa: E402
from slime_like.interfaces import Bucket, Engine, GenerateContext, Sampling  # noqa: E402
from slime_like.metrics.types import reduce_metrics  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.quickstart.model import ModelSpec, write_model  # noqa: E402
from slime_like.rollout.engine.client import EngineClient  # noqa: E402
from slime_like.rollout.engine.server import EngineServer  # noqa: E402
from slime_like.rollout.generate.single_turn import to_sample  # noqa: E402
from slime_like.rollout.manager import ManagerSpec, RolloutManager  # noqa: E402
from slime_like.rollout.pool.router import RequestCounts  # noqa: E402
from slime_like.types import Prompt, Sample  # noqa: E402
from slime_like.weight_sync.shared import SharedBucketMemory  # noqa: E402
from tests.engine.fixed_engine import FixedEngine  # noqa: E402

KEY = "bench"
VOCAB, CONTEXT, PROMPT, ROWS, MAX_LENGTH, MEDIAN = 512, 512, 48, 4000, 384, 24.0
MODEL = ModelSpec(vocab_size=VOCAB, num_hidden_layers=4, max_position_embeddings=CONTEXT)
NUM_ENGINES = 2


def response_length(prompt_id: int, index: int) -> int:
    """Return the maximum length of a sample: log-normal, up to ``MAX_LENGTH``, with most of the variance between prompts."""
    prompt, sample = (np.random.default_rng([7, prompt_id, i]).normal() for i in (0, 1 + index))
    return int(np.clip(MEDIAN * np.exp(0.9 * prompt + 0.6 * sample), 1, MAX_LENGTH))


async def long_tailed(
    prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext
) -> Sequence[Sample]:
    """Generate samples, each with its own maximum length (for ``rollout.generate``)."""

    async def generate_one(index: int, seed: int) -> Sample:
        sampling = replace(context.sampling, max_new_tokens=response_length(prompt.prompt_id, index))
        (completion,) = await engine.generate(prompt.token_ids, [seed], sampling)
        return to_sample(prompt, completion, context, seed=seed, index=index)

    return await asyncio.gather(*(generate_one(index, seed) for index, seed in enumerate(seeds)))


def write_prompts(path: Path) -> None:
    """Write rows of ``PROMPT`` random digits, one token each."""
    numbers = np.random.default_rng(0)
    rows = ("".join(map(str, numbers.integers(0, 10, PROMPT))) for _ in range(ROWS))
    path.write_text("".join(json.dumps({"prompt": text, "label": "1"}) + "\n" for text in rows))


def open_prompts(options: argparse.Namespace) -> FileSource:
    """Open the prompts, in the same order for every arm."""
    path = str(options.prompts)
    tokenizer = open_tokenizer(str(options.model))
    return FileSource(DataConfig(train=path), SourceContext(path, tokenizer, CONTEXT, lambda rm_type: True))


@dataclass
class RolloutArm:
    """One configuration of rollouts, with its own manager on the shared engines."""

    name: str
    manager: RolloutManager
    rows: list[dict[str, float]] = field(default_factory=list[dict[str, float]])


def make_arm(name: str, servers: Sequence[EngineServer], options: argparse.Namespace, **rollout: Any) -> RolloutArm:
    """Return an arm. ``rollout``: fields of its ``RolloutConfig`` in addition to those that all arms share."""
    clients = [EngineClient(s.url, admin_key=KEY, name=f"engine {i}", deadline_s=120) for i, s in enumerate(servers)]
    cfg = RolloutConfig(
        batch_size=options.batch,
        n_samples_per_prompt=options.samples,
        max_response_len=MAX_LENGTH,
        generate="benchmarks.rollout:long_tailed",
        **rollout,
    )
    spec = ManagerSpec(
        rollout=cfg,
        reward=RewardConfig(name="exact", workers=1),
        evaluation=EvalConfig(),
        loop=LoopConfig(num_rollout=10**6),
        health=HealthConfig(on_dead_engine="stop", on_stalled_engine="stop"),
        tokenizer_path=str(options.model),
        max_context_len=CONTEXT,
        stop_token_ids=(),
        chat_template_kwargs={},
        temperature=1.0,
        seed=0,
        probe_sequences=0,
        first_rollout=0,
        deterministic=False,
        receives_pushes=True,
    )
    return RolloutArm(
        name, RolloutManager(spec, open_prompts(options), {}, [FixedEngine(client) for client in clients])
    )


async def push(
    arm: RolloutArm, servers: Sequence[EngineServer], tensors: Sequence[tuple[str, Any]], version: int
) -> None:
    """Push the same weights again as ``version``, so that engines clear their caches."""
    await arm.manager.begin_push()
    for server in servers:
        client, region = EngineClient(server.url, admin_key=KEY, deadline_s=120), SharedBucketMemory()
        await client.update_from_tensors(region.write(Bucket(tuple(tensors))))
        region.close()
        await client.close()
    await arm.manager.commit_push(version)


async def rollout(arm: RolloutArm, rollout_id: int, *, counts: bool) -> None:
    """Run one timed rollout, and add its metrics to ``arm.rows`` if it ``counts``."""
    start = time.perf_counter()
    collected = await arm.manager.collect(rollout_id)
    seconds = time.perf_counter() - start
    metrics = reduce_metrics([*collected.metrics, *group_metrics(collected.groups, rollout_id)])
    lengths = [sample.num_response_tokens for group in collected.groups for sample in group.samples]
    if counts:
        arm.rows.append(
            metrics | {"seconds": seconds, "samples": len(lengths), "tokens": sum(lengths), "longest": max(lengths)}
        )


async def measure(arms: Sequence[RolloutArm], servers: Sequence[EngineServer], tensors: Any, options: Any) -> None:
    """Run rounds of all arms in turn, then stop their managers.

    The first rounds (``--warm``) fill the buffer of partial samples and do not count.
    """
    for number in range(options.warm + options.rounds):
        for arm in arms:
            await push(arm, servers, tensors, number)
            await rollout(arm, number, counts=number >= options.warm)
    for arm in arms:
        await arm.manager.stop()


def table(arms: Sequence[RolloutArm], options: argparse.Namespace) -> str:
    """Return a description and a table over all counted rounds.

    Seconds are medians. Rates, mean length and discarded tokens are ratios of totals, with rates relative to the first
    arm in brackets. Staleness is a maximum; the last three columns are means.
    """
    head = ("", "s per rollout", "samples/s", "trained tokens/s", "mean length", "discarded tokens", "stale, max")
    head = (*head, "several versions", "busiest engine", "prefix hits")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    base: list[float] = []
    for arm in arms:
        total = {key: sum(row.get(key, 0.0) for row in arm.rows) for key in ("seconds", "samples", "tokens")}
        wasted_tokens = sum(row.get("rollout/wasted_tokens", 0.0) for row in arm.rows)
        rates = [total["samples"] / total["seconds"], total["tokens"] / total["seconds"]]
        base = base or rates
        gains = [f"{rate:,.0f} ({rate / first:.2f})" for rate, first in zip(rates, base, strict=True)]
        cells = [
            arm.name,
            f"{statistics.median(row['seconds'] for row in arm.rows):.2f}",
            *gains,
            f"{total['tokens'] / total['samples']:.1f}",
            f"{wasted_tokens / (total['tokens'] + wasted_tokens):.0%}",
            f"{max(row['rollout/staleness_max'] for row in arm.rows):.0f}",
            f"{statistics.mean(row['rollout/mixed_version_ratio'] for row in arm.rows):.0%}",
            f"{statistics.mean(row['rollout/engine_load_max'] for row in arm.rows):.2f}",
            f"{statistics.mean(row['rollout/prefix_cache_hit_rate'] for row in arm.rows):.0%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lengths = sorted(response_length(i, j) for i in range(5_000) for j in range(4))
    share = [lengths[int(q * len(lengths))] for q in (0.5, 0.9, 0.99)]
    sizes = f"{options.batch} groups of {options.samples} samples per rollout; over-sampling starts {options.over_sampling}."
    text = (
        f"{sizes} Lengths: median {share[0]}, 90th percentile {share[1]}, 99th percentile {share[2]}, at most {MAX_LENGTH}, mean "
        f"{statistics.mean(lengths):.1f}. {options.rounds} rounds after {options.warm} that are not counted."
    )
    return "\n".join([text, "", *lines, ""])


async def prefix(servers: Mapping[str, EngineServer], rounds: int) -> str:
    """Return a table of seconds and prefix hits by scheduling policy, on groups of 8 samples with prompts of 256 tokens."""
    sampling, results = Sampling(temperature=1.0, max_new_tokens=16), dict[str, list[tuple[float, float]]]()
    for number in range(rounds + 1):
        for name, server in servers.items():
            client, usage = EngineClient(server.url, admin_key=KEY, deadline_s=120), RequestCounts(1)
            prompts = np.random.default_rng([9, number]).integers(2, VOCAB, (16, 256)).astype(np.int32)
            start = time.perf_counter()
            for completions in await asyncio.gather(*(client.generate(ids, range(8), sampling) for ids in prompts)):
                usage.add("engine", completions)
            seconds = time.perf_counter() - start
            await client.close()
            if number:  # the first round warms up
                hits = reduce_metrics(usage.drain())["rollout/prefix_cache_hit_rate"]
                results.setdefault(name, []).append((seconds, hits))
    lines = ["| `schedule_policy` | seconds | prefix hits |", "|---|---|---|"]
    for name, rows in results.items():
        seconds, hits = (statistics.median(column) for column in zip(*rows, strict=True))
        lines.append(f"| {name} | {seconds:.2f} | {hits:.0%} |")
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=at_least(1), default=8)
    parser.add_argument("--warm", type=at_least(0), default=3)
    parser.add_argument("--batch", type=at_least(1), default=16, help="groups of a rollout")
    parser.add_argument("--samples", type=at_least(2), default=4, help="samples of a group")
    parser.add_argument("--over-sampling", type=at_least(1), default=24, help="groups that over-sampling starts")
    parser.add_argument(
        "--out", type=Path, help=f"page to write; of an existing one, the part below the line {BELOW} is replaced"
    )
    options = parser.parse_args()
    if options.over_sampling < options.batch:
        parser.error(f"--over-sampling {options.over_sampling} is below --batch {options.batch}: raise --over-sampling")
    machine_line = machine(os.getloadavg()[0])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        options.model, options.prompts = Path(folder) / "model", Path(folder) / "prompts.jsonl"
        write_model(options.model, MODEL)
        write_prompts(options.prompts)
        tensors = hf_tensors(options.model)
        servers = [EngineServer(spec(options, i), admin_key=KEY) for i in range(NUM_ENGINES)]
        lpm_server = EngineServer(spec(options, NUM_ENGINES, schedule_policy="lpm"), admin_key=KEY)
        try:
            for server in (*servers, lpm_server):
                server.start()
            for server in (*servers, lpm_server):
                server.wait_ready()
            arms = [
                make_arm("wait for all", servers, options),
                make_arm("over-sampling", servers, options, over_sampling_batch_size=options.over_sampling),
                make_arm(
                    "over-sampling, partial",
                    servers,
                    options,
                    over_sampling_batch_size=options.over_sampling,
                    partial_rollout=True,
                ),
            ]
            asyncio.run(measure(arms, servers, tensors, options))
            prefix_hits = asyncio.run(
                prefix({"fcfs (SGLang's default)": servers[0], "lpm": lpm_server}, options.rounds)
            )
        finally:
            for server in (*servers, lpm_server):
                server.stop()
    text = f"`python {' '.join(sys.argv)}`. {machine_line} {table(arms, options)}\n"
    text += f"16 groups of 8 samples, 256 tokens of prompt, 16 sampled, one engine:\n\n{prefix_hits}\n"
    print(visible(text))
    if options.out is not None:
        write_below(options.out, "# Over-sampling and partial rollouts", text)


def spec(options: argparse.Namespace, number: int, **sglang: Any) -> EngineSpec:
    """Return the specification of one engine."""
    return EngineSpec(
        model_path=str(options.model),
        device="cpu",
        dtype="float32",
        tp=1,
        context_length=CONTEXT,
        seed=0,
        log_path=str(options.model.parent / f"engine_{number}.log"),
        start_deadline_s=300,
        max_running_requests=128,
        sglang={"max_total_tokens": 65_536, **sglang},
    )


def hf_tensors(folder: Path) -> list[tuple[str, Any]]:
    """Return the tensors of the model in ``folder`` as a trainer exports them: tied embeddings once."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    return [(name, value.detach()) for name, value in model.named_parameters()]


if __name__ == "__main__":
    main()
