"""Every bad input ends in one message that names key or file, value and fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.config.load import load_config
from tests.config.bad_input import message

# extra arguments, what the message must hold
KEYS = {
    "unknown key": ("rollout.bach_size=3", "rollout.bach_size=3", "'rollout.batch_size'"),
    "unknown key with plus": ("+rollout.foo=1", "rollout.foo=1", "rollout has batch_size"),
    "unknown group": ("rolout.batch_size=1", "rolout.batch_size=1", "'rollout.batch_size'"),
    "nothing near": ("xyz=1", "xyz=1", "the groups are model, parallel"),
    "key without group": ("batch_size=3", "batch_size=3", "'rollout.batch_size'"),
    "group instead of key": ("rollout=3", "rollout=3", "rollout.batch_size"),
    "key of another algorithm": (
        "algo=dr_grpo algo.kl_coef=1",
        "algo.kl_coef=1",
        "algo=reinforce_pp",
        "'algo.kl_loss_coef'",
    ),
    "unknown algorithm": ("algo=grop", "algo=grop", "'grpo'"),
    "unknown recipe": ("+recipe=quickstrat", "+recipe=quickstrat", "'quickstart'"),
    "no override": ("rollout", "'rollout'", "key=value"),
    "removal": ("~rollout.batch_size", "~rollout.batch_size", "set it to null"),
    "hydra's own": ("hydra.run.dir=x", "hydra.run.dir=x", "--config-dir"),
    "no such folder": ("--config-dir=/no/such", "--config-dir /no/such", "DIR/recipe"),
    "word for a number": ("rollout.batch_size=abc", "rollout.batch_size=abc", "a whole number", "default 32"),
    "fraction": ("parallel.tp=1.5", "parallel.tp=1.5", "a whole number"),
    "null": ("model.dtype=null", "model.dtype=null", "default auto"),
    "empty": ("run.seed=", "run.seed=", "a whole number"),
    "number for a list": ("rollout.filters=3", "rollout.filters=3", "[a,b]"),
    "number for a mapping": ("rollout.sglang=3", "rollout.sglang=3", "{name: value}"),
    "sweep": ("rollout.batch_size=1,2", "rollout.batch_size=1,2", "[1,2]"),
    "unbalanced": ("rollout.stop_token_ids=[1", "rollout.stop_token_ids=[1", "quote"),
    "choice": ("placement.mode=splt", "placement.mode='splt'", "'split'"),
    "environment": ("run.name=${oc.env:NO_SUCH_VARIABLE}", "run.name", "'NO_SUCH_VARIABLE' not found"),
    "algorithm by its name": ("algo.name=dr_grpo", "algo.name='dr_grpo'", "algo=dr_grpo"),
}
RULES = {
    "zero": ("rollout.batch_size=0", "rollout.batch_size=0", "above 0"),
    "not a number": ("optim.lr=nan", "optim.lr=nan", "[0, "),
    "beta": ("optim.beta2=1.5", "optim.beta2=1.5", "[0, 1]"),
    "fault, form": (
        "chaos.faults=[kill_engine]",
        "'kill_engine' is not fault:phase:rollout",
        "kill_engine:collect:3:0.25",
    ),
    "fault, kind": ("chaos.faults=[kil_engine:step:1]", "'kil_engine:step:1'", "did you mean 'kill_engine'"),
    "fault, phase": ("chaos.faults=[kill_rank:stop:1]", "'stop' in 'kill_rank:stop:1'", "'step'"),
    "fault, drawn": ("chaos.kinds=[kill]", "chaos.kinds: 'kill'", "kill_engine"),
    "fault, too late": (
        "chaos.faults=[kill_engine:collect:100] loop.num_rollout=100",
        "'kill_engine:collect:100' is never reached",
        "the last of loop.num_rollout=100 is 99",
    ),
    "fault, no reward server": (
        "chaos.faults=[reward_down:collect:1]",
        "chaos.faults: 'reward_down:collect:1'",
        "set reward.remote_url",
    ),
    "fault, no reward server, drawn": (
        "chaos.random=1 chaos.kinds=[kill_engine,reward_down]",
        "chaos.kinds: 'reward_down'",
        "set reward.remote_url",
    ),
    "fault, nothing to draw": ("chaos.random=2 chaos.kinds=[]", "chaos.random=2", "name the faults"),
    "health": ("health.on_stalled_engine=stopp", "health.on_stalled_engine='stopp'", "'stop'"),
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
    "no advantage": ("algo.group_advantage=null", "algo.group_advantage=None", "algo.group_advantage=grpo"),
    "loss of another algorithm": ("algo.loss=sft", "algo.loss='sft'", "algo=grpo", "algo=sft"),
    "advantage under sft": (
        "algo=sft rollout.n_samples_per_prompt=1 algo.group_advantage=grpo",
        "algo.group_advantage='grpo'",
        "set it to null",
    ),
    "advantage beside reinforce_pp": (
        "algo=reinforce_pp algo.group_advantage=grpo",
        "algo.group_advantage='grpo'",
        "reinforce_pp",
        "set it to null",
    ),
    "token advantage of another algorithm": (
        "algo.token_advantage=reinforce_pp",
        "algo.token_advantage='reinforce_pp'",
        "algo=reinforce_pp",
    ),
    "clip range of sft": ("algo=sft algo.eps_clip=0.1", "algo.eps_clip=0.1", "algo=grpo", "algo=sft"),
    "dual clip of cispo": ("algo=cispo algo.eps_clip_c=3", "algo.eps_clip_c=3", "algo=grpo", "algo=cispo"),
    "aggregation of gspo": (
        "algo=gspo algo.aggregation=token_mean",
        "algo.aggregation='token_mean'",
        "algo.aggregation=sequence_mean",
    ),
    "tis_clip alone": ("algo.tis_clip=3", "algo.tis_clip=3.0", "algo.use_tis=true"),
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
    "rejection word": ("algo.rejection=sequence", "algo.rejection='sequence'", "geometric"),
    "two weights": ("algo.use_tis=true algo.use_mis=true", "algo.use_tis=true", "set one of them to false"),
    "nothing to correct": (
        "algo.use_rollout_logprobs=true algo.use_tis=true",
        "algo.use_rollout_logprobs=true",
        "algo.use_tis",
    ),
    "layers of no probe": (
        "weights.probe_layers=true weights.probe_sequences=0",
        "weights.probe_layers=true",
        "weights.probe_sequences=2",
    ),
    "refill without filter": ("rollout.max_refills=3", "rollout.max_refills=3", "rollout.filters=[nonzero_std]"),
    "oversampling of nothing": (
        "rollout.over_sampling_batch_size=32",
        "rollout.over_sampling_batch_size=32",
        "rollout.filters",
    ),
    "oversampling and bits": (
        "rollout.over_sampling_batch_size=64 run.deterministic=true",
        "rollout.over_sampling_batch_size=64",
        "rollout.partial_rollout=false",
    ),
    "partial without oversampling": (
        "rollout.partial_rollout=true",
        "rollout.partial_rollout=true",
        "rollout.over_sampling_batch_size=49",
    ),
    "mask of nothing": ("algo.mask_offpolicy=true", "algo.mask_offpolicy=true", "rollout.partial_rollout=true"),
    "partial bound alone": (
        "rollout.max_partial_staleness=3",
        "rollout.max_partial_staleness=3",
        "rollout.partial_rollout=true",
    ),
    "partial bound too low": (
        "rollout.over_sampling_batch_size=64 rollout.partial_rollout=true rollout.max_partial_staleness=2 "
        "loop.max_staleness=2 placement.mode=split",
        "rollout.max_partial_staleness=2",
        "at least 3",
    ),
    "oversampling too little": (
        "rollout.filters=[nonzero_std] rollout.over_sampling_batch_size=8",
        "rollout.over_sampling_batch_size=8",
        "rollout.batch_size=32",
    ),
    "overlong factor alone": (
        "reward.overlong_penalty_factor=0.5",
        "reward.overlong_penalty_factor=0.5",
        "reward.overlong_buffer_len",
    ),
    "overlong buffer": (
        "reward.overlong_buffer_len=2000",
        "reward.overlong_buffer_len=2000",
        "rollout.max_response_len=1024",
    ),
    "overlong under sft": (
        "algo=sft rollout.n_samples_per_prompt=1 reward.overlong_buffer_len=9",
        "reward.overlong_buffer_len=9",
        "algo=sft",
    ),
    "dual clip": ("algo.eps_clip_c=1", "algo.eps_clip_c=1.0", "above 1"),
    "lonely sample": ("rollout.n_samples_per_prompt=1", "rollout.n_samples_per_prompt=1", "at least 2"),
    "reward": ("reward.name=mth", "reward.name='mth'", "'math'"),
    "reward module": ("reward.name=no_such_module:f", "reward.name='no_such_module:f'", "PYTHONPATH"),
    "reward attribute": ("reward.name=json:load_", "reward.name='json:load_'", "'load'"),
    "reward not callable": ("reward.name=sys:argv", "reward.name='sys:argv'", "callable"),
    "boxed reward": ("reward.name=boxed_mth", "reward.name='boxed_mth'", "'boxed_math'"),
    "weighted reward": ("reward.weights.mth=1", "reward.weights='mth'", "'math'"),
    "weighted module": ("reward.weights={no_such_module\\:f:1}", "reward.weights='no_such_module:f'", "PYTHONPATH"),
    "weight of 0": ("reward.weights={math:0}", "reward.weights.math=0.0", "other than 0"),
    "weight in words": ("reward.weights={math:much}", "reward.weights.math", "a mapping such as {name: 0.5,"),
    "unweighted name": ("reward.name=f1 reward.weights={math:1}", "reward.name='f1'", "reward.weights.rm_type"),
    "no reward server": ("reward.name=boxed_remote_rm", "boxed_remote_rm", "set reward.remote_url=http://host:port"),
    "no weighted server": ("reward.weights={remote_rm:1}", "remote_rm", "set reward.remote_url=http://host:port"),
    "address": ("reward.remote_url=localhost:8000", "reward.remote_url='localhost:8000'", "http://host:port/path"),
    "retries": ("reward.remote_retries=-1", "reward.remote_retries=-1", "[0, 100]"),
    "fallback": ("reward.fallback=nan", "reward.fallback=nan", "must lie in"),
    "filter": ("rollout.filters=[nonzero_sd]", "rollout.filters='nonzero_sd'", "'nonzero_std'"),
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
        "remove it",
    ),
    "recompute": ("model.recompute_modules=[core]", "model.recompute_modules=['core']", "core_attn"),
    "top-p": ("rollout.top_p=0.9", "rollout.top_p=0.9", "rollout.top_p=1"),
    "top-k": ("rollout.top_k=50", "rollout.top_k=50", "rollout.top_k=-1"),
    "response": (
        "rollout.max_context_len=1024",
        "rollout.max_response_len=1024",
        "rollout.max_context_len=1024",
        "lower it",
    ),
    "staleness": ("loop.max_staleness=1", "loop.max_staleness=1", "placement.mode=split"),
    "transport": ("weights.transport=broadcast", "weights.transport=broadcast", "weights.transport=tensor"),
    "layout": (
        "parallel.tp=2 parallel.pp=2 placement.actor_num_gpus_per_node=6",
        "= 4 ranks per model",
        "= 6 ranks",
        "placement.actor_num_gpus_per_node=8",
    ),
    "idle ranks": (
        "rollout.batch_size=2 rollout.n_samples_per_prompt=2 placement.actor_num_gpus_per_node=8",
        "4 samples per optimizer step",
        "8 data-parallel ranks",
        "placement.actor_num_gpus_per_node=4",
    ),
    "expert parallel": (
        "parallel.ep=4 parallel.cp=2",
        "parallel.ep=4",
        "2 ranks of a pipeline stage",
        "set one of 1, 2",
        "multiple of 4 trainer ranks by placement.actor_num_gpus_per_node",
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
    "sft samples": ("algo=sft", "rollout.n_samples_per_prompt=8", "set it to 1"),
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
        "give one",
    ),
    "steps that nothing reads": ("optim.decay_steps=50", "optim.decay_steps=50", "linear, cosine and wsd", "constant"),
    "wsd steps that nothing reads": (
        "optim.schedule=cosine optim.wsd_decay_steps=5",
        "optim.wsd_decay_steps=5",
        "by optim.schedule wsd only",
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
    "no share": ("optim.cpu_offload_fraction=0", "optim.cpu_offload_fraction=0", "above 0"),
    "sglang key": (
        "rollout.sglang.mem_fraction_statc=1",
        "rollout.sglang.mem_fraction_statc=1",
        "'mem_fraction_static'",
    ),
    "sglang value": ("rollout.sglang.page_size=x", "rollout.sglang.page_size='x'", "Optional[int]"),
    "sglang key of ours": ("rollout.sglang.tp_size=2", "rollout.sglang.tp_size=2", "rollout.tp"),
    "megatron key": ("model.megatron.softmax_scal=0.1", "model.megatron.softmax_scal=0.1", "'softmax_scale'"),
    "megatron key of ours": ("model.megatron.num_layers=3", "model.megatron.num_layers=3", "config.json"),
    "megatron object": (
        "model.megatron.activation_func=gelu",
        "model.megatron.activation_func='gelu'",
        "Python object",
    ),
}


@pytest.mark.parametrize("case", (KEYS | RULES).values(), ids=list(KEYS | RULES))
def test_the_message_names_key_value_and_fix(case: tuple[str, ...], argv: list[str]) -> None:
    extra, *words = case
    text = message(argv, extra, files=False)
    assert all(word in text for word in words), text
    assert "\n" not in text


def test_missing_keys_are_named_with_their_flags() -> None:
    text = message([], "", files=False)
    for word in ("model.hf_checkpoint must be given", "--hf-checkpoint", "data.train must be given", "--prompt-data"):
        assert word in text
    assert "+recipe=quickstart" in text


def test_rollout_only_may_cut_the_distribution(argv: list[str]) -> None:
    cfg = load_config([*argv, "run.mode=rollout_only", "rollout.top_p=0.9", "rollout.n_samples_per_prompt=1"])
    assert cfg.rollout.top_p == 0.9


def test_a_recipe_with_a_mistake_is_named(tmp_path: Path, argv: list[str]) -> None:
    (tmp_path / "recipe").mkdir()
    for name, text, words in (
        ("a", "rollout: {bach_size: 3}", ["configs/recipe/a.yaml", "rollout.bach_size", "'rollout.batch_size'"]),
        ("b", "rollout: {batch_size: x}", ["configs/recipe/b.yaml", "rollout.batch_size", "a whole number"]),
        ("c", "rollout: [", ["recipe/c.yaml:", "not valid YAML"]),
    ):
        (tmp_path / "recipe" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
        told = message(argv, f"--config-dir={tmp_path} +recipe={name}", files=False)
        assert all(word in told for word in words), told
