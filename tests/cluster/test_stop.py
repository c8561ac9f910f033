"""Ctrl-C: once, twice, three times, and during teardown."""

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
    request = StopRequest()
    request.install()
    yield request
    request.restore()


def test_first_signal_stops_second_interrupts_third_is_ignored(
    stop: StopRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    signal.raise_signal(signal.SIGINT)
    assert stop.requested
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    stderr = capfd.readouterr().err
    assert "second SIGTERM: stopping immediately, without a checkpoint" in stderr
    assert "stopping the processes of this run" in stderr


def test_signal_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    request = StopRequest()
    request.install()
    assert signal.getsignal(signal.SIGINT) != before
    request.restore()
    assert signal.getsignal(signal.SIGINT) == before


class Processes(launch.Cluster):
    """Cluster without processes whose teardown is interrupted by signals."""

    def start(self, inputs: Any, first: int, sink: Any, stop: StopRequest, control: Any, record: Any) -> Any:
        ring_folder(self.cfg.run.dir).mkdir()

    def close(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        (self.run_dir / "closed").touch()


@pytest.mark.parametrize("ends", ["by itself", "by the second signal"])
def test_teardown_completes_despite_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
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
