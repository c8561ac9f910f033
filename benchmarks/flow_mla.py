"""Benchmark of FlowMLA and decode context parallelism on this CPU: engines of four ranks with equal memory per rank.

    python benchmarks/flow_mla.py --rounds 2 --write

All engines serve one random DeepSeek-V3 with two groups of data-parallel attention. Each rank has a fixed amount of
memory, and the KV cache gets the part that the weights leave free, as on a GPU. Engines run one after another,
because four of them exceed a laptop's memory. In a round, an engine decodes one request; then it gets more simultaneous
requests than its cache holds. Requests are greedy, so the engines should return the
same tokens; the table counts equal responses.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

from benchmarks.dcp import KEY, DcpArm, DcpRound  # noqa: E402
from benchmarks.options import at_least  # noqa: E402
from benchmarks.run import PAGES, machine, write  # noqa: E402
from slime_like.cluster.plan.engine import engine_settings  # noqa: E402
from slime_like.config.schema.flow_mla import FlowOptions  # noqa: E402
from slime_like.config.schema.rank_memory import VARIABLE  # noqa: E402
from slime_like.config.schema.resolved import EngineSpec  # noqa: E402
from slime_like.planner.config_json import read_shape  # noqa: E402
from slime_like.planner.host import host_pool  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.rollout.engine.client import EngineClient  # noqa: E402
from slime_like.rollout.engine.server import EngineServer  # noqa: E402

RANKS, GROUPS = 4, 2
WEIGHTS = ("o_proj", "q_proj", "kv_b_proj", "a_proj")
ARMS: Mapping[str, tuple[int, str]] = {
    "off": (1, ""),
    "DCP": (2, ""),
    "FlowMLA": (1, FlowOptions(WEIGHTS).to_json()),
    "both": (2, FlowOptions(WEIGHTS).to_json()),
}
"""Engine -> rollout.dcp and rollout.flow_mla."""
MODEL: Mapping[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
}
"""Keys of config.json."""
MEMORY, STATIC = 20_000_000, 0.9  # bytes of a rank, and SGLang's mem_fraction_static
PROMPT, RESPONSE, REQUESTS = 224, 32, 48
LAYER_BYTES = 4 * (
    (8 * 64 * 384 + 128 * 8 * 48 + 2 * 64 * 8 * 96) // 2  # over the two ranks of a group
    + 384 * (128 + 64 + 16)
)
"""Bytes of one layer's sharded projections on a rank without FlowMLA, in float32."""
LOG_LINE = re.compile(r"slime_like FlowMLA shards .*: (\d+) bytes of each rank .* at most (\d+) while loading")


@dataclass(frozen=True, slots=True)
class FlowArm:
    """Results of one engine."""

    rounds: tuple[DcpRound, ...]
    planned_tokens: int  # KV capacity of a group in tokens, as the planner computes it
    weight_bytes: int  # of the sharded projections on a rank, from the engine's log; without FlowMLA from the shapes
    loading_bytes: int  # largest size of the sharded projections on a rank while the engine loaded its weights


def sharded_bytes(flow_mla: bool) -> int:
    """Return the bytes of the sharded projections on a rank.

    If the projections of all ``L`` layers have ``W`` bytes, a rank holds ``W`` bytes without FlowMLA. With FlowMLA over
    ``dp`` attention groups it holds ``W / dp + 2 W / L``: its part of each layer, and two slots for complete layers.
    """
    full = MODEL["num_hidden_layers"] * LAYER_BYTES
    return full // GROUPS + 2 * LAYER_BYTES if flow_mla else full


def make_spec(name: str, model: Path) -> EngineSpec:
    """Return the spec of an engine of ``ARMS``."""
    dcp, flow_mla = ARMS[name]
    return EngineSpec(
        model_path=str(model),
        device="cpu",
        dtype="float32",
        tp=RANKS,
        context_length=PROMPT + RESPONSE + 16,
        seed=0,
        log_path=str(model.parent / f"engine_{name}.log"),
        start_deadline_s=400,
        max_running_requests=None,
        admits_by_kv=True,
        dp_attention=GROUPS,
        dcp=dcp,
        flow_mla=flow_mla,
        sglang={"mem_fraction_static": STATIC},
    )


def planned_tokens(spec: EngineSpec) -> int:
    """Return the KV capacity of an attention group in tokens, as the planner computes it from config.json."""
    settings = replace(engine_settings(spec), rank_memory=MEMORY)
    return host_pool(read_shape("--model", spec.model_path), settings, available=0).tokens


async def measure(server: EngineServer, name: str, num_rounds: int) -> tuple[DcpRound, ...]:
    """Run ``num_rounds`` rounds after a warm-up round, and return their results."""
    arm = DcpArm(server, EngineClient(server.url, admin_key=KEY, name=name, deadline_s=600))
    rounds: list[DcpRound] = []
    try:
        for number in range(num_rounds + 1):
            prompts = np.random.default_rng(number).integers(2, 500, (REQUESTS, PROMPT)).astype(np.int32)
            rounds.append(await arm.measure(list(prompts), RESPONSE))
            line = f"round {number}, {name}: {1e3 * rounds[-1].token_s:.1f} ms/token, {rounds[-1].requests_s:.1f} s"
            print(visible(line), file=sys.stderr, flush=True)
    finally:
        await arm.client.close()
    return tuple(rounds[1:])


def run_arm(name: str, model: Path, num_rounds: int) -> FlowArm:
    """Start the engine of an arm, measure it, stop it, and return the results.

    Raises ``SystemExit`` if a rank does not hold the expected bytes.
    """
    spec = make_spec(name, model)
    server = EngineServer(spec, admin_key=KEY)
    try:
        server.start()
        server.wait_ready()
        rounds = asyncio.run(measure(server, name, num_rounds))
    finally:
        server.stop()
    lines = LOG_LINE.findall(Path(spec.log_path).read_text())
    counts = {(int(weight_text), int(loading_text)) for weight_text, loading_text in lines}
    counts = counts or {(sharded_bytes(False), sharded_bytes(False))}
    expected_bytes = sharded_bytes(bool(spec.flow_mla))
    if wrong_counts := sorted({weight_bytes for weight_bytes, _ in counts} - {expected_bytes}):
        raise SystemExit(
            f"a rank of the engine {name} holds {wrong_counts[0]} bytes of sharded weights instead of {expected_bytes}"
        )
    return FlowArm(rounds, planned_tokens(spec), expected_bytes, max(loading_bytes for _, loading_bytes in counts))


def table(results: Mapping[str, FlowArm]) -> list[str]:
    """Return the lines of the Markdown table.

    Times and rates are medians over the rounds, simultaneous requests are maxima, and retractions are sums.
    """
    base = results["off"].rounds
    lines = [
        "| engine | attention weights per rank, kB | at most while loading, kB | `max_total_num_tokens` of a group | the same by the planner "
        "| at once | retractions | one request, ms/token | all requests, tokens/s | responses equal to the first row's |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in results.items():
        rounds = arm.rounds
        capacity = rounds[0].usage.capacity_tokens
        pairs = [
            (a, b)
            for round_, base_round in zip(rounds, base, strict=True)
            for a, b in zip(round_.responses, base_round.responses, strict=True)
        ]
        rate = statistics.median(sum(map(len, round_.responses)) / round_.requests_s for round_ in rounds)
        lines.append(
            f"| {name} | {arm.weight_bytes / 1e3:,.0f} | {arm.loading_bytes / 1e3:,.0f} | {capacity:,} | {arm.planned_tokens:,} ({arm.planned_tokens / capacity - 1:+.1%}) "
            f"| {max(r.usage.running_requests_max for r in rounds)} | {sum(r.usage.retractions for r in rounds)} "
            f"| {1e3 * statistics.median(r.token_s for r in rounds):.1f} | {rate:,.0f} | {sum(a == b for a, b in pairs)} of {len(pairs)} |"
        )
    return lines


def page(results: Mapping[str, FlowArm], machine_line: str, command: str) -> str:
    """Return the page."""
    return "\n".join(
        [
            "# FlowMLA and DCP, measured",
            "",
            machine_line,
            "",
            f"Command: `{command}`. Engines with [FlowMLA](../flow_mla.md), with [DCP](../dcp.md), with both and with neither (off): "
            f"{RANKS} ranks in {GROUPS} groups of data-parallel attention, one thread per rank, float32, over gloo, with a random "
            f"DeepSeek-V3 ({MODEL['num_hidden_layers']} layers, hidden {MODEL['hidden_size']}, "
            f"{MODEL['num_attention_heads']} heads, latents of {MODEL['kv_lora_rank']}). Each rank has {MEMORY / 1e6:.0f} MB ({VARIABLE}), of "
            f"which SGLang uses {STATIC:.0%} (mem_fraction_static) for weights and KV cache; SGLang sizes the cache itself. An engine "
            f"first gets one request of {PROMPT} prompt tokens and {RESPONSE} response tokens, of which only the decode steps are timed; "
            f"then {REQUESTS} such requests together, timed until the last one has ended. "
            '"At once" is the largest number of requests that ran at the same time, in both groups. '
            "With FlowMLA, a rank holds half of the attention weights that it holds without, and two slots (buffers for one gathered "
            "layer each); while the engine loads, there is only one slot. "
            f"Rounds: {len(results['off'].rounds)}. Engines ran one after another.",
            "",
            *table(results),
            "",
        ]
    )


def main(argv: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=at_least(1), default=2)
    parser.add_argument("--write", action="store_true", help="write docs/measurements/flow_mla.md")
    options = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": "1", VARIABLE: str(MEMORY)}
    machine_line = machine(os.getloadavg()[0])
    from tests.engine.latent_models import build  # transformers takes seconds, and the tests read the pages only

    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder), "deepseek_v3", **MODEL).paths["A"]
        results = {name: run_arm(name, model, options.rounds) for name in ARMS}
    text = page(results, machine_line, f"python benchmarks/flow_mla.py {' '.join(argv)}".strip())
    print(visible(text))
    if options.write:
        write(PAGES / "flow_mla.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
