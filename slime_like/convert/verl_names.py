"""Keys of verl that set nothing here: those without an effect on what is trained, and those of features that are not here.

A pattern is a key in which ``*`` stands for any text. Keys with a counterpart are those of ``names_elsewhere.VERL_KEYS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

_A, _R, _M, _REF = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.model",
    "actor_rollout_ref.ref",
)
_PACKED = "micro-batches are packed by tokens, without padding: parallel.max_tokens_per_rank"
_MEMORY = "memory only; both sides stay on the GPUs here: train.py --plan shows what fits (optim.cpu_offload, model.recompute)"
_SCORES = "scoring passes use the micro-batches of training"
_KERNELS = "the trainer chooses its kernels"
_ENGINE = "speed and memory of the engine; rollout.sglang.* takes any field of SGLang's ServerArgs"
_LAYOUT = "layout of another trainer: parallel.* here"
_REFERENCE = "the reference has the actor's layout"
_CRITIC = "the critic's settings are the actor's, but critic.*"
_ANYWAY = "done here anyway"

WITHOUT_EFFECT: dict[str, str] = {
    "model_engine": "the trainer is megatron-core; FSDP jobs have tp = pp = 1",
    "data.return_raw_*": _ANYWAY,
    "data.return_full_prompt": _ANYWAY,
    "data.return_multi_modal_inputs": "text only",
    "data.gen_batch_size": "verl's own loop fetches prompts in such numbers and trains on train_batch_size of them",
    "data.*num_workers": "prompts are read once, before the run",
    "data.filter_overlong_prompts_workers": "prompts are read once, before the run",
    "data.val_batch_size": "held-out prompts are asked at once",
    "data.validation_shuffle": "the order of held-out prompts has no effect",
    "data.use_shm": _ANYWAY,
    "data.image_patch_size": "text only",
    "*.trust_remote_code": "no code of a checkpoint is run",
    f"{_M}.use_remove_padding": _ANYWAY,
    f"{_M}.use_liger": _KERNELS,
    f"{_M}.use_fused_kernels": _KERNELS,
    f"{_M}.fused_kernel_options.*": _KERNELS,
    f"{_M}.use_shm": _ANYWAY,
    f"{_M}.enable_activation_offload": _MEMORY,
    f"{_M}.tiled_mlp.*": _MEMORY,
    f"{_M}.override_config.attn_implementation": _KERNELS,
    f"{_M}.override_config.*._attn_implementation": _KERNELS,
    f"{_A}.strategy": "the trainer is megatron-core; FSDP jobs have tp = pp = 1",
    f"{_A}.model_engine": "the trainer is megatron-core",
    f"{_A}.ppo_micro_batch_size": _PACKED,
    f"{_A}.calculate_entropy": "train/entropy is measured",
    f"{_A}.use_torch_compile": _KERNELS,
    f"{_A}.use_fused_kernels": _KERNELS,
    f"{_A}.use_remove_padding": _ANYWAY,
    f"{_A}.use_prefix_grouper": _KERNELS,
    f"{_A}.entropy_*": _MEMORY,
    f"{_A}.pad_to_length*": _PACKED,
    f"{_A}.shuffle": "groups stay whole within an optimizer step, in the order in which they were made",
    f"{_A}.data_loader_seed": "run.seed is the one seed",
    f"{_A}.checkpoint.*": "a checkpoint is a whole run; run.save_hf writes the weights in HF format",
    f"{_A}.*.seed": "run.seed is the one seed",
    f"{_A}.*.param_offload": _MEMORY,
    f"{_A}.*.optimizer_offload": _MEMORY,
    f"{_A}.*.grad_offload": _MEMORY,
    f"{_A}.*.offload_policy": _MEMORY,
    f"{_A}.*.enable_fsdp_offload": _MEMORY,
    f"{_A}.*.entropy_*": _MEMORY,
    f"{_A}.*.use_torch_compile": _KERNELS,
    f"{_A}.*.pad_*": _PACKED,
    f"{_A}.*.use_remove_padding": _ANYWAY,
    f"{_A}.*.strategy": "the trainer is megatron-core",
    f"{_A}.*.fsdp_size": _LAYOUT,
    f"{_A}.*.turbo_config.*": _LAYOUT,
    "actor@*": "the trainer is megatron-core",
    f"{_A}": "the trainer is megatron-core",
    f"{_A}.engine.*": _LAYOUT,
    f"{_A}.*.reshard_after_forward": _MEMORY,
    f"{_A}.*.forward_prefetch": "speed only",
    f"{_A}.*.use_orig_params": _LAYOUT,
    f"{_A}.*.wrap_policy.*": _LAYOUT,
    f"{_A}.*.mixed_precision.*": "model.dtype; gradients are reduced and main weights kept in float32",
    f"{_A}.*.model_dtype": "model.dtype; main weights are float32",
    f"{_A}.veomni.*_implementation": _KERNELS,
    f"{_A}.veomni.enable_full_shard": _LAYOUT,
    f"{_A}.torchtitan.*": _LAYOUT,
    f"{_A}.megatron.expert_tensor_parallel_size": "an expert is whole on its rank: parallel.ep",
    f"{_A}.megatron.use_mbridge": "HF folders are read and written",
    f"{_A}.megatron.vanilla_mbridge": "HF folders are read and written",
    f"{_A}.megatron.use_megatron_fsdp": _LAYOUT,
    f"{_A}.megatron.use_dist_checkpointing": "the policy starts from model.hf_checkpoint, which holds the same weights",
    f"{_A}.megatron.dist_*": "the policy starts from model.hf_checkpoint, which holds the same weights",
    f"{_A}.megatron.distrib_*": "the checkpoint's format is the run's own",
    f"{_A}.megatron.override_ddp_config.*": "gradients are reduced in float32; parallel.overlap_*",
    f"{_A}.megatron.max_seqlen_per_dp_cp_rank": _PACKED,
    f"{_A}.optim.total_training_steps": "follows from loop.num_rollout and loop.steps_per_rollout",
    f"{_A}.optim.zero_indexed_step": "the first step here has lr / warmup_steps",
    f"{_A}.optim.lr_warmup_init": "the first step here has lr / warmup_steps",
    f"{_A}.optim.use_checkpoint_opt_param_scheduler": "a resumed run goes on with its schedule",
    f"{_A}.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d": "part of optim.cpu_offload",
    f"{_A}.optim.override_optimizer_config.use_precision_aware_optimizer": "moments are float32, as are verl's unless told",
    f"{_A}.optim.use_precision_aware_optimizer": "moments are float32",
    f"{_REF}.*": _REFERENCE,
    f"{_R}.name": "the engine is SGLang",
    f"{_R}.mode": "every engine is a server",
    f"{_R}.calculate_log_probs": "the engine reports log-probabilities of every token",
    f"{_R}.log_prob_*": _SCORES,
    f"{_R}.logprobs_mode": "log-probabilities are those of the sampling distribution",
    f"{_R}.dtype": "model.dtype",
    f"{_R}.data_parallel_size": "engines of rollout.tp GPUs each fill the GPUs: rollout.num_engines; " + _ENGINE,
    f"{_R}.expert_parallel_size": _ENGINE,
    f"{_R}.moe_tensor_parallel_size": _ENGINE,
    f"{_R}.pipeline_model_parallel_size": _ENGINE,
    f"{_R}.enforce_eager": _ENGINE,
    f"{_R}.cudagraph_capture_sizes": _ENGINE,
    f"{_R}.free_cache_engine": _MEMORY,
    f"{_R}.max_num_batched_tokens": _ENGINE,
    f"{_R}.enable_chunked_prefill": _ENGINE,
    f"{_R}.enable_prefix_caching": _ENGINE,
    f"{_R}.scheduling_policy": _ENGINE,
    f"{_R}.load_format": "engines get their weights from the trainer",
    f"{_R}.layered_summon": "engines get their weights from the trainer",
    f"{_R}.multi_stage_wake_up": _MEMORY,
    f"{_R}.skip_tokenizer_init": "token ids go in and come out",
    f"{_R}.disable_log_stats": "metrics are perf/* and rollout/*",
    f"{_R}.seed": "run.seed is the one seed",
    f"{_R}.full_determinism": "run.deterministic=true asks for the same bits",
    f"{_R}.agent.num_workers": "generate functions run in the rollout manager",
    f"{_R}.checkpoint_engine.backend": "weights.transport follows placement.mode",
    f"{_R}.checkpoint_engine.engine_kwargs.*": "weights.transport follows placement.mode",
    f"{_R}.trace.*": "run.dump_rollouts=true writes every sample",
    f"{_R}.moe_load_balance_metrics_interval": "metrics only",
    f"{_R}.prometheus.*": "metrics only",
    f"{_R}.val_kwargs.do_sample": "verl's own loop reads val_kwargs.temperature alone",
    f"{_R}.multi_turn.format": "counts with multi_turn.enable",
    f"{_R}.engine_kwargs.vllm.compilation_config.*": "speed of vLLM; the engine is SGLang",
    f"{_R}.engine_kwargs.vllm.additional_config.*": "speed of vLLM; the engine is SGLang",
    f"{_R}.engine_kwargs.vllm.*_cache_gb": "speed of vLLM; the engine is SGLang",
    f"{_R}.engine_kwargs.vllm.async_scheduling": "speed of vLLM; the engine is SGLang",
    f"{_R}.engine_kwargs.vllm.max_model_len": "rollout.max_context_len",
    f"{_R}.engine_kwargs.vllm.enable_expert_parallel": "speed of vLLM; the engine is SGLang",
    f"{_R}.engine_kwargs.trtllm.*": "speed of TensorRT-LLM; the engine is SGLang",
    "actor_rollout_ref.nccl_timeout": "every wait has a deadline: loop.step_deadline_s",
    "actor_rollout_ref.hybrid_engine": "placement.mode",
    "critic.strategy": _CRITIC,
    "critic.fsdp.*": _MEMORY,
    "critic.model.fsdp_config.*": _MEMORY,
    "critic.model.use_*": _KERNELS,
    "critic.model.enable_*": "model.recompute holds for the critic as well",
    "critic.use_dynamic_bsz": _PACKED,
    "critic.*max_token_len_per_gpu": _PACKED,
    "critic.*micro_batch_size*": _PACKED,
    "critic.megatron.*_offload": _MEMORY,
    "critic.megatron.use_*": "HF folders are read and written",
    "critic.megatron.vanilla_mbridge": "HF folders are read and written",
    "critic.megatron.dist_*": "the critic starts from critic.hf_checkpoint or the policy's",
    "critic.megatron.expert_*": "an expert is whole on its rank: parallel.ep",
    "critic.megatron.virtual_*": "the critic's pipeline is split evenly",
    "critic.optim.override_optimizer_config.*": _CRITIC,
    "critic.checkpoint.*": "a checkpoint is a whole run",
    "critic.profiler.*": "metrics only",
    "critic.data_loader_seed": "run.seed is the one seed",
    "critic.shuffle": "groups stay whole within an optimizer step",
    "reward.reward_kwargs.overlong_buffer_cfg.log": "metrics only",
    "reward.launch_reward_fn_async": "rewards are computed while samples come in",
    "trainer.balance_batch": "work is balanced over ranks within the token budget",
    "trainer.log_val_generations": "metrics only",
    "trainer.validation_data_dir": "metrics only",
    "trainer.del_local_ckpt_after_load": "checkpoints stay where they are; run.keep_checkpoints",
    "trainer.max_critic_ckpt_to_keep": "the critic's checkpoints are part of the run's: run.keep_checkpoints",
    "trainer.use_v1": "one loop",
    "trainer.use_legacy_worker_impl": "one loop",
    "trainer.esi_redundant_time": "run.save_interval",
    "trainer.ray_wait_register_center_timeout": "every wait has a deadline",
    "trainer.v1.*.hybrid_rollout.switch_*": "counts with enable_switch",
    "trainer.v1.colocate_async.*": "counts with trainer_mode=colocate_async",
    "trainer.v1.sampler.sampler_kwargs.*": "counts with a custom sampler",
    "trainer.v1.sampler.sync_refill_failed_groups": "failed samples have no weight and are counted",
    "algorithm.filter_groups.max_inflight_gen_batches": "speed only; rollout.over_sampling_batch_size",
    "ray_kwargs.*": "the run starts its own Ray; placement.ray_address joins a cluster",
    "global_profiler.*": "profiling only",
    "*.profiler.*": "profiling only",
    "transfer_queue.*": "samples travel in memory",
    "sandbox_fusion.*": "counts with sandbox_fusion.url",
    "reward.sandbox_fusion.max_concurrent": "counts with reward.sandbox_fusion.url",
    "reward.sandbox_fusion.memory_limit_mb": "counts with reward.sandbox_fusion.url",
    "hydra.*": "the run's folder is run.dir",
}


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of verl that is not here: the values that leave it off, and what serves instead."""

    off: tuple[Any, ...]
    instead: str
    settles: tuple[str, ...] = ()  # our keys that answer it, given with --with


_LORA = Feature((0, None, "", False), "all weights are trained: no LoRA")
_MTP = Feature((False,), "no multi-token prediction in training; rollout.sglang.speculative_* in the engine")
_AGENT = Feature(
    (None, False), "write a generate function or an agent (docs/agents.md)", ("rollout.generate", "rollout.agent")
)
_REWARD_MODEL = Feature((False, None), "a reward server: reward.name=remote_rm, reward.remote_url", ("reward.name",))
_TEXT = Feature((), "text only; --drop it where the rows hold no such column")
_REPLAY = Feature(("disabled", False, None), "experts are routed anew in training: no routing replay")

NOT_HERE: dict[str, Feature] = {
    "data.custom_cls.*": Feature((None,), "a data source of your own: data.source", ("data.source",)),
    "data.sampler.*": Feature((None,), "a data source of your own: data.source", ("data.source",)),
    "data.tokenizer": Feature((None,), "the tokenizer is that of model.hf_checkpoint"),
    "data.image_key": _TEXT,
    "data.video_key": _TEXT,
    "data.audio_key": _TEXT,
    "data.mm_processor_kwargs*": Feature(({},), "text only"),
    "data.*_max_samples": Feature((-1, None), "a slice of the file: path@[0:N]", ("data.train",)),
    "data.tool_config_path": _AGENT,
    "data.function_tool_path": _AGENT,
    f"{_M}.lora*": _LORA,
    f"{_M}.mtp.*": _MTP,
    f"{_M}.torch_dtype": Feature(("bfloat16", "bf16", None), "model.dtype"),
    f"{_M}.external_lib": Feature((None,), "import it where train.py is started"),
    f"{_M}.custom_chat_template": Feature((None,), "the chat template is that of model.hf_checkpoint: set it there"),
    f"{_M}.tokenizer_path": Feature((None,), "the tokenizer is that of model.hf_checkpoint"),
    f"{_M}.hf_config_path": Feature((None,), "config.json is that of model.hf_checkpoint"),
    f"{_M}.override_config.*": Feature((), "config.json of model.hf_checkpoint says it: change it there"),
    f"{_A}.ppo_epochs": Feature((1,), "each sample is trained on once"),
    f"{_A}.policy_loss.*": Feature((None,), "read by a loss that is not here"),
    f"{_A}.tau_*": Feature((), "read by a loss that is not here"),
    f"{_A}.calculate_sum_pi_squared": Feature((False,), "read by an advantage that is not here"),
    f"{_A}.freeze_vision_tower": Feature((False,), "text only"),
    f"{_A}.*router_replay.*": _REPLAY,
    f"{_A}.*qat.*": Feature((False, None), "no quantisation-aware training"),
    f"{_A}.*.dtype": Feature(("bfloat16", "bf16"), "model.dtype is float32 or bfloat16"),
    f"{_A}.megatron.dynamic_context_parallel": Feature((False,), "parallel.cp is one for all sequences"),
    f"{_A}.megatron.override_mcore_model_config.*": Feature((), "model.megatron.*"),
    f"{_A}.optim.optimizer": Feature(("AdamW", "adam", "adamw", "Adam"), "the optimizer is AdamW"),
    f"{_A}.optim.optimizer_impl": Feature(("torch.optim",), "the optimizer is AdamW"),
    f"{_A}.optim.num_cycles": Feature((0.5,), "a cosine falls once"),
    f"{_A}.optim.min_lr_factor": Feature((1.0,), "optim.min_lr"),
    f"{_A}.optim.weight_decay_incr_style": Feature(("constant",), "weight decay is constant"),
    f"{_A}.optim.*_dtype": Feature(("fp32",), "gradients and moments are float32"),
    f"{_A}.optim.muon_*": Feature((), "the optimizer is AdamW"),
    f"{_A}.optim.override_optimizer_config.*": Feature((None,), "optim.*"),
    f"{_A}.optim.lr_min": Feature((0.0,), "optim.min_lr"),
    f"{_A}.optim.lr_start": Feature((0.0,), "warm-up begins at 0"),
    f"{_A}.optim.lr_decay_ratio": Feature((1.0,), "optim.decay_steps"),
    f"{_R}.do_sample": Feature((True,), "greedy samples cannot be trained on"),
    f"{_R}.ignore_eos": Feature((False,), "an answer ends at its end token"),
    f"{_R}.over_sample_rate": Feature((0, 0.0), "rollout.over_sampling_batch_size"),
    f"{_R}.quantization*": Feature((None,), "engine and trainer have the same weights: no quantised rollout"),
    f"{_R}.enable_rollout_routing_replay": _REPLAY,
    f"{_R}.engine_kwargs.vllm.*": Feature((), "the engine is SGLang: rollout.sglang.*"),
    f"{_R}.multi_turn.*": _AGENT,
    f"{_R}.agent.default_agent_loop": Feature(("single_turn_agent", None), _AGENT.instead, _AGENT.settles),
    f"{_R}.agent.*": _AGENT,
    f"{_R}.disaggregation.*": Feature((False, None), "engines are alike: no prefill servers"),
    f"{_R}.checkpoint_engine.custom_backend_module": Feature((None,), "weights.transport"),
    f"{_R}.val_kwargs.ignore_eos": Feature((False,), "an answer ends at its end token"),
    f"{_R}.custom.*": Feature((None,), "the engine is SGLang"),
    "critic.enable": Feature((None, True), "algo=ppo has a critic, the others have none: algorithm.adv_estimator"),
    "critic.ppo_epochs": Feature((1,), "each sample is trained on once"),
    "critic.loss_agg_mode": Feature((), "the critic's weights are those of the policy's loss: loss_agg_mode"),
    "critic.model.lora*": _LORA,
    "critic.optim.optimizer": Feature(("AdamW", "adam", "adamw", "Adam"), "the optimizer is AdamW"),
    "critic.optim.*": Feature((), "the critic's settings are the actor's, but critic.lr and critic.lr_warmup_steps"),
    "reward.reward_model.enable": _REWARD_MODEL,
    "reward.sandbox_fusion.url": Feature(
        (None,), "a reward server that runs code: reward.remote_url", ("reward.name",)
    ),
    "reward.reward_loop*": Feature((None,), "a reward function of your own", ("reward.name",)),
    "reward.reward_manager.source": Feature(("register",), "a reward function of your own", ("reward.name",)),
    "reward.reward_manager.module.*": Feature((None,), "a reward function of your own", ("reward.name",)),
    "reward.reward_kwargs.*": Feature((), "a reward function of your own", ("reward.name",)),
    "algorithm.use_pf_ppo": Feature((False,), "samples are not drawn anew"),
    "algorithm.gdpo_*": Feature((None,), "reward.weights adds rewards before the advantage", ("reward.weights",)),
    "distillation.enabled": Feature((False,), "algo=distill with teacher.*: docs/algorithms.md"),
    "trainer.val_only": Feature((False,), "run.mode=rollout_only"),
    "trainer.resume_from_path": Feature((None,), "verl's checkpoints are not read: export HF weights", ("run.resume",)),
    "trainer.default_hdfs_dir": Feature((None,), "checkpoints lie in run.dir"),
    "trainer.device": Feature(("cuda", "gpu"), "NVIDIA GPUs or CPUs"),
    "trainer.v1.*.hybrid_rollout.enable_switch": Feature((False,), "GPUs do not change sides"),
    "trainer.v1.sampler.max_off_policy_strategy": Feature(
        ("drop", "wait"), "samples beyond loop.max_staleness do not arise"
    ),
    "trainer.v1.sampler.custom_sampler.*": Feature((None,), "the loop takes rollouts in order"),
    "skip.*.enable": Feature((False,), "run.replay_from trains on dumped rollouts"),
}
"""Pattern -> feature; the longest pattern that fits counts."""

COUNT_WITH: dict[str, str] = {
    **{
        f"reward.reward_model.{name}": "reward.reward_model.enable"
        for name in (
            *("model_path", "model.*", "rollout.*", "profiler.*", "strategy", "megatron.*", "*micro_batch_size*"),
            *(
                "enable_resource_pool",
                "n_gpus_per_node",
                "nnodes",
                "max_length",
                "use_dynamic_bsz",
                "*max_token_len_per_gpu",
            ),
            *("ulysses_sequence_parallel_size", "param_offload", "use_remove_padding", "load_weight", "dtype"),
        )
    },
    "distillation.*": "distillation.enabled",
    "skip.*": "skip.*.enable",
    f"{_M}.lora.*": f"{_M}.lora*rank",
    f"{_M}.lora_alpha": f"{_M}.lora*rank",
    f"{_M}.target_modules": f"{_M}.lora*rank",
    f"{_M}.exclude_modules": f"{_M}.lora*rank",
    "critic.model.lora.*": "critic.model.lora*rank",
    f"{_M}.mtp.*": f"{_M}.mtp.enable",
    f"{_R}.multi_turn.*": f"{_R}.multi_turn.enable",
    "algorithm.pf_ppo.*": "algorithm.use_pf_ppo",
}
"""Pattern -> the switch without which its keys have no effect."""

LEGACY = {
    "custom_reward_function.": "reward.custom_reward_function.",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.overlong_buffer.": "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_model.reward_loop_class_name": "reward.reward_manager.module.name",
    "reward_model.launch_reward_fn_async": "reward.launch_reward_fn_async",
    "reward_model.use_reward_loop": "reward.launch_reward_fn_async",
    "reward_model.reward_kwargs.": "reward.reward_kwargs.",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.sandbox_fusion.": "reward.sandbox_fusion.",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.": "reward.reward_model.",
    "sandbox_fusion.": "reward.sandbox_fusion.",
    "actor_rollout_ref.actor.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    "actor_rollout_ref.actor.optim.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.veomni.ulysses_parallel_size": "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.veomni.expert_parallel_size": "actor_rollout_ref.actor.megatron.expert_model_parallel_size",
    "actor_rollout_ref.actor.torchtitan.tensor_parallel_size": "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
    "actor_rollout_ref.actor.torchtitan.expert_parallel_size": "actor_rollout_ref.actor.megatron.expert_model_parallel_size",
    "actor_rollout_ref.actor.engine.tp": "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
    "actor_rollout_ref.actor.engine.pp": "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
    "actor_rollout_ref.actor.engine.vpp": "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size",
    "actor_rollout_ref.actor.engine.cp": "actor_rollout_ref.actor.megatron.context_parallel_size",
    "actor_rollout_ref.actor.engine.ep": "actor_rollout_ref.actor.megatron.expert_model_parallel_size",
    "critic.fsdp.ulysses_sequence_parallel_size": "critic.ulysses_sequence_parallel_size",
    "critic.grad_clip": "critic.optim.clip_grad",
}
"""Other and older names of a key: a whole key, or the begin of one that ends with a dot -> the name used here."""


def canonical(key: str) -> str:
    """The name that tables have for ``key``."""
    for old, new in LEGACY.items():
        if key == old or (old.endswith(".") and key.startswith(old)):
            return new + key[len(old) :]
    return key


def without_effect(key: str) -> str | None:
    """Why ``key`` sets nothing and changes nothing; None where it may."""
    return _longest(WITHOUT_EFFECT, key)


def feature(key: str) -> Feature | None:
    """The feature that ``key`` belongs to, where it is not here."""
    return _longest(NOT_HERE, key)


def switch(key: str) -> str | None:
    """The key without which ``key`` has no effect."""
    return _longest(COUNT_WITH, key)


def _longest[T](table: dict[str, T], key: str) -> T | None:
    fitting = [pattern for pattern in table if fnmatchcase(key, pattern)]
    return table[max(fitting, key=len)] if fitting else None
