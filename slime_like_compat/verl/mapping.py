"""Translation of the settings of a verl job to overrides, with a report row for each setting.

A setting that changes the job and has no counterpart is refused. No recipe is written if a setting is refused, is unknown
or has an unknown value; the user may drop such settings by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

from slime_like.config.load.loader import read_override
from slime_like.config.rules import foreign
from slime_like.config.schema.render import render
from slime_like.errors import ConfigError
from slime_like_compat.conversion import compose
from slime_like_compat.conversion_rows import BLOCKING, Mapped, Row, same_value
from slime_like_compat.verl.algo import map_algorithm
from slime_like_compat.verl.critic import map_critic
from slime_like_compat.verl.data import map_data, map_evaluation
from slime_like_compat.verl.defaults import MEGATRON, ROLLOUT, VALUES
from slime_like_compat.verl.job import Job, Setting
from slime_like_compat.verl.layout import map_layout
from slime_like_compat.verl.names import canonical, feature, switch, without_effect
from slime_like_compat.verl.optim import map_batches, map_optimizer
from slime_like_compat.verl.rewards import map_rewards
from slime_like_compat.verl.rollout import lengths, map_rollout
from slime_like_compat.verl.run import map_run

_TRANSFORMER = f"{MEGATRON}.override_transformer_config."
_SGLANG = f"{ROLLOUT}.engine_kwargs.sglang."
_FREE = (_TRANSFORMER[:-1], _SGLANG[:-1], "data.apply_chat_template_kwargs")
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_STAGES = {
    "num_layers_in_first_pipeline_stage": "parallel.first_stage_layers",
    "num_layers_in_last_pipeline_stage": "parallel.last_stage_layers",
    "pipeline_model_parallel_layout": "parallel.pipeline_layout",
}
_KERNELS = (
    "*fusion*",
    "*_overlap",
    "use_flash_attn",
    "use_fused_*",
    "use_ascend_*",
    "use_triton_*",
    "use_naive_*",
    "attention_backend",
    "moe_grouped_gemm",
    "moe_enable_deepep",
    "moe_token_dispatcher_type",
    "deallocate_pipeline_outputs",
    "persist_layer_norm",
    "account_for_*",
    "context_parallel_*",
    "sequence_packing_scheduler",
    "max_seqlen_per_dp_cp_rank",
    "cp_partition_mode",
    "sequence_parallel",
    "use_distributed_optimizer",
    "variable_seq_lengths",
)


def map_settings(
    settings: Sequence[Setting], *, run_name: str, user_overrides: Sequence[str] = (), drop: Sequence[str] = ()
) -> Mapped:
    """Translate the settings of ``verl.trainer.main_ppo`` and compose their overrides.

    ``user_overrides`` set our keys and take precedence; ``drop`` are keys of verl to leave out. The returned ``config`` is
    None if a row has a verdict in ``BLOCKING``. Raises ``ConfigError`` if the settings do not compose to a configuration, and
    the errors of ``translate_settings``.
    """
    job = translate_settings(settings, user_overrides=user_overrides, drop=drop)
    base = {"run.name": render(run_name), "placement.device": "cuda"}
    algorithm = {key: job.overrides[key] for key in ("algo",) if key in job.overrides}
    texts = algorithm | base | {key: text for key, text in job.overrides.items() if key != "algo"}
    overrides = [f"{key}={text}" for key, text in texts.items() if key not in job.user_overrides] + list(user_overrides)
    if any(row.verdict in BLOCKING for row in job.rows):
        return Mapped(tuple(job.rows), (), None)
    hint = "The job sets these keys here; --drop KEY leaves a key out, --with KEY=VALUE sets a key of ours"
    config = compose(overrides, job.rows, hint, project="verl", sign="=")
    return Mapped(tuple(job.rows), tuple(overrides), config)


def translate_settings(
    settings: Sequence[Setting], *, user_overrides: Sequence[str] = (), drop: Sequence[str] = ()
) -> Job:
    """Translate ``settings`` key by key into a ``Job``, without composing a configuration.

    A key in ``drop`` may be given by any of its names. Raises ``ConfigError`` if neither the job nor verl has such a key, or if
    a value or a combination of settings cannot be translated.
    """
    settings = [leaf for setting in settings for leaf in _leaves(setting)]
    user_keys = {text.partition("=")[0]: text for text in user_overrides}
    by_key = {setting.key: setting for setting in settings}
    job = Job(by_key, frozenset(map(canonical, drop)), user_keys)
    if unknown_names := sorted(name for name in drop if (key := canonical(name)) not in by_key and not _is_known(key)):
        raise ConfigError(
            f"--drop {unknown_names[0]}: the job does not give it, and verl has no such key: remove this --drop"
        )
    for setting in settings:
        if setting.key in job.drop:
            job.rows.append(Row(setting.name, setting.text, setting.file_line, "dropped", note="by --drop"))
        elif by_key[setting.key] is not setting:
            note = f"given again at {by_key[setting.key].file_line}"
            job.rows.append(Row(setting.name, setting.text, setting.file_line, "dropped", note=note))
    _map(job)
    job.report_needed()
    for text in user_overrides:
        job.rows.append(Row("--with", text, "", "mapped", (text.partition("=")[0],), "by --with"))
    return job


def _is_known(key: str) -> bool:
    return key in VALUES or without_effect(key) is not None or feature(key) is not None or key == "data.reward_fn_key"


def _map(job: Job) -> None:
    prompt, response = lengths(job)
    parts: tuple[Callable[[], None], ...] = (
        lambda: map_algorithm(job, response),
        lambda: map_batches(job),
        lambda: map_optimizer(job),
        lambda: map_layout(job, prompt + response),
        lambda: map_rollout(job),
        lambda: map_data(job),
        lambda: map_evaluation(job),
        lambda: map_rewards(job, response),
        lambda: map_critic(job),
        lambda: map_run(job),
    )
    for part in parts:
        try:
            part()
        except ConfigError:
            if not job.needed:  # the placeholder of an unknown value may contradict other settings
                raise
    for key in job.settings:
        if job.has(key) and key not in job.reported:
            _report_other(job, key)


def _report_other(job: Job, key: str) -> None:
    """Report a setting that no part of ``_map`` has reported; translate it if it is a field of Megatron or SGLang."""
    setting = job.settings[key]
    if key.startswith((_TRANSFORMER, _SGLANG)) and not setting.problem:
        _set_foreign(job, key)
        return
    needed_switch = switch(key)
    if needed_switch is not None and not fnmatchcase(key, needed_switch):
        job.leave_out(f"read only with {needed_switch}", key)
        return
    reason, missing_feature = without_effect(key), feature(key)
    if reason is not None:
        job.leave_out(reason, key)
    elif setting.value == {} and not setting.problem:
        job.leave_out("empty", key)
    elif setting.problem and (missing_feature is not None or key in VALUES or key.startswith(_FREE)):
        job.needed.add(key)
    elif key in VALUES and same_value(setting.value, VALUES[key]):
        job.leave_out("verl's default", key)
    elif missing_feature is None:
        job.report(key, "unknown", "this version of verl is not known to have the key")
    elif any(same_value(setting.value, off) for off in missing_feature.off):
        job.leave_out(f"off, as here ({missing_feature.instead})", key)
    else:
        job.refuse(key, missing_feature.instead, missing_feature.alternatives)


def _set_foreign(job: Job, key: str) -> None:
    """Translate ``key``, which sets a field of Megatron's TransformerConfig or of SGLang's ServerArgs."""
    root, prefix = ("model.megatron", _TRANSFORMER) if key.startswith(_TRANSFORMER) else ("rollout.sglang", _SGLANG)
    name, value = key.removeprefix(prefix), job.value(key)
    if root == "model.megatron" and name in _STAGES:
        job.set(_STAGES[name], value, key)
        return
    if root == "model.megatron" and any(fnmatchcase(name, pattern) for pattern in _KERNELS):
        job.leave_out("the trainer chooses its kernels and its layout (parallel.*)", key)
        return
    try:
        foreign.check_foreign(root, {name: value})
    except ConfigError as error:
        if f"belongs to {foreign.SHAPE}" in str(error) or name == "swiglu":
            job.leave_out(f"{foreign.SHAPE} has this value", key)
        else:
            job.refuse(key, str(error))
    else:
        job.set(f"{root}.{name}", value, key, f"a field of {foreign.source(foreign.ROOTS[root])}")


def settings_of_tree(tree: dict[str, Any], file_line: str, prefix: str = "") -> list[Setting]:
    """Return a setting for each leaf of a nested mapping. ``prefix`` precedes each key; every setting is at ``file_line``."""
    settings: list[Setting] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            settings += settings_of_tree(cast("dict[str, Any]", value), file_line, f"{key}.")
        else:
            if isinstance(value, str) and _EXPONENT.fullmatch(value):
                value = float(value)  # YAML 1.1 parses 1e-6 as text, Hydra as a number
            problem = "refers to another key: write its value" if "${" in str(value) else ""
            settings.append(Setting(key, value, str(value), file_line, problem))
    return settings


def _leaves(setting: Setting) -> list[Setting]:
    """Return one setting per leaf if the value of ``setting`` is a non-empty mapping, else ``setting`` alone."""
    if not isinstance(setting.value, dict) or not setting.value:
        return [setting]
    return settings_of_tree(cast("dict[str, Any]", setting.value), setting.file_line, f"{setting.name}.")


def setting_of_text(text: str, file_line: str, problem: str = "") -> Setting:
    """Parse ``key=value`` of a command line. ``problem`` is the reason why the value is unknown, empty if it is known.

    Raises ``ConfigError``, which begins with ``file_line``, if ``text`` has another form or its value cannot be parsed.
    """
    name, equals, value = text.lstrip("+").partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.@/-]*", name):
        raise ConfigError(f"{file_line}: {problem or repr(text)}: key=value was expected here")
    if problem:
        return Setting(name, None, "?", file_line, problem)
    try:
        key, parsed_value = read_override(text)
    except ConfigError as error:
        raise ConfigError(f"{file_line}: {error}") from error
    reference_problem = "refers to another key: write its value" if "${" in value else ""
    return Setting(key, parsed_value, value, file_line, reference_problem)
