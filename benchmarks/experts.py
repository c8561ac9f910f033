"""Time of one layer of experts on a CPU, forward and backward: arms that take turns on the same tokens and weights.

    python benchmarks/experts.py                                        # 64 experts, 8 per token, 4096 tokens
    python benchmarks/experts.py --dtype bfloat16 --hidden 256 --width 128

Each arm is a layer with router, dispatch and combination: transformers' with two of its implementations, megatron's
experts one by one (moe_grouped_gemm=false), and this project's grouped experts with torch's kernels and with C kernels
(model.cpu_kernels). A round runs every arm once. Times are medians over the rounds. A ratio is the time of "one by one" divided
by the arm's own time, as a median over the rounds. The script ends with an error if an arm's output or input gradient differs
from that of "one by one" by more than a tolerance.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

import torch  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.processes import join_ranks  # noqa: E402
from benchmarks.run import machine  # noqa: E402
from slime_like.cluster.start.placement import CPU_ENV  # noqa: E402
from slime_like.config.schema.resolved import Layout  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.train.megatron.model_io.convert import untrained_spec  # noqa: E402
from slime_like.util.leave import leave  # noqa: E402
from slime_like.util.ports import PortLease, RendezvousAddress  # noqa: E402

BASE = "one by one"
# Relative difference of outputs and input gradients. transformers scores experts in bfloat16, which changes a few choices.
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1}
MEGATRON = {BASE: (False, "torch"), "grouped, torch": (True, "torch"), "grouped, c": (True, "c")}
"""Arm -> moe_grouped_gemm and model.cpu_kernels."""
TRANSFORMERS = {"transformers, eager": "eager", "transformers, grouped_mm": "grouped_mm"}
TABLE, DIFFERENCE = "table", "difference"  # files that the process of the arms writes
Arm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Times:
    """Wall seconds and CPU seconds of one arm in one round."""

    forward: float
    backward: float
    forward_cpu: float
    backward_cpu: float


def main(argv: Sequence[str]) -> int:
    """Print the table. Raises ``SystemExit`` if the arms disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--width", type=int, default=128, help="intermediate size of an expert")
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--same-tokens", action="store_true", help="use the same tokens in each round, so that no shape is new"
    )
    parser.add_argument("--common", type=float, default=0.0, help="size of the part that all tokens of a round share")
    args = parser.parse_args(argv)
    os.environ |= CPU_ENV  # makes waiting threads sleep, as in a run
    head = (
        f"{args.tokens} tokens, {args.experts} experts, {args.top_k} per token, hidden {args.hidden}, expert size "
        f"{args.width}, {args.dtype}, {args.threads} threads"
    )
    command = " ".join(["python benchmarks/experts.py", *argv])
    lines = [machine(os.getloadavg()[0]), "", f"Command: `{command}`", "", head, ""]
    with tempfile.TemporaryDirectory() as folder, PortLease("127.0.0.1") as port:
        join_ranks(mp.spawn(run, (port, args, folder), join=False))
        if (difference_path := Path(folder) / DIFFERENCE).exists():
            raise SystemExit(difference_path.read_text())
        lines += (Path(folder) / TABLE).read_text().splitlines()
    sys.stdout.write(visible("\n".join(lines) + "\n"))
    return 0


def run(rank: int, port: int, args: argparse.Namespace, folder: str) -> None:
    """Run the rounds, write a table to ``folder`` and exit; if the arms disagree, write the difference instead.

    Call it in a spawned process.
    """
    torch.set_num_threads(args.threads)
    arms = make_arms(args, port)

    def tokens() -> Tensor:
        common = args.common * torch.randn(args.hidden)  # tokens that resemble each other load the experts unevenly
        return (torch.randn(args.tokens, args.hidden) + common).to(getattr(torch, args.dtype)).requires_grad_()

    hidden = tokens()
    if text := difference(arms, hidden, TOLERANCE[args.dtype]):
        (Path(folder) / DIFFERENCE).write_text(text)
        leave(0)
    rounds: list[dict[str, Times]] = []
    for _ in range(args.rounds):
        hidden = hidden if args.same_tokens else tokens()
        rounds.append({name: measure(arm, hidden) for name, arm in arms.items()})
    (Path(folder) / TABLE).write_text("\n".join(table(rounds)))
    leave(0)


def make_arms(args: argparse.Namespace, port: int) -> dict[str, Arm]:
    """Return the layers of all arms, with the same weights. Call it once per process, because it creates process groups."""
    from transformers import AutoConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    def config() -> Any:
        return AutoConfig.for_model(
            "qwen3_moe",
            hidden_size=args.hidden,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=args.experts,
            num_experts_per_tok=args.top_k,
            moe_intermediate_size=args.width,
            norm_topk_prob=True,
            tie_word_embeddings=False,
        )

    torch.manual_seed(0)
    weights: dict[str, Tensor] = {}
    arms: dict[str, Arm] = {}
    for name, implementation in TRANSFORMERS.items():
        chosen_config = config()
        chosen_config._experts_implementation = implementation
        block: Any = Qwen3MoeSparseMoeBlock(chosen_config)
        if not weights:
            weights = {
                key: torch.randn_like(value) * value.shape[-1] ** -0.5 for key, value in block.state_dict().items()
            }
        block.load_state_dict(weights)
        block.to(getattr(torch, args.dtype))
        arms[name] = lambda x, block=block: block(x[None])[0]
    rank_info = join(args.dtype, port)
    for name, settings in MEGATRON.items():
        layer = megatron_layer(config(), args.dtype, settings, rank_info, weights)
        arms[name] = lambda x, layer=layer: layer(x[:, None])[0][:, 0]
    return arms


def join(dtype: str, port: int) -> Any:
    """Create the process groups of a single rank, and return its ``RankInfo``."""
    from slime_like.train.megatron.platform import groups

    spec = untrained_spec("none", Layout(), dtype)
    return groups.join_and_make_groups(spec, rank=0, world_size=1, master=RendezvousAddress("127.0.0.1", port))


def megatron_layer(
    hf: Any, dtype: str, settings: tuple[bool, str], rank_info: Any, weights: Mapping[str, Tensor]
) -> Any:
    """Return megatron's layer of experts with ``weights``.

    ``settings`` is a value of ``MEGATRON``. ``rank_info`` is the result of ``join``, which creates the process groups used here.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    from slime_like.train.megatron.families.qwen3_moe import Qwen3Moe
    from slime_like.train.megatron.model.layers import TorchParts
    from slime_like.train.megatron.model.model import layer_parts
    from slime_like.train.megatron.model.moe import moe_builder
    from slime_like.train.megatron.model.transformer_config import transformer_config

    grouped, kernels = settings
    spec = untrained_spec("none", Layout(), dtype)
    spec = replace(spec, model=replace(spec.model, cpu_kernels=kernels, megatron={"moe_grouped_gemm": grouped}))
    family = Qwen3Moe(hf, 1)
    config = transformer_config(spec, family)
    parts = layer_parts(config, family, rank_info, spec.model)
    builder = moe_builder(config, TorchParts(), parts.experts)
    layer: Any = builder(config, layer_number=1, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    with torch.no_grad():
        layer.router.weight.copy_(weights["gate.weight"])
        for e, expert in enumerate(layer.experts.local_experts):
            expert.linear_fc1.weight.copy_(weights["experts.gate_up_proj"][e])
            expert.linear_fc2.weight.copy_(weights["experts.down_proj"][e])
    return layer


def difference(arms: Mapping[str, Arm], hidden: Tensor, limit: float) -> str:
    """Describe the first arm that differs from arm ``BASE`` in the output or the input gradient.

    Relative differences up to ``limit`` are allowed. Return an empty text if no arm differs by more.
    """
    results: dict[str, tuple[Tensor, Tensor]] = {}
    for name, arm in arms.items():
        out = arm(hidden)
        (grad,) = torch.autograd.grad(out.float().square().sum(), hidden)
        results[name] = (out.detach().float(), grad.float())
    for name, tensors in results.items():
        for expected, actual in zip(results[BASE], tensors, strict=True):
            error = float((actual - expected).norm() / expected.norm())
            if not error <= limit:
                return f"{name} differs from {BASE} by {error:.1e}, more than {limit:g}"
    return ""


def measure(arm: Arm, hidden: Tensor) -> Times:
    """Return the times of a forward pass and of a backward pass; the backward pass replaces ``hidden.grad``."""
    hidden.grad = None
    wall, cpu = [time.perf_counter()], [time.process_time()]
    out = arm(hidden)
    wall.append(time.perf_counter())
    cpu.append(time.process_time())
    out.backward(torch.ones_like(out))
    wall.append(time.perf_counter())
    cpu.append(time.process_time())
    return Times(wall[1] - wall[0], wall[2] - wall[1], cpu[1] - cpu[0], cpu[2] - cpu[1])


def table(rounds: Sequence[Mapping[str, Times]]) -> list[str]:
    """Return a Markdown table: for each arm, the medians of its times and of its speed relative to the arm ``BASE``."""
    lines = ["| arm | forward, ms: wall (CPU) | ratio | backward, ms: wall (CPU) | ratio |", "|---|---|---|---|---|"]
    for name in rounds[0]:
        cells = [name]
        for field in ("forward", "backward"):
            wall, cpu = (median(getattr(r[name], part) for r in rounds) for part in (field, f"{field}_cpu"))
            cells.append(f"{1e3 * wall:.0f} ({1e3 * cpu:.0f})")
            ratios = (
                median(getattr(r[BASE], part) / getattr(r[name], part) for r in rounds)
                for part in (field, f"{field}_cpu")
            )
            cells.append("{:.2f} ({:.2f})".format(*ratios))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
