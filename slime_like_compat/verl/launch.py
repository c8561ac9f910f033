"""Settings of a verl job, from a launch script, which is not run, or from a YAML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from slime_like.errors import ConfigError
from slime_like.util.reading import InputFile, shown
from slime_like_compat.shell.launch_script import Launch, read_launch
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
"""Other programs of verl than ``main_ppo`` -> the alternative."""
BASES = ("ppo_trainer", "ppo_megatron_trainer", "_self_")


def read_verl(
    path: Path, extra: Sequence[str], *, variables: Mapping[str, str], skip: Sequence[str], config: Path | None = None
) -> tuple[Launch, tuple[Setting, ...]]:
    """Return the training command of ``path`` and its settings in the order in which Hydra applies them.

    ``path`` is a launch script or a YAML file; ``extra`` are overrides that are applied last; ``config`` is the file of the
    script's ``--config-name``. Raises ``ConfigError`` with file and line for anything that cannot be read.
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
    return launch, (*_base_settings(path, flags, config), *settings, *extra_settings)


def _hydra_flags(launch: Launch) -> tuple[dict[str, str], list[Any]]:
    """Return the values of ``--config-name`` and Hydra's other flags, and the other words."""
    flags: dict[str, str] = {}
    other_words: list[Any] = []
    words = iter(launch.arguments)
    for value in words:
        flag, equals, text = value.text.partition("=")
        if flag in ("--config-path", "--config-name", "--config-dir", "-cn", "-cp"):
            config_name = value if equals else next(words, value)
            flags[{"-cn": "--config-name", "-cp": "--config-path"}.get(flag, flag)] = (
                text if equals else config_name.text
            )
        elif value.text.startswith("--"):
            raise ConfigError(
                f"{value.file_line}: {value.text} is not a setting of verl: remove it in a copy of the script"
            )
        else:
            other_words.append(value)
    return flags, other_words


def _base_settings(script: Path, flags: Mapping[str, str], config: Path | None) -> tuple[Setting, ...]:
    name = flags.get("--config-name", "ppo_trainer").removesuffix(".yaml")
    if config is not None:
        return _yaml_settings(config)
    if name == "ppo_megatron_trainer":
        return (Setting("model_engine", "megatron", "megatron", "--config-name"),)
    if name == "ppo_trainer":
        return ()
    folder = Path(flags.get("--config-path", flags.get("--config-dir", ".")))
    path = script.parent / folder / f"{name}.yaml"
    if path.is_file():
        return _yaml_settings(path)
    raise ConfigError(
        f"{script} reads its settings from {folder / name}.yaml, which does not exist: give it with --config FILE"
    )


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
            f"has defaults: {shown(defaults)}, which is not a list: write a list of {' or '.join(BASES)}"
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
