"""The settings of a verl job: of a launch script, read without running it, or of a YAML file."""

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
"""Programs of verl that are no job of ``main_ppo`` -> what to do."""
BASES = ("ppo_trainer", "ppo_megatron_trainer", "_self_")


def read_verl(
    path: Path, extra: Sequence[str], *, variables: Mapping[str, str], skip: Sequence[str], config: Path | None = None
) -> tuple[Launch, tuple[Setting, ...]]:
    """Return what ``path`` starts, and its settings in the order in which Hydra takes them.

    ``path`` is a launch script or a YAML file; ``extra`` are overrides that come last, as those behind a script do;
    ``config`` is the file that the script's ``--config-name`` names. Raises ``ConfigError`` on what cannot be read.
    """
    last = [setting_of_text(text, "the command line") for text in extra]
    if path.suffix in (".yaml", ".yml"):
        launch = Launch(path, PROGRAMS[0], (), str(path), (), (), {})
        return launch, (*_yaml(path), *last)
    launch = read_launch(path, variables=variables, skip=skip, programs=(*PROGRAMS, *OTHERS))
    if launch.program in OTHERS:
        raise ConfigError(f"{launch.file_line}: {launch.program} is not translated: {OTHERS[launch.program]}")
    named, words = _hydra_flags(launch)
    settings = [setting_of_text(value.text, value.file_line, value.problem) for value in words]
    return launch, (*_base(path, named, config), *settings, *last)


def _hydra_flags(launch: Launch) -> tuple[dict[str, str], list[Any]]:
    """Return ``--config-name=X`` and the like, and the other words."""
    named: dict[str, str] = {}
    words_left: list[Any] = []
    words = iter(launch.arguments)
    for value in words:
        flag, equals, text = value.text.partition("=")
        if flag in ("--config-path", "--config-name", "--config-dir", "-cn", "-cp"):
            following = value if equals else next(words, value)
            named[{"-cn": "--config-name", "-cp": "--config-path"}.get(flag, flag)] = text if equals else following.text
        elif value.text.startswith("--"):
            raise ConfigError(f"{value.file_line}: {value.text} is no setting of verl: take it out in a copy")
        else:
            words_left.append(value)
    return named, words_left


def _base(script: Path, named: Mapping[str, str], config: Path | None) -> tuple[Setting, ...]:
    name = named.get("--config-name", "ppo_trainer").removesuffix(".yaml")
    if config is not None:
        return _yaml(config)
    if name == "ppo_megatron_trainer":
        return (Setting("model_engine", "megatron", "megatron", "--config-name"),)
    if name == "ppo_trainer":
        return ()
    folder = Path(named.get("--config-path", named.get("--config-dir", ".")))
    beside = script.parent / folder / f"{name}.yaml"
    if beside.is_file():
        return _yaml(beside)
    raise ConfigError(
        f"{script} takes its settings from {folder / name}.yaml, which is not there: --config FILE gives it"
    )


def _yaml(path: Path) -> tuple[Setting, ...]:
    file = InputFile(path, ConfigError, "give a YAML file of verl's keys")
    tree: Any = file.yaml()
    if not isinstance(tree, dict):
        raise file.refused("holds no settings")
    keys = cast("dict[str, Any]", tree)
    settings: list[Setting] = []
    defaults = keys.pop("defaults", [])
    if not isinstance(defaults, list):
        raise file.refused(f"holds defaults: {shown(defaults)}, which is no list; only {', '.join(BASES)} are read")
    for item in cast("list[Any]", defaults):
        name = item if isinstance(item, str) else ""
        if name not in BASES:
            raise ConfigError(f"{path}: defaults holds {item!r}; only {', '.join(BASES)} are read: write its keys out")
        if name == "ppo_megatron_trainer":
            settings.append(Setting("model_engine", "megatron", "megatron", str(path)))
    keys.pop("hydra", None)
    return (*settings, *settings_of_tree(keys, str(path)))
