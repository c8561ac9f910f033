"""Model folder that scripts/export_hf.py reads from a run; ``tests/e2e/test_exports.py`` exports a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import export_hf  # pyright: ignore[reportAttributeAccessIssue]  scripts is not a package
from slime_like.errors import CheckpointError


def model_of(run_dir: Path, config: str) -> str:
    """Return the model that ``config``, written as the run's config.yaml, names."""
    (run_dir / "config.yaml").write_text(config)
    return export_hf.model_of(run_dir / "checkpoints" / "iter_0000002")


def test_the_model_is_that_of_the_runs_config(tmp_path: Path) -> None:
    assert model_of(tmp_path, "model: {hf_checkpoint: /models/a}\n") == "/models/a"


def test_a_relative_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text("model: {hf_checkpoint: /models/a}\n")
    (tmp_path / "checkpoints" / "iter_0000002").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "checkpoints")
    assert export_hf.model_of(Path("iter_0000002")) == "/models/a"
    monkeypatch.chdir("iter_0000002")
    assert export_hf.model_of(Path()) == "/models/a"


@pytest.mark.parametrize(
    "config",
    [
        "model: {hf_checkpoint: !!bool foo}",
        "",
        "model: {}",
        *(f"model: {{hf_checkpoint: {value}}}" for value in ("null", "''", "4", "[a]")),
    ],
)
def test_a_config_without_a_model_is_one_message(tmp_path: Path, config: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"config\.yaml: names no model \(.*\): give its folder with --hf-checkpoint"
    ):
        model_of(tmp_path, config)
