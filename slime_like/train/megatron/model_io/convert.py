"""Conversion of a run's checkpoint to HF format, on the host and in one process: no Ray, engine or optimizer."""

from __future__ import annotations

from pathlib import Path

from slime_like.checkpoint.files import MANIFEST
from slime_like.checkpoint.record import read_manifest
from slime_like.config.schema.algo import SftConfig
from slime_like.config.schema.model import ModelConfig, OptimConfig
from slime_like.config.schema.resolved import Layout, RankSpec
from slime_like.train.megatron.platform import groups, host
from slime_like.util.ports import open_rendezvous

LOOPBACK = "127.0.0.1"


def export_checkpoint(source: Path, hf: str, out: Path, *, dtype: str, max_bytes: int) -> None:
    """Write the weights of the iteration folder ``source`` to ``out``, with the other files of the HF folder ``hf``.

    Tensors of ``hf`` that the trainer does not train, such as a vision tower, are copied too.

    ``dtype`` is float32 or bfloat16. A file holds at most ``max_bytes``, or one larger tensor. The process joins a world of one
    CPU rank: it must not be in another world, nor have imported megatron for a GPU.

    Raises ``ConfigError`` if the trainer does not support the model in ``hf``, and ``CheckpointError`` if ``hf`` cannot be read,
    if the checkpoint is damaged or does not match this model, or if the export fails; ``out`` is then unchanged.
    """
    spec = untrained_spec(hf, Layout(), dtype)
    host.install(spec.device)
    device = groups.join_world(spec, 0, 1, open_rendezvous(LOOPBACK), 0)
    rank_info = groups.make_groups(spec, device)

    from slime_like.train.megatron.families.hf import HFFolder
    from slime_like.train.megatron.model.model import PolicyModel, build_segments
    from slime_like.train.megatron.model.transformer_config import choose_family, transformer_config
    from slime_like.train.megatron.model_io.export import HFExport, write_hf
    from slime_like.train.megatron.model_io.fingerprint import check_model
    from slime_like.train.megatron.model_io.initial import load_megatron

    folder = HFFolder(hf)
    family = choose_family(spec, PolicyModel.adapt_config(folder.config()))
    if (source / MANIFEST).is_file():
        check_model(read_manifest(source), family, PolicyModel.head, source)
    model = build_segments(PolicyModel, transformer_config(spec, family), family, rank_info, spec.model)
    load_megatron(model, source, "checkpoint", family)
    write_hf(HFExport(model, family, rank_info), folder, out, rank_info, max_bytes)


def untrained_spec(hf: str, layout: Layout, dtype: str) -> RankSpec:
    """Return the spec of CPU ranks that hold a model and take no optimizer step."""
    return RankSpec(
        model=ModelConfig(hf_checkpoint=hf),
        optim=OptimConfig(),
        algo=SftConfig(),
        layout=layout,
        device="cpu",
        dtype=dtype,
        temperature=1.0,
        num_steps=1,
        steps_per_rollout=1,
        max_tokens_per_rank=1,
        seed=0,
        deadline_s=600.0,
    )
