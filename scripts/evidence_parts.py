"""Parts of ``gpu_evidence.py`` for one GPU, in order of value: commands, time limits, needs, and expected results."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

Command = tuple[str, ...]
"""Arguments of Python. ``{folder}`` is the part's folder."""

ENGINE = ("sglang", "ray")
TRAIN = "train.py"
SHORT = "+recipe=quickstart loop.num_rollout=10"
GSM8K = "data/gsm8k"
MATH = "data.train=data/gsm8k/train.jsonl evaluation.datasets={} reward.name=math"
SMALL_HYBRID = (
    f"model.hf_checkpoint=models/Qwen3.5-0.8B {MATH} rollout.batch_size=16 rollout.max_response_len=512 model.recompute=full "
    "parallel.max_tokens_per_rank=8192 rollout.sglang.mem_fraction_static=0.4"
)
CURVE = "the curve of the quickstart on a CPU"
MAKE_MODEL = """
from dataclasses import replace
from pathlib import Path
from slime_like.quickstart.arithmetic import ArithmeticSpec, write_datasets
from slime_like.quickstart.model import GDN, LinearSpec, ModelSpec, write_model
folder = Path(r"{folder}/assets")
folder.mkdir(exist_ok=True)
write_datasets(folder, ArithmeticSpec())
write_model(folder / "model", %s)
"""
HEADS_OF_128 = (
    "-c",
    MAKE_MODEL % "replace(GDN, linear=LinearSpec(linear_key_head_dim=128, linear_value_head_dim=128))",
)
ASSETS = "run.prepare=null model.hf_checkpoint={folder}/assets/model data.train={folder}/assets/train.jsonl evaluation.datasets={}"


@dataclass(frozen=True, slots=True)
class EvidencePart:
    """Commands that run in sequence within ``minutes``. Each node needs ``num_gpus`` GPUs with ``gb`` GB of memory each."""

    name: str
    title: str
    commands: tuple[Command, ...]
    minutes: int
    not_run: str  # features that no GPU has executed yet, and results of other tests
    expect: str = ""  # expected results besides exit code 0
    needs: tuple[str, ...] = ()  # packages
    files: tuple[str, ...] = ()  # models and data in the checkout, at the paths of the recipes
    num_gpus: int = 1
    gb: int = 0  # 10**9 bytes
    num_nodes: int = 1


def tests(words: str) -> tuple[Command]:
    """Return one pytest command that runs tests marked ``gpu``; ``words`` are the test files and options."""
    fixed = "-m pytest -v -p no:cacheprovider -m gpu --tb=short --junitxml={folder}/tests.xml"
    return (tuple(f"{fixed} {words}".split()),)


def runs(common: str, **keys: str) -> tuple[Command, ...]:
    """Return a train.py command for each keyword: its name is the run's folder, its value gives overrides after ``common``."""
    return tuple(
        (TRAIN, f"run.dir={{folder}}/{name}", "placement.device=cuda", *shlex.split(f"{common} {overrides}"))
        for name, overrides in keys.items()
    )


def command(words: str) -> tuple[Command]:
    """Split ``words`` as a shell does, and return them as the only command of a tuple."""
    return (tuple(shlex.split(words)),)


ONE_GPU: tuple[EvidencePart, ...] = (
    EvidencePart(
        "guard", "Memory guard and NCCL", tests("tests/distributed/test_gpu.py tests/cluster/test_peaks.py"), 3,
        "release and recreation of communicators; the other tests passed on one H100 with torch 2.11",
        "a query of free memory takes about 10 µs (`mem_get_info_us`), and clearing 1 GiB of cached blocks with "
        "`guard.memory=driver` about 1 ms (`clear_ms_driver`)",
    ),
    EvidencePart(
        "trainer", "Trainer against transformers", tests("tests/train/test_gpu.py tests/train/test_grouped_products.py"), 15,
        "FlashQLA in the trainer, determinism, TransformerEngine (its context parallelism needs a second GPU); the other tests passed on one "
        "H100 with torch 2.11",
        needs=("megatron",),
    ),
    EvidencePart(
        "flow_mla", "FlowMLA's copies between two processes", tests("--noconftest tests/engine/test_flow_mla_gpu.py"), 5,
        "slots (buffers for gathered layers) that are allocated after the weights are loaded; the tests of an earlier version "
        "passed on one H100",
        "`hidden`, the share of a copy's time during which the previous layer computes, above 0.5",
    ),
    EvidencePart(
        "ipc", "Weights from one process to another over CUDA IPC",
        tests("--noconftest tests/weight_sync/test_ipc_gpu.py tests/weight_sync/test_shared_gpu.py"), 5,
        "IPC handles of a real CUDA driver between two processes, page-locked shared memory, the rate of a push",
        "`share_of_the_limit` above 0.2; the limit is the rate of copying each byte three times on the device",
    ),
    EvidencePart(
        "step", "Speed, memory and synchronisations of a training step", command("benchmarks/gpu_step.py --traced"), 20,
        "hybrid models; steps of a dense model and of a model with experts were measured on one H100",
        "peaks within 10% of the traced ones; FlashQLA faster than fla", ("megatron",),
    ),
    EvidencePart(
        "gdn", "Gated DeltaNet's kernels", tests("tests/gdn/test_gpu.py"), 15,
        "FlashQLA's speed, equality of its outputs with and without gradient, the convolution, and context parallelism, which "
        "needs a second GPU; on one H100 with torch 2.11, the parity tests passed with the layer's dtypes, but 4 of 9 failed "
        "with beta and initial state in 16 bits",
        "FlashQLA at least 1.5 times as fast as fla at 32,768 tokens", ("fla",),
    ),
    EvidencePart(
        "gdn_speed", "Speed of fla and FlashQLA",
        command("benchmarks/gdn.py --arms fla flashqla --shapes 32768,16,32,128 8x4096,16,32,128 2048,16,32,128 --rounds 30"), 15,
        "FlashQLA's speed; fla's was measured on one H100 in one round", "FlashQLA twice as fast as fla, forward and backward",
        ("fla", "flash_qla"),
    ),
    EvidencePart(
        "dcp", "Decode context parallelism's kernels", tests("tests/engine/test_dcp_flashinfer_gpu.py"), 10,
        "FlashInfer's calls, which were tested against stand-ins in torch", needs=("flashinfer",),
    ),
    EvidencePart(
        "quickstart", "Quickstart", runs("+recipe=quickstart", float32="model.dtype=float32", bfloat16="model.dtype=bfloat16"), 20,
        "SGLang's kernels, placement of GPUs by Ray, a complete run", CURVE, ENGINE,
    ),
    EvidencePart(
        "one_gpu", "Small dense and hybrid models in bfloat16", runs("", dense="+recipe=one_gpu", hybrid="+recipe=one_gpu_gdn"), 30,
        "a complete run in bfloat16; fla in an engine", "", ENGINE,
    ),
    EvidencePart(
        "deterministic", "Two deterministic runs",
        (
            *runs("+recipe=quickstart run.deterministic=true loop.num_rollout=25", a="", b=""),
            *command("scripts/compare.py {folder}/a {folder}/b --rtol 0 --atol 0 --metrics 'train/*' --metrics 'eval/*'"),
        ), 30,
        "deterministic kernels of SGLang and NCCL", "all metrics `train/*` and `eval/*` are the same bit for bit", ENGINE,
    ),
    EvidencePart(
        "residency", "Memory by phase",
        runs(
            SHORT, resident="", offload="placement.offload_train=true placement.offload_rollout=true",
            restart="placement.offload_train=true placement.offload_rollout=true chaos.faults=[kill_engine:collect:3]",
        ), 20,
        "released memory that another process takes, replay of released graphs, time of the copies; bytes were counted on a phantom GPU",
        "`memory/collect` of `offload` far below its `memory/step`; `rollout/kv_capacity_tokens` of `restart` does not change",
        ENGINE,
    ),
    EvidencePart(
        "transports", "Push by IPC and through host memory", runs(SHORT, ipc="weights.transport=ipc", tensor="weights.transport=tensor"), 15,
        "SGLang's loaders with tensors in the trainer's memory", "a push of `ipc` takes less time than one of `tensor`", ENGINE,
    ),
    EvidencePart(
        "one_gpu_options", "Options of the trainer",
        runs(
            "+recipe=quickstart", guard="guard=always guard.action=none", offload="optim.cpu_offload=true optim.cpu_offload_fraction=0.5",
            save="run.save_interval=1 run.async_save=true", save_waits="run.save_interval=1 run.async_save=false",
        ), 60,
        "runs with offload, the guard and saves; their parts were tested on one H100 or a CPU",
        f"{CURVE}; `guard/time` below 0.1% of a step; `perf/save_time` of `save` well below that of `save_waits`", ENGINE,
    ),
    EvidencePart(
        "gdn_runs", "Runs with each backend of Gated DeltaNet",
        (
            *command("benchmarks/gdn.py --end-to-end +recipe=quickstart_gdn placement.device=cuda --arms torch fla"), HEADS_OF_128,
            *command(f"benchmarks/gdn.py --arms fla flashqla --end-to-end +recipe=quickstart_gdn {ASSETS} placement.device=cuda"),
        ), 60,
        "fla and FlashQLA in a run", "the outputs of both `gdn.py` commands name the kernels that ran", (*ENGINE, "fla", "flash_qla"),
    ),
    EvidencePart(
        "remote_experts", "Remote experts",
        runs(
            "+recipe=quickstart_moe parallel.ep=1 placement.actor_num_gpus_per_node=1 rollout.remote_experts.count=4 "
            "rollout.remote_experts.policy=respawn loop.num_rollout=10",
            cpu="", cuda="rollout.remote_experts.device=cuda",
        ), 20,
        "SGLang's Triton kernels with masked pairs of token and expert, a worker on a GPU",
        "the engine's log has the line `slime_like remote experts:`", ENGINE,
    ),
    EvidencePart(
        "transformer_engine", "TransformerEngine's attention",
        (
            *tests("tests/train/test_gpu.py -k transformer_engine"),
            *runs("+recipe=quickstart", te="model.attention=te"),
        ), 30,
        "TransformerEngine, which is in no lock file: `pip install --no-build-isolation 'transformer-engine[core_cu13,pytorch]'`",
        CURVE, (*ENGINE, "transformer_engine"),
    ),
    EvidencePart(
        "linear_attention", "Engines' kernels of linear attention",
        tuple(
            one
            for kernel in ("triton", "flashinfer", "cutedsl")
            for one in runs(
                f"{SMALL_HYBRID} loop.num_rollout=3 weights.probe_layers=true --sglang-linear-attn-backend {kernel}",
                **{kernel: ""},
            )
        ), 45,
        "`rollout.sglang.linear_attn_*`", "the log names the kernel, or says that the GPU does not support it", ENGINE,
        ("models/Qwen3.5-0.8B", GSM8K), gb=80,
    ),
    EvidencePart(
        "gdn_model", "Qwen3.5-0.8B with fla and FlashQLA",
        command(
            f"benchmarks/gdn.py --arms fla flashqla --end-to-end {SMALL_HYBRID} placement.device=cuda"
        ), 60,
        "a run of a released hybrid model", "`actor train s` of flashqla below that of fla", (*ENGINE, "fla", "flash_qla"),
        ("models/Qwen3.5-0.8B", GSM8K), gb=80,
    ),
)  # fmt: skip
