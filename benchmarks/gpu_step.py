"""Speed, peak memory and host synchronisations of a training step on one GPU, for models of published shapes.

    python benchmarks/gpu_step.py                                      # every arm, each in a process of its own
    python benchmarks/gpu_step.py --arms dense hybrid-flashqla --steps 8
    python benchmarks/gpu_step.py --traced                             # also the peak on a phantom GPU (docs/gpu.md)
    python benchmarks/gpu_step.py --device cpu --tiny --arms dense     # rehearsal on a CPU

Weights are random; "moe" has only 4 layers. A step has four micro-batches, by default of four sequences of 2048 tokens, full
recompute, bfloat16, and one AdamW update; the last three quarters of each sequence are trained on (in the traced step, all
tokens). Seconds are the median over the steps after two warm-up steps; peak GiB is torch's peak over the same steps.
Synchronisations are listed by line, as torch.cuda.set_sync_debug_mode reports them in one step.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.options import at_least  # noqa: E402
from slime_like.batch import PackedBatch  # noqa: E402
from slime_like.cluster.plan.trace import run_trace  # noqa: E402
from slime_like.config.schema.algo import GrpoConfig  # noqa: E402
from slime_like.config.schema.gdn import GDNConfig  # noqa: E402
from slime_like.config.schema.model import ModelConfig  # noqa: E402
from slime_like.config.schema.residency import STEP  # noqa: E402
from slime_like.config.schema.resolved import Layout  # noqa: E402
from slime_like.errors import SlimeLikeError  # noqa: E402
from slime_like.metrics.types import reduce_metrics  # noqa: E402
from slime_like.planner.models import table_config  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.train.megatron.model_io.convert import untrained_spec  # noqa: E402
from slime_like.util.leave import leave  # noqa: E402
from slime_like.util.ports import PortLease, RendezvousAddress  # noqa: E402

MICRO_BATCHES = 4
WARM_UP = 2
LIMIT = 600  # seconds of an arm
GIB = 2**30
TRACED = (
    "+recipe=qwen3_4b_gsm8k algo.kl_loss_coef=0 placement.actor_num_gpus_per_node=1 parallel.tp=1 rollout.num_engines=1 rollout.tp=1 "
    "rollout.sglang.mem_fraction_static=0.3 placement.offload_train=false placement.offload_rollout=false"
)
TINY = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "num_hidden_layers": 4, "num_experts": 8}


@dataclass(frozen=True, slots=True)
class StepArm:
    """Arm of the benchmark: a model that the planner knows, changes to its config.json, and the Gated DeltaNet backend."""

    name: str
    model: str
    changes: Mapping[str, Any]
    gdn: str = "auto"


ARMS = (
    StepArm("dense", "Qwen3-1.7B", {}),
    StepArm("moe", "Qwen3-30B-A3B", {"num_hidden_layers": 4}),
    StepArm("hybrid-fla", "Qwen3.5-0.8B", {}, "fla"),
    StepArm("hybrid-flashqla", "Qwen3.5-0.8B", {}, "flashqla"),
    StepArm("hybrid-torch", "Qwen3.5-0.8B", {}, "torch"),
)


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of an arm: parameters, tokens and seconds of a step, GiB after the start and at the peak, synchronisations."""

    parameters: int
    tokens: int
    seconds: float
    built: float
    peak: float
    syncs: dict[str, int]


def main(argv: Sequence[str]) -> int:
    """Print a table of the arms. Return 1 if an arm failed, else 0; a failed trace does not count.

    Each arm runs in a child process: this script with ``--result``. There, this function measures the arm and exits.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.tokens < args.length:
        parser.error(f"--tokens {args.tokens} has no room for one sequence of --length {args.length}")
    if args.result is not None:
        return run_arm(next(arm for arm in ARMS if arm.name == args.arms[0]), args)
    columns = ["model", "parameters", "tokens/s", "s per step", "GiB after start", "peak GiB", "peak GiB, traced"]
    rows = [f"| {' | '.join([*columns, 'synchronisations per micro-batch'])} |", f"|{'---|' * (len(columns) + 1)}"]
    details: list[str] = []
    failed = False
    for arm in (arm for arm in ARMS if arm.name in args.arms):
        figures = _in_process(arm.name, argv)
        if figures is None:
            failed = True
            rows.append(f"| {arm.name} | failed |{' |' * (len(columns) - 1)}")
            continue
        peaks = [f"{figures.peak:.2f}", traced_peak(arm, args) if args.traced else ""]
        speed = [f"{figures.tokens / figures.seconds:,.0f}", f"{figures.seconds:.3f}", f"{figures.built:.1f}"]
        num_syncs = f"{sum(figures.syncs.values()) / MICRO_BATCHES:g}"
        rows.append(f"| {' | '.join([arm.name, f'{figures.parameters:,}', *speed, *peaks, num_syncs])} |")
        details += [f"- {arm.name}: {line}: {number}" for line, number in figures.syncs.items()]
    sys.stdout.write(visible("\n".join([*rows, "", *details, ""])))
    return int(failed)


def traced_peak(arm: StepArm, args: argparse.Namespace) -> str:
    """Return the peak in GiB of the arm's step on a phantom GPU, or "failed" after an error, which is printed."""
    with tempfile.TemporaryDirectory(prefix="slime_like-step-") as folder:
        model_config(arm, tiny=args.tiny).save_pretrained(folder)
        sizes = f"parallel.max_tokens_per_rank={args.tokens} rollout.max_context_len={args.length} rollout.max_response_len={args.length // 2}"
        keys = f"model.hf_checkpoint={folder} model.recompute=full model.gdn.backend={arm.gdn} {sizes} {TRACED}"
        try:
            (trace,) = run_trace(keys.split(), "1xH200")
        except SlimeLikeError as error:
            error.say()
            return "failed"
    return f"{next(phase['allocated'] for phase in trace['phases'] if phase['name'] == STEP) / GIB:.2f}"


def _in_process(name: str, argv: Sequence[str]) -> StepFigures | None:
    """Run an arm in a process of its own and return its figures.

    Return None if the process fails, or if it is killed after ``LIMIT`` seconds, which a message says.
    """
    with tempfile.TemporaryDirectory(prefix="slime_like-step-") as folder:
        result = Path(folder) / "figures.json"
        command = [sys.executable, __file__, *argv, "--arms", name, "--result", str(result)]
        try:
            process = subprocess.run(command, stdout=sys.stderr, check=False, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            sys.stderr.write(visible(f"{name}: no result within {LIMIT} s\n"))
            return None
        return StepFigures(**json.loads(result.read_text())) if process.returncode == 0 else None


def run_arm(arm: StepArm, args: argparse.Namespace) -> int:
    """Measure one arm, write its figures to ``args.result``, and exit with status 0."""
    from slime_like.train.megatron.platform import groups, host

    device: str = args.device
    host.install(device)
    folder = Path(args.result).parent / "model"
    vocabulary = write_random_model(arm, folder, device, tiny=args.tiny)
    spec = replace(
        untrained_spec(str(folder), Layout(), "bfloat16"),
        model=ModelConfig(hf_checkpoint=str(folder), recompute="full", gdn=GDNConfig(backend=arm.gdn)),
        algo=GrpoConfig(),
        device=device,
        num_steps=1000,
        max_tokens_per_rank=args.tokens,
    )
    with PortLease("127.0.0.1") as port:
        rank_info = groups.join_and_make_groups(spec, rank=0, world_size=1, master=RendezvousAddress("127.0.0.1", port))
        from slime_like.train.megatron.rank.trainer import (
            RankTrainer,  # imports megatron, which ``groups`` has prepared
        )

        trainer = RankTrainer(spec, rank_info)
    built_bytes = _allocated(device)
    micro_batches = [make_rows(seed, args.tokens, args.length, vocabulary) for seed in range(MICRO_BATCHES)]
    num_trained = sum(int((rows.loss_weight > 0).sum()) for rows in micro_batches)

    def step() -> float:
        return reduce_metrics(trainer.train_rollout([micro_batches], [num_trained]))["train/grad_norm"]

    seconds, peak = timed_steps(arm.name, step, args.steps, device)
    syncs = synchronisations(lambda: trainer.train_rollout([micro_batches], [num_trained])) if device == "cuda" else {}
    parameters = sum(p.numel() for p in trainer.model.parameters())
    median = statistics.median(seconds)
    num_tokens = sum(len(rows.token_ids) for rows in micro_batches)
    figures = StepFigures(parameters, num_tokens, median, built_bytes, peak, syncs)
    Path(args.result).write_text(json.dumps(asdict(figures)))
    sys.stdout.flush()
    leave(0)


def timed_steps(name: str, step: Callable[[], float], number: int, device: str) -> tuple[list[float], float]:
    """Run ``number`` steps after two warm-up steps. Return their seconds and their peak memory in GiB, 0 on a CPU.

    ``step`` returns the gradient norm.
    """
    seconds: list[float] = []
    for i in range(WARM_UP + number):
        _synchronize(device)
        if i == WARM_UP and device == "cuda":
            torch.cuda.reset_peak_memory_stats()  # the peak so far includes the creation of the model
        start = time.perf_counter()
        norm = step()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
        sys.stdout.write(visible(f"{name}: {seconds[-1]:.3f} s, gradient norm {norm:.4g}\n"))
    peak = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 0.0
    return seconds[WARM_UP:], peak


def write_random_model(arm: StepArm, folder: Path, device: str, *, tiny: bool) -> int:
    """Write a model of the arm's shape with random weights, made on the device. Return the size of its vocabulary."""
    from transformers import AutoModelForCausalLM

    config = model_config(arm, tiny=tiny)
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return int(config.vocab_size)


def model_config(arm: StepArm, *, tiny: bool) -> Any:
    """Return the arm's config.json as transformers reads it."""
    from transformers import AutoConfig

    published = table_config(arm.model)
    assert published is not None, f"the planner's table lacks {arm.model}"
    keys: dict[str, Any] = {**published, **published.get("text_config", {}), **arm.changes, **(TINY if tiny else {})}
    keys.pop("text_config", None)
    keys["tie_word_embeddings"] = published["tie_word_embeddings"]
    if (interval := keys.pop("full_attention_interval", None)) is not None:
        kinds = ("linear_attention", "full_attention")
        keys["layer_types"] = [kinds[(i + 1) % interval == 0] for i in range(keys["num_hidden_layers"])]
        keys["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    if "num_experts" not in published:
        keys.pop("num_experts", None)
    return AutoConfig.for_model(**keys)


def make_rows(seed: int, tokens: int, length: int, vocabulary: int) -> PackedBatch:
    """Return a micro-batch of random sequences; the last three quarters of each are trained on."""
    numbers = np.random.default_rng(seed)
    sequences = tokens // length
    trained_T = np.tile(np.arange(length) >= length // 4, sequences)
    return PackedBatch(
        token_ids=numbers.integers(0, vocabulary, len(trained_T)).astype(np.int32),
        cu_seqlens=(np.arange(sequences + 1) * length).astype(np.int32),
        loss_weight=(trained_T / trained_T.sum() / MICRO_BATCHES).astype(np.float32),
        versions=np.where(trained_T, 0, -1).astype(np.int32),
        rollout_logprobs=np.where(trained_T, -12.0, 0.0).astype(np.float32),
        rewards=numbers.normal(size=sequences).astype(np.float32),
        advantages=numbers.normal(size=sequences).astype(np.float32),
        sample_ids=np.arange(sequences, dtype=np.int64),
    )


def synchronisations(step: Any) -> dict[str, int]:
    """Return how often one call of ``step`` synchronises the host, by file and line as torch reports them, largest first."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = (
        f"{'/'.join(Path(record.filename).parts[-2:])}:{record.lineno}"
        for record in records
        if "synchroniz" in str(record.message)
    )
    return dict(collections.Counter(lines).most_common())


def _allocated(device: str) -> float:
    return torch.cuda.memory_allocated() / GIB if device == "cuda" else 0.0


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [arm.name for arm in ARMS]
    parser.add_argument("--arms", nargs="+", choices=names, default=names)
    parser.add_argument("--steps", type=at_least(1), default=6, help="timed steps")
    parser.add_argument("--tokens", type=at_least(2), default=8192, help="maximum of a micro-batch")
    parser.add_argument("--length", type=at_least(2), default=2048, help="of a sequence")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--traced", action="store_true", help="also trace the peak memory on a phantom GPU")
    parser.add_argument("--tiny", action="store_true", help="small shapes of the same models")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
