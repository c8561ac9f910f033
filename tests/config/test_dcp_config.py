"""Combinations of ``rollout.dcp`` that would compute wrong tokens or save no memory are refused; the error contains the numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_like.cluster.plan.planner import Plan, make_plan
from slime_like.config.load.loader import load_config
from slime_like.config.rules.gdn_runtime import FLASHINFER, Runtime
from slime_like.config.schema.dcp import (
    BACKEND_FIELDS,
    LATENT_BACKENDS,
    SHARDED_BACKENDS,
    UNSUPPORTED_BACKENDS,
    UNSUPPORTED_FIELDS,
    backend_obstacle,
    kv_head_obstacle,
)
from slime_like.errors import ConfigError
from slime_like.rollout.engine.main import EngineLaunch, server_arguments
from tests.config.bad_input import each_rule, message, one_message
from tests.config.machines import SERVER
from tests.config.model_folder import write_model
from tests.config.test_hybrid_models import HYBRID
from tests.config.test_latent_models import LATENT

ON = "rollout.tp=8 rollout.dcp=2"
# extra arguments, then words that the message must contain
RULES = {
    "zero": ("rollout.dcp=0", "rollout.dcp=0", "above 0"),
    "word": (
        "rollout.dcp=all",
        "rollout.dcp='all' is neither a number nor auto",
        "set a number of ranks, or auto to let the plan choose",
    ),
    "fraction": ("rollout.dcp=1.5", "rollout.dcp"),
    "no divisor": ("rollout.tp=4 rollout.dcp=3", "rollout.dcp=3", "rollout.tp=4", "rollout.dcp=1 or 2 or 4"),
    "no divisor of the attention's ranks": (
        "rollout.tp=4 rollout.dcp=4 rollout.dp_attention=2",
        "rollout.dcp=4",
        "the 2 attention ranks of an engine (rollout.tp=4 / rollout.dp_attention=2)",
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
    "replicated projection alone": (
        "rollout.dcp_replicate_q=true",
        "rollout.dcp_replicate_q=true has no effect",
        "set rollout.dcp",
    ),
    "sglang's replicated projection": (
        f"{ON} rollout.sglang.dcp_replicate_q_proj=true",
        "rollout.sglang.dcp_replicate_q_proj=True",
        "belongs to rollout.dcp_replicate_q",
    ),
    "sglang's symmetric memory": (
        f"{ON} rollout.sglang.enable_symm_mem=true",
        "enable_symm_mem=True",
        "belongs to rollout.symmetric_memory",
    ),
    "graphs of prefills": (
        f"{ON} rollout.sglang.cuda_graph_backend_prefill=full",
        "cuda_graph_backend_prefill='full'",
        "without the layout of a sharded cache",
    ),
    "multi-item scoring": (f"{ON} rollout.sglang.enable_mis=true", "enable_mis=True", "custom masks"),
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
    "two batches": (f"{ON} rollout.sglang.enable_two_batch_overlap=true", "enable_two_batch_overlap=True"),
    "external cache": (f"{ON} rollout.sglang.enable_lmcache=true", "enable_lmcache=True"),
    "another external cache": (f"{ON} rollout.sglang.enable_flexkv=true", "enable_flexkv=True"),
    "linked external cache": (
        f"{ON} rollout.sglang.enable_unified_cache_external_linker=true",
        "enable_unified_cache_external_linker=True",
    ),
    "pool on the host": (f"{ON} rollout.sglang.enable_hisparse=true", "enable_hisparse=True"),
    "prefill during decode": (f"{ON} rollout.sglang.enable_pdmux=true", "enable_pdmux=True"),
    "diffusion": (f"{ON} rollout.sglang.dllm_algorithm=LowConfidence", "dllm_algorithm='LowConfidence'"),
    "backup": (
        f"{ON} rollout.sglang.disaggregation_decode_retraction_backup=host_pool",
        "disaggregation_decode_retraction_backup='host_pool'",
    ),
    "quantised cache": (f"{ON} rollout.sglang.kv_cache_dtype=fp4_e2m1", "kv_cache_dtype='fp4_e2m1'"),
}


@each_rule(RULES)
def test_the_message_names_key_value_and_fix(case: tuple[str, ...], argv: list[str]) -> None:
    one_message(case, argv)


def test_every_field_without_dcp_has_a_case() -> None:
    arguments = " ".join(arguments for arguments, *_ in RULES.values())
    assert [field for field in UNSUPPORTED_FIELDS if f"rollout.sglang.{field}=" not in arguments] == []


@pytest.mark.parametrize("backend", sorted({*UNSUPPORTED_BACKENDS, "wave"} - {*SHARDED_BACKENDS["cuda"]}))
@pytest.mark.parametrize("field", BACKEND_FIELDS)
def test_attention_backends_without_dcp_are_refused(backend: str, field: str, plan: Callable[..., Plan]) -> None:
    expected = rf"(rollout\.sglang\.{field})={backend} with rollout\.dcp=2: .*remove \1, which selects triton"
    with pytest.raises(ConfigError, match=expected):
        plan(*ON.split(), f"rollout.sglang.{field}={backend}", machine=SERVER)


def test_the_backend_of_another_device_is_refused(plan: Callable[..., Plan]) -> None:
    with pytest.raises(
        ConfigError, match=r"attention_backend=triton with rollout\.dcp=2: it was not tested with DCP on cpu"
    ):
        plan(*ON.split(), "rollout.sglang.attention_backend=triton")


# keys, GPUs -> words of the refusal; None: engines start with the option
OPTIONS: dict[tuple[str, bool], str | None] = {
    ("rollout.dcp_replicate_q=true", False): None,
    ("rollout.dcp_replicate_q=true rollout.dcp_comm=a2a", False): None,
    ("rollout.dcp_replicate_q=true rollout.dcp_comm=ag_rs", False): "exchange ag_rs; set rollout.dcp_comm=a2a",
    ("rollout.dcp_replicate_q=true", True): "multi-head latent attention.*set rollout.dcp_replicate_q=false",
    ("rollout.symmetric_memory=true", False): "only NCCL has symmetric memory.*set rollout.symmetric_memory=false",
    ("rollout.symmetric_memory=true", True): None,
    ("rollout.symmetric_memory=true rollout.sglang.attention_backend=flashinfer", True): None,
}


@pytest.mark.parametrize(("keys", "gpus"), OPTIONS)
def test_options_of_the_exchange(keys: str, gpus: bool, plan: Callable[..., Plan]) -> None:
    words = OPTIONS[keys, gpus]
    on_gpus = ("placement.actor_num_gpus_per_node=8",) if gpus else ()
    with contextlib.nullcontext() if words is None else pytest.raises(ConfigError, match=words):
        run_plan = plan(*ON.split(), *keys.split(), *on_gpus, **({"machine": SERVER} if gpus else {}))
        arguments = server_arguments(EngineLaunch(run_plan.engines[0], "key", "127.0.0.1", 1))
        assert arguments.get("enable_symm_mem", False) == ("symmetric" in keys)
        assert arguments.get("dcp_replicate_q_proj", False) == ("replicate" in keys)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (HYBRID, "output gates; set rollout.dcp_replicate_q=false"),
        (
            {"model_type": "minimax_m2"},
            "heads of all ranks of an engine, not over each head; set rollout.dcp_replicate_q",
        ),
    ],
)
def test_query_projections_that_a_rank_cannot_compute_alone_are_not_replicated(
    fields: dict[str, object], words: str, argv: list[str], tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", **(fields | {"num_key_value_heads": 1}))
    for size in ("2", "auto"):
        keys = f"rollout.tp=2 rollout.dcp={size} rollout.dcp_replicate_q=true"
        assert words in message([*argv, f"model.hf_checkpoint={folder}"], keys, files=True)


def test_an_option_of_a_group_is_dropped_where_auto_forms_none(plan: Callable[..., Plan]) -> None:
    (engine,) = plan("rollout.tp=4", "rollout.dcp=auto", "rollout.dcp_replicate_q=true").engines
    assert (engine.dcp, engine.dcp_replicate_q) == (1, False)


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--sglang-dcp-comm-backend a2a", ("dcp_comm", "a2a")),
        ("--sglang-dcp-replicate-q-proj", ("dcp_replicate_q", True)),
        ("--sglang-dcp-replicate-q-proj --no-sglang-dcp-replicate-q-proj", ("dcp_replicate_q", False)),
        ("--sglang-enable-symm-mem", ("symmetric_memory", True)),
    ],
)
def test_flags_of_slime_and_sglang(flags: str, key: tuple[str, object], argv: list[str]) -> None:
    cfg = load_config(
        [*argv, "--rollout-num-gpus-per-engine", "8", "--sglang-dcp-size", "2", *flags.split()], files=False
    )
    assert (cfg.rollout.tp, cfg.rollout.dcp, getattr(cfg.rollout, key[0])) == (8, 2, key[1])


def test_flashinfer_has_to_be_installed(plan: Callable[..., Plan]) -> None:
    keys = (*ON.split(), "placement.actor_num_gpus_per_node=8", "rollout.sglang.decode_attention_backend=flashinfer")
    for version in ((0, 7, 2), None):
        kernels = Runtime("cuda", (9, 0), (13, 0), {FLASHINFER: version}, nvcc=True)
        with (
            contextlib.nullcontext()
            if version
            else pytest.raises(ConfigError, match="needs the package flashinfer-python")
        ):
            plan(*keys, machine=replace(SERVER, kernels=kernels))


def test_flashinfer_from_pages_is_refused(plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_FLASHINFER_USE_PAGED", "1")
    keys = (*ON.split(), "placement.actor_num_gpus_per_node=8")
    plan(*keys, machine=SERVER)
    with pytest.raises(ConfigError, match=r"variable SGLANG_FLASHINFER_USE_PAGED=1 with rollout\.dcp=2.*unset SGLANG"):
        plan(*keys, "rollout.sglang.attention_backend=flashinfer", machine=SERVER)
    plan(*keys, "rollout.sglang.attention_backend=flashinfer", machine=replace(SERVER, is_local=False))


def test_one_exchange_on_a_gpu(plan: Callable[..., Plan]) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.dcp_comm=a2a with placement\.device=cuda.*set rollout\.dcp_comm=ag_rs"
    ):
        plan(*ON.split(), "rollout.dcp_comm=a2a", machine=SERVER)


@pytest.mark.parametrize(
    ("setting", "gpus"),
    [
        ("mamba_radix_cache_strategy=no_buffer", ()),
        ("disable_overlap_schedule=True", ("placement.actor_num_gpus_per_node=8",)),
    ],
)
def test_the_prefix_cache_of_a_hybrid_model_keeps_states_at_pages(
    setting: str, gpus: tuple[str, ...], plan: Callable[..., Plan], tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", **(HYBRID | {"num_key_value_heads": 1}))
    machine: dict[str, Any] = {"machine": SERVER} if gpus else {}
    keys = (*gpus, "rollout.tp=2", "rollout.dcp=2", f"model.hf_checkpoint={folder}")
    words = rf"{setting} for the hybrid model in .* with rollout\.dcp=2: .*set .*strategy=extra_buffer, or set rollout\.dcp=1"
    with pytest.raises(ConfigError, match=words):
        plan(*keys, f"rollout.sglang.{setting}", **machine)
    for fix in ("mamba_radix_cache_strategy=extra_buffer", "disable_radix_cache=True"):
        plan(*keys, f"rollout.sglang.{fix}", **machine)


@pytest.mark.parametrize("field", BACKEND_FIELDS)
def test_flashinfer_is_replaced_on_a_gpu(field: str, plan: Callable[..., Plan]) -> None:
    """SGLang's own FlashInfer backend ignores DCP, so the engine gets this project's and refuses SGLang's."""
    run_plan = plan(
        *ON.split(), "placement.actor_num_gpus_per_node=8", f"rollout.sglang.{field}=flashinfer", machine=SERVER
    )
    arguments = server_arguments(EngineLaunch(run_plan.engines[0], "key", "127.0.0.1", 1))
    assert arguments[field] == "flashinfer_dcp"
    assert arguments["attention_backend"] == ("flashinfer_dcp" if field == "attention_backend" else "triton")
    assert backend_obstacle("flashinfer", "cuda") is not None and backend_obstacle("flashinfer_dcp", "cuda") is None


def test_flashinfer_without_dcp_is_sglangs(plan: Callable[..., Plan]) -> None:
    run_plan = plan(
        *["rollout.tp=8", "placement.actor_num_gpus_per_node=8", "rollout.sglang.attention_backend=flashinfer"],
        machine=SERVER,
    )
    arguments = server_arguments(EngineLaunch(run_plan.engines[0], "key", "127.0.0.1", 1))
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
    with pytest.raises(ConfigError, match="the attention backend triton, which cannot exchange by all-to-all"):
        plan(
            *ON.split(),
            *["rollout.dcp_comm=a2a", "rollout.sglang.prefill_attention_backend=flashinfer"],
            machine=SERVER,
        )


@pytest.mark.parametrize(("setting", "exchange"), [("auto", "a2a"), ("ag_rs", "ag_rs"), ("a2a", "a2a")])
def test_engines_are_started_with_it(setting: str, exchange: str, plan: Callable[..., Plan]) -> None:
    run_plan = plan(*ON.split(), f"rollout.dcp_comm={setting}")
    assert (run_plan.engines[0].tp, run_plan.engines[0].dcp, run_plan.engines[0].dcp_comm) == (8, 2, exchange)
    values = {decision.key: decision.value for decision in run_plan.decisions}
    assert values.get("rollout.dcp_comm") == (exchange if setting == "auto" else None)


def test_the_exchange_on_a_gpu_is_chosen(plan: Callable[..., Plan]) -> None:
    run_plan = plan(*ON.split(), "placement.actor_num_gpus_per_node=8", machine=SERVER)
    assert run_plan.engines[0].dcp_comm == "ag_rs"


# attention ranks, dcp, KV heads -> words of the refusal; None if it fits
HEADS: dict[tuple[int, int, int], str | None] = {
    (2, 2, 1): None,
    (4, 4, 1): None,
    (8, 2, 4): None,  # Qwen3-235B on eight GPUs
    (8, 4, 2): None,
    (8, 4, 4): "each head is stored 2 times, and rollout.dcp must divide 2; set rollout.dcp=1 or 2",
    (4, 2, 8): "each of the 4 attention ranks already stores different KV heads (the model has 8)",  # Llama-3.1-8B
    (4, 2, 4): "set rollout.dcp=1 (engines of rollout.tp=8 ranks would have 2 copies)",
    (6, 2, 2): "each head is stored 3 times, and rollout.dcp must divide 3; set rollout.dcp=1 or 3",
}


@pytest.mark.parametrize("case", HEADS, ids=str)
def test_kv_heads(case: tuple[int, int, int]) -> None:
    words, reason = HEADS[case], kv_head_obstacle(*case)
    assert reason is None if words is None else reason is not None and words in reason


def test_kv_heads_of_the_model_are_checked(argv: list[str]) -> None:
    text = message(argv, "rollout.tp=4 rollout.dcp=2", files=True)
    assert "rollout.dcp=2 for the model in" in text and "the model has 4" in text
    load_config([*argv, *ON.split()], files=True)


@pytest.fixture
def latent(argv: list[str], tmp_path: Path) -> Callable[..., Plan]:
    """Return a function that plans engines of eight GPUs for a model with latent attention."""
    folder = write_model(tmp_path / "latent", **LATENT)
    keys = (f"model.hf_checkpoint={folder}", "rollout.tp=8", "placement.actor_num_gpus_per_node=8")
    return lambda *extra: make_plan(load_config([*argv, *keys, *extra]), SERVER)


@pytest.mark.parametrize("backend", [None, *LATENT_BACKENDS])
@pytest.mark.parametrize("exchange", ["ag_rs", "a2a"])
def test_latent_attention_is_sharded_by_sglangs_backends(
    backend: str | None, exchange: str, latent: Callable[..., Plan]
) -> None:
    """Each rank stores the latents of all tokens, so every divisor of the ranks is useful."""
    backend_override = () if backend is None else (f"rollout.sglang.attention_backend={backend}",)
    (engine,) = latent("rollout.dcp=8", f"rollout.dcp_comm={exchange}", *backend_override).engines
    arguments = server_arguments(EngineLaunch(engine, "key", "127.0.0.1", 1))
    assert arguments["attention_backend"] == (backend or "flashinfer")
    assert (arguments["dcp_size"], arguments["dcp_comm_backend"]) == (8, exchange)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            "rollout.sglang.attention_backend=triton",
            "not tested with latent attention and DCP on cuda; remove rollout.sglang.attention_backend, which",
        ),
        ("rollout.sglang.attention_backend=flashmla", "it passes the lengths of complete sequences"),
        (
            "rollout.sglang.decode_attention_backend=fa3",
            "SGLang does not reject this combination; remove rollout.sglang.decode_attention_backend, which selects flashinfer",
        ),
        ("rollout.dcp_replicate_q=true rollout.dcp_comm=a2a", "a weight push would not update the copies"),
    ],
)
def test_latent_attention_without_dcp_is_refused(keys: str, words: str, latent: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError, match=words):
        latent("rollout.dcp=2", *keys.split())


def test_all_ranks_may_share_the_latents_of_a_sequence(latent: Callable[..., Plan]) -> None:
    assert latent("rollout.dcp=auto", "rollout.sglang.max_total_tokens=2048").engines[0].dcp == 8
    assert latent("rollout.dcp=4", "placement.device=cpu").engines[0].dcp == 4
