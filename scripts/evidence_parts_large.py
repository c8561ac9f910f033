"""Parts of ``gpu_evidence.py`` for several GPUs of a node and for several nodes, smallest first."""

from __future__ import annotations

from scripts.evidence_parts import (
    ASSETS,
    CURVE,
    ENGINE,
    GSM8K,
    MAKE_MODEL,
    MATH,
    SHORT,
    EvidencePart,
    command,
    runs,
    tests,
)

DAPO = "data/dapo-math-17k"
AIME = "data/aime-2024"
LATENT = "+recipe=quickstart_latent parallel.ep=1 rollout.tp=2 rollout.dp_attention=2 placement.actor_num_gpus_per_node=2 loop.num_rollout=10"
ONE_KV_HEAD = ("-c", MAKE_MODEL % "ModelSpec(num_key_value_heads=1, head_dim=64)")

SEVERAL_GPUS: tuple[EvidencePart, ...] = (
    EvidencePart(
        "engine_dcp", "Decode context parallelism, engines", tests("tests/engine/test_dcp_gpu.py"), 15,
        "an engine of two GPUs that shards its cache", needs=ENGINE, num_gpus=2,
    ),
    EvidencePart(
        "engine_flow_mla", "FlowMLA, engines", tests("tests/engine/test_flow_mla_gpu_engines.py"), 15,
        "copies between two GPUs, release and resume of an engine's memory", needs=ENGINE, num_gpus=2,
    ),
    EvidencePart(
        "two_gpus", "Layouts of two GPUs",
        runs(
            SHORT, tp="rollout.tp=2 parallel.tp=2 guard.deadline_s=30", release="rollout.tp=2 parallel.tp=2 guard.release=true",
            host="rollout.tp=2 parallel.tp=2 weights.transport=tensor", cp="parallel.cp=2",
            critic="algo=ppo algo.kl_loss_coef=0 critic.placement=split",
        ), 45,
        "an engine over two bundles of Ray, context parallelism by `varlen_attn`, communicators that are released between steps, a critic "
        "with its own GPU",
        f"{CURVE} for all but `critic`, whose `train/value_loss` falls; a push of `tp` takes less time than that of `host`",
        ENGINE, num_gpus=2,
    ),
    EvidencePart(
        "collectives", "Memory of each collective", command("scripts/profile_comm.py --sweep 2 --out {folder}"), 10,
        "sends and receives; all other ops were measured in a world of one", "", ("megatron",), num_gpus=2,
    ),
    EvidencePart(
        "latent", "Data-parallel attention and FlowMLA",
        runs(
            LATENT, dp_attention="", collective="rollout.flow_mla.enabled=true rollout.flow_mla.transport=collective",
            p2p="rollout.flow_mla.enabled=true rollout.flow_mla.transport=p2p", ctas_2="rollout.flow_mla.enabled=true rollout.flow_mla.max_ctas=2",
            ctas_32="rollout.flow_mla.enabled=true rollout.flow_mla.max_ctas=32",
        ), 60,
        "`rollout.dp_attention` and `rollout.flow_mla` on GPUs, the limit `max_ctas` on NCCL's thread blocks",
        "`perf/rollout_time` shows the effect of `max_ctas`", ENGINE, num_gpus=2,
    ),
    EvidencePart(
        "sharded_cache", "Sharded cache with FlashInfer",
        (
            ONE_KV_HEAD,
            *runs(
                f"+recipe=one_gpu {ASSETS} placement.actor_num_gpus_per_node=2 rollout.tp=2 "
                "rollout.sglang.attention_backend=flashinfer loop.num_rollout=10",
                dcp_1="rollout.dcp=1", dcp_2="rollout.dcp=2", a2a="rollout.dcp=2 rollout.dcp_comm=a2a",
                symmetric="rollout.dcp=2 rollout.symmetric_memory=true",
                triton="rollout.dcp=2 rollout.sglang.attention_backend=triton",
            ),
        ), 60,
        "this project's `flashinfer_dcp` in an engine",
        "`rollout/kv_capacity_tokens` doubles with DCP; if `perf/rollout_time` of `dcp_2` is less than that of `triton`, make "
        "`flashinfer_dcp` the default (`DEFAULT_BACKENDS` in `slime_like/config/schema/dcp.py`)",
        ENGINE, num_gpus=2,
    ),
    EvidencePart(
        "sharded_latent", "Sharded cache of latent attention",
        runs(
            f"model.hf_checkpoint=models/DeepSeek-V2-Lite {MATH} placement.actor_num_gpus_per_node=2 parallel.ep=2 optim.cpu_offload=true "
            "model.recompute=full placement.offload_train=true placement.offload_rollout=true rollout.sglang.mem_fraction_static=0.6 "
            "rollout.tp=2 rollout.sglang.attention_backend=flashinfer loop.num_rollout=3",
            dcp_1="rollout.dcp=1", dcp_2="rollout.dcp=2", a2a="rollout.dcp=2 rollout.dcp_comm=a2a",
        ), 90,
        "DCP of latent attention with SGLang's `flashinfer`", "", ENGINE, ("models/DeepSeek-V2-Lite", GSM8K), 2, 80,
    ),
    EvidencePart(
        "split", "Trainer and engines on different GPUs",
        runs(
            "", two_and_one="+recipe=quickstart_async",
            lost="+recipe=quickstart_async placement.actor_num_gpus_per_node=2 rollout.num_engines=2 loop.num_rollout=10 health.first_wait_s=0 "
            "chaos.faults=[kill_engine:push:3:0.01,kill_engine:collect:5,stop_engine:push:7:0.01] health.interval_s=2 health.timeout_s=10 "
            "weights.push_deadline_s=120",
        ), 45,
        "broadcast over NCCL to an engine, and its abort after an engine is lost or stopped; these were tested over gloo, and with "
        "stand-ins for NCCL",
        f"{CURVE}; each line of the recovery report of `lost` says `serves version`", ENGINE, num_gpus=4,
    ),
    EvidencePart(
        "pipeline", "Pipeline stages",
        runs(
            "+recipe=quickstart_gdn loop.num_rollout=10", vpp="placement.actor_num_gpus_per_node=4 parallel.pp=2 parallel.vpp=2 parallel.overlap_grad_reduce=true "
            "parallel.overlap_param_gather=true",
        ), 20,
        "NCCL's sends between stages, overlapped reductions", CURVE, ENGINE, num_gpus=4,
    ),
    EvidencePart(
        "qwen3_4b", "Qwen3-4B on gsm8k and dapo-math-17k",
        runs(
            "loop.num_rollout=5", gsm8k="+recipe=qwen3_4b_gsm8k", gsm8k_async="+recipe=qwen3_4b_gsm8k_async", dapo="+recipe=qwen3_4b_dapo",
            dapo_async="+recipe=qwen3_4b_dapo_async", release="+recipe=qwen3_4b_dapo guard.release=true",
            resident="+recipe=qwen3_4b_dapo rollout.sglang.mem_fraction_static=0.5 placement.offload_train=false placement.offload_rollout=false",
        ), 360,
        "a released model; each recipe is planned and traced for its machine",
        "memory within 10% of the plan in the recipe; `perf/offload_time` is a few seconds", ENGINE,
        ("models/Qwen3-4B", GSM8K, DAPO, AIME), 8, 80,
    ),
    EvidencePart(
        "qwen3_30b", "Qwen3-30B-A3B",
        runs(
            "+recipe=qwen3_30b_a3b loop.num_rollout=3", recipe="", sharded="rollout.num_engines=1 rollout.tp=8 rollout.dcp=2",
        ), 180,
        "expert parallelism over NCCL",
        "the probe's difference is above the tolerance, if at all, only at tokens whose experts are nearly tied; "
        "`train/moe_load` between 1 and 3", ENGINE,
        ("models/Qwen3-30B-A3B", DAPO, AIME), 8, 80,
    ),
    EvidencePart(
        "gdn_guard", "Qwen3.5-35B-A3B, by backend and guard policy",
        tuple(
            one
            for gdn in ("fla", "flashqla")
            for guard in ("always", "slime")
            for one in runs(f"+recipe=qwen3_5_35b_a3b model.gdn.backend={gdn} guard={guard} loop.num_rollout=10", **{f"{gdn}_{guard}": ""})
        ), 360,
        "step times with the guard presets `always` (a query of free memory before every op) and `slime` (eight ops exempt), "
        "which slime's PR #1947 compares ([guard.md](../guard.md#memory-guard))",
        "`flashqla_slime` takes less time than `fla_always`", (*ENGINE, "fla", "flash_qla"),
        ("models/Qwen3.5-35B-A3B", DAPO), 8, 80,
    ),
    EvidencePart(
        "flow_mla_server", "DeepSeek-V3 with and without FlowMLA",
        tuple(
            one
            for flag in ("", " --enable-flow-mla")
            for one in command(
                "-m sglang.benchmark.one_batch_server --model-path models/DeepSeek-V3 --tp-size 8 --attention-data-parallel-size 8 "
                f"--cuda-graph-backend-prefill disabled --batch-size 256 --input-len 1024 --output-len 128{flag}"
            )
        ), 60,
        "block-quantised FP8 weights with SGLang's kernels, the larger KV cache",
        "`max_total_num_tokens` grows by the tokens that fit into the bytes saved, which the line `slime_like FlowMLA shards` shows", ENGINE,
        ("models/DeepSeek-V3",), 8, 140,
    ),
    EvidencePart(
        "deepseek_r1_h20", "DeepSeek-R1 with engines in float8", runs("", r1="+recipe=deepseek_r1_h20 loop.num_rollout=10"), 600,
        "the recipe, which is planned for 8 H20", "", ENGINE, ("models/DeepSeek-R1", DAPO, AIME), 8, 95,
    ),
)  # fmt: skip

SEVERAL_NODES: tuple[EvidencePart, ...] = (
    EvidencePart(
        "wide_engine", "An engine over two nodes of four GPUs",
        runs(
            "", wide="+recipe=qwen3_4b_gsm8k placement.actor_num_nodes=2 placement.actor_num_gpus_per_node=4 rollout.tp=8 "
            "rollout.num_engines=1 loop.num_rollout=10",
        ), 120,
        "NCCL between the nodes of an engine, CUDA graphs; an engine over two nodes was run on CPUs over gloo",
        "", ENGINE, ("models/Qwen3-4B", GSM8K), 4, 80, 2,
    ),
    EvidencePart(
        "nodes", "Two nodes of eight GPUs",
        runs(
            "", split="+recipe=qwen3_4b_gsm8k_async placement.actor_num_gpus_per_node=4 rollout.num_engines=2 loop.num_rollout=5",
            colocated="+recipe=qwen3_4b_gsm8k placement.actor_num_nodes=2 run.save_interval=1 loop.num_rollout=2",
        ), 120,
        "reservation of each GPU by Ray on the node to which the plan assigns it, NCCL between nodes",
        "the line `nodes:` names both nodes if one has fewer free GPUs than the run needs", ENGINE,
        ("models/Qwen3-4B", GSM8K), 8, 80, 2,
    ),
    EvidencePart(
        "qwen3_next", "Qwen3-Next-80B-A3B", runs("", recipe="+recipe=qwen3_next_80b_a3b loop.num_rollout=10"), 360,
        "the recipe, which is planned for 4 nodes of 8 H100", "", (*ENGINE, "fla"), ("models/Qwen3-Next-80B-A3B", DAPO, AIME), 8, 80, 4,
    ),
    EvidencePart(
        "deepseek_r1_h800", "DeepSeek-R1 on H800", runs("", recipe="+recipe=deepseek_r1_h800 loop.num_rollout=10"), 600,
        "the recipe, which is planned for 4 nodes of 8 H800", "", ENGINE, ("models/DeepSeek-R1", DAPO, AIME), 8, 80, 4,
    ),
    EvidencePart(
        "qwen3_235b", "Qwen3-235B-A22B", runs("", recipe="+recipe=qwen3_235b_a22b loop.num_rollout=10"), 600,
        "the recipe, which is planned for 8 nodes of 8 H200", "", ENGINE, ("models/Qwen3-235B-A22B", DAPO), 8, 140, 8,
    ),
    EvidencePart(
        "deepseek_r1", "DeepSeek-R1", runs("", recipe="+recipe=deepseek_r1 loop.num_rollout=10"), 600,
        "the recipe, which is planned for 16 nodes of 8 H200", "", ENGINE, ("models/DeepSeek-R1", DAPO, AIME), 8, 140, 16,
    ),
)  # fmt: skip
