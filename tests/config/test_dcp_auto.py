"""``rollout.dcp=auto``: DCP only if the planner predicts that the KV cache limits concurrency, with the reason in the plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime_like.cluster.plan.machine import described_machine
from slime_like.cluster.plan.planner import Plan, make_plan
from slime_like.cluster.plan.view import render_plan, show_plan
from slime_like.config.load.loader import load_config
from slime_like.errors import ConfigError
from tests.config.machines import LAPTOP, SERVER
from tests.config.model_folder import write_model
from tests.config.test_hybrid_models import HYBRID

AUTO = "rollout.dcp=auto"
SMALL = "rollout.sglang.max_total_tokens=2048"  # for each rank
COPIES = ("rollout.tp=8", "placement.actor_num_gpus_per_node=8")  # 2 copies of each of the model folder's 4 KV heads
GPU_RUN = (
    "+recipe=qwen3_4b_dapo_async",
    "model.hf_checkpoint=models/Qwen3-30B-A3B",
    "parallel.ep=8",
    "placement.actor_num_gpus_per_node=8",
    "rollout.tp=8",
    "rollout.num_engines=1",
    AUTO,
)


def quickstart(*overrides: str) -> Plan:
    return make_plan(load_config(["+recipe=quickstart", AUTO, *overrides], files=False, machine=False), LAPTOP)


def reason(run_plan: Plan) -> str:
    """Return the reason of the chosen size; check that the plan and its engines agree on the size."""
    (decision,) = [decision for decision in run_plan.decisions if decision.key == "rollout.dcp"]
    assert {int(decision.value), run_plan.dcp.size} == {engine.dcp for engine in run_plan.engines}
    return decision.reason


def test_a_small_cache_on_a_cpu_is_spread() -> None:
    run_plan = quickstart("rollout.tp=4", SMALL)
    assert run_plan.engines[0].dcp == 2 and run_plan.engines[0].dcp_comm == "a2a"
    assert "the KV cache holds 32 of the 512 requests of 64 tokens" in reason(run_plan)
    assert "with 2 ranks per head 64" in reason(run_plan)
    assert run_plan.memory.engine is not None and run_plan.memory.engine.tokens == 4096
    cfg = load_config(["+recipe=quickstart", AUTO, "rollout.tp=4", SMALL], files=False, machine=False)
    text = render_plan(cfg, run_plan, LAPTOP)
    assert "KV cache of a sequence over 2 ranks" in text and "would hold" not in text


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("rollout.tp=4",), "the KV cache holds the 512 requests of 64 tokens"),
        (("rollout.tp=4", SMALL, "rollout.max_running_requests=32"), "holds the 32 requests of 64 tokens"),
        (("rollout.tp=4", "rollout.sglang.max_total_tokens=16384", "rollout.num_engines=2"), "holds the 256 requests"),
        (("rollout.tp=2", SMALL), "KV heads are not replicated: the model has 2, and an engine 2 attention ranks"),
        (("rollout.tp=4", "rollout.dp_attention=2", SMALL), "KV heads are not replicated"),
        (
            ("rollout.tp=4", SMALL, "rollout.sglang.kv_cache_dtype=fp4_e2m1"),
            "rollout.sglang.kv_cache_dtype='fp4_e2m1': SGLang does not",
        ),
        (
            ("rollout.tp=4", SMALL, "rollout.sglang.attention_backend=torch_native"),
            "rollout.sglang.attention_backend=torch_native: it stores and reads",
        ),
        (("rollout.tp=4", SMALL, "rollout.sglang.attn_cp_size=2"), "rollout.sglang.attn_cp_size=2: its ranks"),
    ],
)
def test_one_rank_stores_whole_sequences_otherwise(overrides: tuple[str, ...], expected: str) -> None:
    run_plan = quickstart(*overrides)
    assert run_plan.engines[0].dcp == 1
    assert expected in reason(run_plan)


def test_groups_that_over_sampling_starts_count() -> None:
    assert "of the 768 requests" in reason(quickstart("rollout.tp=4", SMALL, "rollout.over_sampling_batch_size=96"))


def test_a_configured_cache_counts_for_each_rank(plan: Callable[..., Plan]) -> None:
    by_cache = ("rollout.max_running_requests=auto", "rollout.max_response_len=500", "rollout.max_context_len=600")
    run_plan = plan(*COPIES, "rollout.sglang.max_total_tokens=300", AUTO, *by_cache)
    reasons = {decision.key: decision.reason for decision in run_plan.decisions}
    assert run_plan.engines[0].dcp == 2
    assert "the KV cache of 600 tokens" in reasons["rollout.max_running_requests"]


def test_nothing_is_decided_without_engines(plan: Callable[..., Plan], tmp_path: Path) -> None:
    run_plan = plan(AUTO, "run.mode=train_only", f"run.replay_from={tmp_path}")
    assert "rollout.dcp" not in {decision.key for decision in run_plan.decisions}


def test_the_exchange_may_be_set_on_a_cpu_and_is_checked_on_a_gpu(plan: Callable[..., Plan]) -> None:
    assert plan(*COPIES, SMALL, AUTO, "rollout.dcp_comm=ag_rs").engines[0].dcp_comm == "ag_rs"
    a2a = (*COPIES, AUTO, "rollout.dcp_comm=a2a")
    with pytest.raises(ConfigError, match=r"device=cuda .* or set rollout\.sglang\.attention_backend=flashinfer$"):
        plan(*a2a, machine=SERVER)
    with pytest.raises(
        ConfigError, match=r"device=cuda .* or set rollout\.sglang\.decode_attention_backend=flashinfer$"
    ):
        plan(*a2a, "rollout.sglang.decode_attention_backend=triton", machine=SERVER)
    with pytest.raises(ConfigError, match=r"device=cpu .* or remove rollout\.sglang\.attention_backend$"):
        plan(*a2a, "rollout.sglang.attention_backend=torch_native")


def test_long_responses_on_gpus_are_spread() -> None:
    text = show_plan(GPU_RUN, "16xH200")
    assert "(KV cache of a sequence over 2 ranks)" in text and "rollout.dcp=2 would" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("  rollout.dcp ")]
    assert line.split()[1] == "2" and "without DCP, the KV cache holds" in line


def test_a_configured_cache_on_gpus_limits_the_predicted_one() -> None:
    limited = make_plan(
        load_config([*GPU_RUN, "rollout.sglang.max_total_tokens=50000"], files=False, machine=False),
        described_machine("16xH200"),
    )
    assert limited.memory.engine is not None and limited.memory.engine.tokens == 2 * 50_000


@pytest.mark.parametrize(
    ("machine", "overrides", "expected"),
    [
        ("16xH200", ("rollout.batch_size=1",), "the KV cache holds the"),
        ("16xH200", ("rollout.sglang.attention_backend=fa3",), "rollout.sglang.attention_backend=fa3: it stores"),
        ("16xV100", (), "the KV cache is not predicted: the planner does not know the GPU 'V100'"),
    ],
)
def test_gpus_that_keep_whole_sequences(machine: str, overrides: tuple[str, ...], expected: str) -> None:
    text = show_plan([*GPU_RUN, *overrides], machine)
    (line,) = [line for line in text.splitlines() if line.startswith("  rollout.dcp ")]
    assert line.split()[1] == "1" and expected in line


def test_recurrent_states_that_limit_a_hybrid_model_are_not_sharded(plan: Callable[..., Plan], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **(HYBRID | {"num_key_value_heads": 1}))
    hybrid = (f"model.hf_checkpoint={folder}", "rollout.tp=2", AUTO, "rollout.max_context_len=100")
    many_requests = ("rollout.max_response_len=50", "rollout.batch_size=1000")
    states = plan(*hybrid, *many_requests, "rollout.sglang.max_total_tokens=1000000")
    assert states.engines[0].dcp == 1 and "the recurrent states hold" in reason(states)
    cache = plan(*hybrid, *many_requests, SMALL)
    assert cache.engines[0].dcp == 2 and "without DCP, the KV cache holds 20 of the" in reason(cache)
    strategy = "rollout.sglang.mamba_radix_cache_strategy=no_buffer"
    unpaged = plan(*hybrid, *many_requests, SMALL, strategy)
    assert unpaged.engines[0].dcp == 1 and f"{strategy} for the hybrid model" in reason(unpaged)


def test_data_parallel_attention_divides_the_ranks_that_share_heads(plan: Callable[..., Plan]) -> None:
    run_plan = plan(*COPIES, "rollout.dp_attention=2", AUTO, machine=SERVER)
    assert run_plan.memory.engine is not None and run_plan.memory.engine.groups == 2
    assert "an engine 4 attention ranks" in reason(run_plan)
