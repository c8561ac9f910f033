"""Seeded sampling, unwritten parameters, and settings of an engine's server, without an engine."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_like.config.schema.resolved import EngineSpec
from slime_like.errors import EngineError
from slime_like.rollout.engine import environment as engine_environment
from slime_like.rollout.engine import main, processes
from slime_like.rollout.engine.node import DATA_PARALLEL_PORTS
from slime_like.rollout.engine.server import derived_ports
from slime_like.util.deadline import FACTOR_VARIABLE
from slime_like_plugins.rollout_sampling.hooks import draw, filtered, uniform
from slime_like_plugins.weight_commit import hooks as commit_hooks
from slime_like_plugins.weight_commit.hooks import incomplete_message, poison, unwritten

SPEC = EngineSpec("model", "cpu", "float32", 1, 64, 0, "/nowhere/engine.log", 10, 10)


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


# ---- server ----------------------------------------------------------------------------------------------------------
def test_sglang_reads_the_reply_of_a_data_parallel_rank_that_failed() -> None:
    """SGLang reads only the reply that arrived first, so the hook moves a failure to the front."""
    replies = [SimpleNamespace(success=success) for success in (True, False, True)]

    async def reply(communicator: object, request: object) -> list[SimpleNamespace]:
        return replies

    (hook,) = (hook for hook in commit_hooks.HOOKS if hook.target.endswith("FanOutCommunicator.__call__"))
    assert asyncio.run(hook.function(reply, None, None)) == [replies[1], replies[0], replies[2]]
    replies = [SimpleNamespace(state=1), SimpleNamespace(state=0)]
    assert asyncio.run(hook.function(reply, None, None)) == replies


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
    assert cuda[engine_environment.SGLANG_PLUGINS] == "weight_commit,rollout_sampling,kv_usage,kv_size"
    assert "SGLANG_PLATFORM" not in cuda


def test_a_health_check_has_the_limit_of_the_config_and_not_that_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "SGLANG_HEALTH_CHECK_TIMEOUT"
    server = importlib.util.find_spec("sglang.srt.entrypoints.http_server")
    assert server is not None and server.origin is not None
    assert f'int(os.getenv("{variable}", 20))' in Path(server.origin).read_text()
    monkeypatch.setenv(FACTOR_VARIABLE, "2")
    spec = replace(SPEC, health_timeout_s=12.4)
    assert engine_environment.child_environment(spec, "/scratch")[variable] == "26"


def test_crash_dumps_are_disabled_on_a_cpu_unless_the_user_enables_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.environ import envs

    for name in engine_environment.NO_CRASH_DUMPS:
        monkeypatch.delenv(name, raising=False)
        assert getattr(envs, name).get() is True  # fails once SGLang renames the variable or disables the dump itself
        assert engine_environment.child_environment(SPEC, "/scratch")[name] == "0"
        assert name not in engine_environment.child_environment(replace(SPEC, device="cuda"), "/scratch")
        monkeypatch.setenv(name, "1")
        assert engine_environment.child_environment(SPEC, "/scratch")[name] == "1"


def test_the_ports_of_data_parallel_attention_are_reserved() -> None:
    """SGLang derives consecutive ports at a fixed distance from the server's port."""
    from sglang.srt import server_args

    assert derived_ports(2)[0] == server_args.ZMQ_TCP_PORT_DELTA
    assert len(derived_ports(2)) == 9 and not derived_ports(1)
    assert DATA_PARALLEL_PORTS[-1] == server_args.DP_ATTENTION_HANDSHAKE_PORT_DELTA


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
