"""loop.*, weights.*, placement.*, metrics.* and run.*: how the circle turns and what it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config.schema.base import Config, key, positive, within


@dataclass(kw_only=True)
class LoopConfig(Config):
    """The circle. rollout.batch_size * rollout.n_samples_per_prompt = global_batch_size * steps_per_rollout."""

    num_rollout: int = key(100, "Rollouts to train on (slime: --num-rollout).")
    num_epoch: int | None = key(
        None,
        "Passes over data.train: loop.num_rollout becomes num_epoch * (rows // rollout.batch_size); null: "
        "loop.num_rollout counts.",
    )
    steps_per_rollout: int = key(1, "Optimizer steps per rollout (slime: --num-steps-per-rollout).")
    global_batch_size: int | None = key(None, "Samples per optimizer step; null: what the batch identity leaves.")
    max_staleness: int = key(0, "Versions a rollout may lag behind the trainer; 0: synchronous.")
    leftover: str = key(
        "drop",
        "Samples that do not fill a step, as filters leave them: carry to the next rollout, or drop.",
        choices=("carry", "drop"),
    )
    step_deadline_s: float = key(3600.0, "Longest wait for one phase of the loop.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "num_rollout", "num_epoch", "steps_per_rollout", "global_batch_size", "step_deadline_s")


@dataclass(kw_only=True)
class WeightsConfig(Config):
    """How new weights reach the engines, and the gate that proves they did."""

    transport: str = key(
        "auto", "tensor (colocated), broadcast (split) or auto.", choices=("auto", "tensor", "broadcast")
    )
    bucket_mb: float = key(512.0, "Largest bucket (slime: --update-weight-buffer-size).")
    probe_sequences: int = key(2, "Sequences that engine and trainer both score after each push; 0: no gate.")
    probe_tolerance: float | None = key(None, "Largest |difference| of a probe log-probability; null: by dtype.")
    sample_tolerance: float | None = key(
        None,
        "Largest |trainer - engine| log-probability of a sampled token that the trainer's own weights sampled; a step on "
        "larger ones is not taken, and the run ends. null: by dtype and device (bfloat16: none); inf: none.",
    )
    drift_warning: float | None = key(
        2.0,
        "Warn when the mean of that difference in a rollout is above this many times its median over the rollouts before; "
        "null: never.",
    )
    probe_layers: bool = key(
        False,
        "Report the probe's and the samples' difference by kind of layer: a scoring pass per kind, computed in float64.",
    )
    push_deadline_s: float = key(1800.0, "Longest time a push may take.")
    debug_skip_push_at: int | None = key(None, "Fault for tests: pretend to push this version, sending nothing.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "bucket_mb", "probe_tolerance", "sample_tolerance", "push_deadline_s")
        within(prefix, self, 1.0, 1e6, "drift_warning")


@dataclass(kw_only=True)
class PlacementConfig(Config):
    """Which machine part runs what."""

    device: str = key("auto", "cuda where there is one, else cpu.", choices=("auto", "cpu", "cuda"))
    mode: str = key(
        "colocated",
        "colocated: trainer and engines share devices; split: each has its own.",
        choices=("colocated", "split"),
    )
    actor_num_nodes: int = key(1, "Nodes of the trainer.")
    actor_num_gpus_per_node: int | None = key(None, "Trainer ranks per node (also on CPU); null: tp*pp*cp.")
    ray_address: str | None = key(None, "Ray cluster to join; null: start one for this run on this machine.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "actor_num_nodes", "actor_num_gpus_per_node")


@dataclass(kw_only=True)
class MetricsConfig(Config):
    """Where metrics go; metrics.jsonl is always written."""

    console: str = key(
        "auto",
        "live: a terminal view; plain: a line per step; auto: live on a terminal.",
        choices=("auto", "live", "plain", "off"),
    )
    tensorboard: bool = key(False, "Write tensorboard events into the run's folder.")
    wandb: bool = key(False, "Log to wandb; offline when no key is set.")
    wandb_project: str = key("slime_like", "wandb project.")
    wandb_group: str | None = key(None, "wandb group.")


@dataclass(kw_only=True)
class RunConfig(Config):
    """The run's folder, seeds, checkpoints and modes."""

    name: str = key("run", "Name of the run.")
    dir: str = key("runs/${run.name}", "Folder of everything the run writes.")
    mode: str = key(
        "full",
        "full; rollout_only: no trainer; train_only: no engines, needs replay_from.",
        choices=("full", "rollout_only", "train_only"),
    )
    seed: int = key(0, "Seed of data order, sampling and initialisation.")
    deterministic: bool = key(
        False,
        "Same command, same bits, also after a resume; on a CPU engine and trainer agree in every bit (Megatron: --deterministic-mode).",
    )
    resume: str = key(
        "auto",
        "auto: continue from dir's newest checkpoint if there is one; never: refuse to reuse a used folder; or a checkpoint's path.",
    )
    verify_checkpoint: str = key(
        "full",
        "full: compare the SHA-256 of every file of a checkpoint with what was written before it is loaded; size: only its size.",
        choices=("full", "size"),
    )
    save_interval: int | None = key(None, "Checkpoint every N rollouts; null: only at the end and on Ctrl-C.")
    async_save: bool = key(True, "Write checkpoints beside training, from a copy (Megatron: --async-save).")
    keep_checkpoints: int | None = key(None, "Keep the newest N checkpoints; null: all.")
    on_failed_save: str = key(
        "stop",
        "When a checkpoint cannot be written (a full disk): stop the run, or continue with a warning; the last one always stops.",
        choices=("stop", "continue"),
    )
    save_hf: bool = key(False, "Export the final weights in HF format to dir/hf.")
    save_hf_interval: int | None = key(None, "Export weights in HF format every N rollouts to dir/hf_iter_<N>.")
    dump_rollouts: bool = key(
        False, "Write each rollout's groups to dir/rollouts, and how the trainer scored some of them token by token."
    )
    replay_from: str | None = key(None, "Folder of dumped rollouts to train on instead of generating.")
    prepare: str | None = key(
        None, "Dotted path called with the config before anything is checked: makes data or models on the spot."
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "save_interval", "keep_checkpoints", "save_hf_interval")
