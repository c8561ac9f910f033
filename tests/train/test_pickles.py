"""Classes of optimizers in a checkpoint's objects."""

from __future__ import annotations

import io
import pathlib

import pytest
import torch

from slime_like.errors import CheckpointError
from slime_like.train.megatron.platform.adamw import GroupStepAdamW
from slime_like.train.megatron.platform.pickles import load_object

PATH = pathlib.Path("iter_0000001/__0_0.distcp")


def saved(value: object) -> io.BytesIO:
    """Return the file of ``torch.save``."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("module", ["adamw", "patches"])
def test_the_class_of_an_optimizer_is_loaded_under_both_names(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupStepAdamW, "__module__", f"slime_like.train.megatron.platform.{module}")
    file = saved({"class": GroupStepAdamW, "step": 3})
    monkeypatch.undo()
    assert load_object(file, PATH) == {"class": GroupStepAdamW, "step": 3}


def test_another_class_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: its pickle needs pathlib\.\S*PurePath"):
        load_object(saved({"class": pathlib.PurePath}), PATH)
