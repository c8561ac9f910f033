"""critic.* and teacher.*: models next to the actor, each on its own Megatron ranks unless a teacher is swapped in."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config.schema.base import Config, key, positive, within


@dataclass(kw_only=True)
class CriticConfig(Config):
    """Value model of algo=ppo. Layout keys default to the actor's; the critic's pipeline is split evenly."""

    hf_checkpoint: str | None = key(
        None, "HF folder of the critic's initial weights (without the value head); null: model.hf_checkpoint."
    )
    load: str | None = key(
        None,
        "Checkpoint folder of an earlier critic, or one of its iterations, to start from, with the same path on every node of the "
        "critic's ranks; null: a new value head.",
    )
    lr: float | None = key(None, "Peak learning rate; null: optim.lr.")
    lr_warmup_steps: int = key(0, "Optimizer steps of linear warm-up.")
    warmup_rollouts: int = key(0, "Number of initial rollouts that train only the critic.")
    value_clip: float | None = key(
        0.2, "Maximum difference of a value from its estimate before the rollout's updates; null: no limit."
    )
    placement: str = key(
        "colocated",
        "colocated: on the actor's devices; split: on separate devices. On a CPU, always in separate processes.",
        choices=("colocated", "split"),
    )
    tp: int | None = key(None, "Tensor parallel size.")
    pp: int | None = key(None, "Pipeline parallel size.")
    cp: int | None = key(None, "Context parallel size.")
    dp: int | None = key(None, "Data parallel size.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "value_clip", "tp", "pp", "cp", "dp")
        within(prefix, self, 0.0, 1e12, "lr", "lr_warmup_steps", "warmup_rollouts")


@dataclass(kw_only=True)
class TeacherConfig(Config):
    """Teacher policy of algo=distill. Layout keys default to the actor's; the teacher's pipeline is split evenly."""

    hf_checkpoint: str | None = key(None, "HF folder of the teacher (slime: --opd-teacher-load).")
    placement: str = key(
        "auto",
        "swap: on the actor's ranks, which swap weights (same shape required); colocated, split: separate ranks on the actor's "
        "devices or on other devices; auto: swap if the shapes are equal, else colocated.",
        choices=("auto", "swap", "colocated", "split"),
    )
    tp: int | None = key(None, "Tensor parallel size of separate teacher ranks.")
    pp: int | None = key(None, "Pipeline parallel size of separate teacher ranks.")
    cp: int | None = key(None, "Context parallel size of separate teacher ranks.")
    dp: int | None = key(None, "Data parallel size of separate teacher ranks.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "tp", "pp", "cp", "dp")
