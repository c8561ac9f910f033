"""Bad checkpoints and data files end in one message that names the file, what is wrong with it and the fix."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from slime_like.config.load.loader import load_config
from slime_like.errors import CheckpointError, DataError
from tests.config.bad_input import message
from tests.config.model_folder import SHAPE, write_model, write_safetensors


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", None, ["config.json is missing", "Hugging Face format"]),
        ("config.json", b"{", ["config.json cannot be read as JSON", "download"]),
        ("config.json", b"[]", ["config.json contains [] instead of a JSON object", "download"]),
        ("config.json", b'{"model_type": "qwen3"}', ["config.json has no", "causal language model"]),
        ("tokenizer.json", None, ["no tokenizer", "tokenizer.json"]),
        ("model.safetensors", None, ["neither model.safetensors nor", "safetensors"]),
        ("model.safetensors", b"\x05", ["model.safetensors is truncated", "download"]),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]", ["no readable safetensors header", "download"]),
    ],
)
def test_a_damaged_checkpoint_is_named(
    name: str, content: bytes | None, words: list[str], tmp_path: Path, data: Path
) -> None:
    path = write_model(tmp_path / "m") / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    text = message([f"model.hf_checkpoint={tmp_path}/m", f"data.train={data}"], "", files=True, error=CheckpointError)
    assert "model.hf_checkpoint" in text
    assert all(word in text for word in words), text


def test_a_truncated_shard_is_named(tmp_path: Path, data: Path) -> None:
    folder = write_model(tmp_path / "m")
    argv = [f"model.hf_checkpoint={folder}", f"data.train={data}"]
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])
    text = message(argv, "", files=True, error=CheckpointError)
    assert f"{len(content) - 1} bytes, but its header describes {len(content)}" in text


def test_an_index_that_does_not_match_its_shards_is_named(tmp_path: Path, data: Path) -> None:
    folder = write_model(tmp_path / "m")
    argv = [f"model.hf_checkpoint={folder}", f"data.train={data}"]
    shutil.move(folder / "model.safetensors", folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"model.norm.weight": "model-1.safetensors", "x": "model-2.safetensors"}})
    )
    assert "model-2.safetensors is missing" in message(argv, "", files=True, error=CheckpointError)
    write_safetensors(folder / "model-2.safetensors", {"y": (2,)})
    assert "places 'x' in model-2.safetensors" in message(argv, "", files=True, error=CheckpointError)
    write_safetensors(folder / "model-2.safetensors", {"x": (2,)})
    assert load_config(argv).model.hf_checkpoint == str(folder)


def test_an_unknown_architecture_and_a_mismatched_reference_are_named(tmp_path: Path, argv: list[str]) -> None:
    unknown = write_model(tmp_path / "other", model_type="qwen4")
    text = message(argv, f"model.hf_checkpoint={unknown}", files=True)
    assert "model_type 'qwen4'" in text
    assert "'qwen3'" in text
    wide = write_model(tmp_path / "wide", hidden_size=128)
    text = message(argv, f"model.ref_checkpoint={wide}", files=True, error=CheckpointError)
    assert "hidden_size 128" in text
    assert "has 64" in text


@pytest.mark.parametrize(("name", "value"), [("rope_theta", 5e5), ("rms_norm_eps", 1e-3), ("hidden_act", "gelu")])
def test_a_reference_that_the_actor_would_compute_otherwise_is_named(
    name: str, value: object, tmp_path: Path, data: Path
) -> None:
    """The reference's weights are swapped into the actor's model, which has the actor's rope and norms."""
    values: dict[str, Any] = {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    actor, reference = write_model(tmp_path / "actor", **values), write_model(tmp_path / "other")
    config = json.loads((reference / "config.json").read_text()) | values | {name: value, "text_config": None}
    (reference / "config.json").write_text(json.dumps(config))
    argv = [f"model.hf_checkpoint={actor}", f"data.train={data}"]
    text = message(argv, f"model.ref_checkpoint={reference}", files=True, error=CheckpointError)
    assert f"has another {name} than" in text
    load_config([*argv, f"model.ref_checkpoint={write_model(tmp_path / 'silent')}"])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", "", ["a.jsonl is empty"]),
        ("a.csv", "x", [".jsonl or .parquet"]),
        ("tran.jsonl", None, ["'train.jsonl'"]),
        ("x" * 300, None, ["cannot be read (File name too long)"]),
    ],
)
def test_bad_data_files_are_named(
    name: str, content: str | None, words: list[str], data: Path, argv: list[str]
) -> None:
    path = data.parent / name
    if content is not None:
        path.write_text(content)
    text = message(argv, f"data.train={path}@[0:10]", files=True, error=DataError)
    assert str(path) in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            ["rope_scaling.rope_type='yarn'", "default, linear, llama3"],
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling.rope_type='dynamic'"]),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            ["rope_parameters.rope_type='longrope'", "not supported"],
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            ["rope_scaling.rope_type='llama3'", "high_freq_factor, original_max_position_embeddings"],
        ),
    ],
)
def test_an_unsupported_rotary_scaling_is_named(
    changes: dict[str, Any], words: list[str], tmp_path: Path, argv: list[str]
) -> None:
    folder = write_model(tmp_path / "scaled", model_type="llama", **changes)
    text = message(argv, f"model.hf_checkpoint={folder}", files=True, error=CheckpointError)
    assert all(word in text for word in [str(folder), *words]), text


# fields of config.json, words of the message; None: no layer has a window
WINDOWS: list[tuple[dict[str, Any], str | None]] = [
    ({"use_sliding_window": True}, "use_sliding_window=True"),
    (
        {"use_sliding_window": True, "sliding_window": 512},
        "write false if no sequence is longer than the window of 512 tokens",
    ),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "write full_attention in place of sliding_attention"),
    ({"text_config": SHAPE | {"use_sliding_window": True}}, "use_sliding_window=True"),
    ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window=4096"),
    ({"model_type": "llama", "sliding_window": 4096}, "write null if no sequence is longer than the window of 4096"),
    ({"model_type": "llama", "sliding_window": None}, None),
    ({"use_sliding_window": False, "sliding_window": 4096}, None),
    ({"sliding_window": 4096}, None),  # Qwen's default of use_sliding_window is false
]


@pytest.mark.parametrize(("changes", "words"), WINDOWS)
def test_sliding_windows_are_refused(
    changes: dict[str, Any], words: str | None, tmp_path: Path, argv: list[str]
) -> None:
    folder = write_model(tmp_path / "model", **changes)
    arguments = [*argv, f"model.hf_checkpoint={folder}"]
    if words is None:
        load_config(arguments)
        return
    text = message(arguments, "model.family=llama", files=True, error=CheckpointError)
    assert "model.hf_checkpoint=" in text and words in text, text


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_family_with_a_supported_scaling_passes(family: str, tmp_path: Path, argv: list[str]) -> None:
    rope = {"type": "linear", "factor": 2.0}
    folder = write_model(tmp_path / family, model_type=family, rope_scaling=rope)
    assert load_config([*argv, f"model.hf_checkpoint={folder}"]).model.hf_checkpoint == str(folder)
