"""Flags of slime's ``train.py`` whose verdict depends on their value or on other flags."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from slime_like.config.rules.user_functions import check_function
from slime_like.config.schema import names
from slime_like.config.schema.family_entry import REFUSED_FAMILIES
from slime_like.config.schema.policy import PolicyConfig
from slime_like.config.schema.reward_names import split_prefix
from slime_like.errors import ConfigError
from slime_like.registry import resolve
from slime_like.util.reading import parse_strict_json
from slime_like_compat.flags.combined import ROLLOUT_FUNCTIONS
from slime_like_compat.flags.eval_config import eval_config_overrides
from slime_like_compat.flags.table import (
    ESTIMATORS,
    SLIME_FILTERS,
    dotted,
)
from slime_like_compat.slime.occurrences import FlagOccurrence, Flags
from slime_like_compat.slime.weights import hf_checkpoint, load, ref_load, teacher

CODE = {
    "--custom-rm-path": "reward.name",
    "--custom-generate-function-path": "rollout.generate",
    "--custom-advantage-function-path": "algo.token_advantage",
    "--custom-loss-function-path": "algo.loss",
    "--custom-tis-function-path": "algo.off_policy",
    "--data-source-path": "data.source",
    "--dynamic-sampling-filter-path": "rollout.filters",
}
SLIME_SOURCES = [f"{project}.rollout.data_source.RolloutDataSourceWithBuffer" for project in ("slime", "miles")]
SPARSE_SPECS = ("glm5", "deepseek_v32")  # modules of slime and miles that build models with sparse attention
HARMLESS_VARIABLE = re.compile(
    r"(NCCL|CUDA|PYTORCH|TORCH|NVSHMEM|GLOO|RAY|WANDB|HF|TOKENIZERS|OMP|MASTER)_\w+|PYTHON\w+|no_proxy"
)

type VerdictFunction = Callable[[FlagOccurrence, Flags], tuple[str, str] | None]
"""Function that returns a flag's verdict and its note; None to treat the flag like any other."""


def _needs(switch: str, project: str = "slime") -> VerdictFunction:
    """Return a function whose verdict on a flag is ``dropped`` if the job does not give ``switch``, else None.

    The note of the verdict names ``project``.
    """

    def drop_without_switch(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
        del item
        return None if switch in flags else ("dropped", f"has no effect without {switch}, in {project} as well")

    return drop_without_switch


def _kl_loss_type(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    if "--use-kl-loss" not in flags or flags.is_supervised:
        return "dropped", "has no effect without --use-kl-loss, in slime as well"
    if item.text != PolicyConfig.kl_loss_type and not flags.is_positive("--kl-loss-coef"):
        return "dropped", "has no effect without --kl-loss-coef above 0, in slime as well"
    return None


def _rm_type(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    if "--custom-rm-path" in flags:
        return "dropped", "has no effect with --custom-rm-path, in slime as well"
    if item.problem or split_prefix(item.text)[1] in names.REWARDS:
        return None
    return "refused", f"there is no reward of this name: one of {', '.join(names.REWARDS)}"


def _code(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    if item.flag == "--custom-loss-function-path" and flags.text("--loss-type") != "custom_loss":
        return "dropped", "has no effect without --loss-type custom_loss, in slime as well"
    if item.flag == "--custom-tis-function-path" and "--use-tis" not in flags:
        return "dropped", "has no effect without --use-tis, in slime as well"
    if item.problem or item.text in SLIME_FILTERS:
        return None
    if item.text in SLIME_SOURCES:
        return "always", "data.source=file, whose cursor is in the checkpoint"
    try:
        path = dotted(item.flag, item.text)
    except ConfigError as error:
        return "refused", str(error)
    try:
        resolve("", path, {})
    except Exception as error:  # noqa: BLE001  fault boundary: importing a module runs user code
        reason = "" if isinstance(error, ConfigError) else f" ({type(error).__name__}: {error})"
        signature = "with the signature that docs/extending.md names"
        return "code", f"cannot be imported here{reason}: put it on PYTHONPATH, {signature}"
    try:
        check_function(CODE[item.flag], path, {})
    except ConfigError as error:
        return "code", f"to be ported: {error}"
    return None


def _rollout_function(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    kind = ROLLOUT_FUNCTIONS.get(item.text)
    if kind == "sft_loss" and flags.is_supervised:
        return "always", "algo=sft reads the rows and starts no engine"
    if kind == "policy_loss" and not flags.is_supervised:
        return "always", "the training loop here replaces slime's rollout function"
    if "fully_async" in item.text:
        return (
            "refused",
            "loop.max_staleness lets rollouts run during training: 1 as with train_async.py, more for rollouts further "
            "ahead; convert the job without this flag and add the key to the recipe",
        )
    return (
        "refused",
        "write a generate function, which is called once per group: rollout.generate (docs/coming_from_slime.md)",
    )


def _loss_type(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    if item.text == "policy_loss":
        return "always", "--advantage-estimator chooses the policy loss"
    if item.text == "sft_loss" or item.problem:
        return None
    if item.text == "custom_loss" and "--custom-loss-function-path" in flags:
        return "mapped", "--custom-loss-function-path names the loss"
    return "refused", "one of policy_loss, sft_loss, and custom_loss with --custom-loss-function-path"


def _disable_advantages(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    del item
    if flags.is_supervised:
        return "always", "algo=sft computes no advantages"
    return "refused", "every algo except sft computes advantages"


def _num_epoch(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    del item
    return ("dropped", "has no effect with --num-rollout, in slime as well") if "--num-rollout" in flags else None


def _loss_mask(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    if not flags.is_supervised:
        return "dropped", "has no effect without --loss-type sft_loss, in slime as well"
    return (
        None
        if item.text in ("qwen", "qwen3_5")
        else ("refused", "one of qwen (data.conversation=turns) and qwen3_5 (data.conversation=whole)")
    )


def _eval_context(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    is_same = bool(item.text) and item.text == flags.text("--rollout-max-context-len")
    return "always" if is_same else "refused", "held-out prompts have the context of rollout.max_context_len"


def _eval_config(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    del flags
    if item.problem:
        return None
    try:
        list(eval_config_overrides(Path(item.text)))
    except ConfigError as error:
        return "refused", str(error).removeprefix(f"{item.flag}: ")
    return None


def _eval_prompt_data(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    del item
    return ("dropped", "has no effect with --eval-config, in slime as well") if "--eval-config" in flags else None


def _max_prompt_len(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    del item, flags
    return "mapped", "longer prompts are left out, here also held-out prompts and rows that cannot be used"


def _environment(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    del flags
    try:
        values = parse_strict_json(item.text)
    except ValueError:
        values = None
    variables = cast("dict[str, Any]", values) if isinstance(values, dict) else {"?": ""}
    if all(HARMLESS_VARIABLE.fullmatch(name) for name in variables):
        return "dropped", "set the variables in the environment of train.py"
    return (
        "refused",
        "the effect of these variables is unknown: set them in the environment of train.py if they are needed",
    )


def _spec(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    del flags
    if any(f".{name}" in item.text for name in SPARSE_SPECS):
        return "refused", REFUSED_FAMILIES["glm_moe_dsa"]
    if any(f".{name} " in f"{item.text} " for name in names.FAMILIES):  # slime_plugins.models.<name>
        return None
    return "refused", f"it builds no supported model family: one of {', '.join(names.FAMILIES)}"


def _attention_variant(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    del flags
    return ("refused", REFUSED_FAMILIES["deepseek_v32"]) if item.text == "dsa" else None


def _positions(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    del flags
    if item.text != "rope" and not item.problem:
        return "refused", "the supported model families have rotary positions"
    return None


def _num_layers(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    del item
    return (
        None
        if "--swiglu" in flags
        else ("refused", "the supported model families have gated feed-forward layers (--swiglu)")
    )


def _balancing(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    if item.text in ("none", "aux_loss") or not flags.is_positive("--moe-aux-loss-coeff"):
        return "dropped", "has no effect without --moe-aux-loss-coeff above 0"
    return "refused", "the only load-balancing loss is aux_loss"


def _save_rollouts(item: FlagOccurrence, flags: Flags) -> tuple[str, str] | None:
    del item, flags
    return "mapped", "into run.dir/rollouts"


VERDICT_FUNCTIONS: dict[str, VerdictFunction] = {
    **dict.fromkeys(CODE, _code),
    "--hf-checkpoint": hf_checkpoint,
    "--rm-type": _rm_type,
    "--ref-load": ref_load,
    "--load": load,
    "--kl-loss-type": _kl_loss_type,
    "--kl-loss-coef": _needs("--use-kl-loss"),
    "--tis-clip": _needs("--use-tis"),
    "--tis-clip-low": _needs("--use-tis"),
    "--optimizer-offload-fraction": _needs("--optimizer-cpu-offload", "Megatron"),
    "--rollout-function-path": _rollout_function,
    "--loss-type": _loss_type,
    "--opd-teacher-load": teacher,
    "--disable-compute-advantages-and-returns": _disable_advantages,
    "--num-epoch": _num_epoch,
    "--eval-config": _eval_config,
    "--eval-prompt-data": _eval_prompt_data,
    "--rollout-max-prompt-len": _max_prompt_len,
    "--loss-mask-type": _loss_mask,
    "--eval-max-context-len": _eval_context,
    "--train-env-vars": _environment,
    "--spec": _spec,
    "--experimental-attention-variant": _attention_variant,
    "--num-layers": _num_layers,
    "--position-embedding-type": _positions,
    "--moe-router-load-balancing-type": _balancing,
    "--save-debug-rollout-data": _save_rollouts,
    "--advantage-estimator": lambda item, flags: (
        ("refused", f"one of {', '.join(ESTIMATORS)}")
        if item.text not in ESTIMATORS and not item.problem and not flags.is_supervised
        else None
    ),
}
"""Flags whose verdict depends on their value or on other flags."""
