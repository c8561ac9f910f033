"""Settings of a verl job, read from a YAML file or from a launch script, which is parsed, not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from slime_like.errors import ConfigError
from slime_like.util.reading import InputFile, abbreviate
from slime_like_compat.shell.launch_script import Launch, read_launch
from slime_like_compat.shell.lookup import find_file
from slime_like_compat.shell.values import Value
from slime_like_compat.verl.job import Setting
from slime_like_compat.verl.mapping import setting_of_text, settings_of_tree

PROGRAMS = ("verl.trainer.main_ppo", "main_ppo.py")
OTHERS = {
    "verl.trainer.sft_trainer": "supervised fine-tuning is algo=sft: data.train, model.hf_checkpoint and optim.*",
    "verl.trainer.sft_trainer_ray": "supervised fine-tuning is algo=sft: data.train, model.hf_checkpoint and optim.*",
    "verl.trainer.fsdp_sft_trainer": "supervised fine-tuning is algo=sft: data.train, model.hf_checkpoint and optim.*",
    "verl.experimental.fully_async_policy.fully_async_main": "fully asynchronous training is placement.mode=split with "
    "loop.max_staleness: its batches are counted in another way, so write the recipe by hand",
    "verl.experimental.one_step_off_policy.main_ppo": "one step off policy is placement.mode=split with "
    "loop.max_staleness=1: give the overrides to trainer.v1.trainer_mode=separate_async of verl.trainer.main_ppo",
    "verl.trainer.main_ppo_sync": "give its overrides to verl.trainer.main_ppo",
    "recipe.dapo.main_dapo": "give its overrides to verl.trainer.main_ppo, which has algorithm.filter_groups",
    "verl.trainer.main_generation_server": "generation alone is run.mode=rollout_only",
}
"""Programs of verl other than ``main_ppo`` -> the alternative."""
BASES = ("ppo_trainer", "ppo_megatron_trainer", "_self_")
OWN_FOLDER = "trainer/config"  # verl's folder of BASES, to which a relative --config-path leads as well
FLAGS = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}
"""Hydra's short flags -> the long ones."""


def read_verl(
    path: Path, extra: Sequence[str], *, variables: Mapping[str, str], skip: Sequence[str], config: Path | None = None
) -> tuple[Launch, tuple[Setting, ...]]:
    """Return the training command of ``path`` and its settings in the order in which Hydra applies them.

    ``path`` is a launch script or a YAML file; ``extra`` are overrides that are applied last; ``config`` is the file of the
    script's ``--config-name``. ``read_launch`` describes ``variables`` and ``skip``. Raises ``ConfigError`` if the script starts
    one of ``OTHERS``, or if a setting, a flag or the file of settings cannot be read. Also raises the errors of
    ``read_launch``.
    """
    extra_settings = [setting_of_text(text, "the command line") for text in extra]
    if path.suffix in (".yaml", ".yml"):
        launch = Launch(path, PROGRAMS[0], (), str(path), (), (), {})
        return launch, (*_yaml_settings(path), *extra_settings)
    launch = read_launch(path, variables=variables, skip=skip, programs=(*PROGRAMS, *OTHERS))
    if launch.program in OTHERS:
        raise ConfigError(f"{launch.file_line}: {launch.program} is not translated: {OTHERS[launch.program]}")
    flags, words = _hydra_flags(launch)
    settings = [setting_of_text(value.text, value.file_line, value.problem) for value in words]
    if config is None and (config := _config_file(launch, flags)) is not None:
        launch = replace(launch, notes=(*launch.notes, f"settings were read from {config}"))
    if config is not None:
        return launch, (*_yaml_settings(config), *settings, *extra_settings)
    base = (Setting("model_engine", "megatron", "megatron", "--config-name"),) if _is_megatron(flags) else ()
    return launch, (*base, *settings, *extra_settings)


def _hydra_flags(launch: Launch) -> tuple[dict[str, Value], list[Value]]:
    """Return the values of Hydra's flags in ``FLAGS``, by their long names, and the other words.

    Raises ``ConfigError`` if one of these flags has no value, or if another word begins with ``--``.
    """
    flags: dict[str, Value] = {}
    other_words: list[Value] = []
    words = iter(launch.arguments)
    for value in words:
        flag, equals, text = value.text.partition("=")
        flag = FLAGS.get(flag, flag)
        if flag in FLAGS.values():
            flag_value = replace(value, text=text) if equals else next(words, None)
            if flag_value is None:
                raise ConfigError(f"{value.file_line}: {flag} has no value: add it in a copy of the script")
            flags[flag] = flag_value
        elif value.text.startswith("--"):
            raise ConfigError(
                f"{value.file_line}: {value.text} is not a setting of verl: remove it in a copy of the script"
            )
        else:
            other_words.append(value)
    return flags, other_words


def _is_megatron(flags: Mapping[str, Value]) -> bool:
    """Return True if the job reads verl's own settings for Megatron."""
    return "--config-name" in flags and flags["--config-name"].text.removesuffix(".yaml") == "ppo_megatron_trainer"


def _config_file(launch: Launch, flags: Mapping[str, Value]) -> Path | None:
    """Return the file of settings that ``flags`` name; None if it is one of verl's own files.

    Raises ``ConfigError`` if the file does not exist or its name is unknown, or if its folder is unknown and no folder
    above the script has the file.
    """
    name = flags.get("--config-name", Value("ppo_trainer", launch.file_line))
    if name.problem:
        raise ConfigError(f"{name.file_line}: --config-name: {name.problem}, or give the file with --config FILE")
    folder = flags.get("--config-path", Value("", launch.file_line))
    has_own_folder = bool(folder.problem) or Path(folder.text).is_absolute()
    if name.text.removesuffix(".yaml") in BASES and (
        not has_own_folder or folder.text.rstrip("/").endswith(OWN_FOLDER)
    ):
        return None
    if "--config-path" not in flags:
        folder = flags.get("--config-dir", folder)
    file = replace(folder, text=f"{folder.text or '.'}/{name.text.removesuffix('.yaml')}.yaml")
    path = find_file(file, launch.script)
    if path is None and folder.problem:
        raise ConfigError(f"{folder.file_line}: {folder.problem}, or give {Path(file.text).name} with --config FILE")
    if path is None:
        raise ConfigError(
            f"{launch.script} reads its settings from {Path(file.text)}, which does not exist: give it with --config FILE"
        )
    return path


def _yaml_settings(path: Path) -> tuple[Setting, ...]:
    file = InputFile(path, ConfigError, "give a YAML file of verl's keys")
    tree: Any = file.yaml()
    if not isinstance(tree, dict):
        raise file.refused("contains no settings")
    keys = cast("dict[str, Any]", tree)
    settings: list[Setting] = []
    defaults = keys.pop("defaults", [])
    if not isinstance(defaults, list):
        raise file.refused(
            f"has defaults: {abbreviate(defaults)}, which is not a list: write a list of {' or '.join(BASES)}"
        )
    for item in cast("list[Any]", defaults):
        name = item if isinstance(item, str) else ""
        if name not in BASES:
            raise ConfigError(
                f"{path}: defaults contains {item!r}, which is not read (only {', '.join(BASES)} are): copy its keys into this file"
            )
        if name == "ppo_megatron_trainer":
            settings.append(Setting("model_engine", "megatron", "megatron", str(path)))
    keys.pop("hydra", None)
    return (*settings, *settings_of_tree(keys, str(path)))
