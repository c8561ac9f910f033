"""Assertions about a family's weights: shards merge, folders hold the same tensors, bad variants are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slime_like.errors import ConfigError
from slime_like.train.megatron.families.base import Family, family_class
from slime_like.train.megatron.families.hf import HFFolder
from tests.train.lifecycle import ExportedWeights
from tests.train.parity import TEMPERATURE, by_expert, without_fla


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of an HF folder by name."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def family_of(folder: Path, name: str, tp: int = 1, **changes: Any) -> Family:
    """Return the family ``name`` of the model in ``folder``, with ``changes`` of its config."""
    hf = HFFolder(folder).config()
    for key, value in changes.items():
        setattr(hf, key, value)
    return family_class(name)(hf, tp)


def assert_refused(folder: Path, name: str, tp: int, changes: dict[str, Any], message: str) -> None:
    """Assert that the family refuses the variant with ``message``."""
    with pytest.raises(ConfigError, match=message):
        family_of(folder, name, tp, **changes)


def assert_shards_merge(family: Family, folder: Path, tp: int, *, only: str = "") -> None:
    """Assert that shards of ``tp`` ranks have equal shapes and merge to the HF tensors whose names contain ``only``."""
    source, num_weights = HFFolder(folder), 0
    for key, weight in family.weights().items():
        if only not in weight.names[0]:
            continue
        tensors = [source.tensor(n, s) for n, s in zip(weight.names, weight.shapes, strict=True)]
        shards = [weight.split(tensors, tp, rank) for rank in range(tp)]
        assert len({shard.shape for shard in shards}) == 1, key
        for merged, tensor in zip(weight.merge(shards), tensors, strict=True):
            assert torch.equal(merged, tensor), key
        num_weights += 1
    assert num_weights > 0


def assert_same_tensors(actual_folder: Path, expected_folder: Path) -> None:
    """Assert that two HF folders hold the same tensors bit for bit. Experts in ``expected_folder`` may be fused."""
    actual, expected = tensors_of(actual_folder), by_expert(tensors_of(expected_folder))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) and actual[key].dtype == expected[key].dtype for key in expected)


def assert_hf_agrees(exported: list[ExportedWeights]) -> None:
    """Assert that transformers computes the trainer's log-probabilities from the exported folder."""
    from transformers import AutoModelForCausalLM

    (scores,) = [e.scores for e in exported if e.scores is not None]
    rows = exported[0].rows
    model = AutoModelForCausalLM.from_pretrained(exported[0].folder, dtype=torch.float32)
    for start, stop in zip(rows.cu_seqlens[:-1], rows.cu_seqlens[1:], strict=True):
        ids = torch.from_numpy(rows.token_ids[start:stop].astype(np.int64))[None]
        with torch.no_grad(), without_fla(model):
            log_p = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / TEMPERATURE, -1)
        expected = log_p.gather(1, ids[0, 1:, None])[:, 0].numpy()
        assert scores[start] == 0
        np.testing.assert_allclose(scores[start + 1 : stop], expected, rtol=0, atol=1e-5)
