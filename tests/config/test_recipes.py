"""Shipped recipes: composed, checked against the published model shape, and planned on the machine they name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slime_like.cluster.plan.machine import Machine, described_machine
from slime_like.cluster.plan.planner import Plan, make_plan
from slime_like.cluster.plan.view import render_plan
from slime_like.config.load.loader import load_config
from slime_like.config.schema.root import TrainConfig
from tests.config.model_folder import write_model

RECIPES = sorted((Path(__file__).parents[2] / "configs" / "recipe").glob("*.yaml"))
NODE = Machine(8, 96, 1024 * 2**30, ("NVIDIA H100 80GB HBM3",) * 8)
LAPTOP = Machine(0, 2, 16 * 2**30, ())
ONE_GPU = Machine(1, 8, 32 * 2**30, ("NVIDIA L4",))
PLAN_LINE = re.compile(
    r"^# Plan \(--plan-for (\S+)((?: \S+=\S+)*)\): ([\d.]+ GiB) on each GPU, ([\d.]+ GiB) of main memory of a node\.$",
    re.MULTILINE,
)
# (recipe, machine, changes, memory of a GPU, main memory of a node), as the recipes' comments give them
PLANS = [(path.stem, *line.groups()) for path in RECIPES for line in PLAN_LINE.finditer(path.read_text())]
MACHINES = {recipe: machine for recipe, machine, changes, *_ in PLANS if not changes}
LARGE = {name: machine for name, machine in MACHINES.items() if not name.startswith(("qwen3_4b", "one_gpu"))}
FOR_GPUS = [path.stem for path in RECIPES if not path.stem.startswith("quickstart")]


@pytest.fixture(scope="module")
def qwen3_4b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = json.loads((Path(__file__).parent / "qwen3_4b.json").read_text())
    folder = write_model(tmp_path_factory.mktemp("qwen3_4b"), **shape)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def plan_of(recipe: str, model: Path, data: Path) -> tuple[TrainConfig, Plan, Machine]:
    if recipe.startswith("qwen3_4b"):
        first = load_config([f"+recipe={recipe}"], files=False)
        heldout = ", ".join(f"{name}: {data}" for name in first.evaluation.datasets)
        overrides = [f"model.hf_checkpoint={model}", f"data.train={data}", f"evaluation.datasets={{{heldout}}}"]
        cfg, machine = load_config([f"+recipe={recipe}", *overrides]), NODE
    elif recipe in LARGE:
        cfg, machine = (
            load_config([f"+recipe={recipe}"], files=False, machine=False),
            described_machine(LARGE[recipe]),
        )
    else:
        cfg = load_config([f"+recipe={recipe}"], files=False)
        machine = ONE_GPU if cfg.placement.device == "cuda" else LAPTOP
    return cfg, make_plan(cfg, machine), machine


@pytest.mark.parametrize("recipe", [path.stem for path in RECIPES])
def test_a_recipe_is_planned_on_its_machine(recipe: str, qwen3_4b: Path, data: Path) -> None:
    cfg, plan, machine = plan_of(recipe, qwen3_4b, data)
    assert cfg.run.name == recipe
    assert plan.num_gpus == machine.num_gpus, "a recipe uses all GPUs of its machine"
    assert f"run        {recipe}" in render_plan(cfg, plan, machine)
    assert plan.samples_per_rollout == plan.samples_per_step * cfg.loop.steps_per_rollout


@pytest.mark.parametrize("task", ["dapo", "gsm8k"])
def test_a_4b_run_and_its_split_differ_in_placement_only(task: str, qwen3_4b: Path, data: Path) -> None:
    colocated, plan, _ = plan_of(f"qwen3_4b_{task}", qwen3_4b, data)
    separate, split, _ = plan_of(f"qwen3_4b_{task}_async", qwen3_4b, data)
    assert plan.colocated and not split.colocated
    assert (plan.actor.layout.dp, split.actor.layout.dp, split.roles[1].devices) == (4, 2, ((4, 5), (6, 7)))
    assert (plan.transport.kind, split.transport.kind) == ("ipc", "broadcast")
    assert (colocated.optim, colocated.data, colocated.reward) == (separate.optim, separate.data, separate.reward)
    assert colocated.rollout.batch_size == separate.rollout.batch_size
    assert (colocated.loop.max_staleness, separate.loop.max_staleness) == (0, 1)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_has_a_comment(path: Path) -> None:
    comment = "".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    assert len(comment) > 80
    if path.stem.startswith("qwen3_4b"):
        assert "8 GPUs of 80 GB" in comment
        assert "slime" in comment or "verl" in comment or "qwen3_4b_gsm8k" in comment
    if path.stem in LARGE:
        assert "docs/measurements/NOT_RUN.md" in comment


@pytest.mark.parametrize("recipe", FOR_GPUS)
def test_the_comment_of_a_recipe_for_gpus_gives_its_machine_and_source(recipe: str) -> None:
    comment = " ".join(
        line[2:] for line in (RECIPES[0].parent / f"{recipe}.yaml").read_text().splitlines() if line[:1] == "#"
    )
    kind = MACHINES[recipe].rpartition("x")[2]
    assert kind in comment.partition("Plan (")[0] or re.search(r"(8 GPUs of 80|Any GPU with 8) GB", comment)
    source = re.search(r"Mirrors (slime's|the run of slime's|verl's|the article on|\w+)", comment)
    assert source is not None
    assert " " in source[1] or source[1].endswith("'s") or f"{source[1]}.yaml" in {path.name for path in RECIPES}


@pytest.mark.parametrize(("recipe", "described", "changes", "gpu", "node"), PLANS)
def test_the_comment_of_a_recipe_for_gpus_gives_its_planned_memory(
    recipe: str, described: str, changes: str, gpu: str, node: str
) -> None:
    cfg = load_config([f"+recipe={recipe}", *changes.split()], files=False, machine=False)
    machine = described_machine(described)
    plan = make_plan(cfg, machine)
    text = render_plan(cfg, plan, machine)
    assert f"memory     {gpu} of " in text
    assert f"  main memory of a node {node}: " in text
    assert not plan.advice, "a recipe does what the plan advises"


@pytest.mark.parametrize("recipe", sorted(LARGE))
def test_an_engine_of_a_large_recipe_is_on_the_nodes_that_its_comment_names(
    recipe: str, qwen3_4b: Path, data: Path
) -> None:
    _, plan, _ = plan_of(recipe, qwen3_4b, data)
    assert plan.engines[0].num_nodes == (4 if recipe in ("deepseek_r1", "deepseek_r1_h800") else 1)


def test_each_large_model_has_a_recipe() -> None:
    assert sorted(MACHINES) == sorted(FOR_GPUS), "each has a plan without changes"
    assert ("deepseek_r1_h20", "8xH200") in {line[:2] for line in PLANS}
    assert sorted(LARGE) == [
        "deepseek_r1",
        "deepseek_r1_h20",
        "deepseek_r1_h800",
        "qwen3_235b_a22b",
        "qwen3_30b_a3b",
        "qwen3_5_35b_a3b",
        "qwen3_next_80b_a3b",
    ]


def test_qwen3_5_has_the_settings_of_the_pull_request_it_mirrors(qwen3_4b: Path, data: Path) -> None:
    cfg, plan, _ = plan_of("qwen3_5_35b_a3b", qwen3_4b, data)
    sizes = cfg.parallel
    assert (sizes.tp, sizes.cp, sizes.ep, sizes.pp, plan.num_gpus) == (2, 4, 8, 1, 8)
    assert (cfg.rollout.max_response_len, cfg.model.gdn.backend, cfg.guard.checks) == (8192, "flashqla", "always")
    assert sum(policy == "never" for policy in cfg.guard.ops.values()) == 8
    assert "dapo-math-17k" in cfg.data.train


@pytest.mark.parametrize(("recipe", "dcp"), [("qwen3_235b_a22b", 2), ("qwen3_next_80b_a3b", 4)])
def test_dcp_stores_each_token_once_per_kv_head(recipe: str, dcp: int, qwen3_4b: Path, data: Path) -> None:
    cfg, plan, machine = plan_of(recipe, qwen3_4b, data)
    assert cfg.rollout.dcp == plan.dcp.size == dcp
    assert "rollout.dcp=" not in render_plan(cfg, plan, machine), "the plan suggests another size"
