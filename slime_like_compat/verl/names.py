"""Other names of verl's keys, and lookups of a key: its missing feature, the switch it needs, or why it has no effect.

``verl_keys.VERL_KEYS`` lists the keys with a counterpart.
"""

from __future__ import annotations

import functools
from fnmatch import fnmatchcase

from slime_like_compat.verl.features import NOT_HERE, READ_WITH, Feature
from slime_like_compat.verl.without_effect import WITHOUT_EFFECT

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
"""Other and older names: a key, or a prefix that ends with a dot -> the name in the tables."""


@functools.lru_cache(maxsize=4096)  # the translation of a job asks for each of its keys several times
def canonical(key: str) -> str:
    """Return the name by which this package's tables list ``key``: another one for a ``LEGACY`` name, else ``key`` itself."""
    for old, new in LEGACY.items():
        if key == old or (old.endswith(".") and key.startswith(old)):
            return new + key[len(old) :]
    return key


def without_effect(key: str) -> str | None:
    """Return the reason why ``key`` has no effect here; None if it may have one."""
    return _longest(WITHOUT_EFFECT, key)


def feature(key: str) -> Feature | None:
    """Return the missing feature that ``key`` belongs to; None for any other key."""
    return _longest(NOT_HERE, key)


def switch(key: str) -> str | None:
    """Return the name or pattern of a switch that must be on for ``key`` to have an effect; None if ``key`` has no switch."""
    return _longest(READ_WITH, key)


def _longest[T](table: dict[str, T], key: str) -> T | None:
    """Return the entry of the longest pattern that matches ``key``; None if no pattern matches."""
    patterns = [pattern for pattern in table if fnmatchcase(key, pattern)]
    return table[max(patterns, key=len)] if patterns else None
