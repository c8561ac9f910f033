"""Flags of slime's ``train.py`` whose verdict depends on their value or on other flags."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from slime_like.config.rules.user_functions import check_function
from slime_like.config.schema import names
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
from slime_like_compat.slime.given import Flags, Given
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
QUIET = re.compile(r"(NCCL|CUDA|PYTORCH|TORCH|NVSHMEM|GLOO|RAY|WANDB|HF|TOKENIZERS|OMP|MASTER)_\w+|PYTHON\w+|no_proxy")

type Special = Callable[[Given, Flags], tuple[str, str] | None]  # -> (verdict, note); None: as any other flag


def _needs(switch: str, file_line: str = "slime") -> Special:
    def without_effect(item: Given, flags: Flags) -> tuple[str, str] | None:
        del item
        return None if switch in flags else ("dropped", f"has no effect without {switch}, in {file_line} as well")

    return without_effect


def _kl_loss_type(item: Given, flags: Flags) -> tuple[str, str] | None:
    if "--use-kl-loss" not in flags or flags.supervised:
        return "dropped", "has no effect without --use-kl-loss, in slime as well"
    if item.text != PolicyConfig.kl_loss_type and not flags.positive("--kl-loss-coef"):
        return "dropped", "has no effect without --kl-loss-coef above 0, in slime as well"
    return None


def _rm_type(item: Given, flags: Flags) -> tuple[str, str] | None:
    if "--custom-rm-path" in flags:
        return "dropped", "has no effect beside --custom-rm-path, in slime as well"
    if item.problem or split_prefix(item.text)[1] in names.REWARDS:
        return None
    return "refused", f"there is no reward of this name (there are {', '.join(names.REWARDS)})"


def _code(item: Given, flags: Flags) -> tuple[str, str] | None:
    if item.flag == "--custom-loss-function-path" and flags.text("--loss-type") != "custom_loss":
        return "dropped", "has no effect without --loss-type custom_loss, in slime as well"
    if item.flag == "--custom-tis-function-path" and "--use-tis" not in flags:
        return "dropped", "has no effect without --use-tis, in slime as well"
    if item.problem or item.text in SLIME_FILTERS:
        return None
    if item.text in SLIME_SOURCES:
        return "always", "data.source=file, with its cursor in the checkpoint"
    try:
        path = dotted(item.flag, item.text)
    except ConfigError as error:
        return "refused", str(error)
    try:
        resolve("", path, {})
    except Exception as error:  # noqa: BLE001  fault boundary: importing a module runs code of whoever wrote it
        reason = "" if isinstance(error, ConfigError) else f" ({type(error).__name__}: {error})"
        signature = "with the signature that docs/extending.md names"
        return "code", f"cannot be imported here{reason}: put it on PYTHONPATH, {signature}"
    try:
        check_function(CODE[item.flag], path, {})
    except ConfigError as error:
        return "code", f"to be ported: {error}"
    return None


def _rollout_function(item: Given, flags: Flags) -> tuple[str, str] | None:
    kind = ROLLOUT_FUNCTIONS.get(item.text)
    if kind == "sft_loss" and flags.supervised:
        return "always", "algo=sft reads the rows, and no engine runs"
    if kind == "policy_loss" and not flags.supervised:
        return "always", "slime's own rollout function is the loop here"
    if "fully_async" in item.text:
        return (
            "refused",
            "rollouts that go on while the trainer works are loop.max_staleness: 1 with train_async.py, more for rollouts "
            "further ahead; add it to the recipe of the job without this flag",
        )
    return "refused", "a generate function per group is the seam: write rollout.generate (docs/coming_from_slime.md)"


def _loss_type(item: Given, flags: Flags) -> tuple[str, str] | None:
    if item.text == "policy_loss":
        return "always", "a policy loss is what --advantage-estimator chooses"
    if item.text == "sft_loss" or item.problem:
        return None
    if item.text == "custom_loss" and "--custom-loss-function-path" in flags:
        return "mapped", "--custom-loss-function-path names the loss"
    return "refused", "there are policy_loss, sft_loss, and custom_loss with --custom-loss-function-path"


def _sft_only(item: Given, flags: Flags) -> tuple[str, str] | None:
    del item
    if flags.supervised:
        return "always", "algo=sft computes none"
    return "refused", "advantages are computed for every algo but sft"


def _num_epoch(item: Given, flags: Flags) -> tuple[str, str] | None:
    del item
    return ("dropped", "has no effect beside --num-rollout, in slime as well") if "--num-rollout" in flags else None


def _loss_mask(item: Given, flags: Flags) -> tuple[str, str] | None:
    if not flags.supervised:
        return "dropped", "has no effect without --loss-type sft_loss, in slime as well"
    return (
        None
        if item.text in ("qwen", "qwen3_5")
        else ("refused", "there are qwen (data.conversation=turns) and qwen3_5 (whole)")
    )


def _eval_context(item: Given, flags: Flags) -> tuple[str, str] | None:
    if item.text and item.text == flags.text("--rollout-max-context-len"):
        return "always", "held-out prompts have the context of rollout.max_context_len"
    return "refused", "held-out prompts have the context of rollout.max_context_len"


def _eval_config(item: Given, flags: Flags) -> tuple[str, str] | None:
    del flags
    if item.problem:
        return None
    try:
        list(eval_config_overrides(Path(item.text)))
    except ConfigError as error:
        return "refused", str(error).removeprefix(f"{item.flag}: ")
    return None


def _eval_sets(item: Given, flags: Flags) -> tuple[str, str] | None:
    del item
    return ("dropped", "has no effect beside --eval-config, in slime as well") if "--eval-config" in flags else None


def _max_prompt_len(item: Given, flags: Flags) -> tuple[str, str] | None:
    del item, flags
    return "mapped", "longer prompts are left out, here held-out ones as well, and so are rows that cannot be used"


def _environment(item: Given, flags: Flags) -> tuple[str, str] | None:
    del flags
    try:
        parsed = parse_strict_json(item.text)
    except ValueError:
        parsed = None
    variables = cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {"?": ""}
    if all(QUIET.fullmatch(name) for name in variables):
        return "dropped", "set the variables in the environment of train.py"
    return "refused", "what these variables change is not known: set them where train.py is started, if they are needed"


def _spec(item: Given, flags: Flags) -> tuple[str, str] | None:
    del flags
    if any(f".{name} " in f"{item.text} " for name in names.FAMILIES):  # slime_plugins.models.<name>
        return None
    return "refused", f"no supported model family is built by it (supported: {', '.join(names.FAMILIES)})"


def _positions(item: Given, flags: Flags) -> tuple[str, str] | None:
    del flags
    if item.text != "rope" and not item.problem:
        return "refused", "attention of the families here has rotary positions"
    return None


def _num_layers(item: Given, flags: Flags) -> tuple[str, str] | None:
    del item
    return None if "--swiglu" in flags else ("refused", "feed-forward layers of the families here are gated (--swiglu)")


def _norm_after(item: Given, flags: Flags) -> tuple[str, str] | None:
    del item, flags
    return "refused", "no supported model family normalises after attention or feed-forward layers"


def _router_scores(item: Given, flags: Flags) -> tuple[str, str] | None:
    del flags
    return None if item.text in ("softmax", "") else ("refused", "routers of the families here choose by softmax")


def _balancing(item: Given, flags: Flags) -> tuple[str, str] | None:
    if item.text in ("none", "aux_loss") or not flags.positive("--moe-aux-loss-coeff"):
        return "dropped", "--moe-aux-loss-coeff weighs it, by 0 where it is not given"
    return "refused", "the loss that balances experts is aux_loss"


def _dump(item: Given, flags: Flags) -> tuple[str, str] | None:
    del item, flags
    return "mapped", "into run.dir/rollouts"


SPECIAL: dict[str, Special] = {
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
    "--disable-compute-advantages-and-returns": _sft_only,
    "--num-epoch": _num_epoch,
    "--eval-config": _eval_config,
    "--eval-prompt-data": _eval_sets,
    "--rollout-max-prompt-len": _max_prompt_len,
    "--loss-mask-type": _loss_mask,
    "--eval-max-context-len": _eval_context,
    "--train-env-vars": _environment,
    "--spec": _spec,
    "--num-layers": _num_layers,
    "--position-embedding-type": _positions,
    "--post-self-attn-layernorm": _norm_after,
    "--post-mlp-layernorm": _norm_after,
    "--moe-router-score-function": _router_scores,
    "--moe-router-load-balancing-type": _balancing,
    "--save-debug-rollout-data": _dump,
    "--advantage-estimator": lambda item, flags: (
        ("refused", f"one of {', '.join(ESTIMATORS)}")
        if item.text not in ESTIMATORS and not item.problem and not flags.supervised
        else None
    ),
}
"""Flags whose verdict depends on their value or on other flags."""
