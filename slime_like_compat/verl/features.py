"""Keys of verl's features that this project lacks, each with the alternative.

A pattern is a key in which ``*`` stands for any text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_like_compat.verl.defaults import ACTOR as _A
from slime_like_compat.verl.defaults import MODEL as _M
from slime_like_compat.verl.defaults import ROLLOUT as _R


@dataclass(frozen=True, slots=True)
class Feature:
    """Feature of verl that this project lacks: the values that switch it off, and the alternative here."""

    off: tuple[Any, ...]  # (): no value does
    instead: str
    alternatives: tuple[str, ...] = ()  # our keys that may replace it, set with --with


_LORA = Feature((0, None, "", False), "all weights are trained: no LoRA")
_MTP = Feature((False,), "no multi-token prediction in training; rollout.sglang.speculative_* in the engine")
_AGENT = Feature(
    (None, False), "write a generate function or an agent (docs/agents.md)", ("rollout.generate", "rollout.agent")
)
_REWARD_MODEL = Feature((False, None), "a reward server: reward.name=remote_rm, reward.remote_url", ("reward.name",))
_TEXT = Feature((), "text only; --drop it if the rows have no such column")
_REPLAY = Feature(
    ("disabled", False, None), "algo.routing_replay: old for R2, rollout for R3", ("algo.routing_replay",)
)

NOT_HERE: dict[str, Feature] = {
    "data.custom_cls.*": Feature((None,), "write a data source: data.source", ("data.source",)),
    "data.sampler.*": Feature((None,), "write a data source: data.source", ("data.source",)),
    "data.tokenizer": Feature((None,), "the tokenizer is read from model.hf_checkpoint"),
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
    f"{_M}.external_lib": Feature(
        (None,), "no key imports a library: add functions and classes as in docs/extending.md"
    ),
    f"{_M}.custom_chat_template": Feature((None,), "the chat template is read from model.hf_checkpoint: set it there"),
    f"{_M}.tokenizer_path": Feature((None,), "the tokenizer is read from model.hf_checkpoint"),
    f"{_M}.hf_config_path": Feature((None,), "config.json is read from model.hf_checkpoint"),
    f"{_M}.override_config.*": Feature((), "config.json of model.hf_checkpoint has this value: change it there"),
    f"{_A}.ppo_epochs": Feature((1,), "each sample is trained on once"),
    f"{_A}.policy_loss.*": Feature((None,), "read by a loss that is not supported"),
    f"{_A}.tau_*": Feature((), "read by a loss that is not supported"),
    f"{_A}.calculate_sum_pi_squared": Feature((False,), "read by an advantage that is not supported"),
    f"{_A}.freeze_vision_tower": Feature((False,), "text only"),
    f"{_A}.*router_replay.*": _REPLAY,
    f"{_A}.*qat.*": Feature((False, None), "no quantisation-aware training"),
    f"{_A}.*.dtype": Feature(("bfloat16", "bf16"), "model.dtype is float32 or bfloat16"),
    f"{_A}.megatron.dynamic_context_parallel": Feature((False,), "parallel.cp is the same for all sequences"),
    f"{_A}.megatron.override_mcore_model_config.*": Feature((), "model.megatron.*"),
    f"{_A}.optim.optimizer": Feature(("AdamW", "adam", "adamw", "Adam"), "the optimizer is AdamW"),
    f"{_A}.optim.optimizer_impl": Feature(("torch.optim",), "the optimizer is AdamW"),
    f"{_A}.optim.num_cycles": Feature((0.5,), "a cosine schedule has half a period"),
    f"{_A}.optim.min_lr_factor": Feature((1.0,), "optim.min_lr"),
    f"{_A}.optim.weight_decay_incr_style": Feature(("constant",), "weight decay is constant"),
    f"{_A}.optim.*_dtype": Feature(("fp32",), "gradients and moments are float32"),
    f"{_A}.optim.muon_*": Feature((), "the optimizer is AdamW"),
    f"{_A}.optim.override_optimizer_config.*": Feature((None,), "optim.*"),
    f"{_A}.optim.lr_min": Feature((0.0,), "optim.min_lr"),
    f"{_A}.optim.lr_start": Feature((0.0,), "warm-up rises from 0: its first step has lr / warmup_steps"),
    f"{_A}.optim.lr_decay_ratio": Feature((1.0,), "optim.decay_steps"),
    f"{_R}.do_sample": Feature((True,), "greedy samples cannot be trained on"),
    f"{_R}.ignore_eos": Feature((False,), "an answer ends at its end token"),
    f"{_R}.over_sample_rate": Feature((0, 0.0), "rollout.over_sampling_batch_size"),
    f"{_R}.quantization*": Feature((None,), "engine and trainer have the same weights: no quantised rollout"),
    f"{_R}.enable_rollout_routing_replay": _REPLAY,
    f"{_R}.engine_kwargs.vllm.*": Feature((), "the engine is SGLang: rollout.sglang.*"),
    f"{_R}.multi_turn.*": _AGENT,
    f"{_R}.agent.default_agent_loop": Feature(("single_turn_agent", None), _AGENT.instead, _AGENT.alternatives),
    f"{_R}.agent.*": _AGENT,
    f"{_R}.disaggregation.*": Feature((False, None), "all engines have the same settings: no prefill servers"),
    f"{_R}.checkpoint_engine.custom_backend_module": Feature((None,), "weights.transport"),
    f"{_R}.val_kwargs.ignore_eos": Feature((False,), "an answer ends at its end token"),
    f"{_R}.custom.*": Feature((None,), "the engine is SGLang"),
    "critic.enable": Feature((None, True), "algo=ppo has a critic, the others have none: algorithm.adv_estimator"),
    "critic.ppo_epochs": Feature((1,), "each sample is trained on once"),
    "critic.loss_agg_mode": Feature((), "the critic's loss has the policy's aggregation: give the actor's value"),
    "critic.model.lora*": _LORA,
    "critic.optim.optimizer": Feature(("AdamW", "adam", "adamw", "Adam"), "the optimizer is AdamW"),
    "critic.optim.*": Feature((), "the critic has the actor's settings except critic.lr and critic.lr_warmup_steps"),
    "reward.reward_model.enable": _REWARD_MODEL,
    "reward.sandbox_fusion.url": Feature(
        (None,), "a reward server that runs code: reward.remote_url", ("reward.name",)
    ),
    "reward.reward_loop*": Feature((None,), "write a reward function", ("reward.name",)),
    "reward.reward_manager.source": Feature(("register",), "write a reward function", ("reward.name",)),
    "reward.reward_manager.module.*": Feature((None,), "write a reward function", ("reward.name",)),
    "reward.reward_kwargs.*": Feature((), "write a reward function", ("reward.name",)),
    "algorithm.use_pf_ppo": Feature((False,), "samples are not drawn again"),
    "algorithm.gdpo_*": Feature((None,), "reward.weights sums rewards before the advantage", ("reward.weights",)),
    "distillation.enabled": Feature((False,), "algo=distill with teacher.*: docs/algorithms.md"),
    "trainer.val_only": Feature((False,), "run.mode=rollout_only"),
    "trainer.resume_from_path": Feature(
        (None,), "verl's checkpoints cannot be read: export HF weights", ("run.resume",)
    ),
    "trainer.default_hdfs_dir": Feature((None,), "checkpoints are in run.dir"),
    "trainer.device": Feature(("cuda", "gpu"), "NVIDIA GPUs or CPUs"),
    "trainer.v1.*.hybrid_rollout.enable_switch": Feature((False,), "GPUs do not move between trainer and engines"),
    "trainer.v1.sampler.max_off_policy_strategy": Feature(("drop", "wait"), "samples never exceed loop.max_staleness"),
    "trainer.v1.sampler.custom_sampler.*": Feature((None,), "the loop takes rollouts in order"),
    "skip.*.enable": Feature((False,), "run.replay_from trains on dumped rollouts"),
}
"""Pattern -> feature; the longest pattern that matches counts."""

READ_WITH: dict[str, str] = {
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
"""Pattern -> the switch without which the matching keys have no effect."""
