"""Rank functions of test_roles: rollouts of an actor with a critic or a teacher in the same world."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime_like.batch import Columns, PackedBatch
from slime_like.config.schema.policy import AlgoConfig
from slime_like.config.schema.resolved import CriticSpec, Layout, TeacherSpec
from slime_like.config.schema.role_algo import DistillConfig, PpoConfig
from slime_like.errors import SlimeLikeError
from slime_like.metrics.types import reduce_metrics
from slime_like.types import F32
from tests.train.faults import replace_attribute
from tests.train.jobs import Shared, join_and_make_groups, make_actor, save_checkpoint
from tests.train.lifecycle import batch
from tests.train.models import count_tokens, make_spec
from tests.train.ranks import RankWorld

PPO = PpoConfig(gamma=0.95, lambd=0.9, kl_coef=0.1, eps_clip=0.3)
DISTILL = DistillConfig(opd_kl_coef=0.5, reward_coef=1.0)
STEPS = 2


@dataclass(frozen=True)
class TrainedColumns:
    """Metrics per rollout on the reporter, and on all ranks the column of every row before and after training."""

    metrics: list[dict[str, float]]
    before: list[list[F32]]  # [step][row] -> [T]
    after: list[list[F32]]
    advantages: dict[int, F32] = field(default_factory=dict[int, F32])  # sample id -> [L], of the last rollout


def rollout(layout: Layout, rank: int) -> tuple[list[list[PackedBatch]], list[int]]:
    """Return this dp rank's rows of two optimizer steps, and the global counts of trained tokens."""
    steps = [[_with_ids(rows, 100 * seed + 10 * i) for i, rows in enumerate(batch(seed))] for seed in range(STEPS)]
    return [rows[rank :: layout.dp] for rows in steps], [count_tokens(rows) for rows in steps]


def _with_ids(rows: PackedBatch, first: int) -> PackedBatch:
    """Return the rows with sample ids from ``first`` on, which no other rows have."""
    return replace(rows, sample_ids=first + np.arange(len(rows.sample_ids), dtype=np.int64))


def make_role(world: RankWorld, spec: CriticSpec | TeacherSpec) -> Any:
    rank_info = join_and_make_groups(world, spec.rank)
    from slime_like.train.megatron.rank.critic import RankCritic
    from slime_like.train.megatron.rank.teacher import RankTeacher

    return RankCritic(spec, rank_info) if isinstance(spec, CriticSpec) else RankTeacher(spec.rank, rank_info)


def make_critic(world: RankWorld, folder: Path, layout: Layout, **changes: Any) -> Any:
    """Return a critic whose head is not zero and does not depend on the layout."""
    spec = make_spec(folder, layout, optim={"lr": 1e-3}, steps_per_rollout=STEPS)
    critic = make_role(world, replace(CriticSpec(spec, value_clip=0.2, load=None, warmup_rollouts=0), **changes))
    head = getattr(critic.model.last, "value_head", None)
    if head is not None and changes.get("load") is None:
        with torch.no_grad():
            head.weight.copy_(head_weight())
            head.bias.fill_(0.3)
    critic.optimizer.reload_model_params()  # the optimizer has copies of the weights
    return critic


def head_weight() -> torch.Tensor:
    return torch.randn(1, 64, generator=torch.Generator().manual_seed(7)) / 8


def gather_shards(columns: Columns | None, dp_rank: int) -> list[Columns]:
    """Return the columns of every data-parallel rank, on all ranks."""
    columns_of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(columns_of_ranks, (dp_rank, columns))
    return [columns for _, columns in sorted((f for f in columns_of_ranks if f[1] is not None), key=lambda f: f[0])]


def by_row(ranks: list[Columns]) -> list[list[F32]]:
    """Return the columns of each step's rows, which were distributed to the ranks in turn."""
    steps = zip(*ranks, strict=True)
    return [[c for turn in zip(*step, strict=True) for c in turn] for step in steps]


# ---- critic ----------------------------------------------------------------------------------------------------------
def ppo(world: RankWorld, shared: Shared, layout: Layout, *, rollouts: int = 2, fault: bool = False) -> TrainedColumns:
    """Train actor and critic on rollouts, in the order of ``MultiRoleTrainer``."""
    with _sum_gradient_twice() if fault else contextlib.nullcontext():
        actor = make_actor(
            world, shared.models["tied"], layout, algo=PPO, steps_per_rollout=STEPS, returns_advantages=True
        )
        critic = make_critic(world, shared.models["untied"], layout)
        first: list[list[F32]] = []
        metrics: list[dict[str, float]] = []
        for _ in range(rollouts):
            values, report = ppo_rollout(actor, critic, layout)
            first = first or values
            metrics.append(report)
        last, _ = critic.score(rollout(layout, critic.rank_info.dp_rank)[0])
        advantages_of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(advantages_of_ranks, actor.token_advantages([0, 12, 101, 110, 999]))
        advantages = {sample_id: column for of_rank in advantages_of_ranks for sample_id, column in of_rank.items()}
        assert sum(map(len, advantages_of_ranks)) == len(advantages), "exactly one rank reports each shard"
        return TrainedColumns(metrics, first, by_row(gather_shards(last, critic.rank_info.dp_rank)), advantages)


def ppo_rollout(actor: Any, critic: Any, layout: Layout, *, frozen: bool = False) -> tuple[list[list[F32]], Any]:
    """Train on one rollout. Return the values before the update, and the metrics of actor and critic."""
    steps, counts = rollout(layout, actor.rank_info.dp_rank)
    values, score_metrics = critic.score(steps)
    assert score_metrics == ()
    actor.open_rollout(steps)
    shards = gather_shards(values, critic.rank_info.dp_rank)
    returns = gather_shards(
        actor.compute_advantages({"values": shards[actor.rank_info.dp_rank]}), actor.rank_info.dp_rank
    )
    metrics = (*actor.update(counts, frozen=frozen), *critic.update(returns[critic.rank_info.dp_rank], counts))
    return by_row(shards), reduce_metrics(metrics)


def _sum_gradient_twice() -> Any:
    """Inject a fault: the full gradient of each tensor parallel rank is summed over the ranks."""
    from slime_like.train.megatron.model import value_model

    stock = value_model.gather_from_sequence_parallel_region
    return replace_attribute(
        value_model,
        "gather_from_sequence_parallel_region",
        lambda x, **_: stock(x, tensor_parallel_output_grad=True),
    )


def warmup(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, Any]:
    """Train only the critic on one rollout. Return the metrics, whether the actor is unchanged, and its version."""
    actor = make_actor(world, shared.models["tied"], layout, algo=PPO, steps_per_rollout=STEPS)
    critic = make_critic(world, shared.models["untied"], layout)
    before = [p.detach().clone() for p in actor.model.parameters()]
    _, metrics = ppo_rollout(actor, critic, layout, frozen=True)
    is_unchanged = all(torch.equal(a, b) for a, b in zip(before, actor.model.parameters(), strict=True))
    return {"metrics": metrics, "actor unchanged": is_unchanged, "version": actor.version}


def new_critics(world: RankWorld, shared: Shared, layout: Layout) -> list[float]:
    """Return the largest values of critics initialised from HF causal LMs, tied and untied."""
    out: list[float] = []
    for kind in ("tied", "untied"):
        spec = make_spec(shared.models[kind], layout)
        critic = make_role(world, CriticSpec(spec, value_clip=None, load=None, warmup_rollouts=0))
        values, _ = critic.score(rollout(layout, critic.rank_info.dp_rank)[0])
        out += [float(np.abs(c).max()) for step in values or [] for c in step]
    return out


def critic_resumes(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, Any]:
    """Save critic and actor after one rollout; load both checkpoints as a critic, which is refused for the actor's."""
    folder = shared.scratch / "critic"
    actor = make_actor(world, shared.models["tied"], layout, algo=PPO, steps_per_rollout=STEPS)
    critic = make_critic(world, shared.models["untied"], layout)
    ppo_rollout(actor, critic, layout)
    save_checkpoint(critic, folder, 1)
    save_checkpoint(actor, shared.scratch / "actor", 1)
    expected, _ = critic.score(rollout(layout, critic.rank_info.dp_rank)[0])
    resumed = make_critic(world, shared.models["untied"], layout)
    resumed.load(folder, 1)
    values, _ = resumed.score(rollout(layout, resumed.rank_info.dp_rank)[0])
    _, report = ppo_rollout(actor, resumed, layout)
    out = {"expected": expected, "resumed": values, "version": resumed.version, "report": report}
    load = str(folder / "iter_0000001")
    initial_critic = make_critic(world, shared.models["untied"], layout, load=load)
    out["loaded"], _ = initial_critic.score(rollout(layout, initial_critic.rank_info.dp_rank)[0])
    plain = make_critic(world, shared.models["untied"], replace(layout, distributed_optimizer=False), load=load)
    out["loaded by a plain optimizer"], _ = plain.score(rollout(layout, plain.rank_info.dp_rank)[0])
    for name, kind, action in (
        ("actor as critic.load", "tied", lambda c, f: c),
        ("actor resumed as critic", "tied", lambda c, f: c.load(f, 1)),
    ):
        source = shared.scratch / "actor"
        load = str(source / "iter_0000001") if "critic.load" in name else None
        try:
            action(make_critic(world, shared.models[kind], layout, load=load), source)
            out[name] = "no error"
        except SlimeLikeError as error:
            out[name] = f"{type(error).__name__}: {error}"
    return out


def faulty_ppo(world: RankWorld, shared: Shared, layout: Layout) -> TrainedColumns:
    """Run ``ppo`` with the fault."""
    return ppo(world, shared, layout, fault=True)


# ---- teacher ---------------------------------------------------------------------------------------------------------
def distill(
    world: RankWorld, shared: Shared, layout: Layout, *, own_ranks: bool, algo: AlgoConfig = DISTILL, rollouts: int = 2
) -> TrainedColumns:
    """Train a student that starts as a copy of its teacher and diverges from it by rewards."""
    folder = shared.models["untied"]
    swapped = None if own_ranks else str(folder)
    spec: dict[str, Any] = {"algo": algo, "steps_per_rollout": STEPS, "teacher_checkpoint": swapped}
    actor = make_actor(world, folder, layout, **spec)
    teacher = make_role(world, TeacherSpec(make_spec(folder, layout))) if own_ranks else None
    metrics: list[dict[str, float]] = []
    shards: list[Columns] = []
    for _ in range(rollouts):
        steps, counts = rollout(layout, actor.rank_info.dp_rank)
        actor.open_rollout(steps)
        columns: dict[str, Columns] = {}
        if teacher is not None:
            scores, _ = teacher.score(steps)
            shards = gather_shards(scores, teacher.rank_info.dp_rank)
            columns = {"teacher_logprobs": shards[actor.rank_info.dp_rank]}
        assert actor.compute_advantages(columns) is None
        metrics.append(reduce_metrics(actor.update(counts, frozen=False)))
    return TrainedColumns(metrics, by_row(shards) if shards else [], [])


def own_teacher(world: RankWorld, shared: Shared, layout: Layout) -> TrainedColumns:
    """Distill from a teacher on separate ranks."""
    return distill(world, shared, layout, own_ranks=True)


def swapped_teacher(world: RankWorld, shared: Shared, layout: Layout) -> TrainedColumns:
    """Distill from a teacher whose weights are swapped into the actor."""
    return distill(world, shared, layout, own_ranks=False)


def teacher_of_another_shape(world: RankWorld, shared: Shared, layout: Layout) -> list[list[F32]]:
    """Return log-probabilities of a teacher of another family."""
    teacher = make_role(world, TeacherSpec(make_spec(shared.models["llama"], layout)))
    columns, metrics = teacher.score(rollout(layout, teacher.rank_info.dp_rank)[0])
    assert (len(metrics) == 1) == teacher.rank_info.is_reporter
    return by_row(gather_shards(columns, teacher.rank_info.dp_rank))
