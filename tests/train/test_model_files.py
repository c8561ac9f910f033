"""Families, HF folders and layouts: unusable ones are refused with a named cause; shards merge to the HF tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from slime_like.config.schema.resolved import Layout
from slime_like.errors import CheckpointError, ConfigError
from slime_like.train.megatron.families.hf import HFFolder
from slime_like.train.megatron.families.qwen3 import Qwen3
from slime_like.train.megatron.model.transformer_config import choose_family, pipeline_pattern
from slime_like.train.megatron.platform.groups import check_layout
from tests.train.models import VOCAB, make_spec
from tests.train.weights import assert_shards_merge, family_of


@pytest.fixture
def folder(qwen3: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy of a model that a test may damage."""
    return Path(shutil.copytree(qwen3["untied"], tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_shards_merge_to_the_hf_tensors(qwen3: dict[str, Path], kind: str, tp: int) -> None:
    assert_shards_merge(family_of(qwen3[kind], "qwen3", tp), qwen3[kind], tp)


def test_vocabulary_padding_does_not_depend_on_tp(qwen3: dict[str, Path]) -> None:
    hf = HFFolder(qwen3["tied"]).config()
    assert {Qwen3(hf, tp).padded_vocabulary for tp in (1, 2)} == {256}
    assert VOCAB < 256


def test_a_file_cut_short_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated inside its header.*again"):
        HFFolder(folder).tensor("model.norm.weight", (64,))


@pytest.mark.parametrize("metadata", ["9" * 5000, {"format": 9}, ["pt"]])
def test_damaged_metadata_of_a_header_is_refused_in_a_short_message(folder: Path, metadata: Any) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8 : 8 + length]) | {"__metadata__": metadata}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has no .* \(__metadata__ is .* a map") as refusal:
        HFFolder(folder).tensor("model.norm.weight", (64,))
    assert len(str(refusal.value)) < 500


def test_a_missing_tensor_is_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.hf_checkpoint='.*' has no tensor 'model\.layers\.9\.x'"):
        HFFolder(folder).tensor("model.layers.9.x", (1,))


def test_a_shape_against_the_config_is_named(folder: Path) -> None:
    edit_config(folder, intermediate_size=64)
    source = HFFolder(folder)
    weight = Qwen3(source.config(), 1).weights()["blocks.0.mlp.linear_fc1.weight"]
    with pytest.raises(
        CheckpointError, match=r"gate_proj\.weight has shape \(128, 64\) but config\.json implies \(64, 64\)"
    ):
        source.tensor(weight.names[0], weight.shapes[0])


def test_a_missing_folder_names_its_key(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.hf_checkpoint=.*nowhere: no such folder"):
        HFFolder(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text('{"model_type": "no_such"}'), "transformers cannot read it"),
        (
            lambda f: (f / "model.safetensors").unlink(),
            "model.hf_checkpoint='.*' has neither model.safetensors nor model.safetensors.index.json",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"x": "gone.st"}}'),
            r"gone\.st is missing",
        ),
    ],
)
def test_a_damaged_folder_is_refused(folder: Path, damage: Any, message: str) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        source = HFFolder(folder)
        source.config()
        source.tensor("x", (1,))


def test_an_unknown_model_type_names_the_families(folder: Path) -> None:
    edit_config(folder, model_type="gemma2")
    with pytest.raises(ConfigError, match=r"model_type 'gemma2' has no family.*qwen3"):
        choose_family(make_spec(folder, Layout()), HFFolder(folder).config())


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"attention_bias": True}, 1, "attention_bias=True of a qwen3 model is not supported: .* only False"),
        ({"hidden_act": "gelu"}, 1, "hidden_act='gelu'"),
        ({}, 4, r"parallel\.tp=4 does not divide the model's num_key_value_heads=2"),
    ],
)
def test_an_unsupported_variant_or_layout_is_refused(folder: Path, changes: Any, tp: int, message: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        Qwen3(HFFolder(folder).config(), tp)


@pytest.mark.parametrize(
    ("layout", "world", "message"),
    [
        (Layout(tp=2, pp=2), 2, "needs 4 trainer ranks but there are 2"),
        (Layout(cp=2), 3, "cp=2 dp=1.* needs 2 trainer ranks but there are 3"),
        (Layout(ep=2, dp=3), 3, r"parallel\.ep=2 does not divide the 3 ranks .* to a divisor of 3"),
    ],
)
def test_a_layout_that_cannot_run_is_refused(layout: Layout, world: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layout(layout, world)


def test_stages_get_whole_blocks() -> None:
    assert pipeline_pattern(("*-",) * 5, Layout(pp=2)) == "*-*-*-|*-*-"
    assert pipeline_pattern(("*-",) * 4, Layout(pp=2, vpp=2)) == "*-|*-|*-|*-"
    assert pipeline_pattern(("*-",) * 4, Layout(pp=2, segments=(1, 3))) == "*-|*-*-*-"
    with pytest.raises(ConfigError, match=r"parallel\.pp=3 is more than the model's 2"):
        pipeline_pattern(("*-",) * 2, Layout(pp=3))
    with pytest.raises(ConfigError, match=r"segments of 1 \+ 3 layers for parallel\.pp=2 .* a model of 2 layers"):
        pipeline_pattern(("*-",) * 2, Layout(pp=2, segments=(1, 3)))
