"""Invalid values of the algorithm, batches, model, layout, optimizer or run end in one message."""

from __future__ import annotations

from tests.config.bad_input import each_rule, one_message

# extra arguments, then words that the message must contain
RULES = {
    "not a number": ("optim.lr=nan", "optim.lr=nan", "[0, "),
    "beta": ("optim.beta2=1.5", "optim.beta2=1.5", "[0, 1]"),
    "seed": ("run.seed=-1", "run.seed=-1", "[0, "),
    "identity, batch": (
        "loop.global_batch_size=100",
        "32 * rollout.n_samples_per_prompt 8 = 256",
        "= 100",
        "loop.global_batch_size=256",
    ),
    "identity, steps": (
        "loop.global_batch_size=64",
        "64 * loop.steps_per_rollout 1 = 64",
        "loop.steps_per_rollout=4",
        "rollout.batch_size=8",
    ),
    "identity, open": (
        "loop.steps_per_rollout=7",
        "256 samples",
        "loop.steps_per_rollout=7",
        "loop.steps_per_rollout=4 or 8",
    ),
    "loss": ("algo.loss=policy_gradent", "algo.loss='policy_gradent'", "'policy_gradient'"),
    "advantage": ("algo.group_advantage=grop", "algo.group_advantage='grop'", "'grpo'"),
    "no advantage": ("algo.group_advantage=null", "algo.group_advantage=null under", "algo.group_advantage=grpo"),
    "no token advantage": (
        "algo=ppo algo.token_advantage=null",
        "algo.token_advantage=null under algo=ppo, whose advantages are gae",
        "remove algo.token_advantage",
    ),
    "no token advantage of a teacher": (
        "algo=distill teacher.hf_checkpoint=t algo.token_advantage=null",
        "algo.token_advantage=null under algo=distill, whose advantages are distill",
        "remove algo.token_advantage",
    ),
    "loss of another algorithm": ("algo.loss=sft", "algo.loss='sft'", "algo=grpo", "algo=sft"),
    "advantage under sft": (
        "algo=sft rollout.n_samples_per_prompt=1 algo.group_advantage=grpo",
        "algo.group_advantage='grpo'",
        "set algo.group_advantage=null",
    ),
    "advantage with reinforce_pp": (
        "algo=reinforce_pp algo.group_advantage=grpo",
        "algo.group_advantage='grpo'",
        "reinforce_pp",
        "set algo.group_advantage=null",
    ),
    "token advantage of another algorithm": (
        "algo.token_advantage=reinforce_pp",
        "algo.token_advantage='reinforce_pp'",
        "algo=reinforce_pp",
    ),
    "clip range of sft": ("algo=sft algo.eps_clip=0.1", "algo.eps_clip=0.1", "algo=grpo", "algo=sft"),
    "dual clip of cispo": (
        "algo=cispo algo.eps_clip_c=3",
        "algo.eps_clip_c=3",
        "algo=grpo",
        "algo=cispo: remove algo.eps_clip_c, or choose one of these algorithms",
    ),
    "aggregation of gspo": (
        "algo=gspo algo.aggregation=token_mean",
        "algo.aggregation='token_mean'",
        "algo.aggregation=sequence_mean",
    ),
    "tis_clip alone": ("algo.tis_clip=3", "algo.tis_clip=3.0", "algo.use_tis=true"),
    "KL estimator": (
        "algo.kl_loss_type=mine",
        "algo.kl_loss_type='mine' is not one of k1, k2, k3, low_var_kl: choose one of these",
        "(your own: add it to KL_ESTIMATORS in slime_like/config/schema/names.py, see docs/extending.md)",
    ),
    "misspelt KL estimator": ("algo.kl_loss_type=low_var", "low_var_kl: did you mean 'low_var_kl'?", "KL_ESTIMATORS"),
    "mis_low alone": ("algo.mis_low=0.1", "algo.mis_low=0.1", "algo.use_mis=true"),
    "KL estimator of no KL": (
        "algo.kl_loss_type=k1",
        "algo.kl_loss_type='k1' has no effect with algo.kl_loss_coef=0",
        "set algo.kl_loss_coef above 0",
    ),
    **{
        f"KL estimator of no KL in the rewards of {algo}": (
            f"algo={algo} algo.kl_reward_type=k2",
            "algo.kl_reward_type='k2' has no effect with algo.kl_coef=0",
            "set algo.kl_coef above 0",
        )
        for algo in ("ppo", "reinforce_pp", "reinforce_pp_baseline")
    },
    "rejection bound alone": ("algo.rejection_low=0.5", "algo.rejection_low=0.5", "algo.rejection=geometric"),
    "rejection without bounds": ("algo.rejection=product", "algo.rejection=product", "algo.rejection_high"),
    "rejection with 0 as the only bound": (
        "algo.rejection=product algo.rejection_low=0",
        "algo.rejection=product has no bounds",
        "algo.rejection_high",
    ),
    "rejection bound below every ratio": (
        "algo.rejection=product algo.rejection_low=1e-9 algo.rejection_high=2",
        "algo.rejection_low=1e-09",
        "[2.06e-09, 4.85e+08]",
        "remove algo.rejection_low",
    ),
    "rejection bound above every ratio": (
        "algo.rejection=geometric algo.rejection_low=0.5 algo.rejection_high=5e8",
        "algo.rejection_high=5e+08",
        "[2.06e-09, 4.85e+08]",
        "remove algo.rejection_high",
    ),
    "rejection word": ("algo.rejection=sequence", "algo.rejection='sequence'", "geometric"),
    "two weights": (
        "algo.use_tis=true algo.use_mis=true",
        "algo.use_tis=true",
        "set algo.use_tis=false or algo.use_mis=false",
    ),
    "nothing to correct": (
        "algo.use_rollout_logprobs=true algo.use_tis=true",
        "algo.use_rollout_logprobs=true",
        "algo.use_tis",
    ),
    "mask of nothing": ("algo.mask_offpolicy=true", "algo.mask_offpolicy=true", "rollout.partial_rollout=true"),
    "overlong under sft": (
        "algo=sft rollout.n_samples_per_prompt=1 reward.overlong_buffer_len=9",
        "reward.overlong_buffer_len=9",
        "algo=sft",
    ),
    "dual clip": ("algo.eps_clip_c=1", "algo.eps_clip_c=1.0", "above 1"),
    "prepare": ("run.prepare=quickstart", "run.prepare='quickstart'", "my_package.my_module:function"),
    "family": ("model.family=qwen33", "model.family='qwen33'", "'qwen3'"),
    "attention": ("model.attention=flash", "model.attention='flash'", "te, torch"),
    "te on a CPU": (
        "model.attention=te placement.device=cpu",
        "model.attention=te on a CPU",
        "set model.attention=auto",
    ),
    "te and determinism": (
        "model.attention=te run.deterministic=true",
        "model.attention=te with run.deterministic=true",
        "set model.attention=auto",
        "run.deterministic=false",
    ),
    "te in float32": (
        "model.attention=te model.dtype=float32",
        "model.attention=te with model.dtype=float32",
        "set model.dtype=bfloat16",
    ),
    "te by another exchange": (
        "model.attention=te model.megatron.cp_comm_type=a2a",
        "model.megatron.cp_comm_type='a2a' with model.attention=te",
        "remove cp_comm_type",
    ),
    "selective recompute of nothing": (
        "model.recompute=selective model.recompute_modules=[]",
        "model.recompute=selective recomputes the modules of model.recompute_modules, which is empty",
        "core_attn",
    ),
    "recompute": ("model.recompute_modules=[core]", "model.recompute_modules=['core']", "core_attn"),
    "staleness": ("loop.max_staleness=1", "loop.max_staleness=1", "placement.mode=split"),
    "layout": (
        "parallel.tp=2 parallel.pp=2 placement.actor_num_gpus_per_node=6",
        "= 4 ranks per model",
        "= 6 ranks",
        "placement.actor_num_gpus_per_node=8",
    ),
    "layout over three nodes": (
        "parallel.tp=4 placement.actor_num_nodes=3 placement.actor_num_gpus_per_node=1 placement.ray_address=auto",
        "= 4 ranks per model",
        "= 3 ranks",
        "placement.actor_num_gpus_per_node=4, or lower parallel.*",
    ),
    "samples for fewer ranks": (
        "parallel.tp=2 placement.actor_num_nodes=3 placement.actor_num_gpus_per_node=8 rollout.batch_size=1 "
        "placement.ray_address=auto",
        "8 samples per optimizer step leave some of the 12 data-parallel ranks without a sequence",
        "set placement.actor_num_gpus_per_node=4",
    ),
    "samples for fewer nodes": (
        "parallel.tp=2 placement.actor_num_nodes=20 placement.actor_num_gpus_per_node=1 rollout.batch_size=1 "
        "placement.ray_address=auto",
        "8 samples per optimizer step leave some of the 10 data-parallel ranks without a sequence",
        "lower placement.actor_num_nodes",
    ),
    "expert parallel": (
        "parallel.ep=4 parallel.cp=2",
        "parallel.ep=4",
        "2 ranks of a pipeline stage",
        "set parallel.ep to one of 1, 2",
        "set placement.actor_num_gpus_per_node so that the trainer has a multiple of 4 ranks",
    ),
    "two nodes": (
        "placement.actor_num_nodes=2 placement.actor_num_gpus_per_node=8",
        "placement.actor_num_nodes=2",
        "placement.ray_address=auto",
    ),
    "train only": ("run.mode=train_only", "run.mode=train_only", "run.replay_from=<folder>"),
    "evaluation of a replay": (
        "run.mode=train_only run.replay_from=x evaluation.datasets.a=b.jsonl",
        "evaluation.datasets with run.mode=train_only",
        "set evaluation.datasets={}",
    ),
    "replay in full": ("run.replay_from=x", "run.replay_from='x'", "run.mode=train_only"),
    "sft samples": ("algo=sft", "rollout.n_samples_per_prompt=8", "set rollout.n_samples_per_prompt=1"),
    "sft evaluation": ("algo=sft rollout.n_samples_per_prompt=1 evaluation.datasets.a=b", "evaluation.datasets", "={}"),
    "schedule": ("optim.min_lr=1", "optim.min_lr=1", "optim.lr=1e-06"),
    "warm-up": ("optim.schedule=cosine optim.warmup_steps=100", "optim.warmup_steps=100", "optim.decay_steps"),
    "schedule longer than the run": (
        "optim.schedule=linear optim.decay_steps=200",
        "optim.decay_steps=200 is longer than the run",
        "100 optimizer steps",
        "set optim.decay_steps=100",
        "loop.num_rollout",
    ),
    "schedule longer than the run after the critic's warm-up": (
        "algo=ppo critic.warmup_rollouts=10 optim.schedule=linear optim.decay_steps=95",
        "optim.decay_steps=95 is longer than the run",
        "90 optimizer steps ((loop.num_rollout - critic.warmup_rollouts) * loop.steps_per_rollout)",
    ),
    "warm-up longer than the run": (
        "optim.warmup_steps=101",
        "optim.warmup_steps=101 is longer than the run",
        "100 optimizer steps",
        "set optim.warmup_steps=100",
    ),
    "wsd longer than its run": (
        "optim.schedule=wsd optim.warmup_steps=60 optim.wsd_decay_steps=50",
        "optim.warmup_steps=60 and optim.wsd_decay_steps=50",
        "none of 100",
    ),
    "warm-up twice": (
        "optim.warmup_steps=5 optim.warmup_fraction=0.1",
        "optim.warmup_steps=5 and optim.warmup_fraction=0.1",
        "remove optim.warmup_steps or",
    ),
    "steps that nothing reads": ("optim.decay_steps=50", "optim.decay_steps=50", "linear, cosine and wsd", "constant"),
    "wsd steps that nothing reads": (
        "optim.schedule=cosine optim.wsd_decay_steps=5",
        "optim.wsd_decay_steps=5",
        "only by optim.schedule wsd",
    ),
    "wsd shape that nothing reads": (
        "optim.schedule=cosine optim.wsd_decay_style=linear",
        "optim.wsd_decay_style='linear' has no effect with optim.schedule=cosine",
        "set optim.schedule=wsd",
    ),
    "share of no offload": (
        "optim.cpu_offload_fraction=0.5",
        "optim.cpu_offload_fraction=0.5 has no effect with optim.cpu_offload=false",
        "set optim.cpu_offload=true",
    ),
    "method of no recompute": (
        "model.recompute=selective model.recompute_method=block",
        "model.recompute_method='block' has no effect with model.recompute=selective",
        "set model.recompute=full",
    ),
    "layers of no recompute": (
        "model.recompute_num_layers=2",
        "model.recompute_num_layers=2",
        "model.recompute=none",
        "model.recompute=full",
    ),
    "gather alone": (
        "parallel.overlap_param_gather=true",
        "parallel.overlap_param_gather=true",
        "parallel.overlap_grad_reduce=true",
    ),
    "buckets of nothing": ("parallel.bucket_size=5", "parallel.bucket_size=5", "parallel.overlap_grad_reduce=true"),
    "offload of a whole optimizer": (
        "optim.cpu_offload=true parallel.distributed_optimizer=false",
        "optim.cpu_offload=true",
        "parallel.distributed_optimizer=true",
    ),
    "offload of a split trainer": (
        "placement.offload_train=true placement.mode=split",
        "placement.offload_train=true with placement.mode=split",
        "placement.mode=colocated",
    ),
    "offload of split engines": (
        "placement.offload_rollout=true placement.mode=split",
        "placement.offload_rollout=true with placement.mode=split",
        "placement.mode=colocated",
    ),
    "offload without a trainer": (
        "placement.offload_train=true run.mode=rollout_only",
        "placement.offload_train=true with run.mode=rollout_only",
        "set placement.offload_train=false",
    ),
    "offload and stalled engines": (
        "placement.offload_rollout=true health.on_stalled_engine=wait",
        "placement.offload_rollout=true with health.on_stalled_engine=wait",
        "health.on_stalled_engine=restart",
    ),
    "offload and a skipped push": (
        "placement.offload_rollout=true weights.debug_skip_push_at=1",
        "weights.debug_skip_push_at=1",
        "remove weights.debug_skip_push_at, or set placement.offload_rollout=false",
    ),
    "offload without a memory saver": (
        "placement.offload_rollout=true rollout.sglang.enable_memory_saver=false",
        "rollout.sglang.enable_memory_saver=false",
        "remove rollout.sglang.enable_memory_saver",
    ),
    "offload with graphs that cannot be released": (
        "placement.offload_rollout=true rollout.sglang.cuda_graph_backend_prefill=breakable",
        "rollout.sglang.cuda_graph_backend_prefill=breakable",
        "set rollout.sglang.cuda_graph_backend_prefill to disabled",
    ),
    "offload with decode graphs that cannot be released": (
        "placement.offload_rollout=true rollout.sglang.cuda_graph_backend_decode=breakable",
        "rollout.sglang.cuda_graph_backend_decode=breakable",
        "set rollout.sglang.cuda_graph_backend_decode to full",
    ),
    "no share": ("optim.cpu_offload_fraction=0", "optim.cpu_offload_fraction=0", "above 0"),
    "megatron key": ("model.megatron.softmax_scal=0.1", "model.megatron.softmax_scal=0.1", "'softmax_scale'"),
    "megatron key of ours": ("model.megatron.num_layers=3", "model.megatron.num_layers=3", "config.json"),
    "megatron object": (
        "model.megatron.activation_func=gelu",
        "model.megatron.activation_func='gelu'",
        "Python object",
    ),
}


@each_rule(RULES)
def test_the_message_names_key_value_and_fix(case: tuple[str, ...], argv: list[str]) -> None:
    one_message(case, argv)
