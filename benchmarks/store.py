"""Cost of appends to the samples of a batch, in the columnar store and in other containers of samples.

python benchmarks/store.py [--samples 64] [--tokens 512] [--prompt 64] [--rounds 5]

`steps`: one token is appended to every sample, `--tokens` times, as when tokens are streamed. `replies`: each sample
gets all its tokens in one append, as in a reply of an engine. Nanoseconds of CPU per token are those of the fastest
round; they cover the prompts, the appends and the conversion to contiguous columns. Bytes are the peak of Python's
allocations. All containers must hold the same bytes at the end.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.options import at_least  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.store.columns import TokenColumns, context_columns  # noqa: E402
from slime_like.store.store import (  # noqa: E402
    Batch,
    SampleStore,
    StoreRow,
)

Steps = list[TokenColumns]  # tokens of one append, ``samples`` equal parts one after another
Container = Callable[[TokenColumns, int, Steps], list[TokenColumns]]


def batched(prompt: TokenColumns, samples: int, steps: Steps) -> list[TokenColumns]:
    """Append to all rows of a store in one call per step."""
    store = SampleStore()
    rows = np.array(store.fork(store.add(prompt), num_rows=samples))
    last = np.full(samples, True)
    for number, columns in enumerate(steps, 1):
        counts = None if len(columns) == samples else np.full(samples, len(columns) // samples)
        store.append_batch(Batch(rows, columns, counts, (), last if number == len(steps) else None))
    return [store.columns(row) for row in rows.tolist()]


def per_sample(prompt: TokenColumns, samples: int, steps: Steps) -> list[TokenColumns]:
    """Append to each row of a store separately, in every step."""
    store = SampleStore()
    rows = [StoreRow(store, index) for index in store.fork(store.add(prompt), num_rows=samples)]
    for columns in steps:
        n = len(columns) // samples
        for i, row in enumerate(rows):
            row.append(columns.slice(i * n, i * n + n))
    return [row.columns for row in rows]


def arrays(prompt: TokenColumns, samples: int, steps: Steps) -> list[TokenColumns]:
    """Write the tokens of each sample to its own arrays, which have space for all its tokens from the start."""
    size = len(prompt) + sum(len(columns) for columns in steps) // samples
    rows = [
        TokenColumns(np.empty(size, np.int32), np.empty(size, np.float32), np.empty(size, np.int32))
        for _ in range(samples)
    ]
    end = len(prompt)
    for row in rows:
        row.token_ids[:end], row.logprobs[:end], row.versions[:end] = prompt.token_ids, prompt.logprobs, prompt.versions
    for columns in steps:
        n = len(columns) // samples
        for i, row in enumerate(rows):
            part = slice(i * n, i * n + n)
            row.token_ids[end : end + n] = columns.token_ids[part]
            row.logprobs[end : end + n] = columns.logprobs[part]
            row.versions[end : end + n] = columns.versions[part]
        end += n
    return rows


def lists(prompt: TokenColumns, samples: int, steps: Steps) -> list[TokenColumns]:
    """Append the tokens of each sample to its own Python lists, and convert the lists to arrays at the end."""
    fields = [(prompt.token_ids.tolist(), prompt.logprobs.tolist(), prompt.versions.tolist()) for _ in range(samples)]
    for columns in steps:
        n = len(columns) // samples
        ids, logprobs, versions = columns.token_ids.tolist(), columns.logprobs.tolist(), columns.versions.tolist()
        for i, (own_ids, own_logprobs, own_versions) in enumerate(fields):
            part = slice(i * n, i * n + n)
            own_ids.extend(ids[part])
            own_logprobs.extend(logprobs[part])
            own_versions.extend(versions[part])
    return [
        TokenColumns(np.array(a, dtype=np.int32), np.array(b, dtype=np.float32), np.array(c, dtype=np.int32))
        for a, b, c in fields
    ]


def concatenated(prompt: TokenColumns, samples: int, steps: Steps) -> list[TokenColumns]:
    """Concatenate each append to the arrays of its sample."""
    rows = [prompt] * samples
    for columns in steps:
        n = len(columns) // samples
        for i, row in enumerate(rows):
            part = columns.slice(i * n, i * n + n)
            rows[i] = TokenColumns(
                np.concatenate([row.token_ids, part.token_ids]),
                np.concatenate([row.logprobs, part.logprobs]),
                np.concatenate([row.versions, part.versions]),
            )
    return rows


CONTAINERS: dict[str, Container] = {
    "store, `append_batch`": batched,
    "store, one sample per append": per_sample,
    "arrays per sample, preallocated": arrays,
    "lists per sample": lists,
    "arrays per sample, concatenated": concatenated,
}


def main(argv: list[str] | None = None) -> int:
    """Print a table for appends of one token per sample, and one for appends of whole replies.

    Raises ``SystemExit`` if containers disagree.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=at_least(1), default=64)
    parser.add_argument("--tokens", type=at_least(1), default=512)
    parser.add_argument("--prompt", type=at_least(0), default=64)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    options = parser.parse_args(argv)
    prompt = context_columns(np.arange(options.prompt, dtype=np.int32))
    lines: list[str] = []
    for form, num_steps in (("steps", options.tokens), ("replies", 1)):
        steps = _random_steps(options.samples, options.tokens, num_steps)
        lines += [f"| {form} | ns per token | relative | bytes per token, at most |", "|---|---|---|---|"]
        lines += measure(prompt, options.samples, steps, options.rounds)
        lines.append("")
    sys.stdout.write(visible("\n".join(lines)))
    return 0


def measure(prompt: TokenColumns, samples: int, steps: Steps, rounds: int) -> list[str]:
    """Return a row per container. Raises ``SystemExit`` if containers disagree."""
    expected = [_bytes(row) for row in lists(prompt, samples, steps)]
    seconds = dict.fromkeys(CONTAINERS, float("inf"))
    for _ in range(rounds):  # containers take turns, so that the machine's load affects all of them
        for name, container in CONTAINERS.items():
            start = time.process_time()
            rows = container(prompt, samples, steps)
            seconds[name] = min(seconds[name], time.process_time() - start)
            if [_bytes(row) for row in rows] != expected:
                raise SystemExit(f"{name}: the rows differ from the lists")
    num_tokens = sum(map(len, steps))
    first = seconds[next(iter(CONTAINERS))]
    return [
        f"| {name} | {1e9 * seconds[name] / num_tokens:.0f} | {seconds[name] / first:.1f} | {_peak(container, prompt, samples, steps):.0f} |"
        for name, container in CONTAINERS.items()
    ]


def _peak(container: Container, prompt: TokenColumns, samples: int, steps: Steps) -> float:
    tracemalloc.start()
    try:
        container(prompt, samples, steps)
        return tracemalloc.get_traced_memory()[1] / sum(map(len, steps))
    finally:
        tracemalloc.stop()


def _random_steps(samples: int, tokens: int, num_steps: int) -> Steps:
    random, n = np.random.default_rng(0), samples * tokens // num_steps
    return [
        TokenColumns(
            random.integers(0, 150_000, n, dtype=np.int32),
            -random.exponential(size=n).astype(np.float32),
            np.full(n, 3, dtype=np.int32),
        )
        for _ in range(num_steps)
    ]


def _bytes(columns: TokenColumns) -> tuple[bytes, bytes, bytes]:
    return columns.token_ids.tobytes(), columns.logprobs.tobytes(), columns.versions.tobytes()


if __name__ == "__main__":
    raise SystemExit(main())
