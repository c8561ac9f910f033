"""Check of GPU memory in the plan: runs that fit, refused runs with their fixes, and plans without files."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from slime_like.cluster.plan.changes import changes
from slime_like.cluster.plan.engine import engine_settings
from slime_like.cluster.plan.machine import Machine, described_machine
from slime_like.cluster.plan.memory import MemoryPlan, plan_memory
from slime_like.cluster.plan.planner import Plan, make_plan
from slime_like.cluster.plan.remedies import OFFLOAD_KEYS
from slime_like.cluster.plan.shapes import role_shapes
from slime_like.cluster.plan.view import render_plan, show_plan
from slime_like.config.load.loader import load_config
from slime_like.config.rules import foreign
from slime_like.config.schema.resolved import EngineSpec
from slime_like.errors import CheckpointError, ConfigError
from slime_like.planner.hardware import known_gpu
from slime_like.planner.models import MODELS
from tests.config.model_folder import write_model

H100 = described_machine("8xH100")
WIDE = ("model.hf_checkpoint=models/Qwen3-30B-A3B", "rollout.tp=8", "rollout.num_engines=1", "parallel.ep=8")
BY_BLOCK = "model.recompute_method=block"
BARS = ("trainer", "engine", "together")
RECIPES = ("qwen3_4b_gsm8k", "qwen3_4b_gsm8k_async", "qwen3_4b_dapo", "qwen3_4b_dapo_async")


OFFLOAD = tuple(OFFLOAD_KEYS.split())
RESIDENT = (*(f"{key.partition('=')[0]}=false" for key in OFFLOAD), "rollout.sglang.mem_fraction_static=0.5")


def plan(recipe: str, *overrides: str, machine: Machine = H100, shipped: bool = False) -> Plan:
    """Plan a recipe; unless ``shipped``, that of gsm8k without offload, so that trainer and engine stay on a GPU."""
    changed = {override.partition("=")[0] for override in overrides}
    resident = () if shipped or recipe != "qwen3_4b_gsm8k" else RESIDENT
    base = [override for override in resident if override.partition("=")[0] not in changed]
    return make_plan(load_config([f"+recipe={recipe}", *base, *overrides], files=False, machine=False), machine)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fits_its_hardware_with_a_tenth_to_spare(recipe: str) -> None:
    memory = plan(recipe, shipped=True).memory
    assert 0 < memory.needed_bytes < 0.9 * memory.available


def test_gsm8k_without_recompute_is_refused_and_every_named_key_mends_it() -> None:
    with pytest.raises(ConfigError) as refusal:
        plan("qwen3_4b_gsm8k", "model.recompute=none")
    message = str(refusal.value)
    assert "but each H100 has 79.6 GiB" in message and "activations" in message
    fixes = message.partition(": set ")[2].partition(" (docs")[0].split(" or ")
    assert fixes == ["model.recompute=full", "parallel.max_tokens_per_rank=4096", OFFLOAD_KEYS]
    for fix in fixes:
        overrides = {"model.recompute": "none"} | dict(pair.split("=") for pair in fix.split())
        memory = plan("qwen3_4b_gsm8k", *(f"{key}={value}" for key, value in overrides.items())).memory
        assert memory.needed_bytes <= memory.available


def test_a_split_is_named_if_the_machine_has_the_gpus() -> None:
    model = ("model.hf_checkpoint=models/Qwen3-30B-A3B", "parallel.tp=4", "parallel.ep=8")
    for gpus, is_named in ((8, False), (16, True)):
        with pytest.raises(ConfigError) as refusal:
            plan("qwen3_4b_gsm8k", *model, machine=described_machine(f"{gpus}xH100"))
        assert ("placement.mode=split" in str(refusal.value)) is is_named


def test_an_engine_that_takes_too_much_is_lowered() -> None:
    with pytest.raises(ConfigError, match=r"set rollout\.sglang\.mem_fraction_static=0\.\d+") as refusal:
        plan("qwen3_4b_gsm8k", "rollout.sglang.mem_fraction_static=0.9")
    fix = re.findall(r"rollout\.sglang\.mem_fraction_static=[\d.]+", str(refusal.value))[0]
    assert plan("qwen3_4b_gsm8k", fix).memory.min_bytes <= plan("qwen3_4b_gsm8k").memory.available


@pytest.mark.parametrize(
    ("static", "problem"), [(0.15, "less than its weights"), (0.2038, "holds no sequence of 1,536")]
)
def test_an_engine_that_cannot_hold_one_sequence_is_refused_and_every_named_key_mends_it(
    static: float, problem: str
) -> None:
    model = ("model.hf_checkpoint=models/Qwen3-30B-A3B", "parallel.ep=4")
    overrides = {"rollout.sglang.mem_fraction_static": f"{static}"}
    machine = described_machine("8xH200")
    with pytest.raises(ConfigError, match=f"an engine with rollout.tp=2 .*{problem}.*: set rollout") as refusal:
        plan("qwen3_4b_gsm8k_async", *model, *(f"{k}={v}" for k, v in overrides.items()), machine=machine)
    fixes = re.findall(r"rollout\.[a-z_.]+=[\d.]+", str(refusal.value).split(": set ")[1])
    assert fixes
    for fix in fixes:
        changed = overrides | dict([fix.split("=")])
        engines = ("rollout.num_engines=1",) if "rollout.tp" in fix else ()
        memory = plan(
            "qwen3_4b_gsm8k_async", *model, *engines, *(f"{k}={v}" for k, v in changed.items()), machine=machine
        ).memory
        assert memory.engine is not None and memory.engine.requests(1_536) >= 1


@pytest.mark.parametrize(
    ("device", "dcp", "options", "states"),
    [
        ("cuda", 1, {}, 5),
        ("cuda", 1, {"disable_overlap_schedule": True}, 3),
        ("cuda", 1, {"mamba_radix_cache_strategy": "extra_buffer", "disable_overlap_schedule": True}, 4),
        ("cuda", 1, {"mamba_radix_cache_strategy": "extra_buffer_lazy"}, 4),
        ("cuda", 1, {"mamba_radix_cache_strategy": "no_buffer"}, 3),
        ("cuda", 1, {"disable_radix_cache": True}, 1),
        ("cpu", 1, {}, 3),
        ("cpu", 2, {}, 4),
        ("cpu", 2, {"disable_radix_cache": True}, 1),
    ],
)
def test_recurrent_states_per_request_are_sglangs(
    device: str, dcp: int, options: dict[str, object], states: int
) -> None:
    spec = EngineSpec("", device, "bfloat16", 2, 64, 0, "", 1.0, dcp=dcp, sglang=options)
    assert engine_settings(spec).states_per_request == states


@pytest.mark.parametrize("dcp", [1, 2])
def test_max_total_tokens_bounds_the_cache_of_a_gpu_for_each_dcp_rank(dcp: int) -> None:
    overrides = (*WIDE, "placement.actor_num_gpus_per_node=8", "rollout.sglang.max_total_tokens=65536")
    memory = plan("qwen3_4b_gsm8k_async", *overrides, f"rollout.dcp={dcp}", machine=described_machine("16xH200")).memory
    assert memory.engine is not None and memory.engine.tokens == 65_536 * dcp
    table = dict(memory.tables)["engine"]
    assert table.of("KV cache") == memory.engine.tokens * memory.engine.token_bytes


@pytest.mark.parametrize("dcp", [1, 2])
def test_a_limit_below_a_sequence_is_named_and_the_named_value_mends_it(dcp: int) -> None:
    limit = "rollout.sglang.max_total_tokens"
    keys = (*WIDE, "placement.actor_num_gpus_per_node=8", f"rollout.dcp={dcp}")
    machine = described_machine("16xH200")
    with pytest.raises(ConfigError) as refusal:
        plan("qwen3_4b_gsm8k_async", *keys, f"{limit}=512", machine=machine)
    message = str(refusal.value)
    assert message.startswith(f"{limit}=512 ") and "no sequence of 1,536 tokens" in message
    assert "rollout.tp" not in message
    fix = re.findall(rf"set ({limit}=\d+)", message)[0]
    assert fix == f"{limit}={1_536 // dcp}"
    memory = plan("qwen3_4b_gsm8k_async", *keys, fix, machine=machine).memory
    assert memory.engine is not None and memory.engine.requests(1_536) == 1


class RecordingOptions(dict[str, object]):
    """Options of an engine that record the fields read."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: set[str] = set()

    def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
        self.fields.add(key)
        return default


def test_every_engine_field_that_the_plan_reads_can_be_set() -> None:
    options = RecordingOptions()
    engine_settings(EngineSpec("", "cuda", "bfloat16", 2, 64, 0, "", 1.0, sglang=options))
    assert {"cuda_graph_max_bs_decode", "max_total_tokens"} <= options.fields
    assert options.fields <= foreign.table(foreign.SGLANG).keys() - foreign.OWNED[foreign.SGLANG].keys()


@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        ({}, (True, None, None)),
        ({"disable_cuda_graph": True}, (False, 0, None)),
        ({"disable_decode_cuda_graph": True}, (False, None, None)),
        ({"disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": 24}, (True, 0, 24)),
        ({"disable_cuda_graph": True, "cuda_graph_backend_prefill": "full"}, (False, None, None)),
        ({"cuda_graph_backend_decode": "disabled", "cuda_graph_bs_prefill": [64, 512]}, (False, 2, None)),
        ({"cuda_graph_bs_decode": [1, 40], "cuda_graph_max_bs_prefill": 32}, (True, 8, 40)),
        ({"enable_two_batch_overlap": True}, (True, 0, None)),
        ({"moe_a2a_backend": "mooncake"}, (True, 0, None)),
    ],
)
def test_cuda_graphs_are_those_that_sglangs_fields_name(
    options: dict[str, object], graphs: tuple[bool, int | None, int | None]
) -> None:
    settings = engine_settings(EngineSpec("", "cuda", "bfloat16", 2, 64, 0, "", 1.0, sglang=options))
    assert (settings.decode_graphs, settings.prefill_graphs, settings.graph_requests) == graphs


@pytest.mark.parametrize(
    ("recipe", "machine", "extra"),
    [
        ("qwen3_4b_gsm8k", "8xH100", ()),
        ("qwen3_4b_gsm8k", "8xH200", ("algo=ppo",)),
        ("qwen3_4b_gsm8k", "8xH200", ("parallel.pp=2", "parallel.vpp=2", "parallel.tp=1")),
        ("qwen3_4b_gsm8k", "8xH200", (BY_BLOCK, "model.recompute_num_layers=12")),
        ("qwen3_4b_dapo_async", "8xH200", ()),
        ("qwen3_4b_dapo_async", "16xH200", (*WIDE, "placement.actor_num_gpus_per_node=8")),
        ("quickstart", "", ("rollout.tp=4",)),
    ],
)
def test_a_run_with_a_listed_change_is_planned_as_listed(recipe: str, machine: str, extra: tuple[str, ...]) -> None:
    target = described_machine(machine) if machine else Machine(0, 8, 64 * 2**30, ())
    base = plan(recipe, *extra, machine=target)
    assert base.memory.demand is not None
    listed = list(changes(base.memory.demand, base.dcp))
    names = {change.setting.split("=")[0] for change in listed}
    assert "model.logits_chunk" in names and ("model.recompute" in names) is (BY_BLOCK not in extra)
    assert any(change.setting == "rollout.dcp=2" for change in listed) is ("rollout.tp=8" in extra or not machine)
    for change in listed:
        overrides = change.setting.split()
        if change.plan.gpu and change.plan.needed_bytes > change.plan.available:
            continue
        changed = plan(recipe, *extra, *overrides, machine=target)
        assert dict(changed.memory.tables) == dict(change.plan.tables), change.setting


def test_the_plan_of_a_gpu_run_has_a_plot_and_a_table_of_changes() -> None:
    lines = show_plan(["+recipe=qwen3_4b_gsm8k", *RESIDENT], "8xH100").splitlines()
    bars = {name: next(line for line in lines if line.startswith(f"  {name} ") and "|" in line) for name in BARS}
    lengths = {name: len(re.sub(r"[^A-Za-z]", "", line.split()[1])) for name, line in bars.items()}
    assert abs(lengths["together"] - lengths["trainer"] - lengths["engine"]) <= 1
    assert any(re.match(r"  model\.recompute=none +70\.1 GiB .* does not fit", line) for line in lines)


def test_the_examples_of_the_page_are_the_plans_output() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    command = "$ python train.py --plan-for 8xH100 +recipe=qwen3_4b_gsm8k"
    example = page.split(f"{command}\n")[1].split("```")[0].strip("\n")
    assert example in show_plan(["+recipe=qwen3_4b_gsm8k"], "8xH100"), "run the command and copy its lines"
    with pytest.raises(ConfigError) as refusal:
        plan("qwen3_4b_gsm8k", *RESIDENT[:2], shipped=True)
    printed_plan = page.split(f"{command} {' '.join(RESIDENT[:2])}\n")[1].split("```")[0]
    assert f"ConfigError: {refusal.value}" == " ".join(printed_plan.split()), "run the command and copy its message"


def test_a_pipeline_stage_is_named() -> None:
    deep = ("model.recompute=none", "parallel.pp=4", "parallel.tp=1")
    with pytest.raises(ConfigError, match=r"trainer \S+ GiB on pipeline stage 1 of 4"):
        plan("qwen3_4b_gsm8k", *deep)


def test_a_run_that_fits_only_without_the_allocators_overhead_is_warned() -> None:
    tight = plan("qwen3_4b_gsm8k", "model.recompute=none", machine=described_machine("8xH200"))
    assert tight.memory.min_bytes <= tight.memory.available < tight.memory.needed_bytes
    assert any("GiB" in line and "model.recompute=full" in line for line in tight.advice)


def test_a_gpu_that_the_table_does_not_have_is_not_predicted() -> None:
    unknown = plan("qwen3_4b_gsm8k", machine=described_machine("8xV100"))
    assert "does not know the GPU 'V100': its table has H20, H800, H100, " in unknown.memory.unknown
    assert any(line.startswith("memory is not checked: the planner does not know") for line in unknown.advice)
    assert plan("qwen3_4b_gsm8k", "model.recompute=none", machine=described_machine("8")).memory.unknown


def test_the_drivers_memory_of_a_gpu_counts_before_the_tables() -> None:
    here = replace(H100, is_local=True, gpu_names=("NVIDIA H100 80GB HBM3",) * 8, memory_bytes=2**40)
    small = replace(here, gpu_bytes=(80 * 2**30,) * 7 + (40 * 2**30,))
    with pytest.raises(ConfigError, match=r"each H100 has 40\.0 GiB"):
        local_memory(small)
    assert local_memory(replace(here, gpu_bytes=(100 * 2**30,) * 8)).available == 100 * 2**30
    from_table = local_memory(here)
    assert from_table.source == "memory from the planner's table, not from the driver"
    assert from_table.available == known_gpu("H100").memory  # pyright: ignore[reportOptionalMemberAccess]


def test_a_gpu_that_only_the_driver_knows_is_predicted() -> None:
    here = replace(H100, is_local=True, gpu_names=("Tesla V100",) * 8, memory_bytes=2**40)
    assert "does not know the GPU 'Tesla V100'" in local_memory(here).unknown
    with pytest.raises(ConfigError, match=r"each Tesla V100 has 32\.0 GiB"):
        local_memory(replace(here, gpu_bytes=(32 * 2**30,) * 8))
    assert "MIG slice" in local_memory(replace(here, gpu_names=("NVIDIA H100 MIG",) * 8)).unknown


def test_main_memory_of_this_machine_is_checked() -> None:
    here = replace(H100, is_local=True, memory_bytes=100 * 2**30)
    with pytest.raises(ConfigError, match=r"GiB of main memory on a node .*has 100\.0 GiB"):
        local_memory(here)


def local_memory(machine: Machine) -> MemoryPlan:
    """Return the memory of a recipe on this machine; its model's folder is not needed."""
    cfg, described_plan = (
        load_config(["+recipe=qwen3_4b_gsm8k", *RESIDENT], files=False, machine=False),
        plan("qwen3_4b_gsm8k"),
    )
    shapes = role_shapes(cfg, None, None)
    return plan_memory(
        cfg, machine, shapes, described_plan.actor, described_plan.engines, described_plan.roles, (None, None)
    )


def test_this_machines_gpus_are_checked_by_the_drivers_name(tmp_path: Path) -> None:
    here = replace(H100, gpu_names=("NVIDIA H100 80GB HBM3",) * 8)
    with pytest.raises(ConfigError, match="but each H100 has"):
        plan("qwen3_4b_gsm8k", "model.recompute=none", machine=here)


@pytest.mark.parametrize(("recipe", "engine"), [("quickstart", 2.2), ("quickstart_gdn", 2.3), ("quickstart_next", 2.3)])
def test_a_cpu_run_shows_resident_memory_before_its_model_is_made(recipe: str, engine: float) -> None:
    laptop = Machine(0, 4, 16 * 2**30, ())
    memory = plan(recipe, machine=laptop).memory
    tables = dict(memory.tables)
    assert tables["engine"].total / 2**30 == pytest.approx(engine, rel=0.1)
    assert 0.7 < tables["trainer"].total / 2**30 < 2
    assert memory.needed_bytes == 0 and not memory.warning
    assert memory.engine is not None and memory.engine.tokens == 65_536


def test_processes_on_a_cpu_that_may_not_fit_are_warned() -> None:
    laptop = Machine(0, 4, 16 * 2**30, ())
    assert plan("quickstart", machine=laptop).advice == ()
    (warning,) = plan("quickstart", "rollout.num_engines=8", machine=laptop).advice
    assert (
        "the processes may need 18." in warning
        and "but this machine has 16.0 GiB: lower rollout.num_engines" in warning
    )


def test_an_engine_on_a_cpu_whose_share_holds_no_sequence_is_refused_and_the_named_key_mends_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path, **MODELS["Qwen3-0.6B"])
    argv = ("placement.device=cpu", f"model.hf_checkpoint={folder}", "rollout.max_context_len=1024")
    laptop = Machine(0, 4, 10 * 2**30, ())
    with pytest.raises(ConfigError, match="an engine has mem_fraction_static=") as refusal:
        plan("quickstart", *argv, machine=laptop)
    message = str(refusal.value)
    assert "0.3 of 10.0 GiB of main memory for 2.2 GiB of weights" in message
    assert re.search(r"holds [\d,]+ tokens, less than a sequence of", message)
    fix = re.findall(r"set (rollout\.sglang\.mem_fraction_static=[\d.]+)", message)[0]
    memory = plan("quickstart", *argv, fix, machine=laptop).memory
    assert memory.engine is not None and memory.engine.tokens > 1_000


def test_a_limit_below_a_sequence_is_not_blamed_on_the_memory_of_a_cpu() -> None:
    limit = ("rollout.sglang.max_total_tokens=40", "rollout.max_response_len=32")
    memory = plan("quickstart", *limit, machine=Machine(0, 4, 16 * 2**30, ())).memory
    assert memory.engine is not None and memory.engine.tokens == 40


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("quickstart", "rollout.tp=2 rollout.dcp=2", r"rollout\.dcp=2 for the model in .*the model has 2"),
        ("quickstart_next", "rollout.tp=4", r"rollout\.tp=4 does not divide the 2 linear attention key heads"),
    ],
)
def test_a_plan_checks_a_model_that_the_run_will_make(
    recipe: str, overrides: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        show_plan([f"+recipe={recipe}", "placement.device=cpu", *overrides.split()])


def test_a_cpu_run_whose_cache_is_short_is_told_of_dcp() -> None:
    ranks = ("rollout.tp=4", "rollout.sglang.max_total_tokens=2048")
    cfg = load_config(["+recipe=quickstart", *ranks], files=False, machine=False)
    laptop = Machine(0, 4, 16 * 2**30, ())
    text = render_plan(cfg, make_plan(cfg, laptop), laptop)
    assert "KV cache 2,048 tokens per engine: 32 sequences of 64 tokens" in text
    assert "rollout.dcp=2 would hold 4,096 tokens per engine" in text


def test_dcp_is_suggested_if_the_cache_limits_the_rollout_and_ranks_repeat_heads() -> None:
    text = show_plan(["+recipe=qwen3_4b_dapo_async", *WIDE, "placement.actor_num_gpus_per_node=8"], "16xH200")
    assert "rollout.dcp=2 would hold" in text
    assert "rollout.dcp" not in show_plan(["+recipe=qwen3_4b_gsm8k"], "8xH100")


def test_max_running_requests_limits_a_rollout_before_the_cache_does() -> None:
    short = ("rollout.tp=4", "rollout.sglang.max_total_tokens=2048", "rollout.max_running_requests=8")
    cfg = load_config(["+recipe=quickstart", *short], files=False, machine=False)
    laptop = Machine(0, 4, 16 * 2**30, ())
    text = render_plan(cfg, make_plan(cfg, laptop), laptop)
    assert "limited by rollout.max_running_requests" in text and "rollout.dcp=2 would hold" not in text


def test_samples_in_flight_include_the_over_sampled_groups() -> None:
    texts = [
        show_plan(["+recipe=qwen3_4b_gsm8k_async", f"rollout.over_sampling_batch_size={groups}"], "8xH200")
        for groups in (1_024, 2_048)
    ]
    assert [int(re.findall(r"samples ([\d,]+) per engine", text)[0].replace(",", "")) for text in texts] == [
        2_560,
        5_120,
    ]


def test_cores_are_counted_per_node() -> None:
    cluster = ("placement.ray_address=auto", "placement.actor_num_nodes=4", "rollout.num_engines=16")
    described = plan("qwen3_4b_gsm8k")
    four = plan("qwen3_4b_gsm8k", *cluster, machine=described_machine("4x8xH100"))
    assert (
        (described.trainer_threads, described.engine_threads) == (four.trainer_threads, four.engine_threads) == (8, 8)
    )
    assert any("on each of 4 nodes" in decision.reason for decision in four.decisions)


@pytest.mark.parametrize("machine", ["8xH200", "8xNVIDIA H100 80GB HBM3", "2x4xH100"])
def test_another_machine_is_planned_in_an_empty_folder(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["placement.ray_address=auto"] if machine.startswith("2x") else []
    text = show_plan(["+recipe=qwen3_4b_gsm8k", *overrides], machine)
    assert re.search(r"^memory     \d+\.\d GiB of \d+\.\d GiB on each GPU with trainer \+ engine", text, re.MULTILINE)
    assert "sequences of 1,536 tokens" in text and "weights, tokenizer, data and main memory are not checked" in text


def test_a_plan_for_several_nodes_names_the_cluster_that_the_run_joins() -> None:
    for machine, has_nodes in (("8xH100", False), ("2x4xH100", True)):
        advice = plan("qwen3_4b_gsm8k", machine=described_machine(machine)).advice
        assert any("2 nodes" in line and "set placement.ray_address=auto" in line for line in advice) is has_nodes
    joined_plan = plan("qwen3_4b_gsm8k", "placement.ray_address=auto", machine=described_machine("2x4xH100"))
    assert joined_plan.advice == ()


@pytest.mark.parametrize("address", ["placement.ray_address=auto", "placement.ray_address=null"])
def test_an_engine_over_a_part_of_described_nodes_is_refused(address: str) -> None:
    wide = ("rollout.tp=8", "rollout.num_engines=1", address)
    with pytest.raises(ConfigError, match=r"rollout\.tp=8: .* nodes of --plan-for have at most 6 .*rollout\.tp=6"):
        plan("qwen3_4b_gsm8k", *wide, machine=described_machine("2x6xH100"))


def test_an_engine_over_whole_nodes_is_planned_as_on_one_node() -> None:
    """Only the advice tells that a run refuses it."""
    wide = ("rollout.tp=8", "rollout.num_engines=1", "placement.ray_address=auto")
    one, two = (plan("qwen3_4b_gsm8k", *wide, machine=described_machine(text)) for text in ("8xH100", "2x4xH100"))
    assert two.memory.tables == one.memory.tables and two.roles == one.roles and one.advice == ()
    (advice,) = two.advice
    assert re.search(
        r"rollout\.tp=8: .* spans 2 nodes, but a run starts each engine on one node: set rollout\.tp=4 or less", advice
    )


def test_the_largest_machine_that_can_be_described_is_planned() -> None:
    machine = described_machine("9999x999xH100")
    assert machine.num_gpus == 9_999 * 999 and len(machine.gpu_names) == 1


def test_a_model_without_folder_or_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"'models/Unheard-1B' is neither .* Qwen3-4B, "):
        show_plan(["+recipe=qwen3_4b_gsm8k", "model.hf_checkpoint=models/Unheard-1B"], "8xH200")


@pytest.mark.parametrize("text", ["x8", "0xH100", "8xx", "-8xH100", "8x8x8xH100"])
def test_a_malformed_machine_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--plan-for .*: write the number of GPUs"):
        described_machine(text)


@pytest.mark.slow
def test_plan_for_works_from_the_command_line(tmp_path: Path) -> None:
    repository = Path(__file__).parents[2]
    command = [sys.executable, str(repository / "train.py"), "--plan-for", "8xH200", "+recipe=qwen3_4b_gsm8k"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
