"""Benchmark of decoding on this CPU: rollout.cpu_kernels off, torch and c, and transformers' generate.

    python benchmarks/decode.py --model tiny --batches 16 64 256 --rounds 5
    python benchmarks/decode.py --model 20m --arms off c hf --steps 64

All arms stay up and are measured in turn, so that a busy machine slows all of them; quote the ratios. Engines get the
requests of a run: over HTTP, groups of 8 samples per prompt, seeded, temperature 1, log-probabilities returned.
Each arm has one thread by default. transformers gets the same prompts in one batch, samples, and returns no
log-probabilities. The script prints four rows per batch size: wall time and CPU time of whole calls, including the
prefill, and of decoding alone (a call minus a call for one token). CPU time is the user and system time of all
processes of an arm; other work on the machine affects it least. Each row has medians of tokens/s and of milliseconds
per token of a sequence, and the median of the rounds' speeds relative to transformers, or to the first arm if
transformers does not run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

from benchmarks.options import at_least  # noqa: E402
from slime_like.config.schema.resolved import EngineSpec  # noqa: E402
from slime_like.interfaces import Sampling  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.rollout.engine.client import EngineClient  # noqa: E402
from slime_like.rollout.engine.server import EngineServer  # noqa: E402

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

SAMPLES_PER_PROMPT = 8
PROMPT = 32
KINDS = ("whole, wall", "whole, CPU", "decode, wall", "decode, CPU")


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Shape of a random Qwen3 model."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    dtype: torch.dtype


SHAPES = {
    "tiny": DecodeShape(512, 128, 4, 4, 2, 32, 256, torch.float32),
    "20m": DecodeShape(512, 384, 8, 6, 2, 64, 1792, torch.bfloat16),
}


def make_model(shape: DecodeShape, folder: Path) -> Qwen3ForCausalLM:
    """Return a model with random weights, and save it to ``folder``."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # takes seconds, and the tests read the pages only

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        eos_token_id=None,  # a sample that ended early would make its engine look faster
        bos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).to(shape.dtype).eval()  # pyright: ignore[reportArgumentType]
    model.save_pretrained(folder)
    return model


def engine_spec(model: Path, dtype: str, batch: int, log: Path, **settings: Any) -> EngineSpec:
    """Return the settings of an engine on this CPU that runs at most ``batch`` requests at the same time."""
    return EngineSpec(
        model_path=str(model),
        device="cpu",
        dtype=dtype,
        tp=1,
        context_length=512,
        seed=0,
        log_path=str(log),
        start_deadline_s=300,
        max_running_requests=batch,
        sglang={"max_total_tokens": 65_536},
        **settings,
    )


class EngineArm:
    """Engine that generates the samples of prompts.

    The constructor sets ``OMP_NUM_THREADS`` of this process and starts the engine. Call ``server.wait_ready`` before the
    first use, and ``server.stop`` at the end.
    """

    def __init__(self, name: str, spec: EngineSpec, threads: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        self.name = name
        self.server = EngineServer(spec, admin_key="bench")
        self.server.start()

    def cpu_seconds(self) -> float:
        """Return the user and system time so far of the engine's process group, without processes that have ended."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # the process has ended
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.server.pid:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def __call__(self, prompts: np.ndarray, tokens: int) -> None:
        """Generate ``SAMPLES_PER_PROMPT`` samples of each prompt, with different seeds."""

        async def generate() -> None:
            client = EngineClient(self.server.url, admin_key="bench", name=self.name, deadline_s=600)
            sampling = Sampling(temperature=1.0, max_new_tokens=tokens)
            seeds = range(SAMPLES_PER_PROMPT)
            try:
                await asyncio.gather(*(client.generate(row, seeds, sampling) for row in prompts))
            finally:
                await client.close()

        asyncio.run(generate())


def hf_arm(model: Qwen3ForCausalLM) -> Callable[[np.ndarray, int], None]:
    """Return a function that generates ``SAMPLES_PER_PROMPT`` samples of each prompt with ``generate`` of transformers."""

    model_generate: Any = getattr(model, "generate")  # noqa: B009  (its declared type fits no model)

    def generate(prompts: np.ndarray, tokens: int) -> None:
        ids = torch.from_numpy(prompts.astype(np.int64)).repeat_interleave(SAMPLES_PER_PROMPT, 0)
        options = {"do_sample": True, "top_k": 0, "min_new_tokens": tokens, "max_new_tokens": tokens}
        with torch.inference_mode():
            model_generate(ids, attention_mask=torch.ones_like(ids), **options)

    return generate


@contextlib.contextmanager
def arms(options: argparse.Namespace, shape: DecodeShape, folder: Path) -> Generator[dict[str, Callable[..., None]]]:
    """Start the arms of ``options``, yield them by name once they are ready, and stop their engines on exit."""
    model = make_model(shape, folder / "model")
    runners: dict[str, Callable[..., None]] = {}
    engines: list[EngineArm] = []
    try:
        for name in options.arms:
            if name == "hf":
                runners[name] = hf_arm(model)
                continue
            dtype, log = str(shape.dtype).removeprefix("torch."), folder / f"{name}.log"
            spec = engine_spec(folder / "model", dtype, max(options.batches), log, cpu_kernels=name)
            engines.append(EngineArm(name, spec, options.threads))
            runners[name] = engines[-1]
        for engine in engines:
            engine.server.wait_ready()
            print(visible(f"{engine.name}: {engine.server.decode_method()}"))
        yield runners
    finally:
        for engine in engines:
            engine.server.stop()


def measure(runners: dict[str, Callable[..., None]], options: argparse.Namespace, vocab: int, base: str) -> None:
    """For each batch size, run rounds of all arms in turn and print a row per kind of time, with ratios to the arm ``base``."""
    print(
        visible("| batch | time | " + " | ".join(f"{name} tok/s (ms)" for name in runners) + f" | ratios to {base} |")
    )
    for batch in options.batches:
        seconds: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in runners} for kind in KINDS}
        for number in range(options.rounds + 1):
            generator = np.random.default_rng([batch, number])
            prompts = generator.integers(2, vocab, (batch // SAMPLES_PER_PROMPT, PROMPT)).astype(np.int32)
            for name, arm in runners.items():
                first, full = timed(arm, prompts, 1), timed(arm, prompts, options.steps)
                if number:  # the first round warms up
                    scale = options.steps / (options.steps - 1)
                    decode = [(b - a) * scale for a, b in zip(first, full, strict=True)]
                    for kind, value in zip(KINDS, (*full, *decode), strict=True):
                        seconds[kind][name].append(value)
        for kind, times in seconds.items():
            print_row(batch, kind, times, options.steps, base)


def timed(arm: Callable[..., None], prompts: np.ndarray, steps: int) -> tuple[float, float]:
    """Call ``arm`` once and return its wall and CPU seconds."""
    cpu_clock = arm.cpu_seconds if isinstance(arm, EngineArm) else time.process_time
    spent_before, start = cpu_clock(), time.perf_counter()
    arm(prompts, steps)
    return time.perf_counter() - start, cpu_clock() - spent_before


def print_row(batch: int, kind: str, times: dict[str, list[float]], steps: int, base: str) -> None:
    """Print one row: for each arm, its median tokens/s and ms per token of a sequence, and its speed relative to arm ``base``.

    ``times`` maps each arm to the seconds of its rounds.
    """
    cells: list[str] = []
    ratios: list[str] = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        cells.append(f"{batch * steps / median:,.0f} ({median / steps * 1e3:.1f})")
        relative = statistics.median(b / a for a, b in zip(seconds, times[base], strict=True))
        ratios.append(f"{name} {relative:.2f}")
    print(visible(f"| {batch} | {kind} | {' | '.join(cells)} | {', '.join(ratios)} |"), flush=True)


def main() -> None:
    """Run the arms and rounds that the command line asks for, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--arms", nargs="+", choices=("off", "torch", "c", "hf"), default=["off", "torch", "c", "hf"])
    parser.add_argument("--batches", nargs="+", type=at_least(8, multiple=SAMPLES_PER_PROMPT), default=[16, 64, 256])
    parser.add_argument("--steps", type=at_least(2), default=64, help="new tokens per sample")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--threads", type=at_least(1), default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "sglang", "transformers"))
    print(
        visible(f"{' '.join(sys.argv)}\nPython {platform.python_version()}, {packages}, load {os.getloadavg()[0]:.1f}")
    )
    shape = SHAPES[options.model]
    with tempfile.TemporaryDirectory() as folder, arms(options, shape, Path(folder)) as runners:
        measure(runners, options, shape.vocab, "hf" if "hf" in runners else options.arms[0])


if __name__ == "__main__":
    main()
