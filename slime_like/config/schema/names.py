"""Tables that map config names to "module:attribute" (FAMILIES: to a ``FamilyEntry``).

This module does not import torch. To add a component, write one file with the function or class and add one line to its
table below: ``"my_loss": "my_package.my_module:my_loss"`` in ``LOSSES``. ``docs/extending.md`` gives the
interface, the table and an example of each kind of component.
"""

from slime_like.config.schema.family_entry import FamilyEntry

ALGORITHMS = {
    "grpo": "slime_like.config.schema.algo:GrpoConfig",
    "dr_grpo": "slime_like.config.schema.algo:DrGrpoConfig",
    "rloo": "slime_like.config.schema.algo:RlooConfig",
    "gspo": "slime_like.config.schema.algo:GspoConfig",
    "cispo": "slime_like.config.schema.algo:CispoConfig",
    "dapo": "slime_like.config.schema.algo:DapoConfig",
    "reinforce_pp": "slime_like.config.schema.algo:ReinforcePlusPlusConfig",
    "reinforce_pp_baseline": "slime_like.config.schema.algo:ReinforcePlusPlusBaselineConfig",
    "ppo": "slime_like.config.schema.role_algo:PpoConfig",
    "distill": "slime_like.config.schema.role_algo:DistillConfig",
    "sft": "slime_like.config.schema.algo:SftConfig",
}
"""``algo=<name>`` -> schema of its keys, the default first."""
LOSSES = {
    "policy_gradient": "slime_like.algo.loss:policy_gradient",
    "gspo": "slime_like.algo.loss:gspo",
    "cispo": "slime_like.algo.loss:cispo",
    "sft": "slime_like.algo.loss:sft",
}
GROUP_ADVANTAGES = {
    "grpo": "slime_like.algo.advantage:grpo",
    "dr_grpo": "slime_like.algo.advantage:dr_grpo",
    "rloo": "slime_like.algo.advantage:rloo",
}
TOKEN_ADVANTAGES = {
    "gae": "slime_like.algo.gae:GeneralisedAdvantage",
    "distill": "slime_like.algo.distill:ReverseKL",
    "reinforce_pp": "slime_like.algo.token_advantage:ReinforcePlusPlus",
    "reinforce_pp_baseline": "slime_like.algo.token_advantage:ReinforcePlusPlusBaseline",
}
OFF_POLICY = {
    "importance": "slime_like.algo.off_policy:importance_correction",
}
KL_ESTIMATORS = {
    "k1": "slime_like.algo.loss:k1",
    "k2": "slime_like.algo.loss:k2",
    "k3": "slime_like.algo.loss:k3",
    "low_var_kl": "slime_like.algo.loss:low_var_kl",
}
FILTERS = {
    "nonzero_std": "slime_like.algo.filters:nonzero_std",
    "completed": "slime_like.algo.filters:completed",
}
REWARDS = {
    "answer": "slime_like.reward.answer:answer",
    "dapo": "slime_like.reward.dapo:dapo",
    "deepscaler": "slime_like.reward.deepscaler:deepscaler",
    "exact": "slime_like.reward.exact:exact",
    "f1": "slime_like.reward.f1:f1",
    "given": "slime_like.reward.given:given",
    "gpqa": "slime_like.reward.gpqa:gpqa",
    "math": "slime_like.reward.math:math",
    "remote_rm": "slime_like.reward.remote:RemoteReward",
}
"""Reward name -> function; remote_rm -> class of a client.

With the prefix ``boxed_``, a reward scores the content of the response's last box.
"""
GENERATE = {
    "openai_agent": "slime_like.rollout.agent.generate:OpenAIAgent",
    "single_turn": "slime_like.rollout.generate.single_turn:single_turn",
}
DATA_SOURCES = {
    "file": "slime_like.data.prompts:FileSource",
}
SINKS = {
    "tensorboard": "slime_like.metrics.tensorboard_sink:TensorboardSink",
    "wandb": "slime_like.metrics.wandb_sink:WandbSink",
}
_BIASED_EXPERTS = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
FAMILIES = {
    "deepseek_v2": FamilyEntry(
        "slime_like.train.megatron.families.deepseek:DeepseekV2",
        yarn=True,
        engine_fields={"moe_layer_freq": 1, "scoring_func": "softmax"},
    ),
    "deepseek_v3": FamilyEntry(
        "slime_like.train.megatron.families.deepseek:DeepseekV3", yarn=True, engine_fields=_BIASED_EXPERTS
    ),
    "glm4": FamilyEntry("slime_like.train.megatron.families.glm4:Glm4", engine_dp_attention=False),
    "glm4_moe": FamilyEntry("slime_like.train.megatron.families.glm4:Glm4Moe", engine_ties=False),
    "kimi_k2": FamilyEntry(
        "slime_like.train.megatron.families.deepseek:DeepseekV3",
        yarn=True,
        config_class="deepseek_v3",
        engine_fields=_BIASED_EXPERTS,
    ),
    "llama": FamilyEntry(
        "slime_like.train.megatron.families.llama:Llama",
        engine_dp_attention=False,
        fused_engine_model="LlamaForCausalLM",
    ),
    "mimo": FamilyEntry(
        "slime_like.train.megatron.families.mimo:Mimo",
        qkv_bias=True,
        engine_dp_attention=False,
        config_class="qwen2",
    ),
    "minimax_m2": FamilyEntry(
        "slime_like.train.megatron.families.minimax:MinimaxM2",
        projection_norms=True,
        engine_ties=False,
        engine_rotary_dim=True,
        engine_fields={
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "use_routing_bias": True,
        },
    ),
    "qwen2": FamilyEntry(
        "slime_like.train.megatron.families.qwen2:Qwen2",
        qkv_bias=True,
        engine_dp_attention=False,
        fused_engine_model="Qwen2ForCausalLM",
    ),
    "qwen3": FamilyEntry(
        "slime_like.train.megatron.families.qwen3:Qwen3",
        head_norms=True,
        fused_engine_model="Qwen3ForCausalLM",
        bitwise=True,
    ),
    "qwen3_5": FamilyEntry("slime_like.train.megatron.families.qwen3_5:Qwen35", output_gate=True, head_norms=True),
    "qwen3_5_moe": FamilyEntry(
        "slime_like.train.megatron.families.qwen3_5:Qwen35Moe", output_gate=True, head_norms=True
    ),
    "qwen3_5_moe_text": FamilyEntry(
        "slime_like.train.megatron.families.qwen3_5:Qwen35Moe", output_gate=True, head_norms=True
    ),
    "qwen3_5_text": FamilyEntry("slime_like.train.megatron.families.qwen3_5:Qwen35", output_gate=True, head_norms=True),
    "qwen3_moe": FamilyEntry(
        "slime_like.train.megatron.families.qwen3_moe:Qwen3Moe", head_norms=True, engine_ties=False
    ),
    "qwen3_next": FamilyEntry(
        "slime_like.train.megatron.families.qwen3_next:Qwen3Next",
        output_gate=True,
        head_norms=True,
        engine_ties=False,
    ),
}
"""``model_type`` of config.json -> family."""
MIXERS = {
    "G": "slime_like_plugins.qwen_gdn.spec:layer_spec",
}
"""Layer symbol of a hybrid stack -> plugin function that returns its ModuleSpec."""
ATTENTIONS = {
    "torch": "slime_like.train.megatron.model.layers:PackedAttention",
    "te": "slime_like.train.megatron.model.te_attention:TEAttention",
}
FLOAT64_LAYERS = {
    "attention": "slime_like.train.megatron.model.float64_layers:attention",
    "gdn": "slime_like_plugins.qwen_gdn.float64:delta_net",
    "mlp": "slime_like.train.megatron.model.float64_layers:mlp",
}
"""Kind of layer -> function that makes these layers compute in float64, for weights.probe_layers.

The function takes the model and an exit stack, whose closing restores the layers, and returns the number of these layers.
"""
GDN_BACKENDS = {
    "fla": "slime_like_plugins.qwen_gdn.fla:FlaGDN",
    "flashqla": "slime_like_plugins.qwen_gdn.flashqla:FlashQLAGDN",
    "torch": "slime_like_plugins.qwen_gdn.torch_chunk:TorchGDN",
}
CPU_KERNELS = {
    "c": "slime_like_plugins.megatron_cpu.layer:with_c_kernels",
}
COLOCATED_TRANSPORTS = {
    "tensor": "slime_like.weight_sync.tensor:TensorSender",
    "ipc": "slime_like.weight_sync.ipc:IpcSender",
}
SPLIT_TRANSPORTS = {
    "broadcast": "slime_like.weight_sync.broadcast:BroadcastSender",
}
"""``weights.transport`` by ``placement.mode``. ``cluster.plan.transport`` chooses the transport of ``auto``."""
