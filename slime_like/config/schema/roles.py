"""critic.* and teacher.*: models beside the actor, each on Megatron ranks of its own."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config.schema.base import Config, key, positive, within


@dataclass(kw_only=True)
class CriticConfig(Config):
    """The value model of algo=ppo. A layout key that is null is the actor's; its pipeline is split evenly."""

    hf_checkpoint: str | None = key(None, "HF folder whose body the critic starts from; null: model.hf_checkpoint.")
    load: str | None = key(
        None, "Checkpoints of an earlier critic, or one iteration of them, to start from; null: a fresh value head."
    )
    lr: float | None = key(None, "Peak learning rate; null: optim.lr.")
    lr_warmup_steps: int = key(0, "Optimizer steps of linear warm-up.")
    warmup_rollouts: int = key(0, "First rollouts on which the critic alone trains.")
    value_clip: float | None = key(0.2, "How far a value may move from its old one in a rollout; null: no limit.")
    placement: str = key(
        "colocated",
        "colocated: on the actor's devices; split: on devices of its own. On CPU always processes of its own.",
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
    """The policy that algo=distill learns from. A layout key that is null is the actor's; a pipeline is split evenly."""

    hf_checkpoint: str | None = key(None, "HF folder of the teacher (slime: --opd-teacher-load).")
    placement: str = key(
        "auto",
        "swap: in the actor's place on its ranks, needs its shape; colocated, split: ranks of its own on the actor's or "
        "on other devices; auto: swap where the shapes are equal, else colocated.",
        choices=("auto", "swap", "colocated", "split"),
    )
    tp: int | None = key(None, "Tensor parallel size, of ranks of its own.")
    pp: int | None = key(None, "Pipeline parallel size, of ranks of its own.")
    cp: int | None = key(None, "Context parallel size, of ranks of its own.")
    dp: int | None = key(None, "Data parallel size, of ranks of its own.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "tp", "pp", "cp", "dp")
