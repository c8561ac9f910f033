"""Cost of a checkpoint after every rollout: no checkpoint, synchronous save, or asynchronous save (run.async_save).

python benchmarks/save.py [--rounds 3] [--rollouts 3] [--tokens 512] [--threads 1]

One trainer rank on a CPU with a Qwen3 of 20 million parameters, in float32; a rollout is one optimizer step on random rows.
In each round the three kinds take turns: each runs a few rollouts and waits for its last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

from benchmarks.options import at_least  # noqa: E402
from slime_like.config.schema.algo import SftConfig  # noqa: E402  (found by the line above)
from slime_like.config.schema.model import ModelConfig, OptimConfig  # noqa: E402
from slime_like.config.schema.resolved import Layout, RankSpec  # noqa: E402
from slime_like.config.schema.run import RunConfig  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.quickstart.model import ModelSpec, write_model  # noqa: E402
from slime_like.util.ports import open_rendezvous  # noqa: E402

HOST = "127.0.0.1"
SEQUENCES = 8  # number in a rollout
SHAPE = ModelSpec(
    hidden_size=384,
    intermediate_size=1792,
    num_hidden_layers=8,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=1024,
    max_position_embeddings=2048,
)
KINDS = {"no checkpoint": None, "synchronous": False, "asynchronous": True}  # -> run.async_save


def main() -> int:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--rollouts", type=at_least(1), default=3, help="rollouts of each kind in a round")
    parser.add_argument("--tokens", type=at_least(16, multiple=SEQUENCES), default=512, help="tokens of a rollout")
    parser.add_argument("--threads", type=at_least(1), default=1)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", SHAPE)
        actor = _actor(folder / "model")
        runs = {kind: _checkpoints(folder / kind, actor, async_save) for kind, async_save in KINDS.items()}
        seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for k in range(options.rounds + 1):
            for kind, run in runs.items():
                measured_rollouts = _rollouts(
                    actor, run, range(k * options.rollouts, (k + 1) * options.rollouts), options.tokens
                )
                if k:  # the first round warms up
                    seconds[kind].append(measured_rollouts)
        size = sum(path.stat().st_size for path in (folder / "synchronous").rglob("*.distcp"))
    print(
        visible(
            f"a checkpoint is {size / 2**20:.0f} MiB; medians of {options.rounds} rounds of {options.rollouts} rollouts"
        )
    )
    print("| checkpoint | seconds per rollout | of which in the save |\n|---|---|---|")
    for kind, pairs in seconds.items():
        total_s, save_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(visible(f"| {kind} | {total_s:.2f} | {save_s:.2f} |"))
    return 0


def _rollouts(actor: Any, run: Any, numbers: range, tokens: int) -> tuple[float, float]:
    """Run rollouts. Return the seconds per rollout, and how much of that time calls of ``run.save`` take."""
    start, waited_s = time.perf_counter(), 0.0
    for k in numbers:
        _step(actor, tokens, k)
        save_start = time.perf_counter()
        if run is not None:
            run.save(k + 1, final=k == numbers[-1])
        waited_s += time.perf_counter() - save_start
    return (time.perf_counter() - start) / len(numbers), waited_s / len(numbers)


def _step(actor: Any, tokens: int, seed: int) -> None:
    import numpy as np

    from slime_like.batch import PackedBatch

    rng = np.random.default_rng(seed)
    bounds = np.arange(0, tokens + 1, tokens // SEQUENCES).astype(np.int32)
    weight = np.full(tokens, 1 / (tokens - SEQUENCES), np.float32)
    weight[bounds[:-1]] = 0  # the first token of a sequence is not predicted
    rows = PackedBatch(
        token_ids=rng.integers(2, SHAPE.vocab_size, tokens).astype(np.int32),
        cu_seqlens=bounds,
        loss_weight=weight,
        versions=np.zeros(tokens, np.int32),
        rollout_logprobs=np.zeros(tokens, np.float32),
        advantages=None,
        rewards=np.zeros(SEQUENCES, np.float32),
        sample_ids=np.arange(SEQUENCES, dtype=np.int64),
    )
    actor.train_rollout([[rows]], [tokens - SEQUENCES])


def _checkpoints(run_dir: Path, actor: Any, async_save: bool | None) -> Any:
    """Return the driver's ``Checkpoints``; None if no checkpoint is saved."""
    from slime_like.cluster.run.checkpoints import Checkpoints
    from slime_like.cluster.run.rollouts import DemonstrationRollout

    if async_save is None:
        return None
    demonstrations: Any = SimpleNamespace(state=dict)
    config = RunConfig(dir=str(run_dir), async_save=async_save, keep_checkpoints=1)
    rollout = DemonstrationRollout(demonstrations, 1)
    return Checkpoints(run_dir / "checkpoints", actor, rollout, config, enabled=True, last=0)


def _actor(model: Path) -> Any:
    from slime_like.train.megatron.platform import groups

    spec = RankSpec(
        model=ModelConfig(hf_checkpoint=str(model)),
        optim=OptimConfig(lr=1e-5),
        algo=SftConfig(),
        layout=Layout(),
        device="cpu",
        dtype="float32",
        temperature=1.0,
        num_steps=1000,
        steps_per_rollout=1,
        max_tokens_per_rank=4096,
        seed=0,
        deadline_s=600.0,
    )
    rank_info = groups.join_and_make_groups(spec, rank=0, world_size=1, master=open_rendezvous(HOST))
    from slime_like.train.megatron.rank.trainer import RankTrainer

    return RankTrainer(spec, rank_info)


if __name__ == "__main__":
    sys.exit(main())
