"""Invalid values of faults, rewards, user functions, engines or data end in one message."""

from __future__ import annotations

from tests.config.bad_input import each_rule, one_message

# extra arguments, then words that the message must contain
RULES = {
    "zero": ("rollout.batch_size=0", "rollout.batch_size=0", "above 0"),
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
    "refill without filter": ("rollout.max_refills=3", "rollout.max_refills=3", "rollout.filters=[nonzero_std]"),
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
    "filter with a different signature": (
        "rollout.filters=[tests.config.wrong_functions:no_filter]",
        "rollout.filters='tests.config.wrong_functions:no_filter' cannot be called as filter(group)",
        "missing a required argument: 'second'",
    ),
    "filter that nobody awaits": (
        "rollout.filters=[tests.config.wrong_functions:generate_of_two]",
        "is a coroutine function, but is not awaited: it must be filter(group)",
    ),
    "generate with a different signature": (
        "rollout.generate=tests.config.wrong_functions:generate_of_two",
        "cannot be called as async def generate(prompt, engine, seeds, context)",
        "too many positional arguments",
    ),
    "generate that blocks": (
        "rollout.generate=tests.config.wrong_functions:blocking",
        "is not a coroutine function: it must be async def generate(prompt, engine, seeds, context)",
    ),
    "generate class whose instances block": (
        "rollout.generate=tests.config.wrong_functions:Blocking",
        "is not a coroutine function: it must be async def generate(prompt, engine, seeds, context) of its instances",
    ),
    "generate class whose instances cannot be called": (
        "rollout.generate=tests.config.wrong_functions:WithoutCall",
        "its instances cannot be called: add a method __call__ with the signature async def generate(prompt, engine, seeds, context)",
    ),
    "generate class without a config": (
        "rollout.generate=tests.config.wrong_functions:WithoutConfig",
        "cannot be called as WithoutConfig(config)",
    ),
    "data source with a different signature": (
        "data.source=tests.config.wrong_functions:one_argument",
        "data.source='tests.config.wrong_functions:one_argument' cannot be called as source(config, context)",
    ),
    "top-p": ("rollout.top_p=0.9", "rollout.top_p=0.9", "rollout.top_p=1"),
    "top-k": ("rollout.top_k=50", "rollout.top_k=50", "rollout.top_k=-1"),
    "top-k of 0": ("run.mode=rollout_only rollout.top_k=0", "rollout.top_k=0 leaves no token", "rollout.top_k=-1"),
    "top-p of 0": ("evaluation.top_p=0", "evaluation.top_p=0.0 leaves no token", "evaluation.top_p=1"),
    "top-k of 0, data set": (
        "evaluation.datasets.a=a.jsonl evaluation.overrides.a.top_k=0",
        "evaluation.overrides.a.top_k=0 leaves no token",
        "evaluation.overrides.a.top_k=-1",
    ),
    "stop token": ("rollout.stop_token_ids=[3,-1]", "rollout.stop_token_ids: -1 is not a token id"),
    "infinite deadline": ("loop.step_deadline_s=inf", "loop.step_deadline_s=inf must be finite"),
    "infinite bucket": ("weights.bucket_mb=inf", "weights.bucket_mb=inf must be finite"),
    "infinite temperature": ("rollout.temperature=inf", "rollout.temperature=inf must be finite"),
    "infinite penalty": (
        "reward.overlong_buffer_len=4 reward.overlong_penalty_factor=inf",
        "reward.overlong_penalty_factor=inf must be finite",
    ),
    "memory beyond any limit": ("reward.memory_gb=1e12", "reward.memory_gb=1000000000000.0 must lie in [0, 1e+06]"),
    "beta of 1": ("optim.beta2=1", "optim.beta2=1.0 must be below 1"),
    "response": (
        "rollout.max_context_len=1023",
        "rollout.max_response_len=1024",
        "rollout.max_context_len=1023",
        "lower rollout.max_response_len",
    ),
    "attention in parts": (
        "rollout.tp=3 rollout.dp_attention=2",
        "rollout.dp_attention=2",
        "rollout.tp=3",
        "rollout.num_engines",
    ),
    "static fraction": (
        "rollout.sglang.mem_fraction_static=2",
        "rollout.sglang.mem_fraction_static=2 is not between 0 and 1",
        "remove rollout.sglang.mem_fraction_static",
    ),
    "token limit of an engine": (
        "rollout.sglang.max_total_tokens=0",
        "rollout.sglang.max_total_tokens=0 must be above 0",
        "remove rollout.sglang.max_total_tokens",
    ),
    "transport": ("weights.transport=broadcast", "weights.transport=broadcast", "weights.transport=tensor"),
    "idle ranks": (
        "rollout.batch_size=2 rollout.n_samples_per_prompt=2 placement.actor_num_gpus_per_node=8",
        "4 samples per optimizer step",
        "8 data-parallel ranks",
        "placement.actor_num_gpus_per_node=4",
    ),
    "sglang key": (
        "rollout.sglang.mem_fraction_statc=1",
        "rollout.sglang.mem_fraction_statc=1",
        "'mem_fraction_static'",
    ),
    "sglang value": ("rollout.sglang.page_size=x", "rollout.sglang.page_size='x'", "Optional[int]"),
    "sglang key of ours": ("rollout.sglang.tp_size=2", "rollout.sglang.tp_size=2", "rollout.tp"),
    "sglang key that changes samples": (
        "+rollout.sglang.enable_watermark=true",
        "rollout.sglang.enable_watermark=True cannot be trained on",
        "remove rollout.sglang.enable_watermark",
    ),
}


@each_rule(RULES)
def test_the_message_names_key_value_and_fix(case: tuple[str, ...], argv: list[str]) -> None:
    one_message(case, argv)
