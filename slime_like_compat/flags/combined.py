"""Flags whose keys depend on other flags as well: those of ``flag_table.COMBINED``, and the values they are read with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from slime_like.checkpoint.files import MANIFEST, megatron_folder
from slime_like.config.schema.names import GROUP_ADVANTAGES
from slime_like.config.schema.render import render
from slime_like.errors import ConfigError
from slime_like.util.reading import parse_strict_json, reason, shown
from slime_like_compat.flags.eval_config import eval_config_overrides
from slime_like_compat.flags.table import ESTIMATORS, count, number, whole

type Seen = Mapping[str, list[str]]

ROLLOUT_FUNCTIONS = {
    f"{project}.rollout.{module}.generate_rollout": loss
    for project in ("slime", "miles")
    for module, loss in (("sglang_rollout", "policy_loss"), ("sft_rollout", "sft_loss"))
}
"""slime's and miles' own rollout functions that the loop here stands for, with the --loss-type that each goes with."""
NO_VALUE = ("--use-kl-loss", "--use-opd", "--sglang-enable-dp-attention", "--disable-compute-advantages-and-returns")
SEVERAL_VALUES = ("--eval-prompt-data",)


def combine(seen: Seen) -> Iterator[str]:
    """Overrides of the flags in ``COMBINED``; ``seen`` maps each flag of the command line to its values."""
    yield from _algorithm(seen)
    yield from _loss(seen)
    yield from _engines(seen)
    yield from _batches(seen)
    yield from _dp_attention(seen)
    # slime replaces what its filter drops for as long as it takes.
    yield from (["rollout.max_refills=100"] if "--dynamic-sampling-filter-path" in seen else [])
    if (path := _one(seen, "--load")) is not None:
        yield _load(path, _one(seen, "--save"))
    yield from _kl(seen)
    if (path := _one(seen, "--load-debug-rollout-data")) is not None:
        yield f"run.replay_from={render(path)}"
        yield "run.mode=train_only"
    if (text := _one(seen, "--apply-chat-template-kwargs")) is not None:
        yield from _chat_template_kwargs(text)
    if (text := _one(seen, "--rollout-max-prompt-len")) is not None:
        yield f"data.max_prompt_len={whole('--rollout-max-prompt-len', text)}"
        yield "data.on_bad_row=skip"
    if (text := _one(seen, "--eval-config")) is not None:  # counts alone where both are given, as in slime
        yield from eval_config_overrides(Path(text))
    elif "--eval-prompt-data" in seen:
        yield from _eval_sets(seen["--eval-prompt-data"])


def _algorithm(seen: Seen) -> Iterator[str]:
    name = _one(seen, "--advantage-estimator")
    if name is not None and name not in ESTIMATORS:
        raise ConfigError(f"--advantage-estimator {name} is not supported yet: one of {', '.join(ESTIMATORS)}")
    if "--use-opd" in seen:
        yield from _distillation(seen, ESTIMATORS[name or "grpo"])
    elif name is not None:
        yield f"algo={ESTIMATORS[name]}"


def _loss(seen: Seen) -> Iterator[str]:
    """--loss-type, and the two flags that go with supervised fine-tuning."""
    kind = _one(seen, "--loss-type") or "policy_loss"
    if kind not in ("policy_loss", "sft_loss"):
        raise ConfigError(f"--loss-type {kind} is not supported yet: policy_loss, or sft_loss for algo=sft")
    function = _one(seen, "--rollout-function-path")
    if function is not None and ROLLOUT_FUNCTIONS.get(function) != kind:
        raise ConfigError(
            f"--rollout-function-path {function} with --loss-type {kind} is not supported yet: a generate function per "
            "group is the seam (--custom-generate-function-path)"
        )
    if "--disable-compute-advantages-and-returns" in seen and kind != "sft_loss":
        raise ConfigError("--disable-compute-advantages-and-returns is supported with --loss-type sft_loss only")
    if kind == "sft_loss":
        yield "algo=sft"


def _batches(seen: Seen) -> Iterator[str]:
    """Optimizer steps per rollout follow from the batch sizes, and rollouts from epochs, as in slime."""
    sizes = [_one(seen, f) for f in ("--rollout-batch-size", "--n-samples-per-prompt", "--global-batch-size")]
    given = [int(text) for text in sizes if text is not None and text.isdecimal()]
    if len(given) == 3 and "--num-steps-per-rollout" not in seen:
        prompts, samples, step = given
        if step and prompts * samples % step == 0 and prompts * samples > step:
            yield f"loop.steps_per_rollout={prompts * samples // step}"
    if (text := _one(seen, "--num-epoch")) is not None and "--num-rollout" not in seen:
        yield f"loop.num_epoch={whole('--num-epoch', text)}"


def _dp_attention(seen: Seen) -> Iterator[str]:
    """SGLang's attention data parallelism lies inside an engine: its newer name is attn_dp_size."""
    text = _one(seen, "--sglang-dp-size") or _one(seen, "--sglang-data-parallel-size")
    size = whole("--sglang-dp-size", text) if text is not None else 1
    if size > 1 and "--sglang-enable-dp-attention" not in seen:
        raise ConfigError(
            f"--sglang-dp-size {size} needs --sglang-enable-dp-attention, as in slime: it splits the attention of one "
            "engine; several engines are --rollout-num-gpus over --rollout-num-gpus-per-engine"
        )
    if size > 1:
        yield f"rollout.sglang.attn_dp_size={size}"


def _kl(seen: Seen) -> Iterator[str]:
    if (text := _one(seen, "--kl-loss-coef")) is not None:
        if number("--kl-loss-coef", text) > 0 and "--use-kl-loss" not in seen:
            raise ConfigError(
                f"--kl-loss-coef {text} has no effect without --use-kl-loss: add it, or set algo.kl_loss_coef"
            )
        if number("--kl-loss-coef", text) > 0 or _one(seen, "--loss-type") != "sft_loss":
            yield f"algo.kl_loss_coef={render(number('--kl-loss-coef', text))}"
    # slime's scripts give --kl-coef 0 to algorithms that have no such key.
    if (text := _one(seen, "--kl-coef")) is not None and number("--kl-coef", text) != 0:
        yield f"algo.kl_coef={render(number('--kl-coef', text))}"


def _distillation(seen: Seen, estimator: str) -> Iterator[str]:
    """slime adds a teacher's judgement to the advantages of an estimator."""
    kind = _one(seen, "--opd-type")
    if kind != "megatron":
        raise ConfigError(f"--opd-type {kind}: the teacher runs on Megatron ranks; give --opd-type megatron")
    if estimator not in GROUP_ADVANTAGES:
        raise ConfigError(
            f"--use-opd with --advantage-estimator {estimator} is not supported yet: one of {', '.join(GROUP_ADVANTAGES)}"
        )
    yield "algo=distill"
    yield f"algo.group_advantage={estimator}"


def _load(path: str, save: str | None) -> str:
    """slime resumes by --load and --save naming one folder; run.resume=auto looks in run.dir.

    Weights without a trainer's state, as slime's converters write them, are where a run starts.
    """
    try:
        source = megatron_folder(Path(path))
    except OSError as error:
        raise ConfigError(f"--load {shown(path)} cannot be read ({reason(error)}): name a folder") from error
    if source is not None and not (source / MANIFEST).is_file():
        return f"model.megatron_checkpoint={render(path)}"
    same = save is not None and path.rstrip("/") == save.rstrip("/")
    return f"run.resume={render('auto' if same else path)}"


def _one(seen: Seen, flag: str) -> str | None:
    return seen[flag][-1] if flag in seen else None


def _engines(seen: Seen) -> Iterator[str]:
    """slime counts GPUs for rollout, we count engines; without --colocate these GPUs are the rollout's own."""
    per = count("--rollout-num-gpus-per-engine", _one(seen, "--rollout-num-gpus-per-engine") or "1")
    gpus, nodes = _one(seen, "--rollout-num-gpus"), _one(seen, "--actor-num-nodes") or "1"
    if gpus is None and "--colocate" in seen and "--actor-num-gpus-per-node" in seen:
        per_node = count("--actor-num-gpus-per-node", seen["--actor-num-gpus-per-node"][-1])
        gpus = str(per_node * count("--actor-num-nodes", nodes))
    if gpus is None:
        return
    total = count("--rollout-num-gpus", gpus)
    if total % per:
        raise ConfigError(
            f"{total} rollout GPUs do not make whole engines of --rollout-num-gpus-per-engine {per}: "
            f"give --rollout-num-gpus as a multiple of {per}"
        )
    yield f"rollout.num_engines={total // per}"
    if "--colocate" not in seen:
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


def _eval_sets(words: list[str]) -> Iterator[str]:
    words = ["aime", *words] if len(words) == 1 else words  # as slime reads a path alone
    if len(words) % 2:
        raise ConfigError(
            f"--eval-prompt-data {' '.join(words)}: expected pairs of a name and a path, such as aime data/aime.jsonl"
        )
    yield "evaluation.datasets={}"
    for name, path in zip(words[::2], words[1::2], strict=True):
        if not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(f"--eval-prompt-data {name} {path}: a name has letters, digits, - and _ only")
        yield f"evaluation.datasets.{name}={render(path)}"
