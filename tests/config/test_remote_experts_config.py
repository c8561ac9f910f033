"""Combinations of ``rollout.remote_experts`` that an engine would refuse are refused at load, and engines receive the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.cluster.plan.engine import engine_settings
from slime_like.cluster.plan.host import check_node_memory, node_memory
from slime_like.cluster.plan.machine import described_machine
from slime_like.cluster.plan.planner import Plan
from slime_like.config.load.loader import load_config
from slime_like.config.rules.remote_experts import check_remote_experts_model
from slime_like.config.schema.remote_experts import VARIABLE, RemoteOptions, from_json
from slime_like.errors import ConfigError
from slime_like.planner.host import host_engine, host_pool, rank_weights
from slime_like.planner.models import find_shape
from slime_like.rollout.engine.environment import child_environment
from slime_like.rollout.engine.main import EngineLaunch, server_arguments
from slime_like_plugins.sglang_hooks import PLUGINS_VARIABLE
from tests.config import recipe_plans
from tests.config.bad_input import each_rule, one_message
from tests.config.machines import SERVER

ON = "rollout.remote_experts.count=4"
KEY = "rollout.remote_experts"
# extra arguments, then words that the message must contain
RULES = {
    "settings without it": (f"{KEY}.mode=stream", f"{KEY}.mode=stream has no effect", f"set {KEY}.count"),
    "two placements": (f"{ON} {KEY}.experts=[1]", "excludes count", "remove experts, or"),
    "load without count": (f"{KEY}.load_file=a.json", "needs count"),
    "negative count": (f"{KEY}.count=-1", f"{KEY}.count=-1", "at least 0"),
    "expert twice": (f"{KEY}.experts=[1,1]", "repeated id"),
    "negative expert": (f"{KEY}.experts=[-1]", "repeated id: remove that id"),
    "mode": (f"{ON} {KEY}.mode=fast", f"{KEY}.mode='fast'", "auto, batched, stream"),
    "transport": (f"{ON} {KEY}.transport=tcp", "auto, shared, socket"),
    "policy": (f"{ON} {KEY}.policy=ignore", "required, fallback, respawn"),
    "payload": (f"{ON} {KEY}.payload_dtype=int8", "float32, float16, bfloat16"),
    "no capacity": (f"{ON} {KEY}.capacity=0", f"{KEY}.capacity=0", "[1, 4096]"),
    "capacity": (f"{ON} {KEY}.capacity=4097", "[1, 4096]"),
    "deadline": (f"{ON} {KEY}.deadline_s=0", f"{KEY}.deadline_s=0", "above 0"),
    "threads": (f"{ON} {KEY}.threads=0", f"{KEY}.threads=0", "above 0"),
    "region": (f"{ON} {KEY}.shared_bytes=-1", f"{KEY}.shared_bytes=-1"),
    "no key": (
        f"{ON} {KEY}.workers=[127.0.0.1:7100]",
        "key_file=None",
        "set both, or remove rollout.remote_experts.workers",
    ),
    "ranks": (
        f"{ON} {KEY}.workers=[127.0.0.1:7100] {KEY}.key_file=k rollout.tp=2",
        "1 address for 1 engine of 2 ranks",
        "one address for each rank",
    ),
    "engines": (
        f"{ON} {KEY}.workers=[127.0.0.1:7100] {KEY}.key_file=k rollout.num_engines=2",
        "a worker serves one rank",
    ),
    "address": (f"{ON} {KEY}.workers=[host] {KEY}.key_file=k", f"{KEY}.workers=['host']", "is not HOST:PORT"),
    "port": (f"{ON} {KEY}.workers=[host:0] {KEY}.key_file=k", f"{KEY}.workers=['host:0']", "port 0", "set the port"),
    "address twice": (
        f"{ON} {KEY}.workers=[a:1,a:1] {KEY}.key_file=k rollout.tp=2",
        "occurs twice",
        "start a worker for each",
    ),
    "deterministic": (f"{ON} run.deterministic=true", "run.deterministic=true", f"set {KEY}.count=0"),
    "attention groups": (f"{ON} rollout.tp=2 rollout.dp_attention=2", "not been tested", "rollout.dp_attention=1"),
    "balancer": (
        f"{ON} rollout.sglang.enable_eplb=true",
        "enable_eplb=True",
        "between ranks",
        "remove rollout.sglang.enable_eplb",
    ),
    "expert parallel": (f"{ON} rollout.sglang.ep_size=2", "ep_size=2", "remove rollout.sglang.ep_size"),
    "format": (f"{ON} rollout.sglang.load_format=dummy", "load_format='dummy'", "would miss them"),
}


@each_rule(RULES)
def test_the_message_names_key_value_and_fix(case: tuple[str, ...], argv: list[str]) -> None:
    one_message(case, argv)


@pytest.mark.parametrize(("keys", "capacity"), [("", 1024), (f"{KEY}.capacity=1", 1), (f"{KEY}.capacity=4096", 4096)])
def test_requests_have_up_to_4096_tokens(keys: str, capacity: int, argv: list[str]) -> None:
    assert load_config([*argv, ON, *keys.split()], files=False).rollout.remote_experts.capacity == capacity


def test_experts_that_the_model_does_not_have_are_refused(argv: list[str], tmp_path: Path) -> None:
    def check(keys: str, num_experts: int = 8) -> None:
        model: Any = SimpleNamespace(num_experts=num_experts, sparse_layers=(1, 3), folder="models/M")
        check_remote_experts_model(load_config([*argv, *keys.split()], files=False), model)

    for keys in (f"{KEY}.count=7", f"{KEY}.experts=[0,7]", ""):
        check(keys)
    for keys in (f"{KEY}.count=8", f"{KEY}.experts=[8]", f"{KEY}.experts=[0,1,2,3,4,5,6,7]"):
        with pytest.raises(ConfigError, match=r"models/M has 8 experts per layer.*at least one"):
            check(keys)
    with pytest.raises(ConfigError, match="has 0 experts"):
        check(ON, 0)
    load, key = tmp_path / "load.json", tmp_path / "key"
    for text, message in (
        (None, "is missing"),
        ("{", "cannot be read as JSON"),
        ("{}", "no object 'tokens'"),
        ('{"tokens": {}}', "has no layer"),
        ('{"tokens": {"1": [1, -1, 0, 0, 0, 0, 0, 0]}}', "not a list of counts"),
        ('{"tokens": {"1": [1, 2]}}', f"load_file={load} has 2 experts of layer 1, .* has 8; record it again"),
        ('{"tokens": {"1": [1, 0, 0, 0, 0, 0, 0, 0]}}', "has 0 experts of layer 3, .* has 8; record it again"),
    ):
        if text is not None:
            load.write_text(text)
        with pytest.raises(ConfigError, match=message):
            check(f"{ON} {KEY}.load_file={load}")
    load.write_text('{"tokens": {"1": [1, 0, 0, 0, 0, 0, 0, 0], "3": [0, 0, 0, 0, 0, 0, 0, 1]}}')
    check(f"{ON} {KEY}.load_file={load}")
    with pytest.raises(ConfigError, match="is in a folder that does not exist: create it"):
        check(f"{ON} {KEY}.record_load={tmp_path}/missing/load.json")
    settings = f"{ON} {KEY}.workers=[127.0.0.1:7100] {KEY}.key_file={key}"
    with pytest.raises(ConfigError, match="openssl rand"):
        check(settings)
    key.write_text("0" * 15)
    with pytest.raises(ConfigError, match=f"{KEY}.key_file: {key} has 15 characters.*at least 16; create it"):
        check(settings)
    key.write_text("0" * 16)
    key.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        check(settings)
    key.chmod(0o600)
    check(settings)


def test_the_engine_receives_the_settings(plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_like.config.rules.files.check_remote_experts_model", lambda *_: None)  # a dense model
    keys = f"{KEY}.experts=[1,2] {KEY}.mode=batched {KEY}.policy=respawn {KEY}.capacity=64 {KEY}.deadline_s=5"
    expected = RemoteOptions(experts=(1, 2), mode="batched", policy="respawn", capacity=64, deadline_s=5.0)
    split = ("placement.mode=split", "rollout.num_engines=1", "rollout.tp=4")
    for extra, options in (("", None), (keys, expected)):
        engine = plan(*split, *extra.split(), machine=SERVER).engines[0]
        environment = child_environment(engine, "/scratch")
        arguments = server_arguments(EngineLaunch(engine, "key", "127.0.0.1", 1))
        assert ("remote_experts" in environment[PLUGINS_VARIABLE].split(",")) == (options is not None)
        assert ("cuda_graph_backend_decode" in arguments) == (options is not None and engine.device == "cuda")
        assert engine_settings(engine).remote_experts == (2 if options else 0)
        assert options is None or from_json(environment[VARIABLE]) == options
    assert from_json("{}") == RemoteOptions()


def test_flags_of_a_server_that_is_started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime_like_plugins.remote_experts import flags

    monkeypatch.setenv(PLUGINS_VARIABLE, "cpu")
    monkeypatch.delenv(VARIABLE, raising=False)
    text = "--remote-experts-experts 3 1 --model-path m --remote-experts-policy fallback"
    assert flags.is_used(text.split()) and not flags.is_used(["--model-path", "m"])
    flags.enable([*text.split(), "--remote-experts-deadline-s", "7"], "remote_experts")
    assert os.environ[PLUGINS_VARIABLE] == "cpu,remote_experts"
    assert from_json(os.environ[VARIABLE]) == RemoteOptions(experts=(3, 1), policy="fallback", deadline_s=7.0)
    with pytest.raises(SystemExit, match="--remote-experts-capacity=0 must lie in"):
        flags.enable(["--remote-experts-count", "2", "--remote-experts-capacity", "0"], "remote_experts")
    with pytest.raises(SystemExit, match="--remote-experts-key-file=None"):
        flags.enable(["--remote-experts-count", "2", "--remote-experts-workers", "a:1"], "remote_experts")
    for arguments in (["--remote-experts-count", "0"], ["--remote-experts-cou", "2"]):
        with pytest.raises(SystemExit, match="no expert is remote: set --remote-experts-count to at least 1"):
            flags.enable(arguments, "remote_experts")


def test_updates_that_bypass_the_loaders_are_refused() -> None:
    from slime_like_plugins.remote_experts import hooks

    for load_format in (None, "flattened_bucket"):
        assert hooks.load_tensors(lambda *_: (True, "written"), None, [], load_format) == (True, "written")
    result, message = hooks.load_tensors(lambda *_: (True, "written"), None, [], "direct")
    assert result is False and "load_format='direct'" in message and "use the default" in message


def test_the_plan_has_the_experts_of_workers(plan: Callable[..., Plan]) -> None:
    """A rank's weights shrink by the remote experts. Host memory has these experts twice: in the worker, and as a copy."""
    engine = plan("placement.mode=split", "rollout.num_engines=1").engines[0]
    shape = find_shape("--model", "Qwen3-30B-A3B")
    assert shape.experts is not None
    plain = engine_settings(engine)
    remote = replace(plain, remote_experts=shape.experts.num_experts // 2, remote_copy=True)
    difference = rank_weights(shape, plain) - rank_weights(shape, remote)
    names = {item.name: item.num_bytes for item in host_engine(shape, remote, host_pool(shape, remote, 1e12)).items}
    assert difference > 0 and names["remote experts"] == names["copy of remote experts"] == pytest.approx(difference)


ON_GPUS = (
    "optim.cpu_offload=false",
    "placement.mode=split",
    "placement.offload_train=false",
    "placement.offload_rollout=false",
)
COPY, ON_GPU, RUNNING = f"{KEY}.policy=fallback", f"{KEY}.device=cuda:1", f"{KEY}.workers=[a:1,a:2,a:3,a:4]"


@pytest.mark.parametrize(
    ("keys", "in_workers", "copies"),
    [
        ((), 1, 0),
        ((COPY,), 1, 1),
        ((COPY, ON_GPU), 0, 1),
        ((ON_GPU,), 0, 0),
        ((RUNNING, f"{KEY}.key_file=k", "rollout.num_engines=1"), 0, 0),
    ],
)
def test_the_main_memory_of_a_node_has_the_experts_that_engines_on_gpus_lack(
    keys: tuple[str, ...], in_workers: int, copies: int
) -> None:
    machine = described_machine("16xH200")
    plain, remote = (
        recipe_plans.plan("qwen3_30b_a3b", *ON_GPUS, *count, machine=machine).memory
        for count in ((), (f"{KEY}.count=64", *keys))
    )
    assert plain.engine is not None and remote.engine is not None and remote.host is not None
    moved = 2 * 4 * (plain.engine.table.of("experts") - remote.engine.table.of("experts"))  # 2 engines of 4 ranks
    assert moved > 0
    assert remote.host.of("remote experts") == pytest.approx(in_workers * moved)
    assert remote.host.of("copy of remote experts") == pytest.approx(copies * moved)


def test_remote_experts_that_exceed_main_memory_are_refused() -> None:
    machine = described_machine("16xH200")
    demand = recipe_plans.plan("qwen3_30b_a3b", *ON_GPUS, f"{KEY}.count=64", machine=machine).memory.demand
    assert demand is not None
    table = node_memory(demand, machine)
    with pytest.raises(ConfigError, match=r"remote experts 54\.0 GiB.*: make fewer experts remote"):
        check_node_memory(demand, replace(machine, memory_bytes=int(table.total) - 1), table)


@pytest.mark.parametrize(("count", "remedy"), [(96, "make fewer experts remote"), (8, "train without a reference")])
def test_the_remedy_reduces_the_larger_of_reference_and_remote_experts(count: int, remedy: str) -> None:
    machine = described_machine("16xH200")
    keys = (*ON_GPUS, f"{KEY}.count={count}", COPY, "algo.kl_loss_coef=0.001")
    demand = recipe_plans.plan("qwen3_30b_a3b", *keys, machine=machine).memory.demand
    assert demand is not None
    table = node_memory(demand, machine)
    copies, remote = table.of("copies of weights"), table.of("remote experts", "copy of remote experts")
    assert copies and remote and (remote > copies) == (count == 96)
    with pytest.raises(ConfigError, match=remedy):
        check_node_memory(demand, replace(machine, memory_bytes=int(table.total) - 1), table)
