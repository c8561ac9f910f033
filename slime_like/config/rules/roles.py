"""Rules for ``critic.*`` and ``teacher.*``. Some need only the config; others read checkpoints."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from slime_like.checkpoint.record import Manifest, check_value_head, critic_source, read_manifest
from slime_like.config.rules.experts import check_sequence_parallel
from slime_like.config.rules.hf import HfConfig, read_hf_config, read_json
from slime_like.config.rules.saved_model import check_saved_model
from slime_like.config.rules.weight_files import check_shapes
from slime_like.config.schema.base import default_of
from slime_like.config.schema.gdn import gdn_cp_mode
from slime_like.config.schema.role_algo import DistillConfig, PpoConfig
from slime_like.config.schema.roles import CriticConfig, TeacherConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import CheckpointError, ConfigError

# Keys of config.json that must be equal for two checkpoints to swap weights on the same ranks. They determine every
# tensor shape and how the model uses the weights.
SHAPE = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "n_routed_experts",
    "n_shared_experts",
    "first_k_dense_replace",
    "moe_layer_freq",
    "n_group",
    "topk_group",
    "topk_method",
    "scoring_func",
    "routed_scaling_factor",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "use_qk_norm",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_interleave",
    "partial_rotary_factor",
    "attention_bias",
    "layer_types",
    "full_attention_interval",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def check_roles(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` if a role's key is unused or missing, or contradicts another key."""
    _check_unused("critic", cfg.critic, "ppo", is_used=isinstance(cfg.algo, PpoConfig))
    _check_unused("teacher", cfg.teacher, "distill", is_used=isinstance(cfg.algo, DistillConfig))
    if isinstance(cfg.algo, DistillConfig) and cfg.teacher.hf_checkpoint is None:
        raise ConfigError("algo=distill learns from a teacher: set teacher.hf_checkpoint=<HF folder>")
    if cfg.teacher.placement == "swap":
        for name in ("tp", "pp", "cp", "dp"):
            if getattr(cfg.teacher, name) is not None:
                raise ConfigError(
                    f"teacher.{name}={getattr(cfg.teacher, name)} with teacher.placement=swap: the teacher then runs on "
                    f"the actor's ranks; remove teacher.{name}, or set teacher.placement=colocated"
                )


def check_warmup(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` if the critic's warm-up (of rollouts or of the learning rate) is not shorter than the run."""
    warmup, total = cfg.critic.warmup_rollouts, cfg.loop.num_rollout
    if warmup >= total:
        raise ConfigError(
            f"critic.warmup_rollouts={warmup} must be below loop.num_rollout={total}, or the actor is never trained: lower "
            "critic.warmup_rollouts, or raise loop.num_rollout"
        )
    steps = total * cfg.loop.steps_per_rollout
    if cfg.critic.lr_warmup_steps >= steps:
        raise ConfigError(
            f"critic.lr_warmup_steps={cfg.critic.lr_warmup_steps} must be below the critic's {steps} optimizer steps: "
            "lower critic.lr_warmup_steps"
        )


def _check_unused(group: str, config: CriticConfig | TeacherConfig, algo: str, *, is_used: bool) -> None:
    if is_used:
        return
    for item in fields(config):
        value = getattr(config, item.name)
        if value != default_of(item):
            raise ConfigError(
                f"{group}.{item.name}={value!r} has no effect: only algo={algo} has a {group}; remove {group}.{item.name}"
            )


def check_role_files(cfg: TrainConfig, model: HfConfig) -> None:
    """Raise an error on a critic's or teacher's checkpoint that is damaged or does not fit the policy or the config.

    It is a ``ConfigError`` if the role's layout does not fit its model, otherwise a ``CheckpointError``.
    """
    if isinstance(cfg.algo, PpoConfig):
        _check_critic_files(cfg, model)
    if isinstance(cfg.algo, DistillConfig):
        _check_teacher_files(cfg, model)


def _check_critic_files(cfg: TrainConfig, model: HfConfig) -> None:
    key, folder = "critic.hf_checkpoint", cfg.critic.hf_checkpoint
    critic = model if folder is None else read_hf_config(key, folder)
    if folder is not None:
        if critic.vocab_size != model.vocab_size:
            raise CheckpointError(
                f"{key}={folder!r} has a vocabulary of {critic.vocab_size} tokens, but "
                f"model.hf_checkpoint={cfg.model.hf_checkpoint!r} has {model.vocab_size}: the critic reads the policy's tokens; use a model with the same tokenizer"
            )
        check_shapes(key, critic)
    _check_layout("critic", cfg.critic, critic, cfg)
    if cfg.critic.load is not None:
        if not Path(cfg.critic.load).is_dir():
            raise CheckpointError(
                f"critic.load={cfg.critic.load!r} is not a folder: set critic.load to the critic folder of a run"
            )
        source = critic_source(Path(cfg.critic.load))
        check_critic(cfg, source, read_manifest(source))


def check_critic(cfg: TrainConfig, source: Path, manifest: Manifest) -> None:
    """Raise ``CheckpointError`` unless ``source`` is a critic's checkpoint, saved from the model of this run's critic.

    A padded vocabulary in its ``manifest`` must be the one that the critic's tensor parallel size gives.
    """
    check_value_head(source, manifest)
    key, folder = "critic.hf_checkpoint", cfg.critic.hf_checkpoint
    if folder is None:
        key, folder = "model.hf_checkpoint", cfg.model.hf_checkpoint
    check_saved_model(manifest, source, key, folder, cfg.critic.tp or cfg.parallel.tp)


def _check_teacher_files(cfg: TrainConfig, model: HfConfig) -> None:
    key, folder = "teacher.hf_checkpoint", cfg.teacher.hf_checkpoint
    assert folder is not None, "check_roles comes first"
    teacher = read_hf_config(key, folder)
    _check_same_vocabulary(cfg.model.hf_checkpoint, model, folder, teacher)
    check_shapes(key, teacher)
    _check_layout("teacher", cfg.teacher, teacher, cfg)
    difference = shape_difference(cfg.model.hf_checkpoint, folder)
    if cfg.teacher.placement == "swap" and difference is not None:
        raise CheckpointError(
            f"{key}={folder!r} differs from model.hf_checkpoint={cfg.model.hf_checkpoint!r} in {difference}: it cannot swap weights with the actor "
            "on the same ranks; set teacher.placement=colocated for separate ranks"
        )


def _check_same_vocabulary(student_folder: str, student: HfConfig, folder: str, teacher: HfConfig) -> None:
    """Raise ``CheckpointError`` unless student and teacher have the same tokens with the same ids.

    If both files tokenizer.json can be read, each vocabulary size must exceed every token id, and may be larger (padding rows).
    Otherwise, only the vocabulary sizes are compared, and must be equal.
    """
    key = f"teacher.hf_checkpoint={folder!r}"
    student_ids, teacher_ids = _tokens(student_folder), _tokens(folder)
    if student_ids is None or teacher_ids is None:
        if student.vocab_size != teacher.vocab_size:
            raise CheckpointError(
                f"{key} has a vocabulary of {teacher.vocab_size} tokens, but the student's has {student.vocab_size} "
                f"(model.hf_checkpoint={student_folder!r}): a teacher must have the student's tokenizer"
            )
        return
    mismatch = next((token for token, index in student_ids.items() if teacher_ids.get(token) != index), None)
    if mismatch is not None or len(student_ids) != len(teacher_ids):
        token = mismatch if mismatch is not None else next(token for token in teacher_ids if token not in student_ids)
        raise CheckpointError(
            f"{key} has a vocabulary of {len(teacher_ids)} tokens, the student's has {len(student_ids)} "
            f"(model.hf_checkpoint={student_folder!r}); {token!r} is token {teacher_ids.get(token)} of the teacher and "
            f"{student_ids.get(token)} of the student: a teacher must have the student's tokenizer"
        )
    top = max(student_ids.values(), default=0)
    for name, config in ((key, teacher), (f"model.hf_checkpoint={student_folder!r}", student)):
        if top >= config.vocab_size:
            raise CheckpointError(
                f"{name} has {config.vocab_size} embeddings, but its tokenizer has token id {top}: "
                "use the tokenizer that the model was trained with"
            )


def _tokens(folder: str) -> dict[str, int] | None:
    """Return the mapping from token to id in tokenizer.json; None if it is missing or has another format."""
    path = Path(folder) / "tokenizer.json"
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        vocabulary: Any = values["model"]["vocab"]
        if not isinstance(vocabulary, dict):
            return None
        ids = cast("dict[str, int]", dict(vocabulary))
        ids.update({str(item["content"]): int(item["id"]) for item in values.get("added_tokens", [])})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return ids


def _check_layout(group: str, role: CriticConfig | TeacherConfig, model: HfConfig, cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` unless the role's layout fits ``model``. Sizes that the role does not set are the actor's."""
    tp, cp, pp = role.tp or cfg.parallel.tp, role.cp or cfg.parallel.cp, role.pp or cfg.parallel.pp
    for num_heads, kind in ((model.num_heads, "attention"), (model.num_kv_heads, "key/value")):
        if num_heads % tp:
            raise ConfigError(
                f"{group}.tp={tp} does not divide the {num_heads} {kind} heads of the model in {model.folder}: "
                f"lower {group}.tp"
            )
    check_sequence_parallel(f"{group}.tp", tp, cfg, model)
    if model.gdn is not None:
        for num_heads, kind in ((model.gdn.key_heads, "key"), (model.gdn.value_heads, "value")):
            if num_heads % tp:
                raise ConfigError(
                    f"{group}.tp={tp} does not divide the {num_heads} linear attention {kind} heads of the model in "
                    f"{model.folder}: lower {group}.tp"
                )
        gdn_cp_mode(cfg.model.gdn.cp_mode, model.gdn.key_heads, model.gdn.value_heads, tp=tp, cp=cp)
    if pp > model.num_layers:
        raise ConfigError(
            f"{group}.pp={pp} is more than the {model.num_layers} layers of {model.folder}: lower {group}.pp"
        )


def shape_difference(folder: str, other_folder: str) -> str | None:
    """Return the first key of ``SHAPE`` in which two models differ, with both values; None if the models match.

    The value of ``other_folder`` comes first. Raises ``CheckpointError`` if a config.json is missing or damaged.
    """
    first, second = _decoder_values(folder), _decoder_values(other_folder)
    name = next((name for name in SHAPE if first.get(name) != second.get(name)), None)
    return None if name is None else f"{name} ({second.get(name)} and {first.get(name)})"


def contradiction(folder: str, other_folder: str) -> str | None:
    """Return the first key of ``SHAPE`` that two models both set, to different values; None if there is none.

    Unlike ``shape_difference``, it ignores keys that one of the files leaves to the model class. Raises ``CheckpointError``
    if a config.json is missing or damaged.
    """
    first, second = _decoder_values(folder), _decoder_values(other_folder)
    return next((name for name in SHAPE if None not in (a := first.get(name), b := second.get(name)) and a != b), None)


def _decoder_values(folder: str) -> dict[str, Any]:
    """Return the values of the config.json in ``folder``, with those of its text_config at the top level."""
    values = read_json("config.json", Path(folder) / "config.json")
    return values | (values.get("text_config") or {})
