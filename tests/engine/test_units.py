"""Functions of the engine packages that need no engine."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_like.config.schema.dcp import UNSUPPORTED_BACKENDS, UNSUPPORTED_FIELDS
from slime_like.config.schema.resolved import EngineSpec
from slime_like.errors import EngineError
from slime_like.rollout.engine import environment as engine_environment
from slime_like.rollout.engine import main, processes
from slime_like.rollout.engine.plugins import ENTRY_POINTS, OPTIONAL_ENTRY_POINTS
from slime_like.rollout.engine.replies import completions, error_text, scores
from slime_like.rollout.engine.server import derived_ports
from slime_like_plugins import dcp, sglang_hooks
from slime_like_plugins.rollout_sampling.draw import draw, filtered, uniform
from slime_like_plugins.sglang_hooks import Hook, install, problem, replace_attribute
from slime_like_plugins.weight_commit.poison import incomplete_message, poison, unwritten

SPEC = EngineSpec("model", "cpu", "float32", 1, 64, 0, "/nowhere/engine.log", 10, 10)


# ---- replies ---------------------------------------------------------------------------------------------------------
def answer(**changes: Any) -> dict[str, Any]:
    """Return a sample as in SGLang's reply."""
    meta = {
        "finish_reason": {"type": "length", "length": 3},
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None], [-2.5, 9, None]],
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
    }
    return {"output_ids": [7, 8, 9], "meta_info": meta | changes}


def test_a_reply_becomes_columns() -> None:
    (completion,) = completions([answer()], 1)
    np.testing.assert_array_equal(completion.token_ids, np.array([7, 8, 9], np.int32), strict=True)
    np.testing.assert_array_equal(completion.logprobs, np.array([-0.5, -1.5, -2.5], np.float32), strict=True)
    assert completion.versions == ((0, 1, 3), (1, 3, 4))
    assert completion.finish == "length"


def test_a_reply_with_columns_has_the_same_completion() -> None:
    def encoded(values: list[float], dtype: type[np.generic]) -> str:
        return base64.b64encode(np.array(values, dtype).tobytes()).decode()

    item = answer(slime_like_logprobs=encoded([-0.5, -1.5, -2.5], np.float32))
    del item["meta_info"]["output_token_logprobs"]
    (completion,) = completions([item | {"output_ids": encoded([7, 8, 9], np.int32)}], 1)
    np.testing.assert_array_equal(completion.token_ids, np.array([7, 8, 9], np.int32), strict=True)
    np.testing.assert_array_equal(completion.logprobs, np.array([-0.5, -1.5, -2.5], np.float32), strict=True)
    for column in ("no base64!", encoded([7, 8, 9], np.int32)[:-4]):
        with pytest.raises(EngineError, match="not base64 of int32"):
            completions([item | {"output_ids": column}], 1)
    with pytest.raises(EngineError, match="2 tokens but 3 log-probabilities"):
        completions([item | {"output_ids": encoded([7, 8], np.int32)}], 1)


def test_an_aborted_sample_without_tokens_has_no_span() -> None:
    meta = {"finish_reason": {"type": "abort"}, "output_token_logprobs": []}
    (completion,) = completions(
        [{"output_ids": [], "meta_info": meta | {"weight_versions": [{"version": "3", "start": 0, "end": 0}]}}], 1
    )
    assert (len(completion.token_ids), completion.versions, completion.finish) == (0, (), "abort")


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"error": "x"}, "did not return 1 samples but"),
        ([answer(), answer()], "did not return 1 samples"),
        ([{"text": "hi"}], "returned no 'output_ids'"),
        ([answer(output_token_logprobs=[[-0.5, 7, None]])], "3 tokens but 1 log-probabilities"),
        ([answer(weight_versions=[{"version": "default", "start": 0, "end": 3}])], "'default', which is not a number"),
        ([answer(weight_versions=[{"version": "-1", "start": 0, "end": 3}])], "'-1', which is not a number"),
    ],
)
def test_a_reply_that_is_not_an_answer_is_an_engine_error(reply: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        completions(reply, 1)


def test_scores_skip_the_first_token_and_are_counted() -> None:
    item = {"meta_info": {"input_token_logprobs": [[None, 4, None], [-0.25, 5, None]]}}
    np.testing.assert_array_equal(scores([item], [2])[0], np.array([-0.25], np.float32), strict=True)
    with pytest.raises(EngineError, match="scored 2 of 3 tokens"):
        scores([item], [3])


@pytest.mark.parametrize(
    ("body", "reply", "text"),
    [
        (b"", {"error": {"message": "too long"}}, "HTTP 400: too long"),
        (b"", {"success": False, "message": "no session"}, "HTTP 400: no session"),
        (b"", {"detail": "paused"}, "HTTP 400: paused"),
        (b"plain", None, "HTTP 400: plain"),
        (b"", None, "HTTP 400: (no message)"),
    ],
)
def test_the_engines_error_message_is_extracted(body: bytes, reply: Any, text: str) -> None:
    assert error_text(400, body, reply) == text


# ---- seeded sampling -------------------------------------------------------------------------------------------------
def test_uniform_depends_on_seed_and_position_only_and_is_uniform() -> None:
    seeds = torch.arange(-500, 500).repeat_interleave(20)
    positions = torch.arange(20).repeat(1000)
    u = uniform(seeds, positions)
    order = torch.randperm(len(u), generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform(seeds[order], positions[order]), u[order])
    assert u.min() >= 0
    assert u.max() < 1
    assert len(u.unique()) == len(u)
    counts = torch.histc(u, bins=50, min=0, max=1)
    assert ((counts - 400) ** 2 / 400).sum() < 95  # chi-square, 49 degrees of freedom, p < 1e-4


@given(st.integers(1, 700), st.integers(0, 2**31), st.floats(0, 1, exclude_max=True))
def test_draw_inverts_the_distribution_and_never_draws_weight_zero(vocabulary: int, seed: int, u: float) -> None:
    generator = np.random.default_rng(seed)
    weights = generator.random((2, vocabulary)) * (generator.random((2, vocabulary)) < 0.5)
    weights[:, generator.integers(vocabulary)] += 0.1
    weights64 = torch.from_numpy(weights)  # float64 reference
    tokens = draw(weights64.float(), torch.tensor([u, 1 - 2**-53], dtype=torch.float64))
    assert (weights64[[0, 1], tokens] > 0).all()
    sums = weights64[0].cumsum(-1) / weights64[0].sum()
    token = int(tokens[0])
    assert (float(sums[token - 1]) if token else 0.0) <= u + 1e-5
    assert u <= float(sums[token]) + 1e-5


def test_draws_follow_the_weights_over_seeds() -> None:
    weights = torch.tensor([0.5, 0.0, 0.2, 0.3]).repeat(20_000, 1)
    tokens = draw(weights, uniform(torch.arange(20_000), torch.full((20_000,), 3)))
    frequencies = torch.bincount(tokens, minlength=4) / 20_000
    torch.testing.assert_close(frequencies, weights[0], atol=0.015, rtol=0)
    assert frequencies[1] == 0


def test_nucleus_top_k_and_min_p_keep_the_same_tokens_as_sglang() -> None:
    probs = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).repeat(5, 1)
    top_p, top_k = torch.tensor([0.6, 1.0, 1.0, 1.0, 1.0]), torch.tensor([4, 2, 4, 4, 3])
    kept_probs, tokens = filtered(probs, top_p, top_k, torch.tensor([0.0, 0.0, 0.0, 0.4, 0.2]))
    supports = [set(tokens[row][kept_probs[row] > 0].tolist()) for row in range(5)]
    assert supports == [{1, 3}, {1, 3}, {0, 1, 2, 3}, {1, 3}, {1, 2, 3}]


# ---- weight commit ---------------------------------------------------------------------------------------------------
def test_poison_overwrites_floats_in_place_and_unwritten_elements_are_named() -> None:
    parameters = {
        "a": torch.ones(4, 2),
        "steps": torch.ones(3, dtype=torch.int64),
        "b": torch.ones(2, dtype=torch.bfloat16),
    }
    storage = parameters["a"].data_ptr()
    poison(parameters.items())
    parameters["a"][:3] = 0
    assert parameters["a"].data_ptr() == storage
    items = unwritten(parameters.items())
    assert [str(item) for item in items] == ["a (2 of 8 elements)", "b (2 of 2 elements)"]
    parameters["a"][3:], parameters["b"][:] = 0, 0
    assert unwritten(parameters.items()) == []


def test_the_message_about_unwritten_parameters_names_ranks_and_counts() -> None:
    parameters = [(f"p{i}", torch.full((1,), float("nan"))) for i in range(5)]
    text = incomplete_message([[], unwritten(parameters)])
    assert text is not None
    assert "rank 1: 5 parameters: p0 (1 of 1 elements), p1 (1 of 1 elements), p2 (1 of 1 elements) and 2 more" in text
    assert incomplete_message([[], []]) is None


# ---- hooks -----------------------------------------------------------------------------------------------------------
def test_a_hook_on_a_renamed_target_is_detected() -> None:
    assert problem(Hook("os.path.no_such_function", "after", print)) == (
        "os.path.no_such_function does not exist (module 'posixpath' has no attribute 'no_such_function')"
    )
    assert "is not wrapped by" in str(problem(Hook("os.path.join", "after", self_hook)))


def self_hook(result: Any) -> Any:
    """Hook that is never applied."""
    return result


def test_a_missing_hook_target_stops_the_engine() -> None:
    """SGLang's plugin loader logs and ignores other exceptions than SystemExit."""
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
    """SGLang itself would ignore the hook of the second one."""
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
    """No module is searched for a method."""
    from sglang.srt.plugins import hook_registry
    from sglang.srt.utils import weight_versions

    sources = list[Any]()
    search: Any = hook_registry._propagate_patch

    def count(original: Any, wrapped: Any, source: Any) -> int:
        sources.append(source)
        return search(original, wrapped, source)

    monkeypatch.setattr(hook_registry, "_propagate_patch", count)

    class Owner:
        def tested(self) -> str:
            return "a"

    def tested() -> str:
        return "a"

    importer: Any = ModuleType("importer")
    importer.tested = tested
    monkeypatch.setitem(sys.modules, "importer", importer)
    for value in (tested, Owner):
        monkeypatch.setattr(weight_versions, value.__name__, value, raising=False)
    try:
        targets = ("sglang.srt.utils.weight_versions.tested", "sglang.srt.utils.weight_versions.Owner.tested")
        install("weight_commit", [Hook(target, "after", lambda result, *_: result + "b") for target in targets])
        assert importer.tested() == Owner().tested() == "ab"
        assert sources == [weight_versions] and hook_registry._propagate_patch is count
    finally:
        hook_registry.HookRegistry.reset()


def test_replacing_a_missing_attribute_stops_the_engine() -> None:
    with pytest.raises(SystemExit, match=r"thing\.old does not exist"):
        replace_attribute("cpu", SimpleNamespace(__name__="thing"), "old", 1)


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
    """Return ``obstacle`` of an engine of two ranks, as a function of what SGLang resolved: backends, model and other fields."""
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
    ("field", "value"), [("enable_mis", True), ("enable_two_batch_overlap", True), ("kv_cache_dtype", "fp4_e2m1")]
)
def test_dcp_checks_the_fields_that_sglang_resolved(
    field: str, value: object, dcp_obstacle: Callable[..., str | None]
) -> None:
    assert dcp_obstacle("slime_like_cpu") is None
    assert f"SGLang resolved {field}={value!r}" in (dcp_obstacle("slime_like_cpu", **{field: value}) or "")


def test_dcp_checks_the_projection_the_model_and_its_heads(dcp_obstacle: Callable[..., str | None]) -> None:
    replicated = dcp_obstacle("slime_like_cpu", dcp_replicate_q_proj=True, dcp_comm_backend="ag_rs")
    assert "dcp_replicate_q_proj=True, which is not allowed here: SGLang refuses it" in (replicated or "")
    assert "a model with sliding windows" in (dcp_obstacle("slime_like_cpu", windows=True) or "")
    heads = dcp_obstacle("slime_like_cpu", tp_size=4, dcp_size=4, kv_heads=2)
    assert "4 attention ranks store 2 KV heads, which is 2 copies of each head" in (heads or "")
    data_parallel = dcp_obstacle("slime_like_cpu", tp_size=4, attn_dp_size=2, kv_heads=2)
    assert "each of the 2 attention ranks already stores different KV heads" in (data_parallel or "")


@pytest.mark.parametrize("backend", sorted(UNSUPPORTED_BACKENDS))
def test_dcp_checks_the_backend_that_sglang_resolved(backend: str, dcp_obstacle: Callable[..., str | None]) -> None:
    """SGLang chooses the backends of prefill and decode, also where the config names none."""
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


# ---- server ----------------------------------------------------------------------------------------------------------
def test_only_arguments_that_the_run_does_not_set_can_be_overridden() -> None:
    spec = replace(SPEC, sglang={"host": "0.0.0.0", "admin_api_key": "", "page_size": 8})
    arguments = main.server_arguments(main.EngineLaunch(spec, "key", "127.0.0.1", 1))
    assert (arguments["host"], arguments["admin_api_key"], arguments["api_key"]) == ("127.0.0.1", "key", "key")
    assert arguments["page_size"] == 8


def test_config_overrides_of_a_hybrid_model_and_of_the_user_are_merged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"layer_types": ["linear_attention", "full_attention"]}))
    for extra, expected in (
        ({}, {"full_attention_interval": 2}),
        ({"json_model_override_args": '{"rope_theta": 7}'}, {"full_attention_interval": 2, "rope_theta": 7}),
    ):
        spec = replace(SPEC, model_path=str(tmp_path), sglang=extra)
        arguments = main.server_arguments(main.EngineLaunch(spec, "key", "127.0.0.1", 1))
        assert json.loads(arguments["json_model_override_args"]) == expected
    assert "json_model_override_args" not in main.server_arguments(main.EngineLaunch(SPEC, "key", "127.0.0.1", 1))


def test_the_environment_of_the_server_enables_the_seams_and_sets_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = engine_environment.child_environment(SPEC, "/scratch")
    assert environment[engine_environment.SGLANG_PLUGINS] == "cpu,weight_commit,rollout_sampling,kv_usage"
    assert (environment["OMP_NUM_THREADS"], environment["GOMP_SPINCOUNT"]) == ("1", engine_environment.SPIN_COUNT)
    assert environment["SGLANG_MAMBA_CONV_DTYPE"] == SPEC.dtype
    monkeypatch.setenv(engine_environment.SPIN, "5000")
    assert engine_environment.child_environment(SPEC, "/scratch")["GOMP_SPINCOUNT"] == "5000"
    monkeypatch.setenv(engine_environment.SPIN, "many")
    with pytest.raises(
        EngineError, match="SPIN_COUNT='many' is not a number of spins: set it to a number such as 2000"
    ):
        engine_environment.child_environment(SPEC, "/scratch")
    cuda = engine_environment.child_environment(replace(SPEC, device="cuda"), "/scratch")
    assert cuda[engine_environment.SGLANG_PLUGINS] == "weight_commit,rollout_sampling,kv_usage"
    assert "SGLANG_PLATFORM" not in cuda


def test_crash_dumps_are_disabled_on_a_cpu_unless_the_user_enables_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.environ import envs

    for name in engine_environment.NO_CRASH_DUMPS:
        monkeypatch.delenv(name, raising=False)
        assert getattr(envs, name).get() is True  # else SGLang does without them itself, or names them otherwise
        assert engine_environment.child_environment(SPEC, "/scratch")[name] == "0"
        assert name not in engine_environment.child_environment(replace(SPEC, device="cuda"), "/scratch")
        monkeypatch.setenv(name, "1")
        assert engine_environment.child_environment(SPEC, "/scratch")[name] == "1"


def test_the_ports_of_data_parallel_attention_are_reserved() -> None:
    """The ports that SGLang derives follow one another at this distance from the server's port."""
    from sglang.srt import server_args

    assert derived_ports(2)[0] == server_args.ZMQ_TCP_PORT_DELTA
    assert len(derived_ports(2)) == 9 and not derived_ports(1)


def test_the_headline_is_the_last_exception_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(["start", "", "Traceback (most recent call last):", "  x", "ValueError: no such model"]))
    assert processes.headline(processes.last_lines(str(log))) == ": ValueError: no such model"
    assert processes.headline(["all is well"]) == ""
    assert processes.headline(["slime_like plugin 'x': no", *["at x"] * 20, "RuntimeError: rank 0 died"]).endswith(
        "'x': no"
    )
    ours = [
        f"slime_like_plugins.remote_experts.{name}: {name}"
        for name in ("connection.PeerLost", "experts.RemoteExpertsLost")
    ]
    assert processes.headline([*ours, *["at x"] * 20, "RuntimeError: server ended"]) == f": {ours[1]}"
    log.write_text("ValueError: of an earlier engine\nwell\n")
    assert processes.headline(processes.last_lines(str(log), begin=33)) == ""
    assert "no log" in processes.last_lines(str(tmp_path / "missing"))[0]
