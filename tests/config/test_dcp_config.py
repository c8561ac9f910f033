"""Combinations of ``rollout.dcp`` that would compute wrong tokens or save no memory are refused; the error contains the numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime_like.cluster.plan.planner import Plan
from slime_like.config.load.loader import load_config
from slime_like.config.schema.dcp import (
    BACKEND_FIELDS,
    SHARDED_BACKENDS,
    UNSUPPORTED_BACKENDS,
    backend_obstacle,
    kv_head_obstacle,
)
from slime_like.errors import ConfigError
from slime_like.rollout.engine.main import EngineLaunch, server_arguments
from tests.config.bad_input import each_rule, message, one_message
from tests.config.machines import SERVER
from tests.config.model_folder import write_model
from tests.config.test_hybrid_models import HYBRID

ON = "rollout.tp=8 rollout.dcp=2"
# extra arguments, then words that the message must contain
RULES = {
    "zero": ("rollout.dcp=0", "rollout.dcp=0", "above 0"),
    "word": ("rollout.dcp=all", "rollout.dcp='all' is neither a number nor auto", "set a number of ranks, or auto"),
    "fraction": ("rollout.dcp=1.5", "rollout.dcp"),
    "no divisor": ("rollout.tp=4 rollout.dcp=3", "rollout.dcp=3", "rollout.tp=4", "rollout.dcp=1 or 2 or 4"),
    "no divisor of the attention's ranks": (
        "rollout.tp=4 rollout.dcp=4 rollout.sglang.attn_dp_size=2",
        "rollout.dcp=4",
        "the 2 attention ranks of an engine (rollout.tp=4 / rollout.sglang.attn_dp_size=2)",
        "rollout.dcp=1 or 2",
    ),
    "exchange alone": ("rollout.dcp_comm=a2a", "rollout.dcp_comm=a2a has no effect", "set rollout.dcp"),
    "exchange": (f"{ON} rollout.dcp_comm=fi_a2a", "rollout.dcp_comm='fi_a2a'", "ag_rs, a2a"),
    "bits": (f"{ON} run.deterministic=true", "rollout.dcp=2", "run.deterministic=true"),
    "sglang's name": ("rollout.sglang.dcp_size=2", "rollout.sglang.dcp_size=2", "belongs to rollout.dcp"),
    "sglang's exchange": ("rollout.sglang.dcp_comm_backend=a2a", "belongs to rollout.dcp_comm"),
    "drafts": (
        f"{ON} rollout.sglang.speculative_algorithm=EAGLE run.mode=rollout_only",
        "rollout.sglang.speculative_algorithm='EAGLE' with rollout.dcp=2",
    ),
    "replicated projection": (
        f"{ON} rollout.sglang.dcp_replicate_q_proj=true",
        "rollout.sglang.dcp_replicate_q_proj=True",
        "multi-head latent attention",
    ),
    "prefill context parallel": (f"{ON} rollout.sglang.enable_prefill_cp=true", "enable_prefill_cp=True"),
    "attention context parallel": (f"{ON} rollout.sglang.attn_cp_size=2", "attn_cp_size=2"),
    "hierarchical cache": (f"{ON} rollout.sglang.enable_hierarchical_cache=true", "enable_hierarchical_cache=True"),
    "unified memory": (f"{ON} rollout.sglang.enable_unified_memory=true", "enable_unified_memory=True"),
    "disaggregated": (f"{ON} rollout.sglang.disaggregation_mode=decode", "disaggregation_mode='decode'"),
    "deterministic": (
        f"{ON} rollout.sglang.enable_deterministic_inference=true",
        "enable_deterministic_inference=True",
    ),
    "two shardings": (f"{ON} rollout.sglang.enable_kv_cache_sharding=true", "enable_kv_cache_sharding=True"),
    "symmetric memory": (f"{ON} rollout.sglang.enable_symm_mem=true", "enable_symm_mem=True", "not tested"),
    "two batches": (f"{ON} rollout.sglang.enable_two_batch_overlap=true", "enable_two_batch_overlap=True"),
    "external cache": (f"{ON} rollout.sglang.enable_lmcache=true", "enable_lmcache=True"),
    "backup": (
        f"{ON} rollout.sglang.disaggregation_decode_retraction_backup=host_pool",
        "disaggregation_decode_retraction_backup='host_pool'",
    ),
    "quantised cache": (f"{ON} rollout.sglang.kv_cache_dtype=fp4_e2m1", "kv_cache_dtype='fp4_e2m1'"),
}


@each_rule(RULES)
def test_the_message_names_key_value_and_fix(case: tuple[str, ...], argv: list[str]) -> None:
    one_message(case, argv)


@pytest.mark.parametrize("backend", sorted({*UNSUPPORTED_BACKENDS, "wave"} - {*SHARDED_BACKENDS["cuda"]}))
@pytest.mark.parametrize("field", BACKEND_FIELDS)
def test_attention_backends_without_dcp_are_refused(backend: str, field: str, plan: Callable[..., Plan]) -> None:
    expected = rf"rollout\.sglang\.{field}={backend} with rollout\.dcp=2: .*remove it, which selects triton"
    with pytest.raises(ConfigError, match=expected):
        plan(*ON.split(), f"rollout.sglang.{field}={backend}", machine=SERVER)


def test_the_backend_of_another_device_is_refused(plan: Callable[..., Plan]) -> None:
    with pytest.raises(
        ConfigError, match=r"attention_backend=triton with rollout\.dcp=2: it was not tested with DCP on cpu"
    ):
        plan(*ON.split(), "rollout.sglang.attention_backend=triton")


def test_one_exchange_on_a_gpu(plan: Callable[..., Plan]) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.dcp_comm=a2a with placement\.device=cuda.*set rollout\.dcp_comm=ag_rs"
    ):
        plan(*ON.split(), "rollout.dcp_comm=a2a", machine=SERVER)


def test_a_hybrid_model_on_a_cpu_has_no_prefix_cache(plan: Callable[..., Plan], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **(HYBRID | {"num_key_value_heads": 1}))
    extra = (
        "rollout.tp=2",
        "rollout.dcp=2",
        f"model.hf_checkpoint={folder}",
        "rollout.sglang.disable_radix_cache=false",
    )
    with pytest.raises(ConfigError, match=r"disable_radix_cache=False for the hybrid model in .* with rollout\.dcp=2"):
        plan(*extra)
    plan(*extra[:-1])


@pytest.mark.parametrize("field", BACKEND_FIELDS)
def test_flashinfer_is_replaced_on_a_gpu(field: str, plan: Callable[..., Plan]) -> None:
    """SGLang's own FlashInfer backend ignores DCP, so the engine gets this project's and refuses SGLang's."""
    planned = plan(
        *ON.split(), "placement.actor_num_gpus_per_node=8", f"rollout.sglang.{field}=flashinfer", machine=SERVER
    )
    arguments = server_arguments(EngineLaunch(planned.engines[0], "key", "127.0.0.1", 1))
    assert arguments[field] == "flashinfer_dcp"
    assert arguments["attention_backend"] == ("flashinfer_dcp" if field == "attention_backend" else "triton")
    assert backend_obstacle("flashinfer", "cuda") is not None and backend_obstacle("flashinfer_dcp", "cuda") is None


def test_flashinfer_without_dcp_is_sglangs(plan: Callable[..., Plan]) -> None:
    planned = plan(
        *["rollout.tp=8", "placement.actor_num_gpus_per_node=8", "rollout.sglang.attention_backend=flashinfer"],
        machine=SERVER,
    )
    arguments = server_arguments(EngineLaunch(planned.engines[0], "key", "127.0.0.1", 1))
    assert arguments["attention_backend"] == "flashinfer"


@pytest.mark.parametrize("backend", ["flashinfer", "flashinfer_dcp"])
def test_flashinfer_is_refused_on_a_cpu(backend: str, plan: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend={backend} with rollout.dcp=2.*selects slime_like_cpu"):
        plan(*ON.split(), f"rollout.sglang.attention_backend={backend}")


@pytest.mark.parametrize("exchange", ["ag_rs", "a2a"])
def test_flashinfer_has_both_exchanges(exchange: str, plan: Callable[..., Plan]) -> None:
    keys = (
        f"placement.actor_num_gpus_per_node=8 rollout.dcp_comm={exchange} rollout.sglang.attention_backend=flashinfer"
    )
    assert plan(*ON.split(), *keys.split(), machine=SERVER).engines[0].dcp_comm == exchange
    with pytest.raises(ConfigError, match="the attention backend triton, which always exchanges by all-gather"):
        plan(
            *ON.split(),
            *["rollout.dcp_comm=a2a", "rollout.sglang.prefill_attention_backend=flashinfer"],
            machine=SERVER,
        )


@pytest.mark.parametrize(("setting", "exchange"), [("auto", "a2a"), ("ag_rs", "ag_rs"), ("a2a", "a2a")])
def test_engines_are_started_with_it(setting: str, exchange: str, plan: Callable[..., Plan]) -> None:
    planned = plan(*ON.split(), f"rollout.dcp_comm={setting}")
    assert (planned.engines[0].tp, planned.engines[0].dcp, planned.engines[0].dcp_comm) == (8, 2, exchange)
    resolved = {decision.key: decision.value for decision in planned.decisions}
    assert resolved.get("rollout.dcp_comm") == (exchange if setting == "auto" else None)


def test_the_exchange_on_a_gpu_is_chosen(plan: Callable[..., Plan]) -> None:
    planned = plan(*ON.split(), "placement.actor_num_gpus_per_node=8", machine=SERVER)
    assert planned.engines[0].dcp_comm == "ag_rs"


# attention ranks, dcp, KV heads -> words of the refusal; None if it fits
HEADS: dict[tuple[int, int, int], str | None] = {
    (2, 2, 1): None,
    (4, 4, 1): None,
    (8, 2, 4): None,  # Qwen3-235B on eight GPUs
    (8, 4, 2): None,
    (8, 4, 4): "2 copies of each head, and dcp must divide the copies; set rollout.dcp=1 or 2",
    (4, 2, 8): "each of the 4 attention ranks already stores different KV heads (the model has 8)",  # Llama-3.1-8B
    (4, 2, 4): "set rollout.dcp=1, or rollout.tp=8",
    (6, 2, 2): "3 copies of each head, and dcp must divide the copies; set rollout.dcp=1 or 3",
}


@pytest.mark.parametrize("case", HEADS, ids=str)
def test_kv_heads(case: tuple[int, int, int]) -> None:
    words, reason = HEADS[case], kv_head_obstacle(*case)
    assert reason is None if words is None else reason is not None and words in reason


def test_kv_heads_of_the_model_are_checked(argv: list[str]) -> None:
    text = message(argv, "rollout.tp=4 rollout.dcp=2", files=True)
    assert "rollout.dcp=2 for the model in" in text and "the model has 4" in text
    load_config([*argv, *ON.split()], files=True)


@pytest.mark.parametrize(
    "change", [{"use_sliding_window": True}, {"layer_types": ["full_attention", "sliding_attention"]}]
)
def test_sliding_windows_are_refused(change: dict[str, object], argv: list[str], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **change)
    text = message([*argv, f"model.hf_checkpoint={folder}"], ON, files=True)
    assert "rollout.dcp=2" in text and "sliding windows" in text and "set rollout.dcp=1" in text
