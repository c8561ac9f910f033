"""The rollout manager's CPU time and memory per token, with engines that return recorded replies.

python benchmarks/manager.py [--sizes 64x512 1024x4096] [--replies columns lists] [--group 8] [--profile 12]

The manager is the real one, in a process of its own for each line: HTTP client, columnar store, text, reward pool, the pickle that
Ray would send. Only the engine is a recording (`recorded_engine.py`). A size is samples x response tokens; all requests of a
rollout are in flight at the same time. `lists` are SGLang's replies, `columns` those of an engine with this project's plugin.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pickle
import pstats
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY)]

from benchmarks.options import at_least  # noqa: E402
from benchmarks.recorded_engine import VOCAB  # noqa: E402
from slime_like.config.schema.faults import HealthConfig  # noqa: E402
from slime_like.config.schema.rollout import EvalConfig, RewardConfig, RolloutConfig  # noqa: E402
from slime_like.config.schema.run import LoopConfig  # noqa: E402
from slime_like.errors import EngineError  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.rollout.engine.client import EngineClient  # noqa: E402
from slime_like.rollout.manager import ManagerSpec, RolloutManager  # noqa: E402
from slime_like.types import Prompt, Sample  # noqa: E402

PROMPT_TOKENS = 256
SIZES = ["64x512", "256x2048", "1024x4096", "4096x8192"]
LIMIT_S = 600


class RecordedEngine:
    """`EngineSupervisor` of a server that this benchmark started."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client

    async def restart(self) -> tuple[EngineClient, str]:
        """Raise the error that ends the run."""
        raise EngineError("a recorded engine ended")

    async def stop_server(self) -> None:
        """Raise the error that ends the run."""
        raise EngineError("a recorded engine cannot be stopped")

    async def stopped_pids(self) -> tuple[int, ...]:
        """Return nothing: a recorded engine has no processes."""
        return ()


class Prompts:
    """Endless data source of different prompts."""

    def __init__(self) -> None:
        self._position = 0

    def __len__(self) -> int:
        return 10**9

    def next(self, n: int) -> list[Prompt]:
        """Return the next ``n`` prompts."""
        first, self._position = self._position, self._position + n
        return [
            Prompt(i, np.random.default_rng(i).integers(0, VOCAB, PROMPT_TOKENS, dtype=np.int32), "", None, None)
            for i in range(first, self._position)
        ]

    def metrics(self) -> tuple[()]:
        """Return no metrics."""
        return ()

    def state(self) -> Mapping[str, object]:
        """Return the position."""
        return {"position": self._position}

    def load_state(self, state: Mapping[str, object]) -> None:
        """Continue at a position."""
        self._position = int(str(state["position"]))


def reward(prompt: Prompt, sample: Sample) -> float:
    """Return a reward that takes no time."""
    return float(len(sample.text) % 2)


def size_of(text: str) -> tuple[int, int]:
    """Return samples and response tokens of a size."""
    samples, _, tokens = text.partition("x")
    return at_least(1)(samples), at_least(1)(tokens)


def main(argv: list[str] | None = None) -> int:
    """Print a line per size and form of replies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=size_of, nargs="+", default=[size_of(text) for text in SIZES])
    parser.add_argument("--replies", choices=("columns", "lists"), nargs="+", default=["lists", "columns"])
    parser.add_argument("--group", type=at_least(1), default=8)
    parser.add_argument("--profile", type=at_least(0), default=0, help="functions to list by their own time")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # measure in this process
    options = parser.parse_args(argv)
    if wrong_sizes := [f"{n}x{m}" for n, m in options.sizes if n % options.group]:
        parser.error(
            f"--sizes {' '.join(wrong_sizes)}: the number of samples must be a multiple of --group {options.group}"
        )
    if options.one:
        record = measure(options.sizes[0], options.replies[0], options.group, options.profile)
        sys.stdout.write(visible(json.dumps(record)))
        return 0
    titles = (
        "replies",
        "samples x tokens",
        "ns per token",
        "M tokens/s",
        "bytes per token",
        "reward processes, ns per token",
    )
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    profiles: list[str] = []
    for num_samples, num_tokens in options.sizes:
        for replies in options.replies:
            line = measure_in_child((num_samples, num_tokens), replies, options.group, options.profile)
            profiles.append(f"{replies}, {num_samples} x {num_tokens}:\n{line.pop('profile')}")
            values = " | ".join(f"{value:{'.2f' if name == 'rate' else '.0f'}}" for name, value in line.items())
            lines.append(f"| {replies} | {num_samples} x {num_tokens} | {values} |")
    sys.stdout.write(visible("\n".join([*lines, "", *(profiles if options.profile else []), ""])))
    return 0


def measure_in_child(size: tuple[int, int], replies: str, group: int, profile: int) -> dict[str, Any]:
    """Measure in a new process, so that the peak of memory belongs to this size alone."""
    words = [
        "--one",
        "--sizes",
        f"{size[0]}x{size[1]}",
        "--replies",
        replies,
        "--group",
        str(group),
        "--profile",
        str(profile),
    ]
    result = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), *words], stdout=subprocess.PIPE, timeout=LIMIT_S, check=False
    )
    if result.returncode:
        raise SystemExit(f"the measurement {' '.join(words)} ended with code {result.returncode}")
    return json.loads(result.stdout)


def measure(size: tuple[int, int], replies: str, group: int, profile: int) -> dict[str, Any]:
    """Collect a small rollout, then measure one of ``size``."""
    with tempfile.TemporaryDirectory() as folder, engine(replies) as url:
        write_tokenizer(Path(folder))
        return asyncio.run(_measure(size, url, folder, group, profile))


async def _measure(size: tuple[int, int], url: str, folder: str, group: int, profile: int) -> dict[str, Any]:
    num_samples, num_tokens = size
    manager = RolloutManager(
        _spec(size, folder, group), Prompts(), {}, [RecordedEngine(EngineClient(url, admin_key="recorded"))]
    )
    profiler = cProfile.Profile(time.process_time)  # waiting and other processes do not count
    before = memory("VmRSS")
    await manager.collect(0)  # imports, connections, reward processes, and the engine's records
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    cpu_start, start = time.process_time(), time.perf_counter()
    if profile:
        profiler.enable()
    rollout = await manager.collect(1)
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(rollout, protocol=5, buffer_callback=buffers.append)  # as Ray does, which then copies the buffers
    profiler.disable()
    cpu_s, seconds = time.process_time() - cpu_start, time.perf_counter() - start
    peak = memory("VmHWM")
    assert sum(len(g.samples) for g in rollout.groups) == num_samples, "samples are missing"
    total = sum(sample.num_response_tokens for g in rollout.groups for sample in g.samples)
    assert total == num_samples * num_tokens, f"{total} tokens"
    sys.stderr.write(visible(f"{size}: {seconds:.1f} s, {cpu_s:.1f} s of CPU\n"))
    await manager.stop()
    rewards = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "cpu_ns": 1e9 * cpu_s / total,
        "rate": total / cpu_s / 1e6,
        "bytes": (peak - before) / total,
        "reward_ns": 1e9 * (rewards.ru_utime + rewards.ru_stime) / (2 * total),
        "profile": _profile(profiler, profile, total),
    }


def _spec(size: tuple[int, int], folder: str, group: int) -> ManagerSpec:
    num_samples, num_tokens = size
    return ManagerSpec(
        rollout=RolloutConfig(batch_size=num_samples // group, n_samples_per_prompt=group, max_response_len=num_tokens),
        reward=RewardConfig(name="benchmarks.manager:reward", workers=2),
        evaluation=EvalConfig(),
        loop=LoopConfig(num_rollout=2, max_staleness=0),
        health=HealthConfig(),
        tokenizer_path=folder,
        max_context_len=PROMPT_TOKENS + num_tokens,
        stop_token_ids=(),
        chat_template_kwargs={},
        temperature=1.0,
        seed=0,
        probe_sequences=1,
        samples_per_rollout=num_samples,
        first_rollout=0,
        deterministic=False,
    )


@contextmanager
def engine(replies: str) -> Generator[str]:
    """Yield the address of a recorded engine in a process of its own."""
    script = str(Path(__file__).with_name("recorded_engine.py"))
    process = subprocess.Popen(
        [sys.executable, script, replies], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer of `VOCAB` tokens of one to seven letters."""
    from tokenizers import Tokenizer, decoders, models, processors

    source, letters = random.Random(0), "abcdefghijklmnopqrstuvwxyz"
    vocabulary: dict[str, int] = {}
    while len(vocabulary) < VOCAB:
        token = source.choice(("", "Ġ")) + "".join(source.choices(letters, k=source.randint(1, 7)))
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder, tokenizer.post_processor = decoders.ByteLevel(), processors.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def memory(field: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS, the resident memory, or VmHWM, its peak."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024


def _profile(profiler: cProfile.Profile, count: int, num_tokens: int) -> str:
    if not count:
        return ""
    entries: Any = pstats.Stats(profiler).stats  # pyright: ignore[reportAttributeAccessIssue]
    rows = sorted(((own_s, calls, function) for function, (_, calls, own_s, _, _) in entries.items()), reverse=True)[
        :count
    ]
    return "\n".join(
        f"{1e9 * own_s / num_tokens:8.1f} ns per token {calls:9d} calls  {os.path.basename(file)}:{line} {name}"
        for own_s, calls, (file, line, name) in rows
    )


if __name__ == "__main__":
    raise SystemExit(main())
