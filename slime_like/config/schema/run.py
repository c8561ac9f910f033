"""loop.*, weights.*, placement.*, metrics.* and run.*: training loop, weight transfer, devices and outputs."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config.schema.base import Config, key, positive, within


@dataclass(kw_only=True)
class LoopConfig(Config):
    """Training loop. rollout.batch_size * rollout.n_samples_per_prompt = global_batch_size * steps_per_rollout."""

    num_rollout: int = key(100, "Number of rollouts to train on (slime: --num-rollout).")
    num_epoch: int | None = key(
        None,
        "Passes over data.train: sets loop.num_rollout to num_epoch * (rows // rollout.batch_size); null: "
        "loop.num_rollout applies.",
    )
    steps_per_rollout: int = key(1, "Optimizer steps per rollout (slime: --num-steps-per-rollout).")
    global_batch_size: int | None = key(None, "Samples per optimizer step; null: rollout samples / steps_per_rollout.")
    max_staleness: int = key(0, "Maximum weight versions that a rollout may lag behind the trainer; 0: synchronous.")
    leftover: str = key(
        "drop",
        "Surplus samples of a rollout: carry them over to the next rollout, or drop them. If there are too few samples for the "
        "rollout's steps: carry all of them over and train on none; with drop, train on them in smaller steps.",
        choices=("carry", "drop"),
    )
    step_deadline_s: float = key(3600.0, "Time limit of one phase of the loop.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "num_rollout", "num_epoch", "steps_per_rollout", "global_batch_size", "step_deadline_s")


@dataclass(kw_only=True)
class WeightsConfig(Config):
    """Weight transfer to the engines, and the probe that verifies it."""

    transport: str = key(
        "auto",
        "Weight transport: a name registered in COLOCATED_TRANSPORTS (tensor: host memory; ipc: CUDA IPC) or SPLIT_TRANSPORTS (broadcast), "
        "depending on placement.mode; auto: broadcast if split; if colocated, ipc on GPUs, else tensor.",
    )
    bucket_mb: float = key(512.0, "Maximum bucket size in MB (slime: --update-weight-buffer-size).")
    probe_sequences: int = key(
        2, "Sequences that engine and trainer both score after each push, to verify the weights; 0: no probe."
    )
    probe_tolerance: float | None = key(
        None, "Maximum absolute log-probability difference allowed in the probe; null: by dtype and device."
    )
    sample_tolerance: float | None = key(
        None,
        "Maximum |trainer - engine| log-probability difference of a token in samples from the trainer's current weights only; a "
        "larger difference ends the run before the step. null: by dtype and device (bfloat16: no limit); inf: no limit.",
    )
    drift_warning: float | None = key(
        2.0,
        "Warn if a rollout's mean |trainer - engine| log-probability difference exceeds weights.probe_tolerance, or exceeds both "
        "the effect of rounding and this multiple of the median of earlier rollouts' means; null: never warn.",
    )
    probe_layers: bool = key(
        False,
        "Report the log-probability differences with one kind of layer computed in float64, in one more scoring pass per kind.",
    )
    push_deadline_s: float = key(1800.0, "Time limit of a weight push.")
    debug_skip_push_at: int | None = key(
        None, "Fault for tests: skip the push of this weight version but report it as done."
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "bucket_mb", "push_deadline_s")
        positive(prefix, self, "probe_tolerance", "sample_tolerance", finite=False)
        within(prefix, self, 1.0, 1e6, "drift_warning")


@dataclass(kw_only=True)
class PlacementConfig(Config):
    """Assignment of processes to devices and nodes."""

    device: str = key("auto", "Device; auto: cuda if available, else cpu.", choices=("auto", "cpu", "cuda"))
    mode: str = key(
        "colocated",
        "colocated: trainer and engines share devices; split: they use separate devices.",
        choices=("colocated", "split"),
    )
    actor_num_nodes: int = key(1, "Number of trainer nodes.")
    actor_num_gpus_per_node: int | None = key(None, "Number of trainer ranks per node (also on CPU); null: tp*pp*cp.")
    offload_train: bool = key(
        False,
        "Move the trainer's weights, gradients and optimizer state to host memory while rollouts are sampled (slime: "
        "--offload-train; verl: param_offload, grad_offload, optimizer_offload).",
    )
    offload_rollout: bool = key(
        False,
        "Release the engines' weights, KV cache and CUDA graphs while the trainer has the devices (slime: --offload-rollout; "
        "verl: free_cache_engine). On a CPU, engines receive the requests, but keep their memory.",
    )
    ray_address: str | None = key(None, "Ray cluster to join; null: start one for this run on this machine.")
    wait_deadline_s: float = key(
        300.0, "Maximum wait until a joined Ray cluster has the nodes and free GPUs that the run needs."
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "actor_num_nodes", "actor_num_gpus_per_node", "wait_deadline_s")


@dataclass(kw_only=True)
class MetricsConfig(Config):
    """Metric sinks; metrics.jsonl is always written."""

    console: str = key(
        "auto",
        "live: a terminal view; plain: one line per step; auto: live on a terminal, else plain.",
        choices=("auto", "live", "plain", "off"),
    )
    sinks: list[str] = key(
        [], "Additional metric sinks: names registered in SINKS, or import paths such as my_pkg.my_mod:MySink."
    )
    tensorboard: bool = key(False, "Write tensorboard events to the run's folder.")
    wandb: bool = key(
        False, "Log to wandb; offline without an API key (WANDB_API_KEY, `wandb login`), unless WANDB_MODE is set."
    )
    wandb_project: str = key("slime_like", "wandb project.")
    wandb_group: str | None = key(None, "wandb group.")


@dataclass(kw_only=True)
class RunConfig(Config):
    """Folder, seeds, checkpoints and modes."""

    name: str = key("run", "Name of the run.")
    dir: str = key("runs/${run.name}", "Folder of the run's outputs.")
    mode: str = key(
        "full",
        "full: trainer and engines; rollout_only: no trainer; train_only: no engines, needs replay_from.",
        choices=("full", "rollout_only", "train_only"),
    )
    seed: int = key(0, "Seed of data order, sampling and weight initialisation.")
    deterministic: bool = key(
        False,
        "Make runs bitwise reproducible, even after a resume; on a CPU, engine and trainer agree bitwise (Megatron: --deterministic-mode).",
    )
    resume: str = key(
        "auto",
        "auto: continue from the newest checkpoint in run.dir, if there is one; never: reject a folder that was used before; or "
        "the path of a checkpoint.",
    )
    verify_checkpoint: str = key(
        "full",
        "Check of a checkpoint's files before loading. full: compare their SHA-256 with the recorded values; size: compare sizes only.",
        choices=("full", "size"),
    )
    save_interval: int | None = key(None, "Save a checkpoint every N rollouts; null: only at the end and on Ctrl-C.")
    async_save: bool = key(True, "Write checkpoints in the background, from a copy (Megatron: --async-save).")
    keep_checkpoints: int | None = key(None, "Number of newest checkpoints to keep; null: all.")
    on_failed_save: str = key(
        "stop",
        "If a checkpoint cannot be written (for example, on a full disk), stop the run or continue with a warning. A failure of "
        "the last checkpoint always stops the run.",
        choices=("stop", "continue"),
    )
    save_hf: bool = key(False, "Export the final weights in HF format to run.dir/hf.")
    save_hf_interval: int | None = key(None, "Export weights in HF format every N rollouts to run.dir/hf_iter_<N>.")
    dump_rollouts: bool = key(
        False, "Write each rollout's groups to run.dir/rollouts, and the trainer's per-token scores of some samples."
    )
    replay_from: str | None = key(None, "Folder of dumped rollouts to train on instead of generating.")
    prepare: str | None = key(
        None,
        "Import path (my_pkg.my_mod:function) of a function that is called with the config before files are checked. The function "
        "may create data or models.",
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "save_interval", "keep_checkpoints", "save_hf_interval")
