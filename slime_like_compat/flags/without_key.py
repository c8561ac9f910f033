"""Flags of slime and Megatron without a key here: config.json of the model has the value, or the feature is missing.

``table.REFUSED`` includes them. A conversion drops the flags in ``HARMLESS``, which do not change a job, and flags without
effect in the current job. It refuses the others, and --spec and --position-embedding-type if no supported model has their value.
"""

from __future__ import annotations

_SHAPE = "config.json of --hf-checkpoint has this value: remove the flag"
_KERNELS = "the trainer chooses its kernels: remove it"
_HOOK = "there is no such hook; docs/extending.md lists the interfaces"
_DISK = "weights are sent to the engines through memory or a broadcast, never through files"
_PORT = "its signature differs: port it to algo.loss, algo.token_advantage or algo.off_policy (docs/extending.md)"
_BUFFER = "there is no external rollout buffer: write a data source (data.source) or a generate function"
_OUTPUT = "see metrics.jsonl and the report of a run"
_MEMORY = "peaks are the metrics memory/*, free memory is guard/free_bytes"
_PROFILE = "not supported: the trainer has no profiler"
_ROUTER = "engines are addressed directly"
_BATCHES = "batches are sent through Ray's object store"
# slime's MTP loss has gradients in these layers only (its tests/test_mimo_7B_mtp_only_grad.py), so the policy is the same.
MTP = "layers for multi-token prediction are not trained, but exported as in --hf-checkpoint; the policy's training is the same"
_DEADLINES = "a collective has the deadline guard.deadline_s (default: loop.step_deadline_s)"

MODEL_SHAPE: dict[str, str] = dict.fromkeys(
    [
        "--spec",
        "--disable-bias-linear",
        "--group-query-attention",
        "--norm-epsilon",
        "--swiglu",
        "--vocab-size",
        "--rotary-base",
        "--rotary-percent",
        "--untie-embeddings-and-output-weights",
        "--position-embedding-type",
        "--use-rotary-position-embeddings",
        "--no-position-embedding",
        "--rotary-scaling-factor",
        "--use-rope-scaling",
        "--rope-scaling-factor",
        "--rotary-seq-len-interpolation-factor",
        "--use-gated-attention",
        "--attention-output-gate",
        "--apply-layernorm-1p",
        "--max-position-embeddings",
        "--seq-length",
        "--make-vocab-size-divisible-by",
        "--multi-latent-attention",
        "--kv-lora-rank",
        "--q-lora-rank",
        "--qk-head-dim",
        "--qk-pos-emb-head-dim",
        "--v-head-dim",
        "--mscale",
        "--mscale-all-dim",
        "--post-self-attn-layernorm",
        "--post-mlp-layernorm",
        "--model-name",
        "--padded-vocab-size",
    ],
    _SHAPE,
)
"""Megatron's flags that describe a model, which slime's scripts/models set; here the checkpoint's config.json does."""

NOT_HERE: dict[str, str] = {
    **dict.fromkeys(["--no-rope-fusion", "--no-masked-softmax-fusion", "--no-gradient-accumulation-fusion"], _KERNELS),
    **dict.fromkeys(
        [
            "--rollout-sample-hook-path",
            "--buffer-filter-path",
            "--rollout-data-postprocess-path",
            "--rollout-sample-filter-path",
            "--rollout-all-samples-process-path",
            "--custom-reward-post-process-path",
            "--custom-convert-samples-to-train-data-path",
            "--custom-megatron-init-path",
            "--custom-megatron-before-log-prob-hook-path",
            "--custom-megatron-before-train-step-hook-path",
            "--custom-model-provider-path",
            "--eval-function-path",
        ],
        _HOOK,
    ),
    **dict.fromkeys(
        [
            "--update-weight-disk-dir",
            "--update-weight-disk-keep-files",
            "--update-weight-delta-encoding",
            "--update-weight-delta-checksum",
            "--custom-update-weight-post-write-path",
            "--update-weight-local-checkpoint-dir",
        ],
        _DISK,
    ),
    **dict.fromkeys(
        [
            "--custom-pg-loss-reducer-function-path",
        ],
        _PORT,
    ),
    **dict.fromkeys(
        [
            "--rollout-buffer-url",
            "--fetch-trajectory-retry-times",
            "--min-batch-collection-ratio",
            "--rollout-task-type",
            "--disable-rollout-global-dataset",
        ],
        _BUFFER,
    ),
    **dict.fromkeys(
        [
            "--custom-rollout-log-function-path",
            "--custom-eval-rollout-log-function-path",
            "--log-correct-samples",
            "--log-multi-turn",
            "--log-reward-category",
            "--use-rollout-entropy",
            "--wandb-always-use-train-step",
            "--wandb-run-id",
            "--tb-project-name",
            "--tb-experiment-name",
            "--ci-test",
            "--ci-disable-kl-checker",
            "--ci-train-rollout-logprob-abs-diff-threshold",
            "--ci-save-grad-norm",
            "--ci-load-grad-norm",
        ],
        _OUTPUT,
    ),
    **dict.fromkeys(
        [
            "--memory-recorder",
            "--memory-snapshot-dir",
            "--memory-snapshot-num-steps",
            "--memory-snapshot-path",
            "--record-memory-history",
        ],
        _MEMORY,
    ),
    "--profile-target": _PROFILE,
    **dict.fromkeys(
        [
            "--sglang-router-ip",
            "--sglang-router-port",
            "--sglang-router-request-timeout-secs",
            "--use-distributed-post",
            "--http-proxy",
        ],
        _ROUTER,
    ),
    "--rollout-data-transport": _BATCHES,
    "--save-retain-interval": "run.keep_checkpoints keeps the newest checkpoints",
    "--train-memory-margin-bytes": "the memory guard acts on low memory: guard.threshold",
    "--use-miles-dashboard": _OUTPUT,
    "--megatron-deepgemm-forward-layers": "",
    "--megatron-deepgemm-forward-modules": "",
    "--megatron-deepgemm-moe-forward-layers": "",
    "--megatron-deepgemm-moe-forward-modules": "",
    "--load-debug-rollout-data-subsample": "",
    "--load-forge-rollout-data": "run.replay_from trains on dumped rollouts",
    "--opd-teacher-ckpt-step": "set teacher.hf_checkpoint to the folder of this iteration",
    "--ref-ckpt-step": "set model.ref_checkpoint to the folder of this iteration",
    "--opsm-delta": "",
    "--recompute-loss-function": "the loss keeps no copy of the logits: model.logits_chunk",
    "--eval-max-prompt-len": "a prompt that leaves no room in the context is a bad row (data.on_bad_row)",
    "--eval-min-new-tokens": "",
    "--distributed-timeout-minutes": _DEADLINES,
    "--train-env-vars": "set the variables in the environment of train.py",
    "--custom-config-path": "write the equivalents of its settings into the recipe",
    "--megatron-config-path": "set the critic's keys, critic.*",
    "--allgather-cp": "context parallelism always splits attention and Gated DeltaNet layers (model.gdn.cp_mode)",
    "--no-check-for-nan-in-loss-and-grad": "",
    "--log-probs-max-tokens-per-gpu": "passes that compute log-probabilities use the micro-batches of training: --max-tokens-per-gpu",
    "--balance-by-flops": "work is balanced over ranks within the token budget",
    "--eval-max-context-len": "rollout.max_context_len also bounds held-out prompts",
    "--eval-input-key": "set evaluation.overrides.<name>.input_key for each held-out set",
    "--eval-label-key": "set evaluation.overrides.<name>.label_key for each held-out set",
    "--eval-tool-key": "",
    "--start-rollout-id": "a resumed run continues at its checkpoint: run.resume",
    "--no-save-optim": "a checkpoint holds the full state of the run",
    "--only-train-params-name-list": "",
    "--freeze-params-name-list": "",
    "--freeze-indexer": "",
    "--rollout-external-engine-addrs": "",
    "--use-unbiased-kl": "",
    "--ref-update-interval": "",
    "--keep-old-actor": "",
    "--reset-optimizer-states": "",
    "--use-stateless-adam": "",
    "--disable-rewards-normalization": "algo.group_advantage selects the baseline",
    "--dump-details": "run.dump_rollouts=true writes every sample",
    "--save-debug-train-data": "run.dump_rollouts=true writes every sample",
    "--enable-experimental": "",
    "--fp8-format": "",
    "--data-pad-size-multiplier": "rows are packed without padding",
    "--mtp-num-layers": MTP,
    "--wandb-team": "set the environment variable WANDB_ENTITY",
    "--wandb-host": "set the environment variable WANDB_BASE_URL",
    "--wandb-mode": "set the environment variable WANDB_MODE",
    "--wandb-dir": "wandb's files are in run.dir",
    "--disable-wandb-random-suffix": "a wandb run has the name of the run, without a suffix: remove it",
    "--sglang-config": "all engines have the same settings: rollout.num_engines of rollout.tp GPUs each",
    "--prefill-num-servers": "",
}
"""Flag -> alternative, or an empty text."""

HARMLESS: frozenset[str] = frozenset(
    {
        *MODEL_SHAPE,
        *(
            flag
            for flag, reason in NOT_HERE.items()
            if reason in (_KERNELS, _DISK, _DEADLINES, _OUTPUT, _MEMORY, _PROFILE, _ROUTER, _BATCHES)
        ),
        # transport only: weights and samples are the same
        "--update-weight-mode",
        "--update-weight-transport",
        "--release-train",
        "--check-weight-update-equal",
        "--prefill-num-servers",
        "--sglang-server-concurrency",
        # layout and memory
        "--attention-backend",
        "--num-gpus-per-node",
        "--allgather-cp",
        "--log-probs-max-tokens-per-gpu",
        "--balance-by-flops",
        "--train-memory-margin-bytes",
        "--data-pad-size-multiplier",
        "--micro-batch-size",
        "--offload",
        "--recompute-loss-function",
        "--critic-num-nodes",
        "--critic-num-gpus-per-node",
        # files and logs
        "--no-save-optim",
        "--save-retain-interval",
        "--critic-save",
        "--dump-details",
        "--save-debug-train-data",
        "--save-hf",
        "--megatron-to-hf-mode",
        "--wandb-key",
        "--wandb-team",
        "--wandb-host",
        "--wandb-mode",
        "--wandb-dir",
        "--disable-wandb-random-suffix",
        # another random sequence, checks that always run, switches without an effect by themselves
        "--rollout-seed",
        "--no-check-for-nan-in-loss-and-grad",
        "--num-experts",
        "--enable-experimental",
        "--enable-mtp-training",
        "--mtp-num-layers",
        "--opsm-delta",
    }
)
"""Flags that do not change a job: dropped with a reason, and the script is converted."""

SGLANG_RENAMED: dict[str, str] = {
    "cuda_graph_bs": "cuda_graph_bs_decode",
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "nsa_decode_backend": "dsa_decode_backend",
    "nsa_prefill_backend": "dsa_prefill_backend",
    "mamba_scheduler_strategy": "mamba_radix_cache_strategy",
}
"""Fields of older SGLang in slime's scripts -> their current names."""
