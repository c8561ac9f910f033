"""Rank functions of test_starting: initial weights from Megatron folders, and the export script."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime_like.config.schema.algo import GrpoConfig, SftConfig
from slime_like.config.schema.resolved import Layout
from slime_like.errors import SlimeLikeError
from tests.train.faults import replace_attribute
from tests.train.jobs import Shared, make_actor
from tests.train.lifecycle import batch, digest, train
from tests.train.models import VOCAB
from tests.train.parity import logits_of
from tests.train.ranks import RankWorld
from tests.unchanged import unchanged

PADDED = 384  # our models pad to 256


def write_gpt(world: RankWorld, shared: Shared, fused_names: bool, kind: str = "untied") -> dict[str, Any]:
    """Save a random GPTModel of megatron's own layers. Return its weights' names, log-probabilities and logits.

    Log-probabilities and logits are those of S = 20 fixed ids. The logits F32 [S, V] are computed with torch's
    attention, as in the trainer, the log-probabilities [S - 1] with megatron's attention. It rounds a matrix of scores,
    so its logits differ by 2e-6. With ``fused_names``, the norms are saved under the names of TransformerEngine's fused
    linears.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from slime_like.train.megatron.model_io.initial import FUSED_NORMS

    actor = make_actor(world, shared.models[kind], Layout(), algo=SftConfig())
    config = _gpt_config(actor)
    torch.manual_seed(7)
    spec = get_gpt_layer_local_spec(config.num_moe_experts, qk_layernorm=True, normalization="RMSNorm")
    theta = json.loads((shared.models[kind] / "config.json").read_text())["rope_parameters"]["rope_theta"]
    model = GPTModel(config, spec, PADDED, 512, position_embedding_type="rope", rotary_base=theta)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.add_(0.1 * noise) if "norm" in name else parameter.copy_(0.1 * noise)
    state: dict[str, Any] = model.sharded_state_dict(metadata={"singleton_local_shards": False})
    keys = {entry.key for entry in state.values()}
    if fused_names:
        for entry in state.values():
            entry.key = FUSED_NORMS.get(entry.key, entry.key)
    folder = shared.scratch / "release"
    folder.mkdir(parents=True)
    dist_checkpointing.save({"model": state, "iteration": 3}, str(folder))
    (shared.scratch / "latest_checkpointed_iteration.txt").write_text("release")
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        stock = model(ids, torch.arange(20)[None], None)[0, :, :VOCAB]
        with replace_attribute(DotProductAttention, "forward", _fused_attention):
            logits = model(ids, torch.arange(20)[None], None)[0, :, :VOCAB]
    return {"keys": sorted(keys), "logprobs": _next_logprobs(stock, ids), "logits": logits.numpy()}


def _fused_attention(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Map query, key and value [S, 1, heads, D] to [S, 1, heads * D] by causal attention."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.permute(2, 0, 1, 3).flatten(2)


def _gpt_config(actor: Any) -> Any:
    import dataclasses

    stock = actor.model.last.config
    layers = actor.family.hf.num_hidden_layers
    return dataclasses.replace(stock, num_layers=layers, is_hybrid_model=False, normalization="RMSNorm")


def _next_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> Any:
    """Return the log-probability of each token except the first, at the temperature of the tests."""
    log_p = torch.log_softmax(logits / 0.7, -1)
    return log_p[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()


def start_from(world: RankWorld, shared: Shared, folder: str, layout: Layout, kind: str = "untied") -> dict[str, Any]:
    """Start a trainer from ``folder``. Return scores and logits of the ids of ``write_gpt``, and its first KL loss.

    ``logits`` is None for kinds other than untied.
    """
    import dataclasses

    import numpy as np

    path = str(shared.scratch.with_name(folder))
    model = {"megatron_checkpoint": path, "cpu_kernels": "torch"}  # the attention of the model that wrote the folder
    actor = make_actor(world, shared.models[kind], layout, model=model, algo=GrpoConfig(kl_loss_coef=0.1))
    ids = np.arange(3, 23, dtype=np.int32)
    rows = dataclasses.replace(
        batch(1)[1],
        **{
            name: np.zeros(20, dtype)
            for name, dtype in (("loss_weight", np.float32), ("rollout_logprobs", np.float32), ("versions", np.int32))
        },
        token_ids=ids,
        cu_seqlens=np.array([0, 20], dtype=np.int32),
    )
    scores = actor.score(rows)
    logits = logits_of(actor, rows) if kind == "untied" else None
    metrics = train(actor, layout, 1)
    return {"scores": scores, "logits": logits, "kl": metrics.get("train/kl_loss")}


def own_weights(world: RankWorld, shared: Shared, saved_by: str) -> dict[str, Any]:
    """Start from another run's checkpoint: the same weights with a new optimizer.

    Return whether the weights are the same, the optimizer steps of the new schedule, and the weight version.
    """
    folder = shared.scratch.with_name(saved_by)
    actor = make_actor(world, shared.models["tied"], Layout(), algo=SftConfig())
    actor.load(folder)
    model = {"megatron_checkpoint": str(folder)}
    fresh = make_actor(world, shared.models["tied"], Layout(), algo=SftConfig(), model=model)
    return {"same": digest(fresh) == digest(actor), "steps": fresh.schedule.num_steps, "version": fresh.version}


def bad_starts(world: RankWorld, shared: Shared, gpt: str) -> dict[str, str]:
    """Start from folders that are foreign, truncated and garbled. Return the error of each by case.

    The folders stay unchanged.
    """
    source = shared.scratch.with_name(gpt)
    cut_folder = shared.scratch / "cut"
    shutil.copytree(source, cut_folder)
    for shard in cut_folder.rglob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 3])
    garbled_folder = shared.scratch / "garbled"
    shutil.copytree(source, garbled_folder)
    (garbled_folder / "release" / ".metadata").write_bytes(b"nonsense")
    out: dict[str, str] = {}
    cases = {"other family": ("llama", source), "cut": ("untied", cut_folder), "garbled": ("untied", garbled_folder)}
    for name, (kind, folder) in cases.items():
        with unchanged(folder):
            try:
                make_actor(world, shared.models[kind], Layout(), model={"megatron_checkpoint": str(folder)})
            except SlimeLikeError as error:
                out[name] = f"{type(error).__name__}: {error}"
    return out


def export_each(world: RankWorld, shared: Shared, sources: Sequence[str], kind: str = "tied") -> dict[str, Path]:
    """Export checkpoints of other layouts as the export script does, in a process group of one rank.

    Return the folder of each export by the name of its source.
    """
    from slime_like.checkpoint.files import megatron_folder
    from slime_like.train.megatron.model_io.convert import export_checkpoint as export

    assert not dist.is_initialized() or dist.get_world_size() == 1
    for name in sources:
        source = megatron_folder(shared.scratch.with_name(f"reshard_from_{name}".replace(" ", "_")))
        assert source is not None
        export(source, str(shared.models[kind]), shared.scratch / name, dtype="float32", max_bytes=2**30)
    return {name: shared.scratch / name for name in sources}


def export_checkpoint(world: RankWorld, shared: Shared, saved_by: str) -> dict[str, Any]:
    """Export a checkpoint as the export script does, once in float32 and once in bfloat16, on one rank.

    Each export has several files. Return the folders by dtype, a micro-batch ("rows"), and the scores that the
    checkpoint's weights give it.
    """
    from slime_like.checkpoint.files import megatron_folder
    from slime_like.train.megatron.model_io.convert import export_checkpoint as export

    assert dist.get_world_size() == 1
    source = megatron_folder(shared.scratch.with_name(saved_by))
    assert source is not None
    hf = str(shared.models["tied"])
    out: dict[str, Path] = {}
    for dtype in ("float32", "bfloat16"):
        out[dtype] = shared.scratch / dtype
        export(source, hf, out[dtype], dtype=dtype, max_bytes=100_000)
    actor = make_actor(world, shared.models["tied"], Layout(), algo=SftConfig())
    actor.load(shared.scratch.with_name(saved_by))
    return {"folders": out, "scores": actor.score(batch(1)[1]), "rows": batch(1)[1]}
