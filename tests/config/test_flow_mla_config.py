"""Combinations of ``rollout.flow_mla`` that an engine would refuse, or compute wrong tokens with, are refused at load."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from slime_like.cluster.plan.planner import Plan
from slime_like.config.load.loader import load_config
from slime_like.config.rules.flow_mla import check_flow_mla_model
from slime_like.config.schema.flow_mla import (
    MODULES,
    SKIP_VARIABLE,
    VARIABLE,
    FlowOptions,
    from_json,
    required_values,
)
from slime_like.errors import ConfigError
from slime_like.rollout.engine.environment import child_environment
from slime_like.rollout.engine.main import EngineLaunch, server_arguments
from slime_like_plugins.sglang_hooks import PLUGINS_VARIABLE
from tests.config.bad_input import each_rule, one_message, refusal
from tests.config.machines import SERVER

ON = "rollout.tp=4 rollout.dp_attention=2 rollout.flow_mla.enabled=true"
# extra arguments, then words that the message must contain
RULES = {
    "alone": (
        "rollout.flow_mla.enabled=true rollout.tp=4",
        "rollout.flow_mla.enabled=true with rollout.dp_attention=1",
        "set rollout.dp_attention to a divisor of rollout.tp=4",
    ),
    "settings without it": (
        "rollout.flow_mla.weights=[qkv_proj]",
        "rollout.flow_mla.weights=['qkv_proj'] has no effect with rollout.flow_mla.enabled=false",
        "set rollout.flow_mla.enabled=true",
    ),
    "unknown weight": (f"{ON} rollout.flow_mla.weights=[gate_proj]", "'gate_proj'", "o_proj, qkv_proj"),
    "no weight": (f"{ON} rollout.flow_mla.weights=[]", "rollout.flow_mla.weights=[]", "set e.g. [o_proj]"),
    "weight twice": (f"{ON} rollout.flow_mla.weights=[o_proj,o_proj]", "has a name twice"),
    "unknown transport": (
        f"{ON} rollout.flow_mla.transport=ipc",
        "rollout.flow_mla.transport='ipc'",
        "collective, p2p",
    ),
    "limit without collectives": (
        f"{ON} rollout.flow_mla.transport=p2p rollout.flow_mla.max_ctas=4",
        "rollout.flow_mla.max_ctas=4 with rollout.flow_mla.transport=p2p",
        "remove rollout.flow_mla.max_ctas",
    ),
    "no thread block": (f"{ON} rollout.flow_mla.max_ctas=0", "rollout.flow_mla.max_ctas=0", "[1, 64]"),
    "released memory": (
        f"{ON} rollout.flow_mla.transport=p2p rollout.sglang.enable_memory_saver=true",
        "enable_memory_saver=True with rollout.flow_mla.enabled=true and rollout.flow_mla.transport=p2p",
        "cannot be released",
    ),
    "offloaded engines": (
        f"{ON} rollout.flow_mla.transport=p2p placement.offload_rollout=true",
        "placement.offload_rollout=true with rollout.flow_mla.transport=p2p",
        "rollout.flow_mla.transport=collective",
    ),
    "one slot": (f"{ON} rollout.flow_mla.prefetch_distance=1", "rollout.flow_mla.prefetch_distance=1"),
    "sglang's name": ("rollout.sglang.attn_dp_size=2", "attn_dp_size=2", "belongs to rollout.dp_attention"),
    "no divisor": ("rollout.tp=4 rollout.dp_attention=3", "rollout.dp_attention=3", "set a divisor of rollout.tp"),
    "no rank": ("rollout.dp_attention=0", "rollout.dp_attention=0", "above 0"),
    "two batches": (
        f"{ON} rollout.sglang.enable_two_batch_overlap=true",
        "enable_two_batch_overlap=True",
        "one by one",
    ),
    "experts": (f"{ON} rollout.sglang.dwdp_size=2", "dwdp_size=2", "remove rollout.sglang.dwdp_size"),
    "steps without layers": (
        f"{ON} rollout.sglang.enable_nvidia_megakernel=true",
        "enable_nvidia_megakernel=True",
        "without the hooks",
    ),
    "copied weights": (
        f"{ON} rollout.sglang.remote_instance_weight_loader_start_seed_via_transfer_engine=true",
        "start_seed_via_transfer_engine=True",
        "from a slot",
    ),
    "offloader": (
        f"{ON} rollout.sglang.offload_group_size=4",
        "offload_group_size=4",
        "remove rollout.sglang.offload_group_size",
    ),
    "pipeline": (f"{ON} rollout.sglang.pp_size=2", "pp_size=2"),
    "quantised": (
        f"{ON} run.mode=rollout_only rollout.sglang.quantization=fp8",
        "quantization='fp8'",
        "a checkpoint in FP8 blocks",
        "remove rollout.sglang.quantization",
    ),
    "format": (
        f"{ON} rollout.sglang.load_format=sharded_state",
        "load_format='sharded_state'",
        "bypass SGLang's loaders",
    ),
}


@each_rule(RULES)
def test_the_message_names_key_value_and_fix(case: tuple[str, ...], argv: list[str]) -> None:
    one_message(case, argv)


@pytest.mark.parametrize("value", ["true", "1", "Yes", "y"])
def test_ranks_that_skip_forwards_are_refused(value: str, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SKIP_VARIABLE, value)
    with refusal([f"{SKIP_VARIABLE}={value}", f"unset {SKIP_VARIABLE}, or set rollout.flow_mla.enabled=false"]):
        load_config([*argv, *ON.split()])
    load_config(argv)
    load_config([*argv, *ON.split()], machine=False)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_weights_that_the_model_does_not_have_are_refused(name: str, latent: bool, argv: list[str]) -> None:
    cfg = load_config([*argv, *ON.split(), f"rollout.flow_mla.weights=[{name}]"], files=False)
    model = SimpleNamespace(latent=latent, folder="models/M")
    if name == "o_proj" or (name == "qkv_proj") != latent:
        check_flow_mla_model(cfg.rollout, model)  # pyright: ignore[reportArgumentType]
        return
    with pytest.raises(
        ConfigError, match=rf"rollout.flow_mla.weights has {name}, .* does not have: choose from o_proj.*\(models/M\)"
    ):
        check_flow_mla_model(cfg.rollout, model)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("fields", [{"attn_dp_size": 3}, {"dp_size": 3, "enable_dp_attention": True}])
def test_groups_that_do_not_divide_the_ranks_of_a_server_are_refused(fields: dict[str, object]) -> None:
    """The sizes are checked before SGLang resolves the arguments, where it asserts the same without a message."""
    from slime_like_plugins.flow_mla import hooks

    resolved: list[object] = []
    arguments = {"tp_size": 2, "attn_dp_size": 1, "dp_size": 1, "enable_dp_attention": False, **fields}
    with pytest.raises(SystemExit, match=r"3 groups .* do not divide tp_size=2: set --attention-data-parallel-size"):
        hooks.check_arguments(resolved.append, SimpleNamespace(**arguments))
    assert not resolved


def test_the_engine_checks_the_model_that_sglang_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules of the config do not apply to a server that is started by hand."""
    from slime_like_plugins.flow_mla import hooks

    latent, plain = (SimpleNamespace(name=name) for name in ("MLA", "MHA"))
    for weights, arch, missing in (
        (("o_proj",), latent, None),
        (("o_proj", "kv_b_proj"), latent, None),
        (("o_proj", "qkv_proj"), latent, "qkv_proj"),
        (("qkv_proj",), plain, None),
        (("a_proj",), plain, "a_proj"),
    ):
        monkeypatch.setenv(VARIABLE, FlowOptions(weights).to_json())
        text = hooks.model_obstacle(None, SimpleNamespace(attention_arch=arch, hf_quant_config={}))
        assert text is None if missing is None else f"(--flow-mla-weights) has {missing}, which" in (text or "")
    monkeypatch.delenv(VARIABLE)
    for quantisation, is_refused in (({}, True), ({"quant_method": "fp8", "weight_block_size": [128, 128]}, False)):
        text = hooks.model_obstacle("fp8", SimpleNamespace(attention_arch=latent, hf_quant_config=quantisation))
        assert is_refused == ("without FP8 weights" in (text or "")), text


def test_the_engine_receives_the_settings(plan: Callable[..., Plan]) -> None:
    weights = "rollout.flow_mla.weights=[qkv_proj,o_proj] rollout.flow_mla.prefetch_distance=3"
    p2p, blocks = "rollout.flow_mla.transport=p2p", "rollout.flow_mla.max_ctas=4"
    for keys, expected in (
        ("", None),
        (ON, FlowOptions(("o_proj",), 2)),
        (f"{ON} {weights} {p2p}", FlowOptions(("qkv_proj", "o_proj"), 3, "p2p")),
        (f"{ON} {blocks}", FlowOptions(max_ctas=4)),
    ):
        split = ("placement.mode=split", "rollout.num_engines=1", "rollout.tp=4")
        engine = plan(*split, *keys.split(), machine=SERVER).engines[0]
        environment = child_environment(engine, "/scratch")
        arguments = server_arguments(EngineLaunch(engine, "key", "127.0.0.1", 1))
        assert ("flow_mla" in environment["SLIME_LIKE_SGLANG"].split(",")) == (expected is not None)
        assert arguments.get("attn_dp_size", 1) == (2 if expected else 1)
        assert expected is None or from_json(environment[VARIABLE]) == expected
    assert from_json("{}") == FlowOptions()


def test_flags_of_a_server_that_is_started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime_like_plugins.flow_mla import flags

    for plugins, flag, expected in (
        ("", "", FlowOptions()),
        (
            "cpu",
            "--flow-mla-weights q_proj a_proj --flow-mla-prefetch-distance 4 --flow-mla-max-ctas 8",
            FlowOptions(("q_proj", "a_proj"), 4, max_ctas=8),
        ),
        ("", "--flow-mla-transport p2p", FlowOptions(transport="p2p")),
    ):
        monkeypatch.setenv(PLUGINS_VARIABLE, plugins)
        monkeypatch.delenv(VARIABLE, raising=False)
        flags.enable(["--model-path", "m", flags.ENABLE, *flag.split(), "--tp-size", "2"], "flow_mla")
        assert os.environ[PLUGINS_VARIABLE] == f"{plugins},flow_mla".lstrip(",")
        assert from_json(os.environ[VARIABLE]) == expected


def test_a_limit_of_collectives_without_collectives_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime_like_plugins.flow_mla import flags

    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(
        SystemExit, match=r"--flow-mla-max-ctas 4 with --flow-mla-transport p2p.*remove --flow-mla-max-ctas"
    ):
        flags.enable([flags.ENABLE, "--flow-mla-transport", "p2p", "--flow-mla-max-ctas", "4"], "flow_mla")
    assert VARIABLE not in os.environ


def test_a_model_without_sharded_layers_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang builds the layers of some models, such as Granite, without the function that FlowMLA hooks."""
    from slime_like_plugins.flow_mla import hooks

    monkeypatch.setattr(hooks, "_models", [])
    with pytest.raises(
        SystemExit, match=r"no weight of SimpleNamespace is sharded.*set rollout.flow_mla.enabled=false"
    ):
        hooks.check_loaded("loaded", SimpleNamespace(model=SimpleNamespace()))
    monkeypatch.setattr(hooks, "_models", [SimpleNamespace(slot_problems=list, is_loaded=True)])
    assert hooks.check_loaded("loaded", SimpleNamespace()) == "loaded"


@pytest.mark.parametrize("load_format", [None, "flattened_bucket", "direct", "my.loader"])
def test_updates_that_bypass_the_loaders_are_refused(load_format: str | None) -> None:
    from slime_like_plugins.flow_mla import hooks

    result, message = hooks.load_tensors(lambda *_: (True, "written"), None, [], load_format)
    if load_format in (None, "flattened_bucket"):
        assert (result, message) == (True, "written")
    else:
        assert result is False and f"load_format={load_format!r}" in message and "use the default" in message


def test_weights_are_not_read_from_slots() -> None:
    from slime_like_plugins.flow_mla import hooks

    with pytest.raises(NotImplementedError, match="a rank holds a part of the attention weights"):
        hooks.refuse_checks(None, action="checksum")


def test_the_engine_checks_the_fields_that_sglang_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime_like_plugins.flow_mla import hooks

    values = {field: required for field, (required, _) in required_values("p2p").items()} | {"attn_dp_size": 2}
    assert hooks.obstacle(SimpleNamespace(**values)) is None
    cases = (
        ("pp_size", 2, "set {} to 1"),
        ("cuda_graph_backend_prefill", "breakable", "set {} to 'disabled'"),
        ("enable_lora", True, "remove {}"),
    )
    for field, value, fix in cases:
        text = hooks.obstacle(SimpleNamespace(**values | {field: value}))
        assert text is not None and f"SGLang resolved {field}={value!r}" in text
        assert fix.format(f"rollout.sglang.{field} (--{field.replace('_', '-')})") in text
    assert "attn_dp_size=1" in (hooks.obstacle(SimpleNamespace(**values | {"attn_dp_size": 1})) or "")
    assert hooks.obstacle(SimpleNamespace(**values | {"quantization": "fp8"})) is None, "of a checkpoint"
    assert "quantization='awq'" in (hooks.obstacle(SimpleNamespace(**values | {"quantization": "awq"})) or "")
    several = SimpleNamespace(**values | {"nnodes": 2})
    assert hooks.obstacle(several) is None
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, FlowOptions(transport="p2p").to_json())
        assert "cannot read the memory of another machine" in (hooks.obstacle(several) or "")
    monkeypatch.setenv(SKIP_VARIABLE, "1")
    assert SKIP_VARIABLE in (hooks.obstacle(SimpleNamespace(**values)) or "")
