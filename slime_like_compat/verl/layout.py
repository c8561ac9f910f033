"""Translation of a verl job's keys for trainer ranks, token budget and recompute to keys of slime_like."""

from __future__ import annotations

from slime_like_compat.verl.defaults import ACTOR, MEGATRON, MODEL
from slime_like_compat.verl.engines import map_engines
from slime_like_compat.verl.job import Job


def map_layout(job: Job, max_len: int) -> None:
    """Set the keys for trainer ranks, token budget, recompute and engines. ``max_len``: maximum tokens of prompt + response."""
    sizes = {
        "tp": "tensor_model",
        "pp": "pipeline_model",
        "vpp": "virtual_pipeline_model",
        "ep": "expert_model",
        "etp": "expert_tensor",
    }
    for our_key, name in sizes.items():
        key = f"{MEGATRON}.{name}_parallel_size"
        if job.value(key) is not None:
            job.set(f"parallel.{our_key}", job.count(key), key)
        job.leave_out(f"parallel.{our_key} is 1", key)
    cp = f"{MEGATRON}.context_parallel_size"
    ulysses = f"{ACTOR}.ulysses_sequence_parallel_size"
    cp = ulysses if job.has(ulysses) and not job.has(cp) else cp
    job.set("parallel.cp", job.count(cp), cp)
    for name, our_key in (
        ("sequence_parallel", "sequence_parallel"),
        ("use_distributed_optimizer", "distributed_optimizer"),
    ):
        job.set(f"parallel.{our_key}", job.switch(f"{MEGATRON}.{name}"), f"{MEGATRON}.{name}")
    _token_budget(job, max_len, job.count(cp))
    _recompute(job)
    nodes, gpus = job.count("trainer.nnodes"), job.count("trainer.n_gpus_per_node")
    job.set("placement.actor_num_nodes", nodes, "trainer.nnodes")
    job.set("placement.actor_num_gpus_per_node", gpus, "trainer.n_gpus_per_node")
    if nodes > 1:
        job.set("placement.ray_address", "auto", "trainer.nnodes", "joins the cluster that ray start has started")
    map_engines(job, nodes * gpus)


def _token_budget(job: Job, max_len: int, cp: int) -> None:
    dynamic, tokens = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"
    micro = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    reason = "micro-batches are packed by tokens"
    if job.switch(dynamic):
        job.set("parallel.max_tokens_per_rank", job.count(tokens), tokens)
        job.leave_out(reason, micro)
        job.report(dynamic, "mapped", reason, "parallel.max_tokens_per_rank")
        return
    if job.value(micro) is not None:
        note = f"{reason}: as many tokens as {job.count(micro)} sequences of maximum length"
        job.set("parallel.max_tokens_per_rank", -(-job.count(micro) * max_len // cp), micro, note)
    job.leave_out(f"read only with use_dynamic_bsz=True; {reason}", tokens)
    job.leave_out(reason, dynamic)


def _recompute(job: Job) -> None:
    key, prefix = f"{MODEL}.enable_gradient_checkpointing", f"{MEGATRON}.override_transformer_config"
    granularity, method, layers, modules = (
        f"{prefix}.recompute_{n}" for n in ("granularity", "method", "num_layers", "modules")
    )
    is_megatron = job.has(granularity) or job.settings.get("model_engine") is not None
    if not is_megatron:
        job.set("model.recompute", "full" if job.switch(key) else "none", key)
        return
    job.leave_out("recompute_granularity counts", key)
    if job.sets(granularity):
        job.set("model.recompute", job.text(granularity), granularity)
        if job.value(granularity) == "full":
            if job.sets(method):
                job.set("model.recompute_method", job.text(method), method)
            if job.sets(layers):
                job.set("model.recompute_num_layers", job.count(layers), layers)
        elif job.sets(modules):
            job.set("model.recompute_modules", job.texts(modules), modules)
    job.leave_out(
        f"recompute_granularity={job.value(granularity) if job.has(granularity) else None} does not read it",
        granularity,
        method,
        layers,
        modules,
    )
