"""Flags of slime and Megatron: the key that each flag sets, and the converter of its value."""

from __future__ import annotations

from collections.abc import Callable

from slime_like.errors import ConfigError
from slime_like_compat.flags.without_key import MODEL_SHAPE, MTP, NOT_HERE

Value = bool | int | float | str | list[str] | list[int]
Convert = Callable[[str, str], Value]  # (flag, text) -> value

ESTIMATORS = {
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
    "rloo": "rloo",
    "gspo": "gspo",
    "cispo": "cispo",
    "dapo": "dapo",
    "ppo": "ppo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_pp": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "reinforce_pp_baseline": "reinforce_pp_baseline",
}
SLIME_FILTERS = {
    f"{project}.rollout.filter_hub.dynamic_sampling_filters{mark}check_reward_nonzero_std": "nonzero_std"
    for project in ("slime", "miles")
    for mark in ".:"
}


def integer(flag: str, text: str) -> int:
    """Parse a whole number of 64 bits. Raises ``ConfigError`` naming ``flag`` on other text."""
    try:
        value = int(text)
    except ValueError:
        value = 2**63
    if abs(value) >= 2**63:
        raise ConfigError(f"{flag} {text}: expected a whole number")
    return value


def count(flag: str, text: str) -> int:
    """Parse a whole number above 0. Raises ``ConfigError`` naming ``flag`` on other text."""
    if (value := integer(flag, text)) < 1:
        raise ConfigError(f"{flag} {text}: expected 1 or more")
    return value


def number(flag: str, text: str) -> float:
    """Parse a number, inf or nan. Raises ``ConfigError`` naming ``flag`` on other text."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{flag} {text}: expected a number") from None


def word(flag: str, text: str) -> str:
    """Return ``text``. Raises ``ConfigError`` naming ``flag`` if it is empty."""
    if not text:
        raise ConfigError(f"{flag} is empty: give a name or path")
    return text


def one_of(*choices: str, **renamed: str) -> Convert:
    """Return a converter that accepts ``choices``, and the keys of ``renamed``, which it converts to their values.

    The converter raises ``ConfigError`` naming the flag on other text.
    """

    def convert(flag: str, text: str) -> str:
        if text not in (*choices, *renamed):
            raise ConfigError(f"{flag} {text}: expected {', '.join((*choices, *renamed))}")
        return renamed.get(text, text)

    return convert


def dotted(flag: str, text: str) -> str:
    """Convert slime's ``package.module.function``, or our ``package.module:function``, to our form.

    Raises ``ConfigError`` naming ``flag`` on other text.
    """
    module, colon, name = text.partition(":") if ":" in text else text.rpartition(".")
    if not (module and colon and name):
        raise ConfigError(f"{flag} {text}: expected a dotted path such as my_package.my_module.my_function")
    return f"{module}:{name}"


def group_filter(flag: str, text: str) -> list[str]:
    """Return a list of one group filter: our name of a filter in ``SLIME_FILTERS``, or the import path of any other filter.

    Raises the error of ``dotted``.
    """
    return [SLIME_FILTERS.get(text) or dotted(flag, text)]


def attention(flag: str, text: str) -> str:
    """Return the value of ``model.attention`` for Megatron's backend auto, flash or local.

    The value is never ``te``, as TransformerEngine would select a kernel itself, whichever backend the flag names.
    Raises ``ConfigError`` naming ``flag`` on any other text, even if it is another backend of Megatron.
    """
    backend = {"auto": "auto", "flash": "torch", "local": "torch"}.get(text)
    if backend is None:
        raise ConfigError(
            f"{flag} {text}: expected auto, flash or local (our own attention, a flash kernel in 16 bits on a GPU); with "
            "model.attention=te TransformerEngine chooses one of its own kernels"
        )
    return backend


def mebibytes(flag: str, text: str) -> float:
    """Convert a number of bytes, slime's unit, to MiB. Raises ``ConfigError`` as ``integer`` does."""
    return integer(flag, text) / 2**20


VALUES: dict[str, tuple[str, Convert]] = {
    "--actor-num-nodes": ("placement.actor_num_nodes", integer),
    "--actor-num-gpus-per-node": ("placement.actor_num_gpus_per_node", integer),
    "--rollout-num-gpus-per-engine": ("rollout.tp", integer),
    "--sglang-dcp-size": ("rollout.dcp", integer),
    "--sglang-decode-context-parallel-size": ("rollout.dcp", integer),
    "--sglang-dcp-comm-backend": ("rollout.dcp_comm", word),
    "--hf-checkpoint": ("model.hf_checkpoint", word),
    "--ref-load": ("model.ref_checkpoint", word),
    "--save": ("run.dir", word),
    "--save-interval": ("run.save_interval", integer),
    "--prompt-data": ("data.train", word),
    "--input-key": ("data.input_key", word),
    "--label-key": ("data.label_key", word),
    "--metadata-key": ("data.metadata_key", word),
    "--data-source-path": ("data.source", dotted),
    "--num-rollout": ("loop.num_rollout", integer),
    "--num-steps-per-rollout": ("loop.steps_per_rollout", integer),
    "--global-batch-size": ("loop.global_batch_size", integer),
    "--rollout-batch-size": ("rollout.batch_size", integer),
    "--n-samples-per-prompt": ("rollout.n_samples_per_prompt", integer),
    "--rollout-max-response-len": ("rollout.max_response_len", integer),
    "--rollout-max-context-len": ("rollout.max_context_len", integer),
    "--rollout-temperature": ("rollout.temperature", number),
    "--rollout-top-p": ("rollout.top_p", number),
    "--rollout-top-k": ("rollout.top_k", integer),
    "--dynamic-sampling-filter-path": ("rollout.filters", group_filter),
    "--over-sampling-batch-size": ("rollout.over_sampling_batch_size", integer),
    "--custom-generate-function-path": ("rollout.generate", dotted),
    "--custom-advantage-function-path": ("algo.token_advantage", dotted),
    "--loss-mask-type": ("data.conversation", one_of(qwen="turns", qwen3_5="whole")),
    "--sglang-max-running-requests": ("rollout.max_running_requests", integer),
    "--rm-type": ("reward.name", word),
    "--custom-rm-path": ("reward.name", dotted),
    "--rm-url": ("reward.remote_url", word),
    "--eval-interval": ("evaluation.interval", integer),
    "--n-samples-per-eval-prompt": ("evaluation.n_samples_per_prompt", integer),
    "--eval-max-response-len": ("evaluation.max_response_len", integer),
    "--eval-temperature": ("evaluation.temperature", number),
    "--eval-top-p": ("evaluation.top_p", number),
    "--eval-top-k": ("evaluation.top_k", integer),
    "--kl-loss-type": ("algo.kl_loss_type", word),
    "--entropy-coef": ("algo.entropy_coef", number),
    "--eps-clip": ("algo.eps_clip", number),
    "--eps-clip-high": ("algo.eps_clip_high", number),
    "--eps-clip-c": ("algo.eps_clip_c", number),
    "--gamma": ("algo.gamma", number),
    "--lambd": ("algo.lambd", number),
    "--value-clip": ("critic.value_clip", number),
    "--critic-lr": ("critic.lr", number),
    "--critic-lr-warmup-iters": ("critic.lr_warmup_steps", integer),
    "--num-critic-only-steps": ("critic.warmup_rollouts", integer),
    "--critic-load": ("critic.load", word),
    "--opd-kl-coef": ("algo.opd_kl_coef", number),
    "--opd-teacher-load": ("teacher.hf_checkpoint", word),
    "--tis-clip": ("algo.tis_clip", number),
    "--tis-clip-low": ("algo.tis_clip_low", number),
    "--lr": ("optim.lr", number),
    "--min-lr": ("optim.min_lr", number),
    "--lr-decay-style": ("optim.schedule", one_of("constant", "linear", "cosine", WSD="wsd")),
    "--lr-warmup-iters": ("optim.warmup_steps", integer),
    "--lr-warmup-fraction": ("optim.warmup_fraction", number),
    "--lr-decay-iters": ("optim.decay_steps", integer),
    "--lr-wsd-decay-iters": ("optim.wsd_decay_steps", integer),
    "--lr-wsd-decay-style": ("optim.wsd_decay_style", one_of("exponential", "linear", "cosine", "minus_sqrt")),
    "--weight-decay": ("optim.weight_decay", number),
    "--adam-beta1": ("optim.beta1", number),
    "--adam-beta2": ("optim.beta2", number),
    "--adam-eps": ("optim.eps", number),
    "--clip-grad": ("optim.clip_grad", number),
    "--optimizer-offload-fraction": ("optim.cpu_offload_fraction", number),
    "--tensor-model-parallel-size": ("parallel.tp", integer),
    "--pipeline-model-parallel-size": ("parallel.pp", integer),
    "--num-virtual-stages-per-pipeline-rank": ("parallel.vpp", integer),
    "--num-layers-per-virtual-pipeline-stage": ("parallel.layers_per_virtual_stage", integer),
    "--decoder-first-pipeline-num-layers": ("parallel.first_stage_layers", integer),
    "--decoder-last-pipeline-num-layers": ("parallel.last_stage_layers", integer),
    "--pipeline-model-parallel-layout": ("parallel.pipeline_layout", word),
    "--context-parallel-size": ("parallel.cp", integer),
    "--expert-model-parallel-size": ("parallel.ep", integer),
    "--expert-tensor-parallel-size": ("parallel.etp", integer),
    "--max-tokens-per-gpu": ("parallel.max_tokens_per_rank", integer),
    "--ddp-bucket-size": ("parallel.bucket_size", integer),
    "--attention-backend": ("model.attention", attention),
    "--qwen-gdn-backend": ("model.gdn.backend", word),
    "--recompute-granularity": ("model.recompute", one_of("full", "selective")),
    "--recompute-method": ("model.recompute_method", one_of("uniform", "block")),
    "--recompute-num-layers": ("model.recompute_num_layers", integer),
    "--log-probs-chunk-size": ("model.logits_chunk", integer),
    "--update-weight-buffer-size": ("weights.bucket_mb", mebibytes),
    "--update-weight-transport": ("weights.transport", one_of(nccl="auto")),
    "--rollout-health-check-interval": ("health.interval_s", number),
    "--rollout-health-check-timeout": ("health.timeout_s", number),
    "--rollout-health-check-first-wait": ("health.first_wait_s", number),
    "--wandb-project": ("metrics.wandb_project", word),
    "--wandb-group": ("metrics.wandb_group", word),
    "--seed": ("run.seed", integer),
}
"""``--flag value``"""

LISTS: dict[str, tuple[str, Convert]] = {
    "--recompute-modules": ("model.recompute_modules", word),
    "--rollout-stop-token-ids": ("rollout.stop_token_ids", integer),
}
"""``--flag value value ...``"""

SWITCHES: dict[str, tuple[str, Value]] = {
    "--colocate": ("placement.mode", "colocated"),
    "--offload-train": ("placement.offload_train", True),
    "--offload-rollout": ("placement.offload_rollout", True),
    "--no-offload-train": ("placement.offload_train", False),
    "--no-offload-rollout": ("placement.offload_rollout", False),
    "--apply-chat-template": ("data.apply_chat_template", True),
    "--rollout-shuffle": ("data.shuffle", True),
    "--skip-eval-before-train": ("evaluation.before_train", False),
    "--use-tis": ("algo.use_tis", True),
    "--use-rollout-logprobs": ("algo.use_rollout_logprobs", True),
    "--calculate-per-token-loss": ("algo.aggregation", "token_mean"),
    "--disable-grpo-std-normalization": ("algo.group_advantage", "dr_grpo"),
    "--normalize-advantages": ("algo.normalize_advantages", True),
    "--sequence-parallel": ("parallel.sequence_parallel", True),
    "--use-distributed-optimizer": ("parallel.distributed_optimizer", True),
    "--overlap-grad-reduce": ("parallel.overlap_grad_reduce", True),
    "--overlap-param-gather": ("parallel.overlap_param_gather", True),
    "--optimizer-cpu-offload": ("optim.cpu_offload", True),
    "--bf16": ("model.dtype", "bfloat16"),
    "--debug-rollout-only": ("run.mode", "rollout_only"),
    "--debug-train-only": ("run.mode", "train_only"),
    "--save-debug-rollout-data": ("run.dump_rollouts", True),
    "--partial-rollout": ("rollout.partial_rollout", True),
    "--mask-offpolicy-in-partial-rollout": ("algo.mask_offpolicy", True),
    "--async-save": ("run.async_save", True),
    "--use-fault-tolerance": ("health.on_dead_engine", "restart"),
    "--use-wandb": ("metrics.wandb", True),
    "--use-tensorboard": ("metrics.tensorboard", True),
    "--deterministic-mode": ("run.deterministic", True),
    "--sglang-dcp-replicate-q-proj": ("rollout.dcp_replicate_q", True),
    "--no-sglang-dcp-replicate-q-proj": ("rollout.dcp_replicate_q", False),
    "--sglang-enable-symm-mem": ("rollout.symmetric_memory", True),
}
"""``--flag``"""

COMBINED: dict[str, tuple[str, ...]] = {
    "--advantage-estimator": ("algo",),
    "--loss-type": ("algo",),
    "--custom-loss-function-path": ("algo.loss",),
    "--custom-tis-function-path": ("algo.off_policy",),
    "--rollout-function-path": ("algo",),
    "--disable-compute-advantages-and-returns": ("algo",),
    "--num-epoch": ("loop.num_epoch",),
    "--sglang-dp-size": ("rollout.dp_attention",),
    "--sglang-data-parallel-size": ("rollout.dp_attention",),
    "--sglang-enable-dp-attention": ("rollout.dp_attention",),
    "--rollout-num-gpus": ("rollout.num_engines", "placement.mode"),
    "--load": ("run.resume", "model.megatron_checkpoint"),
    "--use-kl-loss": ("algo.kl_loss_coef",),
    "--kl-loss-coef": ("algo.kl_loss_coef",),
    "--kl-coef": ("algo.kl_coef",),
    "--apply-chat-template-kwargs": ("data.chat_template_kwargs",),
    "--eval-prompt-data": ("evaluation.datasets",),
    "--eval-config": ("evaluation.datasets", "evaluation.overrides"),
    "--rollout-max-prompt-len": ("data.max_prompt_len", "data.on_bad_row"),
    "--use-routing-replay": ("algo.routing_replay",),
    "--use-rollout-routing-replay": ("algo.routing_replay",),
    "--use-opd": ("algo", "algo.group_advantage"),
    "--opd-type": ("teacher.hf_checkpoint",),
    "--load-debug-rollout-data": ("run.replay_from", "run.mode"),
}
"""Flags whose keys depend on more than their own value -> these keys; see ``combined``."""

ALWAYS: dict[str, tuple[str | None, str]] = {
    "--use-dynamic-batch-size": (None, "sequences are always packed by a token budget"),
    "--balance-data": (None, "work is always balanced over data-parallel ranks"),
    "--tool-key": ("tools", "the column `tools` of a row is passed to the chat template and added to the metadata"),
    "--train-backend": ("megatron", "Megatron is the only trainer"),
    "--optimizer": ("adam", "AdamW is the only optimizer"),
    "--accumulate-allreduce-grads-in-fp32": (None, "gradients are accumulated and reduced in float32"),
    "--attention-softmax-in-fp32": (None, "attention computes its softmax in float32"),
    "--attention-dropout": ("0.0", "models are trained without dropout"),
    "--hidden-dropout": ("0.0", "models are trained without dropout"),
    "--overlap-cpu-optimizer-d2h-h2d": (None, "an offloaded optimizer always overlaps its copies"),
    "--use-precision-aware-optimizer": (None, "main weights and moments are float32, as with slime's defaults"),
    "--rollout-skip-special-tokens": (None, "rewards read text without special tokens"),
    "--update-weight-mode": ("full", "every push sends all weights"),
    "--reward-key": ("score", "training uses the score of a reward"),
    "--eval-reward-key": ("acc", "evaluation reports the accuracy of a reward"),
    "--log-passrate": (None, "evaluation reports pass@k if prompts have several samples"),
    "--get-mismatch-metrics": (None, "the mismatch of trainer and engine is always measured"),
    "--distributed-backend": ("nccl", "gloo on a CPU, NCCL on GPUs"),
    "--update-weights-interval": ("1", "weights are pushed after training on every rollout"),
}
"""Flags for fixed behaviour of this project -> (the accepted value or None, the behaviour)."""

REFUSED: dict[str, str] = {
    "--release-train": "",
    "--check-weight-update-equal": "every push is verified by the probe: weights.probe_sequences",
    "--num-gpus-per-node": "the machine's GPUs are counted; --actor-num-gpus-per-node limits the trainer",
    **MODEL_SHAPE,
    **NOT_HERE,
    "--num-experts": "config.json of --hf-checkpoint has this number: remove the flag",
    "--micro-batch-size": "micro-batches are always packed by tokens: --max-tokens-per-gpu",
    "--rollout-seed": "the run has one seed: --seed",
    "--enable-mtp-training": MTP,
    "--critic-save": "the critic is saved with the run: run.dir/checkpoints/critic",
    "--critic-num-nodes": "the critic has the actor's layout unless critic.tp, critic.pp, critic.cp or critic.dp are set",
    "--critic-num-gpus-per-node": "the critic has the actor's layout unless critic.tp, critic.pp, critic.cp or critic.dp are set",
    "--use-opsm": "",
    "--group-rm": "mark the function with slime_like.reward.kinds:scores_groups to pass it all samples of a prompt",
    "--multimodal-keys": "",
    "--rollout-stop": "give token ids with --rollout-stop-token-ids",
    "--offload": "use --offload-train --offload-rollout",
    "--fp16": "use --bf16, or model.dtype=float32",
    "--megatron-to-hf-mode": "HF checkpoints are read and written by our own converter",
    "--save-hf": "run.save_hf=true writes the final weights to run.dir/hf, run.save_hf_interval=N the weights after every N-th rollout to run.dir/hf_iter_*",
    "--wandb-key": "set the environment variable WANDB_API_KEY, so that no key is on a command line",
    "--sglang-server-concurrency": "rollout.max_running_requests limits the concurrent requests of an engine; auto: as many as fit its KV cache",
}
"""Flags of slime and Megatron without a key here -> the reason or the alternative, or an empty text."""
