"""Float8 checkpoints with a scale per block pass; other quantised checkpoints are refused for every role.

Weights that are cast without their scales would load as garbage.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from slime_like.cli import main
from slime_like.config.rules.weight_files import BITS, check_weights
from slime_like.errors import CheckpointError
from slime_like.train.megatron.families.hf import HFFolder
from tests.config.bad_input import message
from tests.config.model_folder import write_model

type Tensors = dict[str, tuple[str, tuple[int, ...]]]

LAYER = "model.layers.0"
NAME = f"{LAYER}.self_attn.q_proj"
FUSED = f"{LAYER}.mlp.experts.gate_up_proj"
FLOAT8: dict[str, Any] = {
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 16], "activation_scheme": "dynamic"}
}
PLAIN: dict[str, Any] = {}
WEIGHT: Tensors = {f"{NAME}.weight": ("F8_E4M3", (64, 48))}
SCALES: Tensors = {f"{NAME}.weight_scale_inv": ("F32", (2, 3))}
TENSORS: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "float8 that config.json does not declare": ({**WEIGHT, **SCALES}, PLAIN, "config.json has no quantization_config"),
    "float8 without scales": (WEIGHT, FLOAT8, f"'{NAME}.weight_scale_inv' is missing"),
    "scales of a plain weight": (
        {f"{NAME}.weight": ("BF16", (64, 48)), **SCALES},
        FLOAT8,
        f"is in BF16 with scales in '{NAME}.weight_scale_inv'",
    ),
    "scales in another format": (
        {**WEIGHT, **SCALES, f"{NAME}.weight_zero_point": ("I8", (1,))},
        FLOAT8,
        f"with scales in '{NAME}.weight_zero_point'",
    ),
    "a plain weight with a scale": (
        {f"{NAME}.weight": ("BF16", (64, 48)), f"{NAME}.scale": ("F32", (1,))},
        PLAIN,
        f"is in BF16 with scales in '{NAME}.scale'",
    ),
    "a block size that config.json does not declare": (
        {**WEIGHT, f"{NAME}.weight_scale_inv": ("F32", (1, 1))},
        FLOAT8,
        "has shape [1, 1], but [2, 3] would be one scale per block of [32, 16]",
    ),
    "scales that are exponents": (
        {**WEIGHT, f"{NAME}.weight_scale_inv": ("U8", (2, 3))},
        FLOAT8,
        f"'{NAME}.weight_scale_inv' is in U8",
    ),
    "a float8 vector": (
        {f"{NAME}.weight": ("F8_E4M3", (64,)), f"{NAME}.weight_scale_inv": ("F32", (1,))},
        FLOAT8,
        "of shape [64] is in F8_E4M3",
    ),
    "float8 of a different kind": (
        {f"{NAME}.weight": ("F8_E5M2", (64, 48)), **SCALES},
        FLOAT8,
        f"is in F8_E5M2 with scales in '{NAME}.weight_scale_inv'",
    ),
    "int8": ({f"{NAME}.weight": ("I8", (64, 48))}, PLAIN, "is in I8"),
    "packed float4 with scales": ({f"{NAME}.weight": ("I8", (64, 24)), **SCALES}, FLOAT8, "is in I8"),
    "integers in fused experts": ({FUSED: ("I32", (2, 64, 48))}, PLAIN, f"'{FUSED}' is in I32"),
    "booleans": ({f"{NAME}.bias": ("BOOL", (64,))}, PLAIN, "is in BOOL"),
    "compressed-tensors": (
        {f"{NAME}.weight_packed": ("I32", (64, 6)), f"{NAME}.weight_scale": ("BF16", (64, 1))},
        PLAIN,
        "compressed-tensors",
    ),
    "GPTQ": ({f"{NAME}.qweight": ("I32", (8, 48)), f"{NAME}.g_idx": ("I32", (64,))}, PLAIN, "GPTQ or AWQ"),
    "AWQ": ({f"{NAME}.qzeros": ("I32", (8, 48))}, PLAIN, "GPTQ or AWQ"),
    "MXFP4": ({f"{FUSED}_blocks": ("U8", (2, 64, 2, 16))}, PLAIN, "MXFP4"),
    "bitsandbytes": ({f"{NAME}.weight.absmax": ("F32", (8,))}, PLAIN, "bitsandbytes"),
}
ORPHANS: Tensors = {f"{NAME}.weight_scale_inv": ("F32", (2, 3))}
READ: dict[str, tuple[Tensors, dict[str, Any], int]] = {
    "scales per block": ({**WEIGHT, **SCALES}, FLOAT8, 64 * 48),
    "incomplete blocks": (
        {f"{NAME}.weight": ("F8_E4M3", (65, 47)), f"{NAME}.weight_scale_inv": ("BF16", (3, 3))},
        FLOAT8,
        65 * 47,
    ),
    "fused experts": (
        {FUSED: ("F8_E4M3", (2, 64, 48)), f"{FUSED}_scale_inv": ("F8_E8M0", (2, 2, 3))},
        FLOAT8,
        2 * 64 * 48,
    ),
    "one scale and one of activations": (
        {**WEIGHT, f"{NAME}.weight_scale_inv": ("F32", ()), f"{NAME}.activation_scale": ("F32", ())},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}},
        64 * 48 + 1,
    ),
    "a dequantised copy with scales of activations": (
        {f"{NAME}.weight": ("BF16", (64, 48)), f"{NAME}.activation_scale": ("F32", ())},
        PLAIN,
        64 * 48 + 1,
    ),
    "a buffer": ({f"{LAYER}.visual.position_ids": ("I64", (1, 64))}, PLAIN, 64),
}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "int8": ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method='bitsandbytes'"),
    "another float8": ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fmt='e5m2'"),
    "no block": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}},
        "weight_block_size=[128, 0], not two positive integers",
    ),
    "of the text part": (
        {"text_config": {"quantization_config": {"quant_method": "mxfp4"}}},
        "text_config.quantization_config.quant_method='mxfp4'",
    ),
    "compressed-tensors": ({"compression_config": {"format": "pack-quantized"}}, "compression_config.format"),
}
ROLES = {
    "model.hf_checkpoint": "",
    "model.ref_checkpoint": "",
    "teacher.hf_checkpoint": "algo=distill",
    "critic.hf_checkpoint": "algo=ppo",
}


def write_file(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file with zeros."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def with_tensors(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """Write a model folder whose safetensors file has these tensors, filled with zeros."""
    write_file(write_model(folder, **config) / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_a_quantised_model_are_named(name: str, tmp_path: Path, argv: list[str]) -> None:
    tensors, config, words = TENSORS[name]
    folder = with_tensors(tmp_path / "quantised", tensors, **config)
    text = message(argv, f"model.hf_checkpoint={folder}", files=True, error=CheckpointError)
    assert f"model.hf_checkpoint='{folder}' is a quantised checkpoint (" in text
    assert f"'{LAYER}" in text and words in text and "bfloat16" in text
    weight, (_, shape) = next(iter(tensors.items()))
    with pytest.raises(CheckpointError, match="is a quantised checkpoint"):
        HFFolder(folder).part(weight, shape, 0)
    with pytest.raises(CheckpointError, match="is a quantised checkpoint"):
        HFFolder(folder).tensor(weight, shape)


def test_scales_without_their_weight_are_named(tmp_path: Path, argv: list[str]) -> None:
    folder = with_tensors(tmp_path / "quantised", ORPHANS, **FLOAT8)
    text = message(argv, f"model.hf_checkpoint={folder}", files=True, error=CheckpointError)
    assert f"'{NAME}.weight_scale_inv' are the scales of a weight that is missing" in text


@pytest.mark.parametrize("name", READ)
def test_float8_with_its_scales_passes(name: str, tmp_path: Path, argv: list[str]) -> None:
    tensors, config, num_parameters = READ[name]
    layers = {key.replace(LAYER, f"model.layers.{i}"): value for i in range(4) for key, value in tensors.items()}
    folder = with_tensors(tmp_path / "float8", layers, **config)
    assert main([*argv, f"model.hf_checkpoint={folder}", "--plan"]) == 0
    assert check_weights("model.hf_checkpoint", str(folder)) == 4 * num_parameters


def test_scales_may_be_in_another_file(tmp_path: Path, argv: list[str]) -> None:
    folder = write_model(tmp_path / "float8", num_hidden_layers=1, **FLOAT8)
    (folder / "model.safetensors").unlink()
    files: dict[str, Tensors] = {"a.safetensors": WEIGHT, "b.safetensors": SCALES}
    for file, tensors in files.items():
        write_file(folder / file, tensors)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert main([*argv, f"model.hf_checkpoint={folder}", "--plan"]) == 0
    assert HFFolder(folder).names() == [f"{NAME}.weight"]
    assert not HFFolder(folder).tensor(f"{NAME}.weight", (64, 48)).any()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_a_quantised_model_is_named(name: str, tmp_path: Path, argv: list[str]) -> None:
    changes, words = CONFIGS[name]
    folder = write_model(tmp_path / "quantised", **changes)
    text = message(argv, f"model.hf_checkpoint={folder}", files=True, error=CheckpointError)
    assert "is a quantised checkpoint (config.json has" in text and words in text
    with pytest.raises(CheckpointError, match="is a quantised checkpoint"):
        HFFolder(folder)


@pytest.mark.parametrize("key", ROLES)
def test_every_role_refuses_a_quantised_checkpoint(
    key: str, tmp_path: Path, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    by_tensor = with_tensors(tmp_path / "tensors", TENSORS["int8"][0])
    by_config = write_model(tmp_path / "config", quantization_config={"quant_method": "gptq", "bits": 4})
    by_file = write_model(tmp_path / "modelopt")
    (by_file / "hf_quant_config.json").write_text("{}")
    for folder in (by_tensor, by_config, by_file):
        assert main([*argv, *ROLES[key].split(), f"{key}={folder}", "--plan"]) == 2
        assert f"CheckpointError: {key}='{folder}' is a quantised checkpoint" in capsys.readouterr().err


def test_a_null_quantization_config_passes(tmp_path: Path, argv: list[str]) -> None:
    folder = write_model(tmp_path / "plain")
    (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), "quantization_config": None})
    )
    assert main([*argv, f"model.hf_checkpoint={folder}", "--plan"]) == 0
