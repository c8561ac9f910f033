"""Selection of GDN kernels: validated before their package is imported, and never replaced by another backend."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_like.cluster.plan import gdn as plan_gdn
from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.planner import Plan, make_plan
from slime_like.config.load.loader import load_config
from slime_like.config.rules import gdn as gdn_rules
from slime_like.config.rules.gdn import check_runtime
from slime_like.config.rules.gdn_runtime import Runtime, has_nvcc, installed_version, runtime, torch_cuda, version
from slime_like.config.rules.hf import GDNShape
from slime_like.config.schema.gdn import GDNConfig
from slime_like.errors import ConfigError
from slime_like.util.gpus import Gpu
from slime_like_plugins.qwen_gdn.select import resolve
from tests.config.model_folder import write_model

SHAPE = GDNShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4)
HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
VERSIONS = {
    "torch": (2, 14, 1),
    "triton": (3, 8, 0),
    "fla-core": (0, 6, 0),
    "flash-qla": (0, 1, 3),
    "tilelang": (0, 1, 12),
}
HOPPER = Runtime("cuda", (9, 0), (13, 0), VERSIONS, nvcc=True)


def without(**changes: Any) -> Runtime:
    return replace(HOPPER, versions=VERSIONS | {name.replace("_", "-"): at for name, at in changes.items()})


REFUSALS: dict[str, tuple[str, Runtime, str, GDNShape, list[str]]] = {
    "fla on a CPU": ("fla", replace(HOPPER, device="cpu"), "float32", SHAPE, ["backend=fla on a CPU", "torch"]),
    "flashqla on a CPU": ("flashqla", replace(HOPPER, device="cpu"), "float32", SHAPE, ["NVIDIA GPUs only"]),
    "flashqla, Ampere": ("flashqla", replace(HOPPER, capability=(8, 0)), "auto", SHAPE, ["8.0", "9.0, 10.0", "fla"]),
    "flashqla, GB10": ("flashqla", replace(HOPPER, capability=(12, 1)), "auto", SHAPE, ["12.1", "allow_unvalidated"]),
    "flashqla, CUDA": ("flashqla", replace(HOPPER, cuda=(12, 6)), "auto", SHAPE, ["CUDA >= 12.8", "12.6"]),
    "flashqla, CPU torch": ("flashqla", replace(HOPPER, cuda=None), "auto", SHAPE, ["without CUDA"]),
    "flashqla, float32": ("flashqla", HOPPER, "float32", SHAPE, ["model.dtype=float32", "bfloat16"]),
    "flashqla, keys": ("flashqla", HOPPER, "auto", replace(SHAPE, key_dim=64), ["linear_key_head_dim=64", "128 only"]),
    "flashqla, values": ("flashqla", HOPPER, "auto", replace(SHAPE, value_dim=64), ["linear_value_head_dim=64"]),
    "flashqla, nvcc": ("flashqla", replace(HOPPER, nvcc=False), "auto", SHAPE, ["nvcc", "CUDA_HOME"]),
    "flashqla, version": ("flashqla", without(flash_qla=(0, 1, 2)), "auto", SHAPE, ["flash-qla >= 0.1.3", "0.1.2"]),
    "flashqla, tilelang": ("flashqla", without(tilelang=None), "auto", SHAPE, ["tilelang >=", "not installed"]),
    "flashqla, its convolution": ("flashqla", without(fla_core=None), "auto", SHAPE, ["fla-core", "not installed"]),
    "fla, missing": ("fla", without(fla_core=None), "auto", SHAPE, ["fla-core >= 0.6.0", "setup.sh", "torch"]),
    "fla by auto, missing": ("auto", without(fla_core=None), "auto", SHAPE, ["model.gdn.backend=fla", "fla-core"]),
    "fla, Turing": ("fla", replace(HOPPER, capability=(7, 5)), "auto", SHAPE, ["7.5", "8.0"]),
    "fla, wide heads": ("fla", HOPPER, "auto", replace(SHAPE, key_dim=512), ["linear_key_head_dim=512", "256"]),
    "fla, torch": ("fla", without(torch=(2, 6)), "auto", SHAPE, ["torch >= 2.7", "2.6"]),
}


def refusal(backend: str, machine: Runtime, dtype: str, shape: GDNShape | None, **options: Any) -> str:
    """Return the reason why the backend cannot run on the machine, or an empty string."""
    try:
        check_runtime(GDNConfig(backend=backend, **options), machine, dtype, shape)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_with_reason_and_fix(case: str) -> None:
    backend, target, dtype, shape, words = REFUSALS[case]
    reason = refusal(backend, target, dtype, shape)
    assert reason and "\n" not in reason
    for word in words:
        assert word in reason


def test_valid_backends_pass() -> None:
    for backend in ("auto", "fla", "flashqla", "torch"):
        assert refusal(backend, HOPPER, "auto", SHAPE) == ""
        assert refusal(backend, replace(HOPPER, capability=None), "bfloat16", None) == ""
    assert refusal("fla", HOPPER, "float32", replace(SHAPE, key_dim=64)) == ""
    assert refusal("flashqla", replace(HOPPER, capability=(12, 0)), "auto", SHAPE, allow_unvalidated=True) == ""
    cpu = Runtime("cpu", None, None, {}, nvcc=False)
    assert refusal("auto", cpu, "float32", SHAPE) == ""
    assert refusal("torch", replace(cpu, device="cuda"), "float32", SHAPE) == ""


def test_this_machine_is_described_without_importing_anything() -> None:
    program = (
        "import sys; from slime_like.config.rules.gdn_runtime import runtime; here = runtime('cpu', None);"
        "print(here.versions['torch'][0], here.cuda is None or here.cuda[0] >= 12, sorted(m for m in "
        "('torch', 'triton', 'fla', 'tilelang', 'flash_qla') if m in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["2", "True", "[]"]
    assert version("2.14.1+cu130") == (2, 14, 1) and version("x") == ()
    assert installed_version("no-such-package") is None
    assert torch_cuda() is None or torch_cuda() >= (12,)  # pyright: ignore[reportOptionalOperand]


def test_nvcc_is_found_where_tilelang_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    original = has_nvcc()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert has_nvcc() and (not original or Path("/usr/local/cuda/bin/nvcc").exists())


def test_a_rank_uses_the_configured_backend_or_fails() -> None:
    backend = resolve(GDNConfig(), "cpu")
    assert backend.name == "torch" and "torch" in backend.kernels()
    assert resolve(GDNConfig(backend="torch"), "cpu", "float32", SHAPE) is backend
    for name in ("fla", "flashqla"):
        with pytest.raises(ConfigError, match=f"model.gdn.backend={name} on a CPU"):
            resolve(GDNConfig(backend=name), "cpu")
    with pytest.raises(ConfigError, match="'flashqla'"):
        resolve(GDNConfig(backend="flashqal"), "cpu")
    assert not {"fla", "flash_qla", "tilelang"} & set(sys.modules)


def test_a_package_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # fla is not installed here, so its import fails.
    monkeypatch.setattr("slime_like_plugins.qwen_gdn.select.check_runtime", lambda *_: None)
    with pytest.raises(ConfigError, match=r"model.gdn.backend=fla.*fla"):
        resolve(GDNConfig(backend="fla"), "cpu")


@pytest.fixture
def hybrid(tmp_path: Path, data: Path) -> list[str]:
    folder = write_model(tmp_path / "hybrid", **HYBRID)
    return [f"model.hf_checkpoint={folder}", f"data.train={data}"]


def test_gpu_backends_are_refused_on_a_cpu_at_load(hybrid: list[str]) -> None:
    for name in ("fla", "flashqla"):
        with pytest.raises(ConfigError, match=f"model.gdn.backend={name} on a CPU"):
            load_config([*hybrid, "placement.device=cpu", "--qwen-gdn-backend", name])
    assert load_config([*hybrid, "--qwen-gdn-backend", "torch"]).model.gdn.backend == "torch"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["model.gdn.backend=flashqal"], ["model.gdn.backend='flashqal'", "did you mean 'flashqla'"]),
        (["model.gdn.auto_cp=true"], ["model.gdn.auto_cp=true", "backend=auto", "only flashqla"]),
        (["model.gdn.allow_unvalidated=true"], ["model.gdn.allow_unvalidated=true", "only flashqla"]),
        (
            ["model.gdn.backend=flashqla", "model.gdn.auto_cp=true", "run.deterministic=true"],
            ["model.gdn.auto_cp=true with run.deterministic=true"],
        ),
    ],
)
def test_bad_options(hybrid: list[str], extra: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error_info:
        load_config([*hybrid, *extra])
    for word in words:
        assert word in str(error_info.value), error_info.value


def test_a_backend_without_gdn_layers_is_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"no Gated DeltaNet layers.*remove model\.gdn\.backend"):
        load_config([*argv, "model.gdn.backend=torch"])


def plan_for(argv: list[str], target: Runtime, *extra: str) -> Plan:
    gpus = ("H100",) * (8 if target.device == "cuda" else 0)
    return make_plan(load_config([*argv, *extra]), Machine(len(gpus), 64, 512 * 2**30, gpus, target))


def test_the_plan_decides_the_backend(hybrid: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    laptop = plan_for(hybrid, runtime("cpu", None), "placement.device=cpu")
    assert laptop.actor.model.gdn.backend == "torch"
    assert any(d.key == "model.gdn.backend" and d.value == "torch" for d in laptop.decisions)
    assert plan_for(hybrid, HOPPER).actor.model.gdn.backend == "fla"
    with pytest.raises(ConfigError, match="fla-core"):
        plan_for(hybrid, without(fla_core=None))
    # Options are checked for the GPUs of the machine that loads them, which is not the planned machine here.
    monkeypatch.setattr(gdn_rules, "visible_gpus", lambda: (Gpu("H100", (9, 0)),))
    monkeypatch.setattr(gdn_rules, "runtime", lambda *_: HOPPER)
    flash = ["model.gdn.backend=flashqla"]
    assert plan_for(hybrid, HOPPER, *flash).actor.model.gdn.auto_cp is True
    two_steps = plan_for(hybrid, HOPPER, *flash, "loop.steps_per_rollout=2").actor.model.gdn
    assert two_steps.auto_cp is False
    assert plan_for(hybrid, HOPPER, *flash, "model.gdn.auto_cp=false").actor.model.gdn.auto_cp is False
    newer = replace(HOPPER, capability=(12, 0))
    with pytest.raises(ConfigError, match="allow_unvalidated"):
        plan_for(hybrid, newer, *flash)
    allowed_plan = plan_for(hybrid, newer, *flash, "model.gdn.allow_unvalidated=true")
    assert any(d.key == "model.gdn.allow_unvalidated" for d in allowed_plan.decisions)


def test_deterministic_runs_do_not_split(hybrid: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdn_rules, "visible_gpus", lambda: (Gpu("H100", (9, 0)),))
    monkeypatch.setattr(gdn_rules, "runtime", lambda *_: HOPPER)
    plan = plan_for(hybrid, HOPPER, "model.gdn.backend=flashqla", "run.deterministic=true")
    assert plan.actor.model.gdn.auto_cp is False
    assert plan_gdn._auto_cp(None, "fla", plan.actor)[0] is False


def test_the_runtime_is_checked_before_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the package were imported first, a CPU would report the package's error instead of the config error."""
    imported_names: list[str] = []
    monkeypatch.setattr("slime_like_plugins.qwen_gdn.select._backend", lambda name, _: imported_names.append(name))
    with pytest.raises(ConfigError, match="on a CPU"):
        resolve(GDNConfig(backend="flashqla"), "cpu")
    assert imported_names == []
