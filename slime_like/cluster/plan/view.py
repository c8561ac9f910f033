"""Output of ``train.py`` without a run: help, the composed configuration, the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from slime_like.cluster.plan.dcp import dcp_lines
from slime_like.cluster.plan.guard import guard_lines
from slime_like.cluster.plan.machine import Machine, described_machine, probe_machine
from slime_like.cluster.plan.memory_view import change_lines, memory_lines, plot_lines
from slime_like.cluster.plan.planner import Plan, Role, make_plan
from slime_like.cluster.plan.shapes import PREPARED, model_config
from slime_like.cluster.plan.trace import trace_lines
from slime_like.cluster.plan.user_code import code_rows, unread_keys
from slime_like.config.load.compat import Command
from slime_like.config.load.help import render_help
from slime_like.config.load.loader import load_config, show
from slime_like.config.rules.files import check_files, check_model
from slime_like.config.rules.schedule import without_schedule
from slime_like.config.schema.resolved import Layout
from slime_like.config.schema.root import TrainConfig
from slime_like.quickstart.prepare import check_folders
from slime_like.reward.check import check_reward
from slime_like.util.counted import counted


def describe(command: Command, argv: Sequence[str]) -> str:
    """Return the output of ``--help``, ``--cfg job`` or ``--plan``."""
    match command.action:
        case "help":
            return render_help(command.topic)
        case "show":
            return show(argv)
        case _:
            return show_plan(argv, command.machine, trace=command.trace)


def show_plan(argv: Sequence[str], description: str | None = None, *, trace: bool = False) -> str:
    """Return the plan of a command line for this machine, or for the one described by ``description`` (``8xH200``).

    For this machine, files are checked too. As long as ``run.prepare`` has yet to create the model's folder, only the folders
    and the model of a ``run.prepare`` in ``PREPARED`` are checked. For another machine, only config.json or the planner's
    table of public models is read; weights, tokenizer and data may be missing. With ``trace``, run a step of the trainer on a
    phantom GPU and append the traced memory.
    """
    cfg = load_config(argv, files=False, machine=description is None)
    num_rollout_known = cfg.loop.num_epoch is None
    if cfg.run.replay_from is None:
        check_reward(cfg.reward)
    machine = probe_machine() if description is None else described_machine(description)
    if description is None and cfg.run.prepare in PREPARED:
        check_folders(cfg)
    if description is None and (cfg.run.prepare is None or Path(cfg.model.hf_checkpoint).exists()):
        check_files(cfg)
        if not num_rollout_known:
            cfg, num_rollout_known = load_config(argv), True  # counts the rows
    elif (model := model_config(cfg, machine)) is not None:
        check_model(cfg, model)
    plan = make_plan(cfg if num_rollout_known else without_schedule(cfg), machine)
    text = render_plan(cfg, plan, machine, num_rollout_known=num_rollout_known)
    return text + "".join(f"{line}\n" for line in trace_lines(plan, argv, description)) if trace else text


def render_plan(cfg: TrainConfig, plan: Plan, machine: Machine, *, num_rollout_known: bool = True) -> str:
    """Render the plan: placement, memory, batch, guard around collectives, user code, resolved values with reasons, advice.

    Pass ``num_rollout_known=False`` if ``loop.num_epoch`` is set and the rows of ``data.train`` have not been counted: the plan
    then contains the number of epochs instead of rollouts and steps.
    """
    return "\n".join(_lines(cfg, plan, machine, num_rollout_known)) + "\n"


def _lines(cfg: TrainConfig, plan: Plan, machine: Machine, num_rollout_known: bool) -> Iterator[str]:
    loop, rollout = cfg.loop, cfg.rollout
    gpus = ", ".join(sorted(set(machine.gpu_names))) or "no GPU"
    yield f"run        {cfg.run.name} -> {plan.run_dir} (run.mode={cfg.run.mode}, algo={cfg.algo.name})"
    host = f"{counted(machine.cpu_count, 'core')}, {machine.memory_bytes / 2**30:.1f} GiB"
    note = "described by --plan-for: weights, tokenizer, data and main memory are not checked"
    nodes = f" on {machine.nodes} nodes" if machine.nodes > 1 else ""
    yield f"machine    {counted(machine.num_gpus, 'GPU')}{nodes} ({gpus}), {host if machine.is_local else note}"
    yield ""
    yield f"placement  {cfg.placement.mode} on {plan.device}, {counted(plan.num_gpus, 'GPU')}"
    for role in plan.roles:
        detail = (
            f"tp {rollout.tp} each{_sharded_cache(plan)}, context {plan.max_context_len}"
            if role.layout is None
            else f"tp {role.layout.tp} * pp {role.layout.pp}{_virtual(role.layout)} * cp {role.layout.cp} * "
            f"dp {role.layout.dp}{_experts(role.layout)}"
        )
        yield f"  {role.name:<9}{len(role.devices)} x ({detail}){_devices(role)}"
    if (num_managers := rollout.num_managers) > 1 and plan.needs_engines:
        yield f"  {'manager':<9}{num_managers} x ({counted(rollout.num_engines // num_managers, 'engine')}, {counted(rollout.batch_size // num_managers, 'prompt')} of a rollout)"
    yield ""
    yield from memory_lines(plan.memory, plan.load)
    yield from dcp_lines(plan.dcp, plan.memory.engine, plan.load)
    yield from plot_lines(plan.memory)
    yield from change_lines(plan.memory, plan.load, plan.dcp)
    yield ""
    yield (
        f"batch      rollout.batch_size {rollout.batch_size} * n_samples_per_prompt {rollout.n_samples_per_prompt} = "
        f"{plan.samples_per_rollout} = global_batch_size {plan.samples_per_step} * "
        f"steps_per_rollout {loop.steps_per_rollout}"
    )
    yield f"           {_run_length(cfg, plan, num_rollout_known)}, max_staleness {loop.max_staleness}"
    scores = ["rollout", *(["old"] if plan.actor.needs_old_logprobs else [])]
    scores += ["reference"] if plan.actor.needs_reference else []
    scores += ["teacher"] if plan.actor.swaps_teacher or plan.teacher is not None else []
    yield f"           log-probabilities used: {', '.join(scores)}"
    if plan.needs_trainer:
        yield ""
        yield from guard_lines(plan.actor.guard)
    yield ""
    if rows := code_rows(cfg):
        yield "user code"
        yield from _table(rows)
        yield ""
    yield "resolved"
    yield from _table([(d.key, d.value, d.reason) for d in plan.decisions])
    if advice := (*plan.advice, *unread_keys(cfg)):
        yield ""
        yield "advice"
        yield from (f"  {line}" for line in advice)


def _run_length(cfg: TrainConfig, plan: Plan, num_rollout_known: bool) -> str:
    """Return the run's length as text: rollouts and optimizer steps, or only epochs if data.train's rows were not counted."""
    loop = cfg.loop
    epochs = "" if loop.num_epoch is None else counted(loop.num_epoch, "epoch")
    if not num_rollout_known:
        return f"{epochs} of data.train, whose rows are not counted here"
    rollouts = f"{counted(loop.num_rollout, 'rollout')}{f' ({epochs})' * bool(epochs)}"
    return f"{rollouts}, {counted(plan.actor.num_steps, 'optimizer step')}"


def _virtual(layout: Layout) -> str:
    return f" of {layout.vpp} virtual stages" if layout.vpp > 1 else ""


def _experts(layout: Layout) -> str:
    shards = f", each over {layout.etp}" if layout.etp > 1 else ""
    return f", experts over {layout.ep}{shards}" if layout.ep * layout.etp > 1 else ""


def _sharded_cache(plan: Plan) -> str:
    """Return a note on the number of ranks that share the KV cache of a sequence; empty without such sharing."""
    return f" (KV cache of a sequence over {plan.dcp.size} ranks)" if plan.dcp.size > 1 else ""


def _devices(role: Role) -> str:
    if not any(role.devices):
        return ""
    return " on GPUs " + " ".join("+".join(map(str, devices)) for devices in role.devices)


def _table(rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for key, value, reason in rows:
        yield f"  {key:<{widths[0]}}  {value:<{widths[1]}}  {reason}"
