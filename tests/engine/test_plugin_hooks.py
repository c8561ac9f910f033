"""Hooks of the SGLang plugins, their entry points, and the requirements of ``dcp`` on fields that SGLang resolved."""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slime_like.config.schema.dcp import UNSUPPORTED_BACKENDS, UNSUPPORTED_FIELDS
from slime_like.config.schema.resolved import EngineSpec
from slime_like.rollout.engine import environment as engine_environment
from slime_like.rollout.engine.plugins import ENTRY_POINTS, OPTIONAL_ENTRY_POINTS
from slime_like_plugins import dcp, sglang_hooks
from slime_like_plugins.sglang_hooks import Hook, install, problem, replace_target, resolve_target, wrap_target

SPEC = EngineSpec("model", "cpu", "float32", 1, 64, 0, "/nowhere/engine.log", 10, 10)


def test_a_hook_on_a_renamed_target_is_detected() -> None:
    assert problem(Hook("os.path.no_such_function", "after", print)) == (
        "os.path.no_such_function does not exist (module 'posixpath' has no attribute 'no_such_function')"
    )
    assert "is not wrapped by" in str(problem(Hook("os.path.join", "after", self_hook)))


def self_hook(result: Any) -> Any:
    """Hook that is never applied."""
    return result


def test_a_missing_hook_target_stops_the_engine() -> None:
    """SGLang's plugin loader logs and ignores all exceptions but SystemExit."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing_hook = Hook("sglang.srt.utils.weight_versions.renamed", "after", self_hook)
    try:
        with pytest.raises(
            SystemExit, match=r"plugin 'weight_commit' does not fit.*weight_versions\.renamed does not exist"
        ):
            install("weight_commit", [missing_hook])
    finally:
        HookRegistry.reset()


def test_two_plugins_hook_the_same_function() -> None:
    """SGLang itself would ignore the second plugin's hook."""
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.utils import weight_versions

    def add(letter: str) -> Hook:
        return Hook("sglang.srt.utils.weight_versions.tested", "after", lambda result: result + letter)

    weight_versions.tested = lambda: "a"  # pyright: ignore[reportAttributeAccessIssue]
    try:
        for letter in "bc":
            install("weight_commit", [add(letter)])
        install("weight_commit", [])
        assert weight_versions.tested() == "abc"  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        HookRegistry.reset()
        del weight_versions.tested  # pyright: ignore[reportAttributeAccessIssue]


def test_a_hooked_function_is_replaced_in_the_modules_that_imported_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of a method does not search the modules, and SGLang's own search is in place again afterwards."""
    from sglang.srt.plugins import hook_registry
    from sglang.srt.utils import weight_versions

    search: Any = hook_registry._propagate_patch

    class Owner:
        def method(self) -> str:
            return "a"

    def tested() -> str:
        return "a"

    importer: Any = ModuleType("importer")
    importer.tested, importer.method = tested, Owner.method
    monkeypatch.setitem(sys.modules, "importer", importer)
    for value in (tested, Owner):
        monkeypatch.setattr(weight_versions, value.__name__, value, raising=False)
    try:
        targets = ("sglang.srt.utils.weight_versions.tested", "sglang.srt.utils.weight_versions.Owner.method")
        install("weight_commit", [Hook(target, "after", lambda result, *_: result + "b") for target in targets])
        assert importer.tested() == Owner().method() == "ab"
        assert importer.method(Owner()) == "a" and hook_registry._propagate_patch is search
    finally:
        hook_registry.HookRegistry.reset()


def test_functions_hooked_by_other_packages_are_replaced_under_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """``install`` also applies hooks that other packages registered before."""
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.utils import weight_versions

    def foreign() -> str:
        return "a"

    importer: Any = ModuleType("importer")
    importer.alias = foreign
    monkeypatch.setitem(sys.modules, "importer", importer)
    monkeypatch.setattr(weight_versions, "foreign", foreign, raising=False)
    monkeypatch.setattr(weight_versions, "tested", lambda: "a", raising=False)
    try:
        HookRegistry.register("sglang.srt.utils.weight_versions.foreign", lambda result: result + "b")
        install("weight_commit", [Hook("sglang.srt.utils.weight_versions.tested", "after", self_hook)])
        assert importer.alias() == "ab"
    finally:
        HookRegistry.reset()


def test_a_module_that_forbids_to_replace_a_function_does_not_prevent_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would not record the hook as applied, and the next plugin would apply it a second time."""
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.utils import weight_versions

    class ReadOnly(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    tested: Callable[[], str] = lambda: "a"  # noqa: E731
    importer = ReadOnly("importer")
    vars(importer)["tested"] = tested
    monkeypatch.setitem(sys.modules, "importer", importer)
    monkeypatch.setattr(weight_versions, "tested", tested, raising=False)
    target = "sglang.srt.utils.weight_versions.tested"
    try:
        install("weight_commit", [Hook(target, "after", lambda result: result + "b")])
        install("weight_commit", [])
        assert resolve_target("weight_commit", target)() == "ab"
        assert sglang_hooks.replace_imported(tested, weight_versions.tested, weight_versions) == 0  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        HookRegistry.reset()


def test_an_attribute_is_replaced_or_wrapped_if_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    thing: Any = ModuleType("thing")
    thing.name, thing.Owner = "a", SimpleNamespace(name="b")
    monkeypatch.setitem(sys.modules, "thing", thing)
    wrap_target("cpu", "thing.name", lambda original: f"{original}!")
    replace_target("cpu", "thing.Owner.name", "c")
    assert (thing.name, thing.Owner.name) == ("a!", "c")
    for target in ("thing.old", "thing.Owner.old", "thing.Old.name", "no_such_module.name"):
        problem = rf"plugin 'cpu' does not fit.*{re.escape(target)} does not exist \("
        with pytest.raises(SystemExit, match=problem):
            replace_target("cpu", target, 1)
        with pytest.raises(SystemExit, match=problem):
            wrap_target("cpu", target, lambda original: 1)


@pytest.mark.parametrize("line", ["import no_such_dependency", "from os import no_such_name"])
@pytest.mark.parametrize("attribute", ["", ".name"])
def test_the_import_error_of_a_module_that_exists_is_shown(
    line: str, attribute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").touch()
    (tmp_path / "broken_package" / "broken.py").write_text(f"{line}\nname = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    target = f"broken_package.broken{attribute}"
    shown = rf"{re.escape(target)} cannot be imported \(.*no_such_"
    with pytest.raises(SystemExit, match=shown):
        resolve_target("cpu", target)
    assert re.match(shown, str(problem(Hook(target, "after", print))))


@pytest.mark.parametrize(
    ("plugin", "target"),
    [
        ("rotary.install", "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu"),
        ("expert_parallel.replace", "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"),
        ("data_parallel.replace", "sglang.srt.distributed.parallel_state.reg_all_gather_into_tensor"),
    ],
)
def test_a_renamed_function_stops_the_engine(plugin: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin = pkgutil.resolve_name(f"slime_like_plugins.sglang_cpu.{plugin}")  # imports SGLang
    pkgutil.resolve_name(target)
    monkeypatch.delattr(target)
    with pytest.raises(SystemExit, match=rf"plugin 'cpu' does not fit.*{re.escape(target)} does not exist \("):
        install_plugin()


def test_entry_points_import_nothing_heavy_unless_enabled() -> None:
    program = (
        "import sys\n"
        "from slime_like_plugins import kv_capacity, rollout_sampling, sglang_cpu, weight_commit\n"
        "assert sglang_cpu.activate() is None\n"
        "for plugin in (sglang_cpu, rollout_sampling, weight_commit, kv_capacity): plugin.load()\n"
        "assert not {'torch', 'megatron', 'sglang'} & sys.modules.keys(), 'heavy import'\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != engine_environment.SGLANG_PLUGINS}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_a_plugin_that_fails_to_load_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine_environment.SGLANG_PLUGINS, "dcp")
    monkeypatch.setitem(sys.modules, "slime_like_plugins.dcp.hooks", None)
    with pytest.raises(ImportError):
        dcp.load()
    with pytest.raises(SystemExit, match="plugin not loaded: dcp of SLIME_LIKE_SGLANG"):
        sglang_hooks.load_all()


@pytest.mark.parametrize("user", ["", "mine"])
def test_a_whitelist_of_the_user_keeps_the_plugins(user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", user)
    allowed = engine_environment.child_environment(SPEC, "/scratch")["SGLANG_PLUGINS"]
    points = (*ENTRY_POINTS["sglang.srt.plugins"], *OPTIONAL_ENTRY_POINTS)
    assert allowed == (",".join([user, *points]) if user else "")
    setup = (Path(__file__).parents[2] / "setup.py").read_text()
    assert all(f'"{name} = ' in setup for name in points)
    assert setup.count(":load") + setup.count(":activate") == len(points) + len(ENTRY_POINTS["sglang.srt.platforms"])


@pytest.fixture
def dcp_obstacle(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    """Return a function from resolved backends, model and fields to the obstacle of a DCP engine, or None."""
    from sglang.srt.arg_groups import overrides
    from sglang.srt.configs.model_config import AttentionArch

    from slime_like_plugins.dcp import hooks

    def obstacle(
        *backends: str, kv_heads: int = 1, windows: bool = False, latent: bool = False, **fields: object
    ) -> str | None:
        arch = AttentionArch.MLA if latent else AttentionArch.MHA
        model = SimpleNamespace(is_hybrid_swa=windows, get_total_num_kv_heads=lambda: kv_heads, attention_arch=arch)
        for name, result in (("attention_backends_of", backends), ("model_config_of", model)):
            monkeypatch.setattr(overrides, name, lambda arguments, result=result: result)  # pyright: ignore
        monkeypatch.setattr(overrides, "resolved_view", lambda arguments: arguments)  # pyright: ignore
        values = {name: required for name, (required, _) in UNSUPPORTED_FIELDS.items()}
        sizes = {"dcp_size": 2, "tp_size": 2, "attn_dp_size": 1, "device": "cpu", "dcp_replicate_q_proj": False}
        return hooks.obstacle(SimpleNamespace(**(sizes | values | fields)))

    return obstacle


@pytest.mark.parametrize(
    ("field", "value", "fix"),
    [
        ("enable_mis", True, "remove rollout.sglang.enable_mis (--enable-mis), or set rollout.dcp=1"),
        ("enable_two_batch_overlap", True, "remove rollout.sglang.enable_two_batch_overlap"),
        ("kv_cache_dtype", "fp4_e2m1", "set rollout.sglang.kv_cache_dtype (--kv-cache-dtype) to 'auto'"),
    ],
)
def test_dcp_checks_the_fields_that_sglang_resolved(
    field: str, value: object, fix: str, dcp_obstacle: Callable[..., str | None]
) -> None:
    assert dcp_obstacle("slime_like_cpu") is None
    text = dcp_obstacle("slime_like_cpu", **{field: value}) or ""
    assert f"SGLang resolved {field}={value!r}" in text and fix in text


def test_dcp_checks_the_projection_the_model_and_its_heads(dcp_obstacle: Callable[..., str | None]) -> None:
    replicated = dcp_obstacle("slime_like_cpu", dcp_replicate_q_proj=True, dcp_comm_backend="ag_rs")
    assert "dcp_replicate_q_proj=True, which is not allowed here: SGLang refuses it" in (replicated or "")
    assert "a model with sliding windows" in (dcp_obstacle("slime_like_cpu", windows=True) or "")
    heads = dcp_obstacle("slime_like_cpu", tp_size=4, dcp_size=4, kv_heads=2)
    assert "4 attention ranks store 2 KV heads, so each head is stored 2 times" in (heads or "")
    data_parallel = dcp_obstacle("slime_like_cpu", tp_size=4, attn_dp_size=2, kv_heads=2)
    assert "each of the 2 attention ranks already stores different KV heads" in (data_parallel or "")


@pytest.mark.parametrize("backend", sorted(UNSUPPORTED_BACKENDS))
def test_dcp_checks_the_backend_that_sglang_resolved(backend: str, dcp_obstacle: Callable[..., str | None]) -> None:
    """SGLang chooses a backend for prefill and for decode even if the config names none."""
    assert dcp_obstacle("triton", "flashinfer_dcp", device="cuda") is None
    for backends in ([backend, "triton"], ["triton", backend]):
        text = dcp_obstacle(*backends, device="cuda") or ""
        assert f"SGLang resolved the attention backend {backend!r}, which cannot serve with dcp_size=2" in text


@pytest.mark.parametrize(("backend", "words"), [("flashinfer", ""), ("triton", "attention backend 'triton'")])
def test_dcp_of_latent_attention_has_one_head(
    backend: str, words: str, dcp_obstacle: Callable[..., str | None]
) -> None:
    text = dcp_obstacle(backend, kv_heads=128, latent=True, device="cuda", tp_size=8, dcp_size=8)
    assert words in (text or "") and (text is None) == (not words)
