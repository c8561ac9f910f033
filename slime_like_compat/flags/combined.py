"""Overrides that depend on several flags, such as those of the flags in ``table.COMBINED``."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from slime_like.checkpoint.files import MANIFEST, megatron_folder
from slime_like.config.schema.names import GROUP_ADVANTAGES
from slime_like.config.schema.render import render
from slime_like.errors import ConfigError
from slime_like.util.reading import abbreviate, parse_strict_json, reason
from slime_like_compat.flags.eval_config import eval_config_overrides
from slime_like_compat.flags.table import ESTIMATORS, count, dotted, integer, number

type FlagValues = Mapping[str, list[str]]

ROLLOUT_FUNCTIONS = {
    f"{project}.rollout.{module}.generate_rollout": loss
    for project in ("slime", "miles")
    for module, loss in (("sglang_rollout", "policy_loss"), ("sft_rollout", "sft_loss"))
}
"""Rollout functions of slime and miles that the loop here replaces -> the --loss-type they need."""
NO_VALUE = (
    "--use-kl-loss",
    "--use-opd",
    "--use-routing-replay",
    "--use-rollout-routing-replay",
    "--sglang-enable-dp-attention",
    "--disable-compute-advantages-and-returns",
)
SEVERAL_VALUES = ("--eval-prompt-data",)


def combine(flags: FlagValues) -> Iterator[str]:
    """Yield the overrides of the flags in ``COMBINED``, and others that follow from several flags.

    ``flags`` maps each given flag of ``COMBINED``, ``VALUES`` and ``SWITCHES`` to its values. Raises ``ConfigError`` if a
    value or a combination of flags is wrong or not supported, or if a file or folder cannot be read, and ``CheckpointError``
    as ``_load`` does.
    """
    yield from _algorithm(flags)
    yield from _loss(flags)
    yield from _engines(flags)
    yield from _batches(flags)
    yield from _dp_attention(flags)
    # slime replaces dropped groups without a limit.
    yield from (["rollout.max_refills=100"] if "--dynamic-sampling-filter-path" in flags else [])
    if (path := _last(flags, "--load")) is not None:
        yield _load(path, _last(flags, "--save"))
    yield from _kl(flags)
    yield from _routing_replay(flags)
    if (path := _last(flags, "--load-debug-rollout-data")) is not None:
        yield f"run.replay_from={render(path)}"
        yield "run.mode=train_only"
    if (text := _last(flags, "--apply-chat-template-kwargs")) is not None:
        yield from _chat_template_kwargs(text)
    if (text := _last(flags, "--rollout-max-prompt-len")) is not None:
        yield f"data.max_prompt_len={integer('--rollout-max-prompt-len', text)}"
        yield "data.on_bad_row=skip"
    if (text := _last(flags, "--eval-config")) is not None:  # takes precedence over --eval-prompt-data, as in slime
        yield from eval_config_overrides(Path(text))
    elif "--eval-prompt-data" in flags:
        yield from _eval_datasets(flags["--eval-prompt-data"])


def _algorithm(flags: FlagValues) -> Iterator[str]:
    name = _last(flags, "--advantage-estimator")
    if name is not None and name not in ESTIMATORS:
        raise ConfigError(f"--advantage-estimator {name} is not supported yet: give one of {', '.join(ESTIMATORS)}")
    if "--use-opd" in flags:
        yield from _distillation(flags, ESTIMATORS[name or "grpo"])
    elif name is not None:
        yield f"algo={ESTIMATORS[name]}"


def _loss(flags: FlagValues) -> Iterator[str]:
    """Yield the overrides of --loss-type, and of the user's loss and off-policy correction.

    Raises ``ConfigError`` if a value or a combination of these flags is not supported, or if --rollout-function-path or
    --disable-compute-advantages-and-returns does not fit --loss-type.
    """
    kind = _last(flags, "--loss-type") or "policy_loss"
    if kind not in ("policy_loss", "custom_loss", "sft_loss"):
        raise ConfigError(
            f"--loss-type {kind} is not supported yet: give policy_loss, custom_loss or sft_loss (algo=sft)"
        )
    yield from _user_functions(flags, kind)
    kind = "policy_loss" if kind == "custom_loss" else kind
    function = _last(flags, "--rollout-function-path")
    if function is not None and ROLLOUT_FUNCTIONS.get(function) != kind:
        raise ConfigError(
            f"--rollout-function-path {function} with --loss-type {kind} is not supported yet: write a generate "
            "function, which is called once per group (--custom-generate-function-path)"
        )
    if "--disable-compute-advantages-and-returns" in flags and kind != "sft_loss":
        raise ConfigError(
            f"--disable-compute-advantages-and-returns with --loss-type {kind} is not supported: remove "
            "--disable-compute-advantages-and-returns, or give --loss-type sft_loss"
        )
    if kind == "sft_loss":
        yield "algo=sft"


def _user_functions(flags: FlagValues, loss: str) -> Iterator[str]:
    """Yield the overrides that name the user's loss and off-policy correction.

    Raises ``ConfigError`` if the loss is missing, if slime would not call one of them, or if one is not a dotted path.
    """
    path, flag = _last(flags, "--custom-loss-function-path"), "--custom-loss-function-path"
    if loss == "custom_loss" and path is None:
        raise ConfigError(f"--loss-type custom_loss needs {flag}: give it, or policy_loss")
    if loss != "custom_loss" and path is not None:
        raise ConfigError(f"{flag} {path} has no effect without --loss-type custom_loss: add it, or set algo.loss")
    if path is not None:
        yield f"algo.loss={render(dotted(flag, path))}"
    path, flag = _last(flags, "--custom-tis-function-path"), "--custom-tis-function-path"
    if path is not None and "--use-tis" not in flags:
        raise ConfigError(f"{flag} {path} has no effect without --use-tis: add it, or set algo.off_policy")
    if path is not None:
        yield f"algo.off_policy={render(dotted(flag, path))}"


def _batches(flags: FlagValues) -> Iterator[str]:
    """Yield the overrides of the optimizer steps per rollout, which slime derives from batch sizes, and of the epochs.

    The steps are left out if --num-steps-per-rollout is given, the epochs if --num-rollout is given. Raises ``ConfigError`` if
    --num-epoch is used and is not a whole number.
    """
    sizes = [_last(flags, f) for f in ("--rollout-batch-size", "--n-samples-per-prompt", "--global-batch-size")]
    numbers = [int(text) for text in sizes if text is not None and text.isdecimal()]
    if len(numbers) == 3 and "--num-steps-per-rollout" not in flags:
        prompts, samples, step = numbers
        if step and prompts * samples % step == 0 and prompts * samples > step:
            yield f"loop.steps_per_rollout={prompts * samples // step}"
    if (text := _last(flags, "--num-epoch")) is not None and "--num-rollout" not in flags:
        yield f"loop.num_epoch={integer('--num-epoch', text)}"


def _dp_attention(flags: FlagValues) -> Iterator[str]:
    """Yield the override for SGLang's data-parallel attention within an engine.

    Raises ``ConfigError`` if --sglang-dp-size is not a whole number, or if it is above 1 without --sglang-enable-dp-attention.
    """
    text = _last(flags, "--sglang-dp-size") or _last(flags, "--sglang-data-parallel-size")
    size = integer("--sglang-dp-size", text) if text is not None else 1
    if size > 1 and "--sglang-enable-dp-attention" not in flags:
        raise ConfigError(
            f"--sglang-dp-size {size} needs --sglang-enable-dp-attention, as in slime: it splits the attention of one "
            "engine; several engines are --rollout-num-gpus over --rollout-num-gpus-per-engine"
        )
    if size > 1:
        yield f"rollout.dp_attention={size}"


def _kl(flags: FlagValues) -> Iterator[str]:
    if (text := _last(flags, "--kl-loss-coef")) is not None:
        if number("--kl-loss-coef", text) > 0 and "--use-kl-loss" not in flags:
            raise ConfigError(
                f"--kl-loss-coef {text} has no effect without --use-kl-loss: add it, or set algo.kl_loss_coef"
            )
        if number("--kl-loss-coef", text) > 0 or _last(flags, "--loss-type") != "sft_loss":
            yield f"algo.kl_loss_coef={render(number('--kl-loss-coef', text))}"
    # slime's scripts give --kl-coef 0 to algorithms that have no such key.
    if (text := _last(flags, "--kl-coef")) is not None and number("--kl-coef", text) != 0:
        yield f"algo.kl_coef={render(number('--kl-coef', text))}"


def _routing_replay(flags: FlagValues) -> Iterator[str]:
    """Yield the override of --use-rollout-routing-replay or, if it is not given, of --use-routing-replay, as slime does."""
    if "--use-rollout-routing-replay" in flags:
        yield "algo.routing_replay=rollout"
    elif "--use-routing-replay" in flags:
        yield "algo.routing_replay=old"


def _distillation(flags: FlagValues, estimator: str) -> Iterator[str]:
    """Yield the overrides of distillation, in which slime adds a teacher's term to the advantages of an estimator.

    Raises ``ConfigError`` if the teacher or the estimator is not supported.
    """
    kind = _last(flags, "--opd-type")
    if kind != "megatron":
        raise ConfigError(f"--opd-type {kind}: the teacher runs on Megatron ranks; give --opd-type megatron")
    if estimator not in GROUP_ADVANTAGES:
        raise ConfigError(
            f"--use-opd with --advantage-estimator {estimator} is not supported yet: give one of {', '.join(GROUP_ADVANTAGES)}"
        )
    yield "algo=distill"
    yield f"algo.group_advantage={estimator}"


def _load(path: str, save: str | None) -> str:
    """Return the override of --load: run.resume=FOLDER or, if --save names the same folder, run.resume=auto, as in slime.

    A Megatron checkpoint that this project did not write, such as one of slime's converters, sets model.megatron_checkpoint
    instead. Raises ``ConfigError`` if the folder cannot be read, and the error of ``megatron_folder``.
    """
    try:
        source = megatron_folder(Path(os.path.expanduser(path)))
    except OSError as error:
        raise ConfigError(f"--load {abbreviate(path)} cannot be read ({reason(error)}): name a folder") from error
    if source is not None and not (source / MANIFEST).is_file():
        return f"model.megatron_checkpoint={render(path)}"
    is_saved_there = save is not None and path.rstrip("/") == save.rstrip("/")
    return f"run.resume={render('auto' if is_saved_there else path)}"


def _last(flags: FlagValues, flag: str) -> str | None:
    return flags[flag][-1] if flag in flags else None


def _engines(flags: FlagValues) -> Iterator[str]:
    """Yield the override of the number of engines and, if --colocate is not given, that of the split placement.

    Yield nothing if the flags do not determine the number of slime's rollout GPUs. Raises ``ConfigError`` if that number
    is not a multiple of the GPUs of an engine, or if one of the flags is not a whole number above 0.
    """
    gpus_per_engine = count("--rollout-num-gpus-per-engine", _last(flags, "--rollout-num-gpus-per-engine") or "1")
    gpus, nodes = _last(flags, "--rollout-num-gpus"), _last(flags, "--actor-num-nodes") or "1"
    if gpus is None and "--colocate" in flags and "--actor-num-gpus-per-node" in flags:
        per_node = count("--actor-num-gpus-per-node", flags["--actor-num-gpus-per-node"][-1])
        gpus = str(per_node * count("--actor-num-nodes", nodes))
    if gpus is None:
        return
    total = count("--rollout-num-gpus", gpus)
    if total % gpus_per_engine:
        raise ConfigError(
            f"--rollout-num-gpus {total} does not divide into engines of --rollout-num-gpus-per-engine {gpus_per_engine}: "
            f"give a multiple of {gpus_per_engine}"
        )
    yield f"rollout.num_engines={total // gpus_per_engine}"
    if "--colocate" not in flags:
        yield "placement.mode='split'"


def _chat_template_kwargs(text: str) -> Iterator[str]:
    try:
        values = parse_strict_json(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ConfigError(
            f"--apply-chat-template-kwargs {text}: expected JSON such as '{{\"enable_thinking\": false}}'"
        )
    yield "data.chat_template_kwargs={}"
    for name, value in cast("dict[str, Any]", values).items():
        yield f"data.chat_template_kwargs.{name}={render(value)}"


def _eval_datasets(words: list[str]) -> Iterator[str]:
    words = ["aime", *words] if len(words) == 1 else words  # as slime reads a single path
    if len(words) % 2:
        raise ConfigError(
            f"--eval-prompt-data {' '.join(words)}: expected pairs of name and path, such as aime data/aime.jsonl"
        )
    yield "evaluation.datasets={}"
    for index, (name, path) in enumerate(zip(words[::2], words[1::2], strict=True)):
        if not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(f"--eval-prompt-data {name} {path}: a name consists of letters, digits, - and _")
        if name in words[: 2 * index : 2]:
            raise ConfigError(f"--eval-prompt-data {name} {path}: another dataset has the name {name}: rename one")
        yield f"evaluation.datasets.{name}={render(path)}"
