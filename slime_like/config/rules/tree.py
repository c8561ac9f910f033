"""Rules across keys, checked at load before any process starts. They read no file that the config names, except user code."""

from __future__ import annotations

import math
import os

from slime_like.config.rules import foreign
from slime_like.config.rules.agents import check_agent
from slime_like.config.rules.algorithms import check_algorithm
from slime_like.config.rules.attention import check_attention, check_transformer_engine
from slime_like.config.rules.dcp import check_dcp
from slime_like.config.rules.deterministic import check_seeds
from slime_like.config.rules.engine_nodes import check_engine_nodes
from slime_like.config.rules.engine_sizes import check_engine_sizes
from slime_like.config.rules.eval_overrides import check_overrides, override_lengths
from slime_like.config.rules.experts import EXPERT_RECOMPUTE_MODULES, stage_ranks
from slime_like.config.rules.float8_engines import check_float8_engines
from slime_like.config.rules.flow_mla import check_flow_mla
from slime_like.config.rules.gdn import check_gdn
from slime_like.config.rules.managers import check_managers
from slime_like.config.rules.names import check_functions, check_names
from slime_like.config.rules.no_token import OFF, refuse_no_token
from slime_like.config.rules.offload import check_offload
from slime_like.config.rules.over_sampling import check_over_sampling
from slime_like.config.rules.pipeline import check_pipeline
from slime_like.config.rules.remote_experts import check_remote_experts
from slime_like.config.rules.roles import check_roles, check_warmup
from slime_like.config.rules.routing_replay import check_routing_replay
from slime_like.config.rules.schedule import actor_steps, resolve_schedule
from slime_like.config.rules.trained_sampling import check_trained_sampling
from slime_like.config.schema import names
from slime_like.config.schema.algo import SftConfig
from slime_like.config.schema.base import within
from slime_like.config.schema.policy import PolicyConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.registry import check

RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm", *EXPERT_RECOMPUTE_MODULES)  # for any model family
BIG = 1e12


def check_rules(cfg: TrainConfig, *, machine: bool = True, code: bool = True, num_rollout_known: bool = True) -> None:
    """Raise ``ConfigError`` on the first rule that ``cfg`` breaks.

    With ``machine=False``, only rules that hold on every machine are checked. With ``code=False``, no function
    is imported. With ``num_rollout_known=False``, rules that read loop.num_rollout are skipped.
    """
    environment = os.environ if machine else {}
    _check_ranges(cfg)
    check_names(cfg)
    check_agent(cfg.rollout)
    check_overrides(cfg.evaluation, cfg.reward)
    check_algorithm(cfg)
    if code:
        check_functions(cfg)
    _check_mode(cfg)
    samples_per_step(cfg)
    _check_lengths(cfg)
    check_trained_sampling(cfg, environment)
    check_over_sampling(cfg)
    check_managers(cfg.rollout)
    stage_ranks(cfg, trainer_ranks(cfg))
    check_pipeline(cfg.parallel)
    _check_placement(cfg)
    check_offload(cfg)
    check_roles(cfg)
    cfg.chaos.check_reward_server(cfg.reward.remote_url)
    if num_rollout_known:
        check_warmup(cfg)
        cfg.chaos.check_rollout_ids(cfg.loop.num_rollout)
        _check_schedule(cfg)
    _check_memory_and_overlap(cfg)
    check_attention(cfg, cfg.placement.device, cfg.model.dtype)
    if machine:
        check_transformer_engine(cfg)
    check_gdn(cfg, machine=machine)
    foreign.check_foreign("rollout.sglang", cfg.rollout.sglang)
    foreign.check_foreign("model.megatron", cfg.model.megatron)
    check_engine_sizes(cfg.rollout)
    check_engine_nodes(cfg, cfg.rollout.engine_num_nodes or 1)
    check_dcp(cfg)
    check_flow_mla(cfg.rollout, environment)
    check_float8_engines(cfg)
    check_remote_experts(cfg)
    check_routing_replay(cfg)
    check_seeds(cfg)


def samples_per_rollout(cfg: TrainConfig) -> int:
    """Return the number of samples per rollout."""
    return cfg.rollout.batch_size * cfg.rollout.n_samples_per_prompt


def samples_per_step(cfg: TrainConfig) -> int:
    """Return the number of samples per optimizer step.

    Raises ``ConfigError`` unless prompts * samples per prompt = global batch size * steps per rollout. If no global batch
    size is set, the steps per rollout must divide prompts * samples per prompt.
    """
    prompts, per_prompt, steps = cfg.rollout.batch_size, cfg.rollout.n_samples_per_prompt, cfg.loop.steps_per_rollout
    num_samples, step = prompts * per_prompt, cfg.loop.global_batch_size
    product = (
        f"rollout.batch_size {prompts} * rollout.n_samples_per_prompt {per_prompt} = {num_samples} samples per rollout"
    )
    if step is None:
        if num_samples % steps:
            divisors = [s for s in range(1, num_samples + 1) if num_samples % s == 0]
            near = sorted(sorted(divisors, key=lambda s: abs(s - steps))[:2])
            raise ConfigError(
                f"{product}, which loop.steps_per_rollout={steps} does not divide: "
                f"set loop.steps_per_rollout={' or '.join(map(str, near))}"
            )
        return num_samples // steps
    if num_samples == step * steps:
        return step
    fixes = [f"loop.global_batch_size={num_samples // steps}"] if num_samples % steps == 0 else []
    fixes += [f"loop.steps_per_rollout={num_samples // step}"] if num_samples % step == 0 else []
    fixes += [f"rollout.batch_size={step * steps // per_prompt}"] if step * steps % per_prompt == 0 else []
    fixes = fixes or ["loop.global_batch_size=null loop.steps_per_rollout=1"]
    raise ConfigError(
        f"{product}, but loop.global_batch_size {step} * loop.steps_per_rollout {steps} = {step * steps}: "
        f"set {', or '.join(fixes)}"
    )


def trainer_ranks(cfg: TrainConfig) -> int:
    """Return the number of trainer ranks.

    Raises ``ConfigError`` unless it is a multiple of tp * pp * cp and of the number of nodes, and every data-parallel rank
    has a sample in each optimizer step.
    """
    p, place = cfg.parallel, cfg.placement
    model = p.tp * p.pp * p.cp
    product = f"parallel.tp {p.tp} * parallel.pp {p.pp} * parallel.cp {p.cp} = {model} ranks per model"
    if place.actor_num_gpus_per_node is None:
        if model % place.actor_num_nodes:
            raise ConfigError(
                f"{product}, which placement.actor_num_nodes={place.actor_num_nodes} does not divide: "
                "set placement.actor_num_gpus_per_node"
            )
        return model
    world = place.actor_num_nodes * place.actor_num_gpus_per_node
    unit = model // math.gcd(model, place.actor_num_nodes)  # numbers of GPUs per node that fit are multiples of it
    if world % model:
        raise ConfigError(
            f"{product} do not fit placement.actor_num_nodes {place.actor_num_nodes} * "
            f"placement.actor_num_gpus_per_node {place.actor_num_gpus_per_node} = {world} ranks: make them a multiple of "
            f"{model}, as with placement.actor_num_gpus_per_node={-(-place.actor_num_gpus_per_node // unit) * unit}, or "
            "lower parallel.*"
        )
    dp = world // model
    if dp > (step := samples_per_step(cfg)):
        num_gpus = model * step // place.actor_num_nodes // unit * unit
        fix = f"set placement.actor_num_gpus_per_node={num_gpus}" if num_gpus else "lower placement.actor_num_nodes"
        raise ConfigError(
            f"{step} samples per optimizer step leave some of the {dp} data-parallel ranks without a sequence: "
            f"raise rollout.batch_size, or {fix}"
        )
    return world


def _check_ranges(cfg: TrainConfig) -> None:
    within("optim.", cfg.optim, 0.0, BIG, "lr", "min_lr", "warmup_steps", "weight_decay", "clip_grad")
    within("optim.", cfg.optim, 0.0, 1.0, "beta1", "beta2", "warmup_fraction", "cpu_offload_fraction")
    for name in ("beta1", "beta2"):
        if getattr(cfg.optim, name) == 1.0:
            raise ConfigError(f"optim.{name}=1.0 must be below 1: Adam divides its estimates by 1 - {name}**step")
    within("loop.", cfg.loop, 0, BIG, "max_staleness")
    within("weights.", cfg.weights, 0, BIG, "probe_sequences", "debug_skip_push_at")
    within("run.", cfg.run, 0, 2**31 - 1, "seed")
    within("reward.", cfg.reward, 0.0, 1e6, "memory_gb")
    within("rollout.", cfg.rollout, 0.0, 1.0, "top_p")
    within("rollout.", cfg.rollout, -1, BIG, "top_k")
    for prefix, config in (("rollout.", cfg.rollout), ("evaluation.", cfg.evaluation)):
        for name in OFF:
            refuse_no_token(f"{prefix}{name}", name, getattr(config, name))
    if negative := [token_id for token_id in cfg.rollout.stop_token_ids if token_id < 0]:
        raise ConfigError(f"rollout.stop_token_ids: {negative[0]} is not a token id: give numbers of 0 or more")
    if isinstance(cfg.algo, PolicyConfig):
        within("algo.", cfg.algo, -10.0, 10.0, "entropy_coef")
        if hasattr(cfg.algo, "kl_coef"):
            within("algo.", cfg.algo, 0.0, 10.0, "kl_coef")
    if unknown := [m for m in cfg.model.recompute_modules if m not in RECOMPUTE_MODULES]:
        raise ConfigError(f"model.recompute_modules={unknown} is unknown: choose from {', '.join(RECOMPUTE_MODULES)}")
    if cfg.model.recompute == "selective" and not cfg.model.recompute_modules:
        raise ConfigError(
            "model.recompute=selective recomputes the modules of model.recompute_modules, which is empty: name some of "
            f"{', '.join(RECOMPUTE_MODULES)}, or set model.recompute=none"
        )


def _check_mode(cfg: TrainConfig) -> None:
    run = cfg.run
    if run.mode == "train_only" and run.replay_from is None and not isinstance(cfg.algo, SftConfig):
        raise ConfigError(
            "run.mode=train_only needs dumped rollouts: set run.replay_from=<folder> (run.dump_rollouts=true writes one)"
        )
    if run.mode == "train_only" and cfg.evaluation.datasets:
        raise ConfigError("evaluation.datasets with run.mode=train_only: no engine runs; set evaluation.datasets={}")
    if run.replay_from is not None and run.mode != "train_only":
        raise ConfigError(
            f"run.replay_from={run.replay_from!r} with run.mode={run.mode}: a replay generates nothing; "
            "set run.mode=train_only"
        )
    if run.mode == "rollout_only" and isinstance(cfg.algo, SftConfig):
        raise ConfigError(
            "run.mode=rollout_only with algo=sft: supervised fine-tuning has no rollout; choose another algo"
        )


def _check_lengths(cfg: TrainConfig) -> None:
    buffer = cfg.reward.overlong_buffer_len
    if buffer is not None and isinstance(cfg.algo, SftConfig):
        raise ConfigError(
            f"reward.overlong_buffer_len={buffer} with algo=sft, which reads no reward: remove reward.overlong_buffer_len"
        )
    if buffer is not None and buffer > cfg.rollout.max_response_len:
        raise ConfigError(
            f"reward.overlong_buffer_len={buffer} is above rollout.max_response_len={cfg.rollout.max_response_len}, "
            "so responses of every length would be penalised: lower reward.overlong_buffer_len"
        )
    longest = cfg.rollout.max_context_len
    for key, value in (
        ("rollout.max_response_len", cfg.rollout.max_response_len),
        ("evaluation.max_response_len", cfg.evaluation.max_response_len),
        *override_lengths(cfg.evaluation),
    ):
        if longest is not None and value is not None and value > longest:
            raise ConfigError(
                f"{key}={value} is longer than rollout.max_context_len={longest}, which includes the prompt: lower {key}, or "
                f"raise rollout.max_context_len"
            )


def _check_placement(cfg: TrainConfig) -> None:
    mode, transport = cfg.placement.mode, cfg.weights.transport
    if cfg.loop.max_staleness > 0 and mode == "colocated":
        raise ConfigError(
            f"loop.max_staleness={cfg.loop.max_staleness} with placement.mode=colocated: rollout and training share "
            "devices and cannot overlap; set placement.mode=split, or loop.max_staleness=0"
        )
    tables = {"colocated": names.COLOCATED_TRANSPORTS, "split": names.SPLIT_TRANSPORTS}
    if transport != "auto" and transport not in tables[mode]:
        all_transports = tables["colocated"] | tables["split"] | {"auto": ""}
        check("weights.transport", transport, all_transports, table_name=f"{mode.upper()}_TRANSPORTS")
        raise ConfigError(
            f"weights.transport={transport} with placement.mode={mode}: set weights.transport={' or '.join(tables[mode])} or "
            f"auto"
        )
    if cfg.placement.actor_num_nodes > 1 and cfg.placement.ray_address is None:
        raise ConfigError(
            f"placement.actor_num_nodes={cfg.placement.actor_num_nodes} needs a running Ray cluster: "
            "set placement.ray_address=auto or its address"
        )


def _check_schedule(cfg: TrainConfig) -> None:
    if cfg.run.mode != "rollout_only":
        resolve_schedule(cfg.optim, *actor_steps(cfg))


def _check_memory_and_overlap(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` if a key of recompute, overlap or offload is set without the keys it requires."""
    model, p, optim = cfg.model, cfg.parallel, cfg.optim
    if model.recompute_num_layers is not None and model.recompute != "full":
        raise ConfigError(
            f"model.recompute_num_layers={model.recompute_num_layers} with model.recompute={model.recompute}: "
            "only model.recompute=full reads this key; set model.recompute=full, or remove model.recompute_num_layers"
        )
    if p.overlap_param_gather and not (p.overlap_grad_reduce and p.distributed_optimizer):
        raise ConfigError(
            "parallel.overlap_param_gather=true needs parallel.overlap_grad_reduce=true and "
            "parallel.distributed_optimizer=true: set both, or set parallel.overlap_param_gather=false"
        )
    if p.bucket_size is not None and not p.overlap_grad_reduce:
        raise ConfigError(
            f"parallel.bucket_size={p.bucket_size} without parallel.overlap_grad_reduce=true: gradients are then "
            "reduced in one piece; set parallel.overlap_grad_reduce=true, or remove parallel.bucket_size"
        )
    if optim.cpu_offload and not p.distributed_optimizer:
        raise ConfigError(
            "optim.cpu_offload=true needs parallel.distributed_optimizer=true: set parallel.distributed_optimizer=true, or set "
            "optim.cpu_offload=false"
        )
