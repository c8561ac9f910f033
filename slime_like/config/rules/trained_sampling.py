"""Rules that ensure that trained samples are drawn from the model's unmodified distribution at ``rollout.temperature``.

The trainer computes log-probabilities of that distribution only. A key or an environment variable that makes an
engine sample differently is rejected at load, except in runs that train on no samples (run.mode=rollout_only, algo=sft).
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from slime_like.config.rules import foreign
from slime_like.config.schema.algo import SftConfig
from slime_like.config.schema.rollout import RolloutConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.util.reading import InputFile, abbreviate

_FIELDS = {
    "SGLang merges it into every request, and min_p or a penalty would change the distribution": (
        "preferred_sampling_params",
    ),
    "a watermark biases every token": (
        "enable_watermark",
        *(f"watermark_{name}" for name in ("config", "key", "key_b", "context_window", "mixing_probability")),
        *(f"watermark_{name}" for name in ("max_probability", "default_enabled", "enforce_all")),
    ),
    "drafts are accepted more often than the model would sample them": (
        "speculative_accept_threshold_single",
        "speculative_accept_threshold_acc",
    ),
    "a logit processor changes logits before a token is drawn": ("enable_custom_logit_processor",),
    "tokens are blocked while the model thinks": ("enable_strict_thinking",),
    "this backend replaces sampled tokens": ("sampling_backend",),
    "a diffusion decoder fills in tokens in a different order than the trainer scores them": ("dllm_algorithm",),
    "the trainer would score the full prompt, but the engine a truncated one": ("allow_auto_truncate",),
    "engine and trainer would run different models; change config.json in model.hf_checkpoint, which both read": (
        "json_model_override_args",
    ),
    "a hook changes the forward pass: engine and trainer would run different models": ("forward_hooks",),
    "tokens would be routed to random experts: engine and trainer would run different models": (
        "ep_dispatch_algorithm",
    ),
    "expert outputs would be added one layer late: engine and trainer would run different models": (
        "kt_max_deferred_experts_per_token",
    ),
    "engines would serve quantised weights, but the trainer pushes and trains weights of model.dtype": (
        "quantization",
        "modelopt_quant",
        "quantize_and_serve",
        "rl_quant_profile",
    ),
    "its KV cache survives the flush after a push, so prefixes computed with earlier weights would be reused": (
        "hicache_storage_backend",
        "enable_unified_cache_external_linker",
        "enable_lmcache",
        "enable_flexkv",
    ),
}
CHANGES_SAMPLES: Mapping[str, str] = {field: reason for reason, fields in _FIELDS.items() for field in fields}
"""Field of SGLang's ``ServerArgs`` -> reason why samples of an engine with it cannot be trained on.

All other fields are listed in ``tests/config/sglang_fields.txt``. A test fails if a new SGLang has fields in neither.
"""
HARMLESS: Mapping[str, tuple[object, ...]] = {
    "sampling_backend": ("flashinfer", "pytorch", "ascend", "intel_xpu"),
    "ep_dispatch_algorithm": ("static", "dynamic", "lp"),
}
"""Field of ``CHANGES_SAMPLES`` -> values that do not change samples, in addition to its default."""
_PERTURBED = "it overwrites keys, values or drawn tokens at random, to test SGLang's checks"
_EXPERTS = "tokens would be routed to fake experts: engine and trainer would run different models"
CHANGES_SAMPLES_BY_VARIABLE: Mapping[str, str] = {
    "SGLANG_SIMULATE_ACC_LEN": "it accepts a fixed number of drafted tokens regardless of the model",
    "SGLANG_NGRAM_FORCE_GREEDY_VERIFY": "drafts are accepted if they are the most probable token",
    "SGLANG_SIMULATE_UNIFORM_EXPERTS": _EXPERTS,
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": _EXPERTS,
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "log-probabilities are reported at temperature 1 regardless of the sampling temperature",
    "SGLANG_DEBUG_HISPARSE_SKIP_IO": "copies of keys and values are skipped, to measure how long they take",
    "SGLANG_DEBUG_REVERT_PR": "it restores a bug that SGLang has fixed",
    "SGLANG_KV_CANARY_PERTURB_REQ_TO_TOKEN_PROB": _PERTURBED,
    "SGLANG_KV_CANARY_PERTURB_REAL_KV_USED_PROB": _PERTURBED,
    "SGLANG_KV_CANARY_PERTURB_REAL_KV_UNUSED_CACHE_PROB": _PERTURBED,
    "SGLANG_KV_CANARY_PERTURB_REAL_KV_POST_FORWARD_PROB": _PERTURBED,
    "SGLANG_KV_CANARY_PERTURB_NEXT_TOKEN_SWAP_PROB": _PERTURBED,
}
"""Environment variable of SGLang -> reason why samples of an engine with it cannot be trained on.

Other variables whose names suggest sampling are listed in ``tests/config/sglang_environment.txt``. A test fails if a
new SGLang has such variables in neither.
"""


def check_trained_sampling(cfg: TrainConfig, environment: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` on a key or environment variable that makes the engines' samples unsuitable for training.

    Runs that train on no samples (``run.mode=rollout_only``, algo=sft) are not checked. With ``run.mode=train_only``, the
    environment is not checked, as no engine runs.
    """
    if cfg.run.mode == "rollout_only" or isinstance(cfg.algo, SftConfig):
        return
    for key, value, off in (("rollout.top_p", cfg.rollout.top_p, 1.0), ("rollout.top_k", cfg.rollout.top_k, -1)):
        if value != off:
            raise ConfigError(
                f"{key}={value} cannot be trained on: tokens would be sampled from a truncated distribution while the trainer "
                f"computes log-probabilities of the full one; set {key}={off:g} (evaluation.top_p is free)"
            )
    for field, value in cfg.rollout.sglang.items():
        if field in CHANGES_SAMPLES and not _is_harmless(field, value):
            raise ConfigError(
                f"rollout.sglang.{field}={value!r} cannot be trained on: {CHANGES_SAMPLES[field]}; remove "
                f"rollout.sglang.{field} (run.mode=rollout_only allows it)"
            )
    for name in () if cfg.run.mode == "train_only" else sorted(changing_variables(environment)):
        raise ConfigError(
            f"{name}={environment[name]} in the environment, which engines inherit, so their samples cannot be trained on: "
            f"{CHANGES_SAMPLES_BY_VARIABLE[name]}; unset {name} (run.mode=rollout_only allows it)"
        )


def check_drafts(cfg: TrainConfig, device: str) -> None:
    """Raise ``ConfigError`` if engines would decode speculatively on a CPU.

    PyPI has no CPU build of SGLang's kernels that verify drafts.
    """
    method = cfg.rollout.sglang.get("speculative_algorithm")
    if device != "cpu" or not method or cfg.run.mode == "train_only" or isinstance(cfg.algo, SftConfig):
        return
    raise ConfigError(
        f"rollout.sglang.speculative_algorithm={method} with placement.device=cpu: engines on a CPU cannot verify drafts; "
        "remove rollout.sglang.speculative_algorithm, or set placement.device=cuda"
    )


def changing_variables(environment: Mapping[str, str]) -> set[str]:
    """Return the variables of ``CHANGES_SAMPLES_BY_VARIABLE`` that ``environment`` turns on."""
    return {name for name in CHANGES_SAMPLES_BY_VARIABLE if not _is_off(environment.get(name, ""))}


def check_replayed_sampling(cfg: TrainConfig, folder: Path) -> None:
    """Raise ``ConfigError`` if the rollouts in ``folder`` were not sampled from the distribution of ``cfg``.

    Their settings are read from the ``config.yaml`` of the run that dumped the rollouts, in the folder that contains ``folder``.
    A damaged file is an error too. If it is missing, for example because only the rollouts were copied, or with algo=sft, nothing
    is checked.
    """
    path = Path(os.path.abspath(folder)).parent / "config.yaml"  # not that of a link's target
    if isinstance(cfg.algo, SftConfig) or not path.is_file():
        return
    file = InputFile(path, ConfigError, "remove this file to replay unchecked", "run.replay_from")
    rollouts = _mapping(file, _mapping(file, file.yaml(), "").get("rollout"), "rollout")
    for name in ("temperature", "top_p", "top_k"):
        value, configured = rollouts.get(name, getattr(RolloutConfig, name)), getattr(cfg.rollout, name)
        if value != configured:
            fix = f"set rollout.{name}={value}" if name == "temperature" else "sample them again"
            raise ConfigError(
                f"run.replay_from={str(folder)!r} contains rollouts that were sampled at rollout.{name}={value} ({path}), but "
                f"rollout.{name} is {configured}: the trainer would compute log-probabilities of another distribution; {fix}"
            )
    for field, value in _mapping(file, rollouts.get("sglang"), "rollout.sglang").items():
        if field in CHANGES_SAMPLES and not _is_harmless(field, value):
            raise ConfigError(
                f"run.replay_from={str(folder)!r} contains rollouts that were sampled with rollout.sglang.{field}={value!r} "
                f"({path}), which cannot be trained on: {CHANGES_SAMPLES[field]}; sample them again without it"
            )


def _mapping(file: InputFile, value: object, key: str) -> dict[str, Any]:
    """Return ``value``, which a config file has at ``key``, as a mapping: empty if it is None.

    Raises ``ConfigError`` if it is not a mapping.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise file.refused(f"contains {abbreviate(value)} as {key or 'its settings'}, not a mapping")
    return cast("dict[str, Any]", value)


def _is_harmless(field: str, value: Any) -> bool:
    default = foreign.table(foreign.SGLANG)[field]["default"]
    return (default is not None and value == ast.literal_eval(default)) or value in HARMLESS.get(field, ())


def _is_off(value: str) -> bool:
    """Return whether SGLang reads the ``value`` of a variable (a switch, a number or a probability) as off."""
    try:
        return float(value) <= 0
    except ValueError:
        return value.lower() not in ("true", "yes", "y")  # SGLang also reads other text as off, with a warning
