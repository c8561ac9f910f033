"""Metric sinks: metrics.jsonl, console, live view, TensorBoard and wandb."""

import inspect
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_like.config.schema.run import MetricsConfig
from slime_like.errors import ConfigError
from slime_like.metrics.dictionary import ENTRIES
from slime_like.metrics.sinks import JsonlSink, open_sinks
from slime_like.metrics.spans import Spans
from slime_like.metrics.types import RunWarning
from slime_like.metrics.view import evaluations
from slime_like.metrics.wandb_sink import _has_api_key, _wandb_id
from slime_like.report.record import read_record
from slime_like.report.run_page import run_page

VALUES = {
    "rollout/raw_reward": 0.25,
    "perf/train_time": 3.0,
    "perf/train_wait_time": 1.0,
    "eval/sums": 0.5,
    "eval/sums-pass@4": 0.9,
    "eval/sums/response_len/mean": 7.0,
}


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_has_flat_names_and_spans(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", 0)
    sink.log(1, VALUES, {"train": (10.0, 13.0)})
    (row,) = rows(tmp_path / "metrics.jsonl")  # read before close: every line is flushed
    sink.close()
    assert row["step"] == 1
    assert row["rollout/raw_reward"] == 0.25
    assert row["spans"] == {"train": [10.0, 13.0]}


def test_resume_drops_steps_that_will_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, 0)
    for step in range(5):
        sink.log(step, {}, {})
    sink.close()
    with path.open("a") as file:
        file.write('{"step": 5, "tor')
    sink = JsonlSink(path, 2)
    sink.log(3, {"a": 1.0}, {})
    sink.close()
    assert [row["step"] for row in rows(path)] == [0, 1, 2, 3]
    dropped_lines = (tmp_path / "metrics_dropped.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in dropped_lines[:2]] == [3, 4]


def test_a_fresh_run_starts_a_fresh_file_and_loses_no_line(tmp_path: Path) -> None:
    original = b'{"step": 1}\n\xff\xfe torn\n{"step": 7}'
    (tmp_path / "metrics.jsonl").write_bytes(original)
    for expected in ("had 3 lines of an earlier run, moved to", ""):  # the second run finds an empty file
        stream = io.StringIO()
        open_sinks(MetricsConfig(console="plain"), tmp_path, first_step=0, num_steps=9, console=stream).close()
        assert expected in stream.getvalue() and stream.getvalue().count("\n") == bool(expected)
        assert (tmp_path / "metrics.jsonl").read_bytes() == b""
        assert (tmp_path / "metrics_dropped.jsonl").read_bytes() == original + b"\n"


def test_console_lines_and_tensorboard_events(tmp_path: Path) -> None:
    stream = io.StringIO()
    sinks = open_sinks(MetricsConfig(tensorboard=True), tmp_path, first_step=0, num_steps=9, console=stream)
    sinks.log(1, VALUES, {})
    sinks.note("control: save: seen")
    sinks.close()
    assert stream.getvalue() == "[1/9] reward 0.250  eval/sums 0.500\ncontrol: save: seen\n"
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_tensorboard_shows_repeated_steps_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, steps in ((0, range(4)), (2, range(3, 6))):
        sinks = open_sinks(MetricsConfig(tensorboard=True, console="off"), tmp_path, first_step=first, num_steps=9)
        for step in steps:
            sinks.log(step, {"train/loss": first + step / 10}, {})
        sinks.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    values = {event.step: event.value for event in events.Scalars("train/loss")}
    assert values == pytest.approx({0: 0.0, 1: 0.1, 2: 0.2, 3: 2.3, 4: 2.4, 5: 2.5})
    assert len(events.Scalars("train/loss")) == 6


def test_the_live_view_shows_rows_split_and_evaluations(tmp_path: Path) -> None:
    stream = io.StringIO()
    sinks = open_sinks(MetricsConfig(console="live"), tmp_path, first_step=0, num_steps=9, console=stream)
    for step in (1, 2):
        sinks.log(step, VALUES, {})
    for text in ("first [red]", "control: save: seen", "2", "3", "control: save: done"):
        sinks.note(text)
    sinks.close()
    screen = stream.getvalue()
    assert "control: save: done" in screen.splitlines()[-1] and "first" not in screen, "the newest four"
    for text in ("2/9", "0.250", "eval/sums: 0.500 -> 0.500", "train_wait 25%, train 75%", "min left"):
        assert text in screen


@pytest.mark.slow
def test_wandb_is_offline_without_a_key_and_resumes_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = MetricsConfig(wandb=True, console="off")
    for first in (0, 1):
        sinks = open_sinks(config, tmp_path, first_step=first, num_steps=2, settings={"lr": 1.0})
        sinks.log(1, VALUES, {})
        sinks.log(2, VALUES, {})
        sinks.close()
        (part,) = (tmp_path / "wandb").glob("offline-run-*")
        part.rename(tmp_path / f"part{first}")  # wandb distinguishes parts of a run by their start second
    run_id = (tmp_path / "wandb" / "run_id").read_text().strip()
    logs = sorted(tmp_path.glob("part*/run-*.wandb"))
    assert [log.name for log in logs] == [f"run-{run_id}.wandb"] * 2, "the same run, resumed"


def test_a_key_of_wandb_login_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not _has_api_key()
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {'0' * 40}\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert _has_api_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example:8080")
    assert not _has_api_key()
    for text, has_key in (
        ("machine wandb.example:8080 login user password 0", True),
        ("default login anonymous password me@example", False),
        ("machine wandb.example:8080 login user", False),
        ("machine", False),
    ):
        (tmp_path / ".netrc").write_text(text + "\n")
        assert _has_api_key() == has_key, text
    (tmp_path / ".netrc").write_bytes(b"# caf\xe9\n")
    assert not _has_api_key()
    monkeypatch.setenv("WANDB_BASE_URL", "http://[x")
    assert not _has_api_key()
    monkeypatch.setenv("WANDB_API_KEY", "0")
    assert _has_api_key()


def test_an_error_of_wandb_names_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise RuntimeError("no network\nat all")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=lambda **_: None))
    with pytest.raises(
        ConfigError, match=r"metrics.wandb=true or .*: wandb did not start \(no network at all\).*WANDB_MODE=offline"
    ):
        open_sinks(MetricsConfig(wandb=True, console="off"), tmp_path, first_step=0, num_steps=2)


def test_a_fresh_run_is_a_new_one_for_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    path = tmp_path / "wandb" / "run_id"
    first = _wandb_id(path, resumed=False)
    assert _wandb_id(path, resumed=True) == first
    assert _wandb_id(path, resumed=False) != first
    assert _wandb_id(tmp_path / "other", resumed=True), "for a run that started without wandb"
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert _wandb_id(path, resumed=True) == "mine" == path.read_text().strip()


def test_an_invalid_wandb_id_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "wandb" / "run_id"
    for bad_id in ("a/b", " a", "a\nb", "a" * 200):
        monkeypatch.setenv("WANDB_RUN_ID", bad_id)
        with pytest.raises(ConfigError, match=r"WANDB_RUN_ID=.* cannot be the id of a wandb run: .*unset it"):
            _wandb_id(path, resumed=False)
    assert not path.exists()
    monkeypatch.setenv("WANDB_RUN_ID", "qwen3.5 run")
    _wandb_id(path, resumed=False)
    monkeypatch.delenv("WANDB_RUN_ID")
    assert _wandb_id(path, resumed=True) == "qwen3.5 run"


def test_a_wandb_id_that_cannot_be_stored_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "wandb").write_text("")
    with pytest.raises(ConfigError, match=r"wandb/run_id: the id .* cannot be stored \(.*\): make run.dir writable"):
        _wandb_id(tmp_path / "wandb" / "run_id", resumed=False)


@pytest.mark.parametrize(("switch", "module"), [("wandb", "wandb"), ("tensorboard", "tensorboard.compat.proto")])
def test_a_missing_library_names_key_and_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str, module: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    config = MetricsConfig(console="off", wandb=switch == "wandb", tensorboard=switch == "tensorboard")
    with pytest.raises(ConfigError, match=rf"metrics\.{switch}=true.*pip install {switch}"):
        open_sinks(config, tmp_path, first_step=0, num_steps=2)


def test_a_dataset_may_be_named_like_another_one_with_a_suffix() -> None:
    further = {f"eval/math{suffix}": 0.5 for suffix in ("-truncated_ratio", "-pass@8", "/response_len/mean")}
    values = {"eval/math": 0.1, "eval/math-hard": 0.2, "eval/math/new": 0.3, **further, "eval/gsm-pass@1": 0.4}
    assert evaluations(values) == {"math": 0.1, "math-hard": 0.2, "math/new": 0.3, "gsm-pass@1": 0.4}


def test_every_further_metric_of_a_dataset_is_recognised() -> None:
    suffixes = [
        entry.name.removeprefix("eval/<dataset>") for entry in ENTRIES if entry.name.startswith("eval/<dataset>")
    ]
    names = [f"eval/a{suffix.replace('<k>', '4')}" for suffix in suffixes]
    assert len(names) > 6 and evaluations(dict.fromkeys(names, 0.0)) == {"a": 0.0}


def test_spans_keep_earliest_start_and_latest_stop() -> None:
    spans = Spans()
    spans.add("push", 3.0, 4.0)
    spans.add("push", 5.0, 6.0)
    spans.add("push", 1.0, 2.0)  # of another process, which reports later
    with spans("train"):
        pass
    drained_spans = spans.drain()
    assert drained_spans["push"] == (1.0, 6.0)
    assert drained_spans["train"][0] <= drained_spans["train"][1]
    assert spans.drain() == {}


def test_warnings_are_kept_in_the_log_and_alerted_without_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wandb.sdk.wandb_run import Run

    inspect.signature(Run.alert).bind(None, title="slime_like", text="", level="WARN")
    alerts: list[str] = []
    run = SimpleNamespace(define_metric=lambda *_, **__: None, alert=lambda **fields: alerts.append(fields["text"]))
    wandb = SimpleNamespace(init=lambda **_: run, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run.log, run.finish = lambda _: None, lambda: None
    sinks = open_sinks(MetricsConfig(wandb=True, console="off"), tmp_path, first_step=0, num_steps=9)
    sinks.warn(1, RunWarning("rollout 0 is empty", "prompt 3: 'secret'"))
    sinks.log(1, VALUES, {})
    sinks.log(2, VALUES, {})
    sinks.close()
    first, second = read_record(tmp_path).rows
    assert first.warnings == ("rollout 0 is empty\n  for example prompt 3: 'secret'",) and second.warnings == ()
    assert alerts == ["step 1: rollout 0 is empty"]
    page = run_page(read_record(tmp_path), [], lambda _: "")
    assert "rollout 0 is empty" in page and "prompt 3: &#x27;secret&#x27;" in page
    assert "2 rollouts, 0 of them trained on" in page


def test_damaged_lines_of_the_log_are_moved_aside_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    valid_lines = [f'{{"step": {step}, "a": 1.0}}'.encode() for step in range(1, 5)]
    damaged_lines = [
        b"\xff\x00",
        b'{"step": "2"}',
        b"[" * 100_000,
        b'{"step": 3, "a": "x"}',
        b'{"step": 1' + b"0" * 400 + b"}",
    ]
    path.write_bytes(
        b"\n".join([valid_lines[0], *damaged_lines, *valid_lines[1:3], b"", valid_lines[3], b'{"step": 5, "to'])
    )
    stream = io.StringIO()
    sinks = open_sinks(MetricsConfig(console="plain"), tmp_path, first_step=4, num_steps=9, console=stream)
    sinks.log(5, {"a": 2.0}, {})
    sinks.close()
    assert [row["step"] for row in rows(path)] == [1, 2, 3, 4, 5]
    assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == b"".join(line + b"\n" for line in damaged_lines)
    assert f"5 lines of {path} cannot be read (line 2: " in stream.getvalue()
    assert "metrics.damaged.jsonl" in stream.getvalue() and stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("num_lines", [2, 0])
def test_steps_missing_in_the_log_are_reported(tmp_path: Path, num_lines: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, num_lines + 1)))
    stream = io.StringIO()
    open_sinks(MetricsConfig(console="plain"), tmp_path, first_step=4, num_steps=9, console=stream).close()
    assert f"{path} has no lines for the steps {num_lines + 1} to 4" in stream.getvalue()


@pytest.mark.parametrize("first_step", [0, 4])
def test_a_folder_in_place_of_the_log_is_named(tmp_path: Path, first_step: int) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl .*move it away"):
        JsonlSink(tmp_path / "metrics.jsonl", first_step)
