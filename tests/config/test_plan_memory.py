"""Check of GPU memory in the plan: runs that fit, refused runs with their fixes, and plans without files."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from slime_like.cluster.plan.changes import changes
from slime_like.cluster.plan.machine import Machine, described_machine
from slime_like.cluster.plan.memory import MemoryPlan, plan_memory
from slime_like.cluster.plan.remedies import OFFLOAD_KEYS
from slime_like.cluster.plan.shapes import role_shapes
from slime_like.cluster.plan.view import show_plan
from slime_like.config.load.loader import load_config
from slime_like.errors import ConfigError
from slime_like.hardware import known_gpu
from slime_like.planner.models import MODELS
from tests.config.model_folder import write_model
from tests.config.recipe_plans import H100, RESIDENT, WIDE, plan

BY_BLOCK = "model.recompute_method=block"
BARS = ("trainer", "engine", "together")
RECIPES = ("qwen3_4b_gsm8k", "qwen3_4b_gsm8k_async", "qwen3_4b_dapo", "qwen3_4b_dapo_async")


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


@pytest.mark.parametrize(
    ("recipe", "machine", "extra"),
    [
        ("qwen3_4b_gsm8k", "8xH100", ()),
        ("qwen3_4b_gsm8k", "8xH100", ("rollout.num_managers=4",)),
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
    rows = list(changes(base.memory.demand, base.dcp))
    names = {change.setting.split("=")[0] for change in rows}
    assert "model.logits_chunk" in names and ("model.recompute" in names) is (BY_BLOCK not in extra)
    assert any(change.setting == "rollout.dcp=2" for change in rows) is ("rollout.tp=8" in extra or not machine)
    for change in rows:
        overrides = change.setting.split()
        if change.plan.gpu and change.plan.needed_bytes > change.plan.available:
            continue
        changed = plan(recipe, *extra, *overrides, machine=target)
        assert dict(changed.memory.tables) == dict(change.plan.tables), change.setting


def test_the_largest_static_fraction_that_fits_is_listed() -> None:
    base = plan("qwen3_4b_gsm8k_async", machine=described_machine("8xH200"))
    assert base.memory.demand is not None
    assert base.memory.busiest == ("engine",), "the case needs engines with GPUs of their own"
    settings = [change.setting for change in changes(base.memory.demand, base.dcp)]
    assert "rollout.sglang.mem_fraction_static=0.95" in settings


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


def test_an_engine_gpu_that_is_too_small_is_refused_even_if_the_trainers_gpu_needs_more_with_overhead() -> None:
    split = ("model.recompute=none", "parallel.max_tokens_per_rank=17900")
    trainer = plan("qwen3_4b_gsm8k_async", *split).memory
    assert trainer.busiest == ("trainer",) and trainer.min_bytes < trainer.available < trainer.needed_bytes
    with pytest.raises(
        ConfigError, match=r"the run needs 79\.8 GiB on a GPU \(engine 79\.8 GiB;.*each H100 has 79\.6 GiB"
    ):
        plan("qwen3_4b_gsm8k_async", *split, "rollout.sglang.mem_fraction_static=0.98")


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
    mixed = replace(here, gpu_names=("NVIDIA H100", "NVIDIA A30 MIG"))
    assert "the memory of a MIG slice is not known (NVIDIA A30 MIG)" in local_memory(mixed).unknown


def test_main_memory_of_this_machine_is_checked() -> None:
    here = replace(H100, is_local=True, memory_bytes=100 * 2**30)
    with pytest.raises(ConfigError, match=r"GiB of main memory on a node .*has 100\.0 GiB"):
        local_memory(here)


def local_memory(machine: Machine) -> MemoryPlan:
    """Return the memory plan of a recipe on ``machine``; the model's folder is not needed."""
    cfg, described_plan = (
        load_config(["+recipe=qwen3_4b_gsm8k", *RESIDENT], files=False, machine=False),
        plan("qwen3_4b_gsm8k"),
    )
    shapes = role_shapes(cfg, None, None)
    return plan_memory(
        cfg, machine, shapes, described_plan.actor, described_plan.engines, described_plan.roles, (None, None)
    )


def test_a_plan_has_the_shape_of_model_family(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", model_type="mine")
    argv = ["+recipe=qwen3_4b_gsm8k", f"model.hf_checkpoint={folder}"]
    shapes = [
        role_shapes(load_config([*argv, *family], files=False, machine=False), None, None).actor
        for family in ((), ("model.family=qwen3",), ("model.family=qwen2",))
    ]
    attentions = [shape.attention for shape in shapes if shape is not None]
    assert [(item.normed, item.bias) for item in attentions if item is not None] == [
        (False, False),
        (True, False),
        (False, True),
    ]


def test_this_machines_gpus_are_checked_by_the_drivers_name() -> None:
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
