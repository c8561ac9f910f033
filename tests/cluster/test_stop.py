"""Ctrl-C once, twice, three times, and while a run is taken down."""

from __future__ import annotations

import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from slime_like.cluster.plan.guard import ring_folder
from slime_like.cluster.run.stop import StopRequest
from slime_like.cluster.start import launch
from slime_like.cluster.start.inputs import RunInputs
from slime_like.config.load.loader import load_config
from tests.config.model_folder import write_model


@pytest.fixture
def stop() -> Generator[StopRequest]:
    made = StopRequest()
    made.install()
    yield made
    made.restore()


def test_the_first_asks_the_second_ends_and_the_third_leaves_the_teardown_alone(
    stop: StopRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    signal.raise_signal(signal.SIGINT)
    assert stop.requested
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    said = capfd.readouterr().err
    assert "second SIGTERM: stopping at once, without a checkpoint" in said
    assert "stopping the processes of this run" in said


def test_signals_are_given_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    made = StopRequest()
    made.install()
    assert signal.getsignal(signal.SIGINT) != before
    made.restore()
    assert signal.getsignal(signal.SIGINT) == before


class Processes(launch.Cluster):
    """A cluster that has started nothing, and whose taking down is interrupted."""

    def start(self, inputs: Any, first: int, sink: Any, stop: StopRequest, control: Any, record: Any) -> Any:
        ring_folder(self.cfg.run.dir).mkdir()

    def close(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        (self.run_dir / "closed").touch()


@pytest.mark.parametrize("ends", ["by itself", "by the second signal"])
def test_what_was_started_is_taken_down_whatever_is_pressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1+1=", "label": "2"}\n')
    model = write_model(tmp_path / "model")
    cfg = load_config([f"model.hf_checkpoint={model}", f"data.train={data}", f"run.dir={tmp_path / 'run'}"])
    monkeypatch.setattr(launch, "Cluster", Processes)
    monkeypatch.setattr(launch, "_report", lambda *_: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(launch, "load_inputs", lambda *_: RunInputs(None, ()))  # the folder has no tokenizer
    if ends == "by itself":
        with launch.launch(cfg):
            pass
    else:
        with pytest.raises(KeyboardInterrupt, match=r"^stopped$"), launch.launch(cfg):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
    assert (tmp_path / "run" / "closed").exists()
    assert not ring_folder(cfg.run.dir).exists()
