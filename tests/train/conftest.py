"""Models, references and results of trainer tests. One set of ranks per world size runs the jobs of all modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train import parity
from tests.train.float8 import dequantising, quantise
from tests.train.jobs import SECONDS_PER_JOB, RankJob, Results, Shared
from tests.train.models import (
    SHARED,
    add_mtp,
    add_mtp_layer,
    make_model,
    make_qwen3,
    make_vision,
    rename_to_kimi,
    rename_to_mimo,
)
from tests.train.ranks import run_ranks

SMALL = ("one layer", "two layers", "few experts")  # kinds of models that are not compared with a reference
BALANCE = {"qwen3_moe balanced": 0.05}  # kind -> coefficient of the routers' auxiliary loss; others have none


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of small Qwen3 models, tied and untied, for tests that need not wait for all ``models``."""
    folder = tmp_path_factory.mktemp("qwen3")
    return {
        kind: make_qwen3(folder / kind, tied=kind == "tied", seed=seed) for seed, kind in enumerate(("tied", "untied"))
    }


@pytest.fixture(scope="session")
def models(qwen3: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of small models: the two of ``qwen3``, and one per other family and variant."""
    folder = tmp_path_factory.mktemp("models")
    folders = qwen3 | {
        "llama": make_model(folder / "llama", "llama", tied=False, seed=2, rope="llama3"),
        "llama tied": make_model(folder / "llama_tied", "llama", tied=True, layers=2, seed=3),
        "qwen2": make_model(folder / "qwen2", "qwen2", tied=True, layers=2, seed=4),
        "qwen3_5": make_model(folder / "qwen3_5", "qwen3_5_text", tied=True, seed=5),
        "qwen3_5 two key heads": make_model(
            folder / "qwen3_5_two", "qwen3_5_text", tied=True, seed=10, changes={"linear_num_key_heads": 2}
        ),
        "qwen3_next": add_mtp(make_model(folder / "qwen3_next", "qwen3_next", tied=False, seed=6)),
        "qwen3_5_moe": make_model(folder / "qwen3_5_moe", "qwen3_5_moe_text", tied=True, seed=8),
        "qwen3_next experts": add_mtp(
            make_model(
                folder / "next_experts", "qwen3_next", tied=False, seed=9, changes={**SHARED, "mlp_only_layers": []}
            )
        ),
        "qwen3_moe": make_model(folder / "qwen3_moe", "qwen3_moe", tied=False, seed=7),
        "float8": quantise(
            add_mtp(
                make_model(
                    folder / "float8", "qwen3_next", tied=False, seed=11, changes={**SHARED, "mlp_only_layers": []}
                )
            )
        ),
        "deepseek_v2": make_model(folder / "deepseek_v2", "deepseek_v2", tied=False, seed=11, rope="yarn"),
        "deepseek_v3": add_mtp_layer(
            make_model(folder / "deepseek_v3", "deepseek_v3", tied=False, seed=12, rope="yarn")
        ),
        "kimi_k2": rename_to_kimi(
            make_model(
                folder / "kimi_k2",
                "deepseek_v3",
                tied=False,
                seed=13,
                rope="yarn",
                changes={"n_group": 1, "topk_group": 1, "qk_nope_head_dim": 24},  # heads that fit the C kernel
            )
        ),
        "glm4": make_model(folder / "glm4", "glm4", tied=False, layers=2, seed=14),
        "glm4_moe": add_mtp_layer(make_model(folder / "glm4_moe", "glm4_moe", tied=False, seed=15)),
        "minimax_m2": add_mtp_layer(make_model(folder / "minimax_m2", "minimax_m2", tied=False, seed=16)),
        "mimo": rename_to_mimo(make_model(folder / "mimo", "qwen2", tied=False, layers=2, seed=17)),
        "one layer": make_qwen3(folder / "one_layer", tied=True, layers=1, seed=18),
        "two layers": make_qwen3(folder / "two_layers", tied=True, layers=2, seed=19),
        "few experts": make_model(
            folder / "few_experts",
            "qwen3_moe",
            tied=False,
            seed=20,
            changes={"num_experts": 4, "mlp_only_layers": [1, 2]},
        ),
        "vision": make_vision(folder / "vision", seed=7),
        "vision experts": make_vision(folder / "vision_experts", seed=10, experts=True),
    }
    return folders | dict.fromkeys(("qwen3_moe balanced", parity.REPLAYED), folders["qwen3_moe"])


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the output of the jobs, one subfolder per job name."""
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, models: dict[str, Path], scratch: Path) -> Results:
    """Return the results of every rank of every job of the collected modules."""
    by_size: dict[int, list[RankJob]] = {}
    modules = {item.module for item in request.session.items if isinstance(item, pytest.Function)}
    trainers = [module for module in modules if getattr(module, "__name__", "").startswith("tests.train.")]
    for module in sorted(trainers, key=str):
        for size, jobs in getattr(module, "JOBS", {}).items():
            by_size.setdefault(size, []).extend(jobs)
    with dequantising():
        references = {
            kind: parity.reference(folder, BALANCE.get(kind, 0.0), kind)
            for kind, folder in models.items()
            if kind not in SMALL
        }
    shared = Shared(models, references, scratch)
    seconds = sum(120 + SECONDS_PER_JOB * len(jobs) for jobs in by_size.values())
    return Results(run_ranks("tests.train.jobs:run_pools", 1, shared, by_size, seconds=seconds)[0])
