"""Cost of one Gated DeltaNet layer on a trainer rank: parameters, activations for backward, collectives, CPU time.

    python benchmarks/gdn_layer.py --tokens 2048 --layouts tp1 tp2 tp2-sp cp2 tp2-cp2 tp4 cp4
    python benchmarks/gdn_layer.py --tokens 8192 --sequences 1 --layouts tp1 cp2 cp2-state cp4 cp4-state

Ranks are processes of this machine over gloo, with one thread each. Bytes are exact. Activations are the storages, except
parameters, that autograd keeps between forward and backward, each counted once. Bytes of collectives are counted by the
trainer's wrapper in forward and backward, including the part that stays on the rank. Time is the CPU time of a rank's process
in forward and backward, including all-to-alls: the minimum over the repeats. Other ranks on the same cores do not affect it.
A layer that every rank computes in full costs each rank as much as ``tp1``. The table has the maximum over the ranks
and, except for collectives, the ratio to the first layout in brackets.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

from benchmarks.options import at_least  # noqa: E402
from benchmarks.processes import join_ranks  # noqa: E402
from slime_like.config.schema.gdn import GDNConfig  # noqa: E402
from slime_like.config.schema.guard_policy import GuardSpec  # noqa: E402
from slime_like.config.schema.resolved import Layout, RankSpec  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.train.megatron.model_io.convert import untrained_spec  # noqa: E402
from slime_like.train.megatron.platform import host  # noqa: E402
from slime_like.util.leave import leave  # noqa: E402
from slime_like.util.ports import PortLease, RendezvousAddress  # noqa: E402

LAYOUTS = {
    "tp1": Layout(),
    "tp2": Layout(tp=2),
    "tp2-sp": Layout(tp=2, sequence_parallel=True),
    "cp2": Layout(cp=2),
    "tp2-cp2": Layout(tp=2, cp=2, sequence_parallel=True),
    "tp4": Layout(tp=4, sequence_parallel=True),
    "cp4": Layout(cp=4),
    "cp2-state": Layout(cp=2),
    "cp4-state": Layout(cp=4),
}
STATE = "-state"  # suffix of layouts with model.gdn.cp_mode=state; other layouts have cp_mode=head


@dataclass(frozen=True, slots=True)
class Cost:
    """Measurement of one rank."""

    parameters: int  # bytes
    activations: int  # bytes
    collectives: int  # bytes
    seconds: float  # CPU time of forward and backward


FIELDS = tuple(field.name for field in fields(Cost))


def run_rank(rank: int, port: int, name: str, args: argparse.Namespace, folder: str) -> None:
    """Measure the layer on one rank, write the costs to ``folder`` and exit. Collective over the ranks of the layout.

    Call it in a child process for each rank.
    """
    torch.set_num_threads(1)
    from slime_like.train.megatron.platform import groups

    layout = LAYOUTS[name]
    spec = untrained_spec("none", layout, args.dtype)
    mode = GDNConfig(cp_mode="state" if name.endswith(STATE) else "head")
    spec = replace(spec, model=replace(spec.model, gdn=mode), guard=GuardSpec(wrap=True))
    rank_info = groups.join_and_make_groups(
        spec, rank=rank, world_size=layout.world_size, master=RendezvousAddress("127.0.0.1", port)
    )
    layer, hidden, packed = build(rank_info, spec, args)
    parameters = sum(p.numel() * p.element_size() for p in layer.parameters())
    activations, collectives, seconds = measure(layer, hidden, packed, args.repeats)
    Path(folder, str(rank)).write_text(json.dumps(asdict(Cost(parameters, activations, collectives, seconds))))
    torch.distributed.barrier()
    leave(0)


def build(rank_info: Any, spec: RankSpec, args: argparse.Namespace) -> tuple[Any, torch.Tensor, Any]:
    """Return the layer, its input on this rank, and the ``PackedRows`` of the input."""
    import numpy as np
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module
    from transformers import Qwen3_5TextConfig

    from slime_like.batch import PackedBatch
    from slime_like.train.megatron.families.qwen3_5 import Qwen35
    from slime_like.train.megatron.model.forward import make_micro
    from slime_like.train.megatron.model.model import layer_parts
    from slime_like.train.megatron.model.transformer_config import transformer_config

    hf = Qwen3_5TextConfig(
        hidden_size=args.hidden,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=args.hidden,
        linear_num_key_heads=args.key_heads,
        linear_num_value_heads=args.value_heads,
        linear_key_head_dim=args.head_dim,
        linear_value_head_dim=args.head_dim,
    )
    layout = spec.layout
    family = Qwen35(hf, layout.tp)
    config = transformer_config(spec, family)
    parts: Any = layer_parts(config, family, rank_info, spec.model).mixers["G"].submodules
    torch.manual_seed(0)
    layer: Any = build_module(
        parts.self_attention, config, layer_number=1, pg_collection=ProcessGroupCollection.use_mpu_process_groups()
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    lengths = np.full(args.sequences, args.tokens // args.sequences)
    num_tokens, num_sequences = int(lengths.sum()), len(lengths)
    rows = PackedBatch(
        token_ids=np.zeros(num_tokens, np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_weight=np.zeros(num_tokens, np.float32),
        versions=np.zeros(num_tokens, np.int32),
        rollout_logprobs=np.zeros(num_tokens, np.float32),
        rewards=np.zeros(num_sequences, np.float32),
        advantages=np.zeros(num_sequences, np.float32),
        sample_ids=np.arange(num_sequences, dtype=np.int64),
    )
    micro = make_micro(rows, rank_info)
    local = micro.input_ids.shape[1] // (layout.tp if config.sequence_parallel else 1)
    hidden = torch.randn(local, 1, args.hidden, dtype=config.params_dtype, requires_grad=True)
    return layer, hidden, micro.packed


def measure(layer: Any, hidden: torch.Tensor, packed: Any, repeats: int) -> tuple[int, int, float]:
    """Return bytes kept for backward (parameters excluded), bytes of collectives, and CPU seconds of the fastest pass.

    Each of the ``repeats`` passes is forward and backward. Collective over the ranks of the layout.
    """
    from slime_like.distributed.wrapper import install

    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    best, kept_bytes, sent_bytes = float("inf"), 0, 0
    for _ in range(repeats):
        storages: dict[int, int] = {}

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = storages) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        torch.distributed.barrier()
        install.drain()  # resets the counts
        start = time.process_time()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out, _ = layer(hidden, packed_seq_params=packed)
        out.backward(torch.ones_like(out))
        best = min(best, time.process_time() - start)
        kept_bytes = sum(storages.values())
        sent_bytes = sum(int(m.value) for m in install.drain() if m.name.endswith("/bytes"))
    return kept_bytes, sent_bytes, best


def main() -> None:
    """Measure every layout and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--tokens", type=at_least(1), default=2048)
    parser.add_argument("--sequences", type=at_least(1), default=4)
    parser.add_argument("--hidden", type=at_least(1), default=512)
    parser.add_argument("--key-heads", type=at_least(1), default=8)
    parser.add_argument("--value-heads", type=at_least(1), default=16)
    parser.add_argument("--head-dim", type=at_least(1), default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=at_least(1), default=3)
    args = parser.parse_args()
    if args.tokens < args.sequences:
        parser.error(f"--tokens {args.tokens} are fewer than the --sequences {args.sequences}: raise --tokens")
    host.install("cpu")
    for name in ("train.megatron.rank.trainer", "train.megatron.families.qwen3_5"):
        import_module(f"slime_like.{name}")  # imported once; the ranks are forked
    import_module("slime_like_plugins.qwen_gdn.state_passing")
    print(
        "| layout | ranks | parameters per rank | activations per rank | bytes of collectives per rank | CPU time per rank |"
    )
    print("|---|---|---|---|---|---|")
    first: Cost | None = None
    for name in args.layouts:
        layout = LAYOUTS[name]
        with tempfile.TemporaryDirectory() as folder, PortLease("127.0.0.1") as port:
            job = (port, name, args, folder)
            join_ranks(mp.start_processes(run_rank, job, layout.world_size, join=False, start_method="fork"))
            costs = [Cost(**json.loads(Path(folder, str(rank)).read_text())) for rank in range(layout.world_size)]
        worst = Cost(*(max(getattr(c, field) for c in costs) for field in FIELDS))
        first = first or worst
        cells = (
            f"{worst.parameters / 2**20:.2f} MiB ({worst.parameters / first.parameters:.2f})",
            f"{worst.activations / 2**20:.1f} MiB ({worst.activations / first.activations:.2f})",
            f"{worst.collectives / 2**20:.1f} MiB",
            f"{1000 * worst.seconds:.0f} ms ({worst.seconds / first.seconds:.2f})",
        )
        print(visible(f"| {name} | {layout.world_size} | {' | '.join(cells)} |"), flush=True)


if __name__ == "__main__":
    main()
