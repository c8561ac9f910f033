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


def file_of(value: object) -> io.BytesIO:
    """Return the file of ``torch.save``."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_the_class_of_an_optimizer_is_loaded() -> None:
    value = {"class": GroupStepAdamW, "step": 3}
    assert load_object(file_of(value), PATH) == value


def test_another_class_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: its pickle needs pathlib\.PurePath"):
        load_object(file_of({"class": pathlib.PurePath}), PATH)
