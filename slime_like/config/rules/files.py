"""Rules that read files: checks of the model folder, of the data files, and of the parallel layout against the model's shape."""

from __future__ import annotations

from pathlib import Path

from slime_like.checkpoint.files import LATEST, megatron_folder
from slime_like.config.rules.dcp import check_dcp_model, num_attention_ranks
from slime_like.config.rules.eval_overrides import override_lengths
from slime_like.config.rules.experts import check_experts
from slime_like.config.rules.float8_engines import check_float8_model
from slime_like.config.rules.flow_mla import check_flow_mla_model
from slime_like.config.rules.gdn import check_has_gdn
from slime_like.config.rules.hf import HfConfig, check_rope, check_tokenizer, read_hf_config, rope_type
from slime_like.config.rules.pipeline import segments
from slime_like.config.rules.remote_experts import check_remote_experts_model
from slime_like.config.rules.roles import check_role_files, contradiction
from slime_like.config.rules.routing_replay import check_replayed_model
from slime_like.config.rules.trained_sampling import check_replayed_sampling
from slime_like.config.rules.weight_files import check_shapes
from slime_like.config.schema import names
from slime_like.config.schema.algo import SftConfig
from slime_like.config.schema.family_entry import REFUSED_FAMILIES
from slime_like.config.schema.gdn import gdn_cp_mode
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import CheckpointError, ConfigError, DataError
from slime_like.registry import nearest
from slime_like.util.row_count import SLICE, check_found

DATA_SUFFIXES = (".jsonl", ".parquet")


def check_files(cfg: TrainConfig) -> None:
    """Raise ``CheckpointError``, ``DataError`` or ``ConfigError`` on a missing, broken or unsuitable file."""
    key, folder = "model.hf_checkpoint", cfg.model.hf_checkpoint
    model = read_hf_config(key, folder)
    check_model(cfg, model)
    check_shapes(key, model)
    templated = "data.apply_chat_template=true" if cfg.data.apply_chat_template else ""
    agent = f"rollout.generate={cfg.rollout.generate}" if cfg.rollout.agent is not None else ""
    check_tokenizer(key, folder, needs_template=templated or agent)
    _check_megatron(cfg)
    _check_reference(cfg, model)
    check_role_files(cfg, model)
    if cfg.run.replay_from is not None and not Path(cfg.run.replay_from).is_dir():
        raise DataError(
            f"run.replay_from={cfg.run.replay_from!r} is not a folder: give the rollouts folder of an earlier run"
        )
    if cfg.run.replay_from is not None:
        check_replayed_sampling(cfg, Path(cfg.run.replay_from))
    if cfg.run.replay_from is None and cfg.data.source == "file":
        check_data_file("data.train", cfg.data.train)
    for name, path in cfg.evaluation.datasets.items():
        check_data_file(f"evaluation.datasets.{name}", path)
    if cfg.run.resume not in ("auto", "never") and not Path(cfg.run.resume).exists():
        raise CheckpointError(f"run.resume={cfg.run.resume!r} does not exist: give a checkpoint's path, auto or never")


def check_model(cfg: TrainConfig, model: HfConfig) -> None:
    """Raise ``CheckpointError`` or ``ConfigError`` on a model that cannot run with this config.

    The weights are not read.
    """
    family_of(cfg, model)
    check_has_gdn(cfg.model.gdn, model)
    check_rope("model.hf_checkpoint", model)
    _check_layout(cfg, model)
    _check_engine_support(cfg, model)
    _check_context(cfg, model)
    _check_stop_tokens(cfg, model)


def family_of(cfg: TrainConfig, model: HfConfig) -> str:
    """Return the model's family: ``model.family`` or, if that key is auto, the model_type.

    Raises ``ConfigError`` if the model_type is in ``REFUSED_FAMILIES``, or if the key is auto and no family has this name.
    """
    refuse_family("model.hf_checkpoint", model.folder, model.model_type)
    if cfg.model.family != "auto":
        return cfg.model.family
    if model.model_type not in names.FAMILIES:
        raise ConfigError(
            f"model.hf_checkpoint={model.folder!r} has model_type {model.model_type!r}, which is not supported: "
            f"{nearest(model.model_type, names.FAMILIES)}; model.family=<name> reads it with the weight names of another family"
        )
    return model.model_type


def refuse_family(key: str, folder: str, model_type: str) -> None:
    """Raise ``ConfigError`` naming ``key`` if models of this ``model_type`` are not supported."""
    if reason := REFUSED_FAMILIES.get(model_type):
        raise ConfigError(f"{key}={folder!r} has model_type {model_type!r}, which is not supported: {reason}")


def _check_layout(cfg: TrainConfig, model: HfConfig) -> None:
    p, ranks = cfg.parallel, num_attention_ranks(cfg)
    engine = "rollout.tp" if ranks == cfg.rollout.tp else "rollout.tp / rollout.dp_attention", ranks
    _check_divides("parallel.tp", p.tp, model.num_heads, "attention heads", model)
    _check_divides("parallel.tp", p.tp, model.num_kv_heads, "key/value heads", model)
    if model.gdn is not None:
        for key, size in (("parallel.tp", p.tp), engine):
            _check_divides(key, size, model.gdn.key_heads, "linear attention key heads", model)
            _check_divides(key, size, model.gdn.value_heads, "linear attention value heads", model)
        gdn_cp_mode(cfg.model.gdn.cp_mode, model.gdn.key_heads, model.gdn.value_heads, tp=p.tp, cp=p.cp)
    segments(p, model.num_layers)
    check_experts(cfg, model)
    check_replayed_model(cfg, model)
    _check_divides(*engine, model.num_heads, "attention heads", model)
    if model.num_kv_heads % ranks and ranks % model.num_kv_heads:
        raise ConfigError(
            f"{engine[0]}={ranks} is neither a divisor nor a multiple of the "
            f"{model.num_kv_heads} key/value heads of the model in {model.folder}: set {engine[0]} to {model.num_kv_heads}"
        )
    check_dcp_model(cfg, model)
    check_flow_mla_model(cfg.rollout, model)
    check_float8_model(cfg, model)
    check_remote_experts_model(cfg, model)


def _check_engine_support(cfg: TrainConfig, model: HfConfig) -> None:
    """Raise ``CheckpointError`` or ``ConfigError`` on a model that SGLang 0.5.23 would compute incorrectly.

    Nothing is checked if no engine runs: with ``run.mode=train_only`` or algo=sft.
    """
    if cfg.run.mode == "train_only" or isinstance(cfg.algo, SftConfig):
        return
    family = names.FAMILIES.get(model.model_type)
    if model.tied and family is not None and not family.engine_ties:
        raise CheckpointError(
            f"model.hf_checkpoint={model.folder!r}: config.json has tie_word_embeddings=true, which SGLang's "
            f"{model.model_type} does not read: its output layer would stay uninitialised; save the model with a separate "
            f"output layer (tie_word_embeddings=false)"
        )
    groups = cfg.rollout.dp_attention
    if groups > 1 and family is not None and not family.engine_dp_attention:
        raise ConfigError(
            f"rollout.dp_attention={groups}: SGLang's {model.model_type} (the model in {model.folder}) does not implement "
            "data-parallel attention and would add outputs of different requests: remove rollout.dp_attention, and set "
            "rollout.num_engines for more engines"
        )
    kind = rope_type(model)
    if model.latent and kind not in ("default", "yarn"):
        raise CheckpointError(
            f"model.hf_checkpoint={model.folder!r}: config.json has {model.rope_key}.rope_type={kind!r}, which SGLang reads as "
            "yarn in models with latent attention; use default or yarn, or train without engines (algo=sft, or "
            "run.mode=train_only)"
        )


def _check_divides(key: str, size: int, total: int, unit: str, model: HfConfig) -> None:
    if total % size:
        valid_sizes = [str(n) for n in range(1, total + 1) if total % n == 0]
        raise ConfigError(
            f"{key}={size} does not divide the {total} {unit} of the model in {model.folder}: "
            f"set one of {', '.join(valid_sizes)}"
        )


def _check_context(cfg: TrainConfig, model: HfConfig) -> None:
    limit, max_positions = cfg.rollout.max_context_len, model.max_positions
    if limit is not None and limit > max_positions:
        raise ConfigError(
            f"rollout.max_context_len={limit} is above the model's {max_positions} positions (max_position_embeddings of "
            f"{model.folder}): lower rollout.max_context_len"
        )
    for key, value in (
        ("rollout.max_response_len", cfg.rollout.max_response_len),
        ("evaluation.max_response_len", cfg.evaluation.max_response_len),
        *override_lengths(cfg.evaluation),
    ):
        if value is not None and value > (limit or max_positions):
            raise ConfigError(
                f"{key}={value} is longer than the model's {max_positions} positions ({model.folder}), which include the "
                f"prompt: lower {key}"
            )


def _check_stop_tokens(cfg: TrainConfig, model: HfConfig) -> None:
    if invalid := [token for token in cfg.rollout.stop_token_ids if not 0 <= token < model.vocab_size]:
        raise ConfigError(
            f"rollout.stop_token_ids has {invalid[0]}, but the last token id of {model.folder} is "
            f"{model.vocab_size - 1}: no response could end with that token; correct the token id"
        )


def _check_megatron(cfg: TrainConfig) -> None:
    path = cfg.model.megatron_checkpoint
    if path is not None and megatron_folder(Path(path)) is None:
        raise CheckpointError(
            f"model.megatron_checkpoint={path!r} is not a torch_dist checkpoint (no metadata.json there, nor in the folder "
            f"that {LATEST} names): give an iter_* folder, or the one above it"
        )


def _check_reference(cfg: TrainConfig, model: HfConfig) -> None:
    """Raise ``CheckpointError`` if the reference's HF folder is broken or its model differs from the actor's.

    Both must have the same shape and settings, because the reference's weights are swapped in on the actor's ranks. Nothing is
    checked if the reference is in Megatron's format, or with algo=sft, which has no reference.
    """
    folder = cfg.model.ref_checkpoint
    if folder is None or isinstance(cfg.algo, SftConfig) or megatron_folder(Path(folder)) is not None:
        return
    reference = read_hf_config("model.ref_checkpoint", folder)
    for field in (
        "model_type",
        "num_layers",
        "hidden_size",
        "num_heads",
        "num_kv_heads",
        "vocab_size",
        "num_experts",
        "gdn",
    ):
        expected, actual = getattr(model, field), getattr(reference, field)
        if expected != actual:
            raise CheckpointError(
                f"model.ref_checkpoint={folder!r} has {field} {actual}, "
                f"model.hf_checkpoint={cfg.model.hf_checkpoint!r} has {expected}: "
                "the reference runs on the actor's ranks by swapping weights, so both models must have the same shape"
            )
    if name := contradiction(cfg.model.hf_checkpoint, folder):
        raise CheckpointError(
            f"model.ref_checkpoint={folder!r}: its config.json has another {name} than that of model.hf_checkpoint, which "
            "the actor's ranks would use for the reference: use a reference with the same config.json"
        )
    check_shapes("model.ref_checkpoint", reference)


def check_data_file(key: str, text: str) -> None:
    """Raise ``DataError`` unless ``text`` names an existing, non-empty .jsonl or .parquet file, with an optional slice."""
    match = SLICE.match(text)
    path = Path(match["path"] if match else text)
    if "@[" in path.name:
        raise DataError(
            f"{key}={text!r}: write a slice as path@[a:b]; without a it starts at the first row, without b it ends at the last"
        )
    check_found(key, text, path)
    if path.is_dir():
        file_names = ", ".join(sorted(p.name for p in path.glob("*") if p.suffix in DATA_SUFFIXES)[:5])
        raise DataError(f"{key}={text!r} is a folder: name one file ({file_names or 'it has no .jsonl or .parquet'})")
    if not path.is_file():
        data_files = (
            sorted(p.name for p in path.parent.glob("*") if p.suffix in DATA_SUFFIXES) if path.parent.is_dir() else []
        )
        hint = (
            f"{nearest(path.name, data_files)} (in {path.parent})"
            if data_files
            else f"no data file is in {path.parent}"
        )
        raise DataError(f"{key}={text!r}: the file {path} does not exist: {hint}")
    if path.suffix not in DATA_SUFFIXES:
        raise DataError(f"{key}={text!r}: expected a {' or '.join(DATA_SUFFIXES)} file")
    if path.stat().st_size == 0:
        raise DataError(f"{key}={text!r}: the file {path} is empty: it needs a JSON object per line")
