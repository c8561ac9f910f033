"""The rollout manager's CPU time and memory per token, with engines that return prepared replies.

python benchmarks/manager.py [--sizes 64x512 1024x4096] [--replies columns lists] [--managers 1 2] [--group 8] [--profile 12]

The manager is the real one, with its HTTP client, columnar store, decoding to text, reward pool, and the pickle that Ray would
send. It runs in a new process for each line of the table. The engine is simulated: `recorded_engine.py` replies with random
tokens. Prompts and tokenizer are random too. A size is samples x response tokens; all requests of a rollout are in flight at the
same time. `lists` are SGLang's replies, `columns` those of an engine with this project's plugins.

With `--managers K`, K managers collect the rollout at the same time, each with a process and an engine for its share.
The time per token is the CPU time of the busiest manager; tokens/s are K times that manager's rate. Memory and the times
of reward processes and driver are means over the managers; the driver's time is for reading a manager's pickle and for
the selection of groups from it.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import itertools
import json
import math
import os
import pickle
import pstats
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
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
from slime_like.data.share import SINGLE, ManagerShare  # noqa: E402
from slime_like.errors import EngineError  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.rollout.engine.client import EngineClient  # noqa: E402
from slime_like.rollout.manager import ManagerSpec, RolloutManager  # noqa: E402
from slime_like.rollout.selection import GroupSelection, LearningSignal, SelectionSpec  # noqa: E402
from slime_like.types import Prompt, Sample  # noqa: E402

PROMPT_TOKENS = 256
SIZES = ["64x512", "256x2048", "1024x4096", "4096x8192"]
LIMIT_S = 600


class RecordedEngine:
    """`EngineSupervisor` of a server that this benchmark started."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client

    async def restart(self) -> tuple[EngineClient, str]:
        """Raise ``EngineError``. After ``health.max_restarts`` attempts the run ends."""
        raise EngineError("a recorded engine ended")

    async def stop_server(self) -> None:
        """Raise ``EngineError``: ``engine`` ends the process itself."""
        raise EngineError("a recorded engine cannot be stopped")

    async def stopped_pids(self) -> tuple[int, ...]:
        """Return no process ids: nothing suspends the process of a recorded engine."""
        return ()


class Prompts:
    """Endless data source of different prompts."""

    def __init__(self) -> None:
        self._position = 0

    def __len__(self) -> int:
        return 10**9

    def next(self, num_prompts: int) -> list[Prompt]:
        """Return the next ``num_prompts`` prompts."""
        first, self._position = self._position, self._position + num_prompts
        return [
            Prompt(i, np.random.default_rng(i).integers(0, VOCAB, PROMPT_TOKENS, dtype=np.int32), "", None, None)
            for i in range(first, self._position)
        ]

    def metrics(self) -> tuple[()]:
        """Return no metrics."""
        return ()

    def state(self) -> Mapping[str, object]:
        """Return the position of the next prompt."""
        return {"position": self._position}

    def load_state(self, state: Mapping[str, object]) -> None:
        """Continue at the position in ``state``."""
        self._position = int(str(state["position"]))


def reward(prompt: Prompt, sample: Sample) -> float:
    """Return a reward that takes no time."""
    return float(len(sample.text) % 2)


def size_of(text: str) -> tuple[int, int]:
    """Parse a size such as ``64x512``, samples x response tokens. Raises ``ArgumentTypeError`` on other text."""
    samples, _, tokens = text.partition("x")
    return at_least(1)(samples), at_least(1)(tokens)


def main(argv: list[str] | None = None) -> int:
    """Print a line per size, form of replies and number of managers, in each round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=size_of, nargs="+", default=[size_of(text) for text in SIZES])
    parser.add_argument("--replies", choices=("columns", "lists"), nargs="+", default=["lists", "columns"])
    parser.add_argument("--managers", type=at_least(1), nargs="+", default=[1], help="numbers of rollout managers")
    parser.add_argument("--rounds", type=at_least(1), default=1, help="repetitions of all lines, in turn")
    parser.add_argument("--share", type=at_least(0), default=0, help=argparse.SUPPRESS)  # index of the manager of --one
    parser.add_argument("--group", type=at_least(1), default=8)
    parser.add_argument("--profile", type=at_least(0), default=0, help="functions to list by their own time")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # measure in this process
    options = parser.parse_args(argv)
    divisor = options.group * math.lcm(*options.managers)
    if wrong_sizes := [f"{n}x{m}" for n, m in options.sizes if n % divisor]:
        parser.error(
            f"--sizes {' '.join(wrong_sizes)}: the number of samples must be a multiple of --group {options.group}"
            + (f" times --managers, {divisor}" if divisor > options.group else "")
        )
    if options.one:
        share = ManagerShare(options.share, options.managers[0])
        record = measure(options.sizes[0], options.replies[0], options.group, options.profile, share)
        sys.stdout.write(visible(json.dumps(record)))
        return 0
    titles = (
        "managers",
        "replies",
        "samples x tokens",
        "ns per token",
        "M tokens/s",
        "bytes per token",
        "reward processes, ns per token",
        "driver, ns per token",
    )
    sys.stdout.write(visible("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|\n"))
    profiles: list[str] = []
    for _ in range(options.rounds):
        for size, replies, count in itertools.product(options.sizes, options.replies, options.managers):
            line = combine(measure_in_children(size, replies, options.group, options.profile, count))
            name = f"{replies} | {size[0]} x {size[1]}"
            profiles.append(f"{count} | {name}:\n{line.pop('profile')}")
            values = " | ".join(f"{value:{'.2f' if key == 'rate' else '.0f'}}" for key, value in line.items())
            sys.stdout.write(visible(f"| {count} | {name} | {values} |\n"))
            sys.stdout.flush()
    sys.stdout.write(visible("\n".join(["", *(profiles if options.profile else []), ""])))
    return 0


def combine(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine the managers' measurements of one rollout.

    Time and profile are those of the busiest manager, and tokens/s are its rate times the number of managers. The other
    values are means.
    """
    busiest = max(records, key=lambda record: record["cpu_ns"])
    means = {
        name: sum(record[name] for record in records) / len(records) for name in ("bytes", "reward_ns", "driver_ns")
    }
    return busiest | means | {"rate": len(records) * busiest["rate"]}


def measure_in_children(
    size: tuple[int, int], replies: str, group: int, profile: int, num_managers: int
) -> list[dict[str, Any]]:
    """Measure each of ``num_managers`` managers in a new process, so that the peak of memory belongs to this size.

    Waits for the processes one after the other. Raises ``SystemExit`` if one fails, and ``TimeoutExpired`` if the wait for one
    takes longer than ``LIMIT_S``.
    """
    options = {"--sizes": f"{size[0]}x{size[1]}", "--replies": replies, "--managers": num_managers, "--group": group}
    options |= {"--profile": profile}
    words = [str(word) for option in options.items() for word in option]
    commands = [
        [sys.executable, str(Path(__file__).resolve()), "--one", *words, "--share", str(i)] for i in range(num_managers)
    ]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if codes := [process.returncode for process in processes if process.returncode]:
        raise SystemExit(f"the measurement {' '.join(words)} ended with code {codes[0]}")
    return [json.loads(output) for output in outputs]


def measure(
    size: tuple[int, int], replies: str, group: int, profile: int, share: ManagerShare = SINGLE
) -> dict[str, Any]:
    """Collect a manager's ``share`` of two rollouts of ``size``; return measurements of the second. The first warms up.

    The time of the reward processes is the mean over both rollouts and includes the start of these processes.
    """
    with tempfile.TemporaryDirectory() as folder, engine(replies) as url:
        write_tokenizer(Path(folder))
        return asyncio.run(_measure(_spec(size, folder, group, share), url, profile))


async def _measure(spec: ManagerSpec, url: str, profile: int) -> dict[str, Any]:
    rollout_config = spec.rollout
    num_samples = spec.share.size(rollout_config.batch_size) * rollout_config.n_samples_per_prompt
    manager = RolloutManager(spec, Prompts(), {}, [RecordedEngine(EngineClient(url, admin_key="recorded"))])
    profiler = cProfile.Profile(time.process_time)  # waiting and other processes do not count
    before = memory("VmRSS")
    await manager.collect(0)  # warms up imports, connections, reward processes, and the engine's records
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    cpu_start, start = time.process_time(), time.perf_counter()
    if profile:
        profiler.enable()
    rollout = await manager.collect(1)
    buffers: list[pickle.PickleBuffer] = []
    # Ray pickles in the same way, and then copies the buffers.
    pickled = pickle.dumps(rollout, protocol=5, buffer_callback=buffers.append)
    profiler.disable()
    cpu_s, seconds = time.process_time() - cpu_start, time.perf_counter() - start
    peak = memory("VmHWM")
    assert sum(len(g.samples) for g in rollout.groups) == num_samples, "samples are missing"
    num_tokens = sum(sample.num_response_tokens for g in rollout.groups for sample in g.samples)
    assert num_tokens == num_samples * rollout_config.max_response_len, f"{num_tokens} tokens"
    sys.stderr.write(visible(f"{spec.share.name}, {num_tokens} tokens: {seconds:.1f} s, {cpu_s:.1f} s of CPU\n"))
    driver_s = driver_time(pickled, buffers, num_samples)
    await manager.stop()
    rewards = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "cpu_ns": 1e9 * cpu_s / num_tokens,
        "rate": num_tokens / cpu_s / 1e6,
        "bytes": (peak - before) / num_tokens,
        "reward_ns": 1e9 * (rewards.ru_utime + rewards.ru_stime) / (2 * num_tokens),
        "driver_ns": 1e9 * driver_s / num_tokens,
        "profile": _profile(profiler, profile, num_tokens),
    }


def driver_time(pickled: bytes, buffers: Sequence[pickle.PickleBuffer], num_samples: int) -> float:
    """Return the CPU seconds that the driver needs to read a manager's rollout and select its groups."""
    selection = GroupSelection(SelectionSpec(num_samples, "drop", 0, shuffle=False, seed=0), LearningSignal("group"))
    start = time.process_time()
    part = pickle.loads(pickled, buffers=buffers)  # noqa: S301  written by this process
    selected = selection.select(1, [part])
    seconds = time.process_time() - start
    assert sum(len(group.samples) for group in selected.groups) == num_samples, "samples are missing"
    return seconds


def _spec(size: tuple[int, int], folder: str, group: int, share: ManagerShare) -> ManagerSpec:
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
        first_rollout=0,
        deterministic=False,
        share=share,
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


def _profile(profiler: cProfile.Profile, num_functions: int, num_tokens: int) -> str:
    if not num_functions:
        return ""
    entries: Any = pstats.Stats(profiler).stats  # pyright: ignore[reportAttributeAccessIssue]
    rows = sorted(((own_s, calls, function) for function, (_, calls, own_s, _, _) in entries.items()), reverse=True)[
        :num_functions
    ]
    return "\n".join(
        f"{1e9 * own_s / num_tokens:8.1f} ns per token {calls:9d} calls  {os.path.basename(file)}:{line} {name}"
        for own_s, calls, (file, line, name) in rows
    )


if __name__ == "__main__":
    raise SystemExit(main())
