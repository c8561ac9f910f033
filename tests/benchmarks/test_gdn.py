"""Evaluation of measurements in the benchmark of Gated DeltaNet's kernels; the measurements themselves are not repeated."""

from __future__ import annotations

import importlib
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_like.data.dump import rollout_path, save_groups
from slime_like.errors import ConfigError
from slime_like.metrics.flops import decoder_shape, train_flops
from slime_like.types import Prompt, Sample, SampleGroup, Source, Span, Status
from tests.metrics.test_flops import DENSE

METRICS = {"perf/actor_train_time": 0.5, "perf/step_time": 2.0, "perf/tokens_per_gpu_per_sec": 40.0}


@pytest.fixture
def script() -> Any:
    return importlib.import_module("benchmarks.gdn")


def test_shapes_are_read(script: Any) -> None:
    assert script.shape_of("2048,16,32,128").lengths == (2048,)
    assert script.shape_of("64x32,4,8,16").lengths == (32,) * 64
    assert str(script.shape_of("64x32,4,8,16")) == "64 x 32, 4/8 x 16"


def test_a_page_of_small_shapes(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gdn.md"
    argv = ["--arms", "hf", "torch", "flashqla", "--shapes", "64,1,2,16", "--long", "32", "64", "--rounds", "1"]
    assert script.main([*argv, "--device", "cpu", "--dtype", "float32", "--output", str(out)]) == 0
    text = out.read_text()
    assert "_ChunkRule" in text and "triangular" in text  # what ran, by the profiler
    assert "`flashqla` did not run: model.gdn.backend=flashqla on a CPU" in text
    assert text.count("| one sequence |") == 2 and text.count("| packed | torch |") == 1
    parts = "| case | arm | out | final | dq | dk | dv | dg | dbeta | dinitial |"  # each error has a column
    assert parts in text
    assert all(line.count("|") == parts.count("|") for line in text.splitlines() if "| one sequence |" in line)
    assert f"{script.commit()} Torch " in text and f"{script.machine('cpu')}; medians" in text
    assert "gdn.svg" in text
    lines = ET.fromstring((tmp_path / "gdn.svg").read_text()).findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [2, 2]
    capsys.readouterr()


def test_an_arm_is_not_called_before_its_first_timed_call(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = importlib.import_module("benchmarks.gdn_arms")
    (arm,), _ = arms.make_arms(["torch"], "cpu", "float32", [script.shape_of("32,1,1,8")])
    calls: list[str] = []

    class Rule:
        """Rule that records its calls."""

        def kernels(self) -> str:
            return ""

        def chunk_rule(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("call")
            return arm.rule.chunk_rule(*args, **kwargs)

    def cold_seconds(run: Any, device: str) -> float:
        calls.append("first timed call")
        return original(run, device)

    original = arms.cold_seconds
    monkeypatch.setattr(arms, "cold_seconds", cold_seconds)
    monkeypatch.setattr(script, "make_arms", lambda *_: ([arms.GdnArm("torch", "", Rule())], {}))
    argv = ["--arms", "torch", "--shapes", "32,1,1,8", "--long", "32", "--rounds", "1", "--device", "cpu"]
    assert script.main([*argv, "--dtype", "float32"]) == 0
    assert calls[:2] == ["first timed call", "call"]
    capsys.readouterr()


def test_each_arm_gets_the_shapes_that_it_computes(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = importlib.import_module("benchmarks.gdn_arms")
    resolve = arms.resolve

    def refuse_64(config: Any, device: str, dtype: str, shape: Any) -> Any:
        if shape.key_dim == 64:
            raise ConfigError("heads of 64")
        return resolve(config, device, dtype, shape)

    monkeypatch.setattr(arms, "resolve", refuse_64)
    shapes = [script.shape_of(text) for text in ("32,1,1,64", "2x16,1,1,8")]
    (torch_arm, hf), missing = arms.make_arms(["torch", "hf"], "cpu", "float32", shapes)
    assert [[arm.computes(shape) for shape in shapes] for arm in (torch_arm, hf)] == [[False, True], [True, False]]
    assert not missing
    assert "packed" in arms.make_arms(["hf"], "cpu", "float32", shapes[1:])[1]["hf"]
    assert arms.make_arms(["torch"], "cpu", "float32", shapes[:1]) == ([], {"torch": "heads of 64"})
    options = script.parse(["--shapes", "32,1,1,64", "2x16,1,1,8", "--rounds", "1", "--dtype", "float32"])
    assert script.speed([hf], options)[-1] == "| 2 x 16, 1/1 x 8 | none | | | | | |"
    capsys.readouterr()


def test_failed_parity_is_reported(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(script.TOLERANCE, "float32", 1e-12)
    argv = ["--arms", "torch", "--shapes", "32,1,1,8", "--long", "32", "--rounds", "1", "--device", "cpu"]
    assert script.main([*argv, "--dtype", "float32"]) == 1
    assert "parity FAILED" in capsys.readouterr().err
    errors = dict.fromkeys(script.PARTS, 0.0) | {"dq": float("nan")}
    monkeypatch.setattr(script.recurrence, "errors", lambda *_: errors)
    assert script.main([*argv, "--dtype", "float32"]) == 1
    assert "parity FAILED" in capsys.readouterr().err


def group(lengths: tuple[int, ...]) -> SampleGroup:
    samples = tuple(
        Sample(
            group_id=0,
            episode_id=0,
            sample_id=i,
            seed=0,
            token_ids=np.arange(n, dtype=np.int32),
            logprobs=np.zeros(n, dtype=np.float32),
            spans=(Span(0, 1, Source.PROMPT, 0), Span(1, n, Source.MODEL, 0)),
            reward=None,
            status=Status.COMPLETED,
        )
        for i, n in enumerate(lengths)
    )
    return SampleGroup(0, Prompt(0, np.zeros(1, dtype=np.int32), "", None, None), samples)


def test_a_run_becomes_a_row(script: Any, tmp_path: Path) -> None:
    runs = importlib.import_module("benchmarks.gdn_runs")
    lines = [{**METRICS, "perf/actor_train_time": 99.0}] * runs.WARM_UP + [METRICS, {"eval/x": 1.0}, METRICS]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for rollout in range(runs.WARM_UP + 2):
        save_groups(rollout_path(tmp_path / "rollouts", rollout), [group((3, 5))])
    shape = decoder_shape(DENSE)
    row = runs.row("torch", runs.read_steps(tmp_path), shape, ranks=2)
    tflops = train_flops(shape, [3, 5]) / 0.5 / 2 / 1e12
    assert row == ["torch", "-", "0.500", "2.000", "40", "16", f"{tflops:.4g}"]
    assert runs.table([row])[0].count("|") == len(row) + 1


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("+recipe=quickstart_gdn", ["loop.num_rollout=9", "loop.num_epoch=null"]),  # a recipe may set epochs
        ("loop.num_rollout=4", ["loop.num_rollout=4", "loop.num_epoch=null"]),
        ("loop.num_epoch=2", ["loop.num_epoch=2"]),
    ],
)
def test_the_length_of_a_run_may_be_overridden(
    monkeypatch: pytest.MonkeyPatch, override: str, expected: list[str]
) -> None:
    runs = importlib.import_module("benchmarks.gdn_runs")
    commands: list[list[str]] = []
    monkeypatch.setattr(runs, "run", lambda arguments: commands.append(arguments) or (1, [], "not run"))
    assert runs.compare(["torch"], [override], 9) == 1
    assert [argument for argument in commands[0] if argument.startswith("loop.")] == expected
