"""Cost of a training step of one Megatron rank on a CPU: model.cpu_kernels=torch and model.cpu_kernels=c take turns.

    python benchmarks/step.py                                           # both tables of this machine
    python benchmarks/step.py --cases tiny,float32,1 --rounds 1         # one case, quickly
    python benchmarks/step.py --output FILE                             # as a page

A case is size, dtype and threads; it runs in a separate process, in which each arm has its own model and takes one step per
round: 64 sequences in one micro-batch, each a prompt of 4 to 6 tokens and 64 tokens that are trained on; one AdamW update.
Figures are medians over rounds, ratios medians of the rounds' ratios. The script ends with an error if the first gradient
norms differ by more than the dtype's tolerance. Cases are rows of the first table; the second has two parts of a step that
have C kernels: log-probabilities and attention.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.inputs import NEW_TOKENS, PROMPTS, SAMPLES, SHAPES, write_inputs  # noqa: E402
from benchmarks.options import at_least  # noqa: E402
from benchmarks.processes import join_ranks  # noqa: E402
from benchmarks.run import machine  # noqa: E402
from slime_like.batch import PackedBatch  # noqa: E402
from slime_like.cluster.start.placement import CPU_ENV  # noqa: E402
from slime_like.config.schema.algo import GrpoConfig  # noqa: E402
from slime_like.config.schema.model import ModelConfig, OptimConfig  # noqa: E402
from slime_like.config.schema.resolved import Layout, RankSpec  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.train.megatron.model_io.convert import untrained_spec  # noqa: E402
from slime_like.util.leave import leave  # noqa: E402
from slime_like.util.ports import PortLease, RendezvousAddress  # noqa: E402

ARMS = ("torch", "c")
CASES = ("tiny,bfloat16,2", "tiny,float32,2", "20m,bfloat16,2")
WARM_UP = 2  # steps left out
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03}  # relative difference of gradient norms
Times = dict[str, list[tuple[float, float]]]  # arm -> (wall, CPU) seconds of each round


@dataclass(frozen=True, slots=True)
class Case:
    """Case in which both arms are measured: size of the model, dtype and number of threads."""

    size: str
    dtype: str
    threads: int

    @classmethod
    def of(cls, text: str) -> Case:
        """Parse a case, for example ``tiny,bfloat16,2``. Raises ``ArgumentTypeError`` on other text."""
        size, dtype, threads = (*text.split(","), "", "")[:3]
        if size not in SHAPES or dtype not in TOLERANCE or text.count(",") != 2:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not SIZE,DTYPE,THREADS: a size of {', '.join(SHAPES)}, a dtype of {', '.join(TOLERANCE)}"
            )
        return cls(size, dtype, at_least(1)(threads))


def main(argv: Sequence[str]) -> int:
    """Print the tables, and write them to ``--output`` if it is given. Raises ``SystemExit`` if the arms disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", type=Case.of, default=[Case.of(case) for case in CASES])
    parser.add_argument("--rounds", type=at_least(1), default=9, help="timed steps of each arm, and repeats of a part")
    parser.add_argument("--sequences", type=at_least(1), default=PROMPTS * SAMPLES)
    parser.add_argument("--tables", nargs="+", choices=("steps", "parts"), default=["steps", "parts"])
    parser.add_argument("--output", type=Path, help="a page to write")
    args = parser.parse_args(argv)
    os.environ |= CPU_ENV  # makes waiting threads sleep, as in a run
    head = [machine(os.getloadavg()[0]), "", f"Command: `{' '.join(['python benchmarks/step.py', *argv])}`", ""]
    tables = {"steps": lambda: steps(args.cases, args.rounds, args.sequences), "parts": lambda: parts(args.rounds)}
    text = "\n".join([*head, *(line for name in args.tables for line in (*tables[name](), ""))])
    sys.stdout.write(visible(text))
    if args.output is not None:
        args.output.write_text(text)
    return 0


def steps(cases: Sequence[Case], rounds: int, sequences: int) -> Iterator[str]:
    """Yield a table of median seconds per step.

    Raises ``SystemExit`` if the arms' first gradient norms differ by more than ``TOLERANCE``.
    """
    yield "| model, dtype, threads | torch, wall (CPU) | c, wall (CPU) | ratio, wall (CPU) |"
    yield "|---|---|---|---|"
    for case in cases:
        with tempfile.TemporaryDirectory() as folder, PortLease("127.0.0.1") as port:
            join_ranks(mp.spawn(run_case, (port, case, rounds, sequences, folder), join=False))
            results = json.loads((Path(folder) / "results.json").read_text())
        check(case, results["norms"])
        yield row(f"{case.size}, {case.dtype}, {case.threads}", results["times"], 1.0, 3)


def check(case: Case, norms: Mapping[str, float]) -> None:
    """Raise ``SystemExit`` unless the arms' first gradient norms agree within ``TOLERANCE`` of the dtype."""
    limit = TOLERANCE[case.dtype]
    if not abs(norms["torch"] - norms["c"]) <= limit * norms["torch"]:
        raise SystemExit(f"{case}: gradient norms of the first step are {norms}, which differ by more than {limit:g}")


def row(name: str, times: Mapping[str, Sequence[Sequence[float]]], scale: float, digits: int) -> str:
    """Return one line of a table: the median times of both arms, and the median of the rounds' ratios torch / C."""
    cells = [name]
    for arm in ARMS:
        wall, cpu = (statistics.median(pair[i] for pair in times[arm]) * scale for i in (0, 1))
        cells.append(f"{wall:.{digits}f} ({cpu:.{digits}f})")
    pairs = list(zip(times["torch"], times["c"], strict=True))
    wall, cpu = (statistics.median(plain[i] / fused[i] for plain, fused in pairs) for i in (0, 1))
    return f"| {' | '.join(cells)} | {wall:.2f} ({cpu:.2f}) |"


def run_case(rank: int, port: int, case: Case, rounds: int, sequences: int, folder: str) -> None:
    """Time both arms step by step, write the times and first gradient norms to ``folder`` and exit.

    Call it in a spawned process.
    """
    torch.set_num_threads(case.threads)
    from slime_like.train.megatron.platform import groups

    inputs = write_inputs(Path(folder), case.size)
    specs = {arm: spec_of(str(inputs.model), case.dtype, arm, WARM_UP + rounds) for arm in ARMS}
    rank_info = groups.join_and_make_groups(
        specs["c"], rank=rank, world_size=1, master=RendezvousAddress("127.0.0.1", port)
    )
    from slime_like.train.megatron.rank.trainer import RankTrainer  # imports megatron, which ``groups`` has prepared

    trainers = {arm: RankTrainer(spec, rank_info) for arm, spec in specs.items()}
    rows = make_rows(sequences, SHAPES[case.size]["vocab_size"])
    num_trained = int((rows.loss_weight > 0).sum())
    times: Times = {arm: [] for arm in ARMS}
    norms: dict[str, float] = {}
    for _ in range(WARM_UP + rounds):
        for arm, trainer in trainers.items():
            wall, cpu = time.perf_counter(), time.process_time()
            metrics = trainer.train_rollout([[rows]], [num_trained])
            times[arm].append((time.perf_counter() - wall, time.process_time() - cpu))
            norms.setdefault(arm, next(metric.value for metric in metrics if metric.name == "train/grad_norm"))
    results = {"times": {arm: pairs[WARM_UP:] for arm, pairs in times.items()}, "norms": norms}
    (Path(folder) / "results.json").write_text(json.dumps(results))
    leave(0)


def spec_of(model: str, dtype: str, arm: str, num_steps: int) -> RankSpec:
    """Return the specification of a single rank that takes one optimizer step per rollout."""
    return replace(
        untrained_spec(model, Layout(), dtype),
        model=ModelConfig(hf_checkpoint=model, cpu_kernels=arm),
        optim=OptimConfig(lr=1e-3),
        algo=GrpoConfig(),
        num_steps=num_steps,
    )


def make_rows(sequences: int, vocabulary: int) -> PackedBatch:
    """Return prompts of 4 to 6 random tokens, each followed by ``NEW_TOKENS`` tokens that are trained on."""
    numbers = np.random.default_rng(0)
    lengths = NEW_TOKENS + np.resize([4, 5, 6], sequences)
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    trained_T = np.concatenate([np.arange(length) >= length - NEW_TOKENS for length in lengths])
    return PackedBatch(
        token_ids=numbers.integers(0, vocabulary, len(trained_T)).astype(np.int32),
        cu_seqlens=bounds,
        loss_weight=(trained_T / trained_T.sum()).astype(np.float32),
        versions=np.where(trained_T, 0, -1).astype(np.int32),
        rollout_logprobs=np.where(trained_T, -6.0, 0.0).astype(np.float32),
        rewards=numbers.normal(size=sequences).astype(np.float32),
        advantages=numbers.normal(size=sequences).astype(np.float32),
        sample_ids=np.arange(sequences, dtype=np.int64),
    )


def parts(rounds: int) -> Iterator[str]:
    """Yield a table of median milliseconds of log-probabilities and attention, forward and backward, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield "| part, forward and back, one thread | torch, wall (CPU), ms | c, wall (CPU), ms | ratio, wall (CPU) |"
    yield "|---|---|---|---|"
    half, full = torch.bfloat16, torch.float32
    for n, v, h, dtype, entropy in (
        (4096, 1024, 384, half, False),
        (4096, 1024, 384, half, True),
        (512, 32768, 384, half, False),
        (4096, 512, 128, full, False),
    ):
        name = f"log-probabilities{' and entropies' if entropy else ''} of {n} x {v} logits, {str(dtype)[6:]}"
        yield row(f"{name}, hidden {h}", alternate(scores(n, v, h, dtype, entropy=entropy), rounds), 1e3, 1)
    for size in SHAPES:
        for sequences, length in ((64, 69), (8, 512)):
            inputs = attention(sequences, length, SHAPES[size])
            yield row(f"attention, a layer of {size}, {sequences} x {length}", alternate(inputs, rounds), 1e3, 1)


def alternate(arms: Mapping[str, Callable[[], object]], rounds: int) -> Times:
    """Return the times of arms that take turns, after one warm-up call of each."""
    times: Times = {arm: [] for arm in arms}
    for timed in range(1 + rounds):
        for arm, call in arms.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            if timed:
                times[arm].append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def scores(n: int, v: int, h: int, dtype: torch.dtype, *, entropy: bool) -> dict[str, Callable[[], object]]:
    """Return one function per arm. Each computes log-probabilities from hidden states, and their backward pass.

    With ``entropy``, each also computes entropies.
    """
    from slime_like.train.megatron.model.vocab import VocabularyPart, vocab_scores
    from slime_like_plugins.megatron_cpu.scores import fused_vocab_scores

    hidden, weight = (torch.randn(rows, h, dtype=dtype, requires_grad=True) for rows in (n, v))
    target, part = torch.randint(0, v, (n,)), VocabularyPart(0, v, None)

    def run(function: Any) -> None:
        outputs = function(hidden, weight, target, part=part, temperature=1.0, chunk=n, entropy=entropy)
        torch.stack([column.sum() for column in outputs if column is not None]).sum().backward()

    return {"torch": lambda: run(vocab_scores), "c": lambda: run(fused_vocab_scores)}


def attention(sequences: int, length: int, shape: Mapping[str, int]) -> dict[str, Callable[[], object]]:
    """Return one function per arm. Each computes packed causal attention and its backward pass.

    The inputs are float32, the output is bfloat16.
    """
    from slime_like.train.megatron.model.sdpa import attention_batches, in_batches
    from slime_like_plugins.megatron_cpu.functions import AttentionFunction
    from slime_like_plugins.megatron_cpu.kernels import kernels

    queries, groups, width = (shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    query, key, value = (torch.randn(sequences * length, n, width).requires_grad_() for n in (queries, groups, groups))
    bounds = np.arange(0, sequences * length + 1, length, dtype=np.int32)
    batches, on_device = attention_batches(bounds, torch.device("cpu")), torch.from_numpy(bounds)
    grad = torch.randn(sequences * length, queries, width).bfloat16()

    def plain() -> Tensor:
        return in_batches(query, key, value, batches, None).bfloat16()

    def fused() -> Tensor:
        attended: Any = AttentionFunction.apply(query, key, value, on_device, width**-0.5, torch.bfloat16, kernels())
        return attended

    return {"torch": lambda: plain().backward(grad), "c": lambda: fused().backward(grad)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
