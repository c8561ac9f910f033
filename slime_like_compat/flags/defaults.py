"""Defaults of slime that differ from ours, as values of our keys.

Source of the values: ``slime/utils/arguments.py`` of slime 0.3.1, and Megatron-LM's parser for flags that slime does not
change.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlimeDefault:
    """Behaviour of slime if ``flag`` is not given.

    ``override`` is the equivalent value of ``key`` in Hydra's grammar; None keeps our default.
    """

    flag: str
    value: str
    key: str
    override: str | None
    note: str = ""
    needs: tuple[str, ...] = ()  # the default applies only if one of these flags is given


HELD_OUT = ("--eval-prompt-data", "--eval-config")
DEFAULTS: tuple[SlimeDefault, ...] = (
    SlimeDefault("--actor-num-gpus-per-node", "8", "placement.actor_num_gpus_per_node", "8"),
    SlimeDefault("--n-samples-per-prompt", "1", "rollout.n_samples_per_prompt", "1"),
    SlimeDefault("--input-key", "input", "data.input_key", "'input'"),
    SlimeDefault("--rollout-shuffle", "off", "data.shuffle", "false"),
    SlimeDefault(
        "--calculate-per-token-loss",
        "off: the mean over the tokens of each sample, then over samples",
        "algo.aggregation",
        "sequence_mean",
    ),
    SlimeDefault(
        "--eps-clip-high",
        "as --eps-clip",
        "algo.eps_clip_high",
        "null",
        "differs here only for dapo (0.28), gspo (4e-4) and cispo (4.0)",
    ),
    SlimeDefault("--eps-clip", "0.2", "algo.eps_clip", "0.2", "differs here only for gspo (3e-4) and cispo (1.0)"),
    SlimeDefault("--kl-loss-type", "k1", "algo.kl_loss_type", "k1", needs=("--use-kl-loss",)),
    SlimeDefault(
        "--eval-temperature",
        "as --rollout-temperature",
        "evaluation.temperature",
        "${rollout.temperature}",
        "here held-out prompts are sampled greedily by default",
        needs=HELD_OUT,
    ),
    SlimeDefault("--eval-top-p", "as --rollout-top-p", "evaluation.top_p", "${rollout.top_p}", needs=HELD_OUT),
    SlimeDefault("--lr-decay-style", "linear (Megatron)", "optim.schedule", "linear"),
    SlimeDefault("--weight-decay", "0.01 (Megatron)", "optim.weight_decay", "0.01"),
    SlimeDefault("--adam-beta2", "0.999 (Megatron)", "optim.beta2", "0.999"),
    SlimeDefault("--seed", "1234", "run.seed", "1234"),
    SlimeDefault(
        "--sequence-parallel",
        "off",
        "parallel.sequence_parallel",
        None,
        "here on with tp > 1: the same values, less memory",
    ),
    SlimeDefault(
        "--qwen-gdn-backend",
        "fla",
        "model.gdn.backend",
        None,
        "here fla on a GPU, torch on a CPU",
        needs=("--spec",),
    ),
    SlimeDefault("--label-key", "none", "data.label_key", None, "here the column `label` is read if a row has it"),
    SlimeDefault(
        "--tool-key",
        "tools",
        "data.metadata_key",
        None,
        "as in slime; the column's name cannot be changed",
    ),
    SlimeDefault(
        "--async-save", "off", "run.async_save", None, "here on: training continues while a checkpoint is written"
    ),
)
"""Ordered like slime's groups of arguments."""

NEEDED: dict[str, str] = {
    flag: f"without it slime trains with Megatron's dropout of 0.1, which is not supported here: add {flag} 0.0 to the script"
    for flag in ("--attention-dropout", "--hidden-dropout")
}
"""Flags that a script has to give, because slime's default has no equivalent here -> the reason."""
