"""Kernels of a run compiled without a GPU: fla's by a trainer's step, SGLang's by calls with the engine's shapes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slime_like.cluster.plan import compiled_kernels as plan_kernels
from slime_like.cluster.plan.compiled_kernels import CompileJob, engine_shape, run_capabilities
from slime_like.errors import ConfigError
from slime_like.util.deadline import scale
from slime_like.util.gpus import Gpu
from slime_like.util.kernel_cache import cache_lines, read_cache, relocate
from tests.gdn.test_fla import PREPARED, install

ROOT = Path(__file__).parents[2]
SECONDS = 300
HYBRID = ("--plan-for", "1xH100", "--first-configs", "+recipe=one_gpu_gdn")
SHARED = {
    "chunk_fwd_kernel_o",
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel",
    "chunk_local_cumsum_scalar_kernel",
    "l2norm_fwd_kernel",
    "recompute_w_u_fwd_kernel",
}
FLA = SHARED | {
    "causal_conv1d_fwd_kernel",
    "causal_conv1d_bwd_kernel",
    "chunk_bwd_kernel_dqkwg",
    "chunk_bwd_kernel_dv_local",
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64",
    "l2norm_bwd_kernel",
    "prepare_wy_repr_bwd_kernel",
}
SGLANG = SHARED | {
    "_causal_conv1d_fwd_kernel",
    "_causal_conv1d_update_kernel",
    "_fwd_grouped_kernel_stage1",
    "_fwd_kernel",
    "_fwd_kernel_stage2",
    "fused_recurrent_gated_delta_rule_packed_decode_kernel",
    "get_last_loc_kernel",
    "write_req_to_token_pool_triton",
}
BLACKWELL = (  # of fla, then of SGLang
    "chunk_bwd_kernel_dv_local",
    "causal_conv1d_bwd_kernel",
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64",
    "_fwd_grouped_kernel_stage1",
    "_causal_conv1d_update_kernel",
    "fused_recurrent_gated_delta_rule_packed_decode_kernel",
)
compile_kernels: Any = importlib.import_module("scripts.compile_kernels")


def run(arguments: Sequence[str], **variables: str) -> str:
    """Return the output of a Python process that must succeed."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "plugins"), *filter(None, [variables.pop("path", "")])))
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=SECONDS * scale(),
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the kernels of a small hybrid run for sm_90."""
    scratch = tmp_path_factory.mktemp("kernels")
    packages = PREPARED if PREPARED.is_dir() else install(scratch / "packages")
    run(("scripts/compile_kernels.py", "--cache", str(scratch / "cache"), *HYBRID), path=str(packages))
    return scratch / "cache"


@pytest.mark.ranks
@pytest.mark.slow
def test_the_kernels_of_trainer_and_engine_are_compiled(cache: Path) -> None:
    entries = read_cache(cache)
    names = Counter(entry.name for entry in entries)
    assert names.keys() >= FLA | SGLANG
    assert {name for name, count in names.items() if count > 1} >= SHARED, "trainer and engine have different kernels"
    assert {entry.target for entry in entries} == {"sm_90"}
    for cubin in cache.glob("*/*.cubin"):
        assert cubin.read_bytes().startswith(b"\x7fELF"), cubin.name
    assert list(cache.glob("**/*.autotune.json")) == [], "the fastest configuration must be measured on the GPU"


@pytest.mark.ranks
@pytest.mark.slow
def test_kernels_compile_for_blackwell(cache: Path, tmp_path: Path) -> None:
    """The input is Triton's IR for sm_90.

    ``docs/measurements/compiled_kernels.md`` has every kernel and configuration for sm_100.
    """
    module = ("-m", "tests.phantom.compile_ir", str(cache), "100", *BLACKWELL)
    sizes = json.loads(run(module, TRITON_CACHE_DIR=str(tmp_path)))
    assert sizes.keys() == set(BLACKWELL) and min(sizes.values()) > 1000


def test_the_shape_of_an_engine_is_that_of_a_rank() -> None:
    argv = ("+recipe=qwen3_next_80b_a3b", "model.hf_checkpoint=Qwen3-Next-80B-A3B", "rollout.tp=4")
    shape = engine_shape(CompileJob(argv, "4x8xH100", (9, 0), Path()))
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.dtype) == (4, 1, 256, "bfloat16")
    assert shape.gdn == (4, 8, 128, 128, 4)


def test_latent_attention_is_not_compiled_with_the_shapes_of_other_attention() -> None:
    from slime_like_plugins import compiled_engine

    names = [
        {
            function.__name__
            for function in compiled_engine.functions({"attention_backend": "", "gdn": None, "latent": latent})
        }
        for latent in (False, True)
    ]
    assert names[0] - names[1] == {"attention_prefill", "attention_decode"} and "request_pool" in names[1]


@pytest.mark.parametrize(("gpus", "capability"), [("1xB200", (10, 0)), ("4x8xH20", (9, 0)), ("2xA100-40GB", (8, 0))])
def test_kernels_are_compiled_for_the_described_gpus(gpus: str, capability: tuple[int, int]) -> None:
    assert run_capabilities(gpus) == [capability]


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (None, "this machine has no GPU: describe those of the run, for example with --plan-for 8xH100"),
        ("8xB300", "the compute capability of GPU 'B300' is unknown: add it, for example --capability 9.0"),
        ("8", "the compute capability of GPU 'GPU' is unknown"),
    ],
)
def test_gpus_without_a_known_capability_are_refused(
    gpus: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_kernels, "visible_gpus", lambda: ())
    machine = [] if gpus is None else ["--plan-for", gpus]
    assert compile_kernels.main([*machine, "--cache", str(tmp_path), "+recipe=one_gpu"]) == 2
    assert message in capsys.readouterr().err


def test_kernels_are_compiled_for_each_kind_of_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (Gpu("NVIDIA H100 80GB HBM3", (9, 0)), Gpu("NVIDIA B200"), Gpu("NVIDIA H100 80GB HBM3", (9, 0)))
    monkeypatch.setattr(plan_kernels, "visible_gpus", lambda: gpus)
    assert run_capabilities(None) == [(9, 0), (10, 0)]


def test_a_run_without_gpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no engines on GPUs: .*--plan-for 8xH100"):
        engine_shape(CompileJob(("+recipe=quickstart", "placement.device=cpu"), None, (9, 0), tmp_path))


def test_a_cache_is_listed(tmp_path: Path) -> None:
    for number, (name, arch) in enumerate((("a_kernel", 90), ("a_kernel", 90), ("b_kernel", 100), ("broken", None))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / f"{name}.cubin").write_bytes(bytes(2048))
        (folder / f"{name}.json").write_text("{" if arch is None else json.dumps({"target": {"arch": arch}}))
    b, a, total = cache_lines(read_cache(tmp_path))
    assert a.split() == ["sm_90", "a_kernel", "2", "4", "KiB"] and b.split()[:3] == ["sm_100", "b_kernel", "1"]
    assert total == "2 kernels in 3 variants, 0.0 MiB"


def copied_cache(cache: Path) -> Path:
    """Write a cache with a kernel and a part of another one, and lists with the paths of another machine."""
    for name, suffixes in (("whole", (".cubin", ".json", ".ttir")), ("partial", (".json",))):
        (cache / name).mkdir(parents=True)
        for suffix in suffixes:
            (cache / name / f"kernel{suffix}").write_text("")
        paths = {f"kernel{suffix}": f"/elsewhere/kernel{suffix}" for suffix in (".cubin", ".json", ".ttir", ".ptx")}
        (cache / name / "__grp__kernel.json").write_text(json.dumps({"child_paths": paths}))
    return cache


def test_a_copied_cache_has_its_own_paths(tmp_path: Path) -> None:
    cache = copied_cache(tmp_path / "moved")
    assert relocate(cache) == 1
    listed = json.loads((cache / "whole" / "__grp__kernel.json").read_text())["child_paths"]
    assert listed == {f"kernel{suffix}": str(cache / "whole" / f"kernel{suffix}") for suffix in (".cubin", ".json")}
    assert compile_kernels.main(("--moved", "--cache", str(cache))) == 0


def test_a_list_of_paths_is_replaced_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run may read the cache of a folder that several runs relocate."""
    cache = copied_cache(tmp_path / "moved")
    group = cache / "whole" / "__grp__kernel.json"
    before, write = group.read_text(), Path.write_text

    def full(path: Path, text: str, **options: Any) -> int:
        write(path, text[:10], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert compile_kernels.main(("--moved", "--cache", str(cache))) == 2
    assert (
        "moved cannot be written (No space left on device): copy it to a folder with space" in capsys.readouterr().err
    )
    assert group.read_text() == before and list(cache.glob("*/*.tmp")) == []


def test_a_copied_cache_without_kernels_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_kernels.main(("--moved", "--cache", str(tmp_path / "missing"))) == 2
    assert "missing has no compiled kernels of Triton: give the folder that was copied" in capsys.readouterr().err


def test_a_cache_that_cannot_be_created_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert compile_kernels.main(("--cache", str(tmp_path / "file" / "cache"), "+recipe=one_gpu")) == 2
    assert "file/cache cannot be created (Not a directory): give another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--capability", "90"), "90: write a compute capability as 9.0"),
        (("--parts", "trainer,critic"), "critic: write some of trainer,engine"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compile_kernels.main(arguments)
    assert message in capsys.readouterr().err


def test_a_function_that_fails_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [
        {"name": "convolution", "error": "ImportError: no module named x"},
        {"name": "request_pool", "error": ""},
    ]
    monkeypatch.setitem(compile_kernels.PARTS, "engine", lambda job: results)
    assert (
        compile_kernels.main(("--capability", "9.0", "--parts", "engine", "--cache", str(tmp_path), "+recipe=one_gpu"))
        == 1
    )
    out = capsys.readouterr().out
    assert "  convolution: ImportError: no module named x\n" in out and "request_pool" not in out
