"""Policy model: megatron's HybridModel built from slime_like's layers, with hidden states as output."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from slime_like.config.rules.hf import ROPE_TYPES
from slime_like.config.schema.model import ModelConfig
from slime_like.config.schema.names import ATTENTIONS, CPU_KERNELS, MIXERS
from slime_like.errors import ConfigError
from slime_like.registry import resolve
from slime_like.train.megatron.families.base import Family, Weight
from slime_like.train.megatron.families.experts import global_key
from slime_like.train.megatron.families.hf import HFFolder
from slime_like.train.megatron.model.exact_attention import ExactAttention
from slime_like.train.megatron.model.layers import LayerParts, PackedRows, stack_spec
from slime_like.train.megatron.model.transformer_config import pipeline_pattern
from slime_like.train.megatron.model.vocab import VocabularyPart
from slime_like.train.megatron.platform.collective import wait_for_weights
from slime_like.train.megatron.platform.device import current_device
from slime_like.train.megatron.platform.groups import RankInfo


class Rotary(torch.nn.Module):
    """Rotary angles at positions. A head's first channels are rotated; ``partial_rotary_factor`` is their share.

    ``scale`` is the factor of the angles' cosines and sines; it is 1 except with YaRN (https://arxiv.org/abs/2309.00071). Raises
    ``ConfigError`` on unsupported scaling.
    """

    def __init__(self, hf: Any, head_dim: int, device: torch.device, *, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved  # True: channels 0 and 1 are a pair; False: channels 0 and dim / 2
        parameters: dict[str, Any] = getattr(hf, "rope_parameters", None) or {}
        kind = parameters.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise ConfigError(
                f"config.json: rope_type={kind!r} is not supported: the trainer supports only {', '.join(ROPE_TYPES)}; train another "
                "model"
            )
        if kind == "default":
            rotary_dim = int(head_dim * float(parameters.get("partial_rotary_factor", 1.0)))
            exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
            frequencies, self.scale = 1.0 / (float(parameters["rope_theta"]) ** exponent), 1.0
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            frequencies, self.scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
        self.frequencies = frequencies.to(device)  # [dim / 2]; a plain tensor: never cast to bfloat16

    def forward(self, position_ids: Tensor) -> Tensor:
        """Map position_ids [P] to angles [P, 1, 1, dim]."""
        angles = torch.outer(position_ids.to(self.frequencies.dtype), self.frequencies)
        of_channels = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        return of_channels[:, None, None, :]


OUTPUT = "output_layer.weight"
ROUTER_BIAS = ".router.expert_bias"  # suffix of a buffer's name: a bias for the choice of experts, without a gradient
VALUE_HEAD = "value_head."  # prefix of a critic's parameters that the HF checkpoint lacks


class PolicyModel(HybridModel):
    """Segment of the decoder that returns hidden states. Logits exist only in chunks, inside ``scores``.

    ``segment`` is the index of the segment on this rank, which has several segments if there are virtual stages.
    """

    head = "vocabulary"

    def __init__(
        self,
        config: TransformerConfig,
        family: Family,
        rank_info: RankInfo,
        segment: int = 0,
        parts: LayerParts | None = None,
    ) -> None:
        parts = parts or LayerParts()
        rotary = Rotary(family.hf, family.head_dim, current_device(), interleaved=config.rotary_interleaved)
        super().__init__(
            config,
            stack_spec(
                config,
                parts,
                rotary.scale,
                output_norms=family.output_norms,
                projection_norms=family.projection_norms,
            ),
            vocab_size=family.padded_vocabulary,
            max_sequence_length=int(family.hf.max_position_embeddings),
            hybrid_layer_pattern=pipeline_pattern(family.blocks(), rank_info.layout),
            pre_process=rank_info.is_first and segment == 0,
            post_process=rank_info.is_last and segment == rank_info.layout.vpp - 1,
            share_embeddings_and_output_weights=bool(family.hf.tie_word_embeddings),
            position_embedding_type="none",
            vp_stage=segment if rank_info.layout.vpp > 1 else None,
        )
        self.rank_info = rank_info
        self.vocab_scores = parts.scores
        self.rotary = rotary
        size = family.padded_vocabulary // rank_info.layout.tp
        start = size * rank_info.tp_rank
        real = max(0, min(size, int(family.hf.vocab_size) - start))
        self.vocabulary = VocabularyPart(start, real, rank_info.tp_group)

    @classmethod
    def adapt_config(cls, hf: Any) -> Any:
        """Return the HF config with the changes that this class of model needs: none for a policy."""
        return hf

    def forward(self, input_ids: Tensor | None, packed: PackedRows) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Map input_ids [1, L] to hidden states [L, 1, H], with sequence parallelism [L / tp, 1, H].

        Stages after the first take their input from ``set_input_tensor``. Collective over the tensor, context and expert
        parallel ranks and, with overlap_param_gather, over the data parallel ranks.
        """
        embedded = self.embedding(input_ids=input_ids, position_ids=None) if self.pre_process else None
        return self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=self.rotary(packed.position_ids),
            packed_seq_params=packed,
            padding_mask=None if self.config.num_moe_experts is None else packed.padding,
        )

    def scores(
        self, hidden: Tensor, source_N: Tensor, target_N: Tensor, *, temperature: float, chunk: int, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probabilities F32 [N] of tokens ``target_N`` and, if ``entropy``, the entropies F32 [N], otherwise None.

        ``source_N`` indexes the hidden states [L] that predict the tokens. Collective over the tensor parallel ranks and, with
        overlap_param_gather, over the data parallel ranks.
        """
        wait_for_weights(self.output_layer)
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        is_tied = self.share_embeddings_and_output_weights
        weight: Any = self.shared_embedding_or_output_weight() if is_tied else self.output_layer.weight
        return self.vocab_scores(
            hidden[:, 0][source_N],
            weight,
            target_N,
            part=self.vocabulary,
            temperature=temperature,
            chunk=chunk,
            entropy=entropy,
        )


class ModelSegments(torch.nn.ModuleList):
    """Segments of the model on a pipeline rank, in the order of megatron's interleaved schedule.

    There are several if there are virtual stages. Either all segments or none are in data parallel wrappers.
    """

    @property
    def policies(self) -> list[PolicyModel]:
        """The segments without their data parallel wrappers."""
        models: list[Any] = [getattr(segment, "module", segment) for segment in self]
        return models

    @property
    def last(self) -> PolicyModel:
        """Last segment, which on the last pipeline stage returns the hidden states that are scored."""
        return self.policies[-1]

    def sharded_state_dict(self, *, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return megatron's sharded state, by segment if there are several.

        In the dict, layers are numbered from 0 in each segment; in the keys on disk, they are numbered through all segments
        of the model.
        """
        parts = [policy.sharded_state_dict(metadata=metadata) for policy in self.policies]
        return parts[0] if len(parts) == 1 else {f"segment{i}": part for i, part in enumerate(parts)}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict structured like the result of ``sharded_state_dict``."""
        policies = self.policies
        parts = [state_dict] if len(policies) == 1 else [state_dict[f"segment{i}"] for i in range(len(policies))]
        for policy, part in zip(policies, parts, strict=True):
            policy.load_state_dict(part, strict, assign)


def build_segments(
    kind: type[PolicyModel], config: TransformerConfig, family: Family, rank_info: RankInfo, model: ModelConfig
) -> ModelSegments:
    """Build this rank's part of a model on its device, with the kernels that ``model`` selects.

    The weights must then be loaded, except a critic's value head, which is 0. Raises ``ConfigError`` as ``layer_parts`` does, if
    the attention has dropout, if the rotary scaling is not supported, or if the pipeline segments do not fit the model.
    """
    parts = layer_parts(config, family, rank_info, model)
    segments = (kind(config, family, rank_info, segment, parts) for segment in range(rank_info.layout.vpp))
    return ModelSegments(segments).to(rank_info.device)


def layer_parts(config: TransformerConfig, family: Family, rank_info: RankInfo, model: ModelConfig) -> LayerParts:
    """Return the modules that the config section ``model`` selects for the kinds of layers in the family.

    Deterministic mode on a CPU always uses ``ExactAttention`` and torch's kernels. Raises ``ConfigError`` if the attention or the
    kernels cannot be imported, if the kernels cannot be compiled, or if those of Gated DeltaNet layers do not support the device,
    the model or the parallel layout.
    """
    is_batch_invariant = config.deterministic_mode and rank_info.device.type == "cpu"
    core = _core_attention(model.attention, is_batch_invariant=is_batch_invariant)
    symbols = sorted({symbol for block in family.blocks() for symbol in block} & MIXERS.keys())
    parts = LayerParts(core, {s: resolve("model.family", s, MIXERS)(config, model, rank_info) for s in symbols})
    return parts if is_batch_invariant or rank_info.device.type != "cpu" else _on_cpu_kernels(parts, model.cpu_kernels)


def _on_cpu_kernels(parts: LayerParts, kernels: str) -> LayerParts:
    """Return ``parts`` with the kernels of ``model.cpu_kernels``: for auto, C kernels if they can be used, else torch's.

    Raises ``ConfigError`` if ``kernels`` is c and the C kernels cannot be imported or compiled.
    """
    if kernels == "torch":
        return parts
    try:
        return resolve("model.cpu_kernels", "c", CPU_KERNELS)(parts)
    except ConfigError as error:
        if kernels == "c":
            raise
        logging.getLogger(__name__).warning("training with torch's kernels: %s", error)
        return parts


def _core_attention(name: str, *, is_batch_invariant: bool) -> type:
    if is_batch_invariant:
        return ExactAttention
    return resolve("model.attention", "torch" if name == "auto" else name, ATTENTIONS)


def named_weights(model: ModelSegments) -> Iterator[tuple[str, Tensor]]:
    """Yield (slime_like's key, weight) for the parameters and router biases of this pipeline rank, in export order.

    In a decoder block, a key is "blocks", the block's number and the rest of megatron's name; other keys are megatron's names
    without "decoder.". Blocks and experts are numbered over the whole model.
    """
    by_key = {_key(policy, name): weight for policy in model.policies for name, weight in _tensors(policy)}
    yield from sorted(by_key.items(), key=lambda item: _order(item[0]))


def _tensors(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (megatron's name, weight) for the parameters, then for the router biases, which are buffers."""
    yield from policy.named_parameters()
    yield from ((name, buffer) for name, buffer in policy.named_buffers() if name.endswith(ROUTER_BIAS))


def _key(model: PolicyModel, name: str) -> str:
    if name.startswith("decoder.layers."):
        # A decoder block is two layers of the hybrid stack; ``layer_number`` counts layers from 1 over all segments.
        _, _, local, suffix = name.split(".", 3)
        layers: Any = model.decoder.layers  # pyright: ignore[reportFunctionMemberAccess]
        block = (int(layers[int(local)].layer_number) - 1) // 2
        num_local = (model.config.num_moe_experts or 0) // model.rank_info.layout.ep
        return global_key(f"blocks.{block}.{suffix}", num_local, model.rank_info.ep_rank)
    return name.removeprefix("decoder.")


def _order(key: str) -> tuple[int, int]:
    if key.startswith("blocks."):
        return 1, int(key.split(".")[1])
    if key.startswith(VALUE_HEAD):
        return 4, 0
    return {"embedding.word_embeddings.weight": 0, "final_norm.weight": 2, OUTPUT: 3}[key], 0


@torch.no_grad()
def load_hf(model: ModelSegments, table: Mapping[str, Weight], folder: HFFolder, rank_info: RankInfo) -> None:
    """Load this rank's weights from an HF folder; a critic's value head is not changed.

    Raises ``CheckpointError`` on a missing tensor or file, a wrong shape, an unsupported dtype, a damaged file or unusable scales
    of float8 weights.
    """
    for key, target in named_weights(model):
        if key.startswith(VALUE_HEAD):
            continue
        weight = table[key]
        tensors = [tensor.to(target.dtype) for tensor in weight.read(folder)]
        shard = weight.split(tensors, *rank_info.shard(expert=weight.is_expert))
        assert shard.shape == target.shape, f"{key}: shard {tuple(shard.shape)} for weight {tuple(target.shape)}"
        target.copy_(shard)
